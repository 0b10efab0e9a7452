"""The same question gets the same answer: in another process, and however peers are listed."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

from bench.papers.clusters import published
from bench.planner.placement import load
from coordinator.commands.full_load import OfflineConfig, offline
from coordinator.planning.placement import best_placement
from coordinator.simulator.core.trace import typical
from tests.unit.coordinator.problems import ends_after

SEEDS_OF_HASHES = ("1", "6")
"""Orders of sets of names differ between these."""


def placed(cluster: str, model: str, shuffled: int | None = None) -> list[Any]:
    """What a fixed amount of planning finds."""
    problem, service = load(cluster, model)
    if shuffled is not None:
        draw = random.Random(shuffled)
        problem = replace(
            problem,
            nodes=tuple(draw.sample(problem.nodes, len(problem.nodes))),
            links=tuple(draw.sample(problem.links, len(problem.links))),
        )
    found = best_placement(problem, time_limit_s=5.0, seed=1, spent=ends_after(40), service=service)
    spans = sorted((a.peer_id, a.start, a.end) for a in found.assignments)
    edges = sorted((e.tail, e.head, e.tokens_per_s) for e in found.edges or ())
    return [found.value, spans, edges]


def answers() -> list[Any]:
    """A plan of ours, Helix's flow where there are many maximum ones, and a minute served by it."""
    problem, profiles, plan = published("het42/70b/helix")
    config = OfflineConfig(warm_up_s=0.0, measured_s=5.0)
    report = offline(problem, profiles, plan, typical(), config)
    flows = [(e.tail, e.head, e.tokens_per_s) for e in plan.edges]
    return [placed("small10", "30b"), flows, report.events, report.decode_tokens_per_s]


def test_answers_do_not_depend_on_the_order_of_hashes() -> None:
    module = "tests.unit.coordinator.planning.test_determinism"
    command = f"import json; from {module} import answers; print(json.dumps(answers()))"
    found = [
        subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in SEEDS_OF_HASHES
    ]
    assert found[0] == found[1]
    assert len(json.loads(found[0])[1]) > 40


def test_the_order_in_which_peers_and_links_are_listed_does_not_matter() -> None:
    assert placed("small10", "30b", shuffled=1) == placed("small10", "30b", shuffled=2)
