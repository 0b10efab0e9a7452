"""Helix's clusters, what was published about them, and our plans for them."""

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

from bench.papers.helix_flow import helix_plan
from bench.papers.jobs import PLANS
from coordinator.commands.planner_view import service_of
from coordinator.commands.swarm_file import read_swarm
from coordinator.evaluation.max_flow import follows
from coordinator.planning.placement import Placement, best_placement, score
from coordinator.planning.solve import by_clock
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.core.trace import Request, as_in_papers, read_trace
from dht.messages.types import SINK, SOURCE, Assignment, Plan, Problem
from testing.paths import ROOT

DATA = ROOT / "bench" / "data"
REFERENCE = DATA / "helix" / "reference.json"
LINKS = DATA / "helix" / "published_links.json"
AZURE = DATA / "azure" / "conversations_2023.csv"
PLANNER = "ours"

Found = tuple[Problem, Profiles, Plan | Placement]


def cluster_path(cluster: str) -> Path:
    """The file of one of Helix's clusters."""
    return DATA / "helix" / "clusters" / f"{cluster}.json"


@cache
def azure() -> tuple[Request, ...]:
    """The trace, as Helix and MoLink use it."""
    return as_in_papers(read_trace(AZURE.read_bytes()))


@cache
def reference() -> dict[str, Any]:
    """What Helix published."""
    found: dict[str, Any] = json.loads(REFERENCE.read_text())
    return found


def readme(part: str) -> float | None:
    """What the artifact's README announces for ``section: command``, in decoded tokens/s."""
    section, command = part.split(": ")
    for entry in reference()["expected_results_readme"]:
        if section in entry["section"] and entry["command"].endswith(command):
            return float(entry["decode_tps"])
    return None


def artifact(case: str, value: str = "decode_tps") -> float | None:
    """What Helix's simulator prints for one of its cases."""
    for run in reference()["artifact_simulator_runs"]:
        if run["case"] == case:
            return float(run[value])
    return None


def published(case: str) -> tuple[Problem, Profiles, Plan]:
    """A placement that Helix published (``cluster/model/placement``), with Helix's own flow.

    Where the artifact names no links, all that the placement allows may carry flow.
    """
    cluster, model, _ = case.split("/")
    problem, profiles = read_swarm(cluster_path(cluster), model)
    spans = reference()["max_flow_shipped"][case]["placement"]
    assignments = [
        Assignment(peer_id=node.peer_id, start=start, end=end)
        for node, (start, end) in zip(problem.nodes, spans, strict=True)
    ]
    named = json.loads(LINKS.read_text())["links"].get(case)
    if named is None:
        pairs = [(a.peer_id, b.peer_id) for a in assignments for b in assignments if follows(a, b)]
        pairs += [(SOURCE, a.peer_id) for a in assignments if a.start == 0]
        pairs += [(a.peer_id, SINK) for a in assignments if a.end == problem.model.layers]
    else:
        pairs = [
            (
                SOURCE if tail == "coordinator" else str(tail),
                SINK if head == "coordinator" else str(head),
            )
            for tail, head in named
        ]
    return problem, profiles, helix_plan(problem, profiles, assignments, pairs)


def ours(cluster: str, model: str) -> tuple[Problem, Profiles, Placement]:
    """This project's placement, as ``bench.planner.placement`` wrote it down."""
    problem, profiles = read_swarm(cluster_path(cluster), model)
    spans = [
        Assignment(peer_id=name, start=start, end=end)
        for name, (start, end) in _planned(cluster, model)["placement"].items()
    ]
    return problem, profiles, score(problem, spans, "ours", service=service_of(problem, profiles))


def planned_s(cluster: str, model: str) -> float:
    """How long the planner searched for that placement, in seconds."""
    return float(_planned(cluster, model)["seconds"])


def _planned(cluster: str, model: str) -> dict[str, Any]:
    for case in json.loads((ROOT / PLANS).read_text())["cases"]:
        if (case["cluster"], case["model"]) == (cluster, model):
            for row in case["planners"]:
                if row["planner"] == PLANNER:
                    found: dict[str, Any] = row
                    return found
    raise LookupError(
        f"{PLANS} has no plan for {cluster}/{model}: run python -m bench.planner.placement"
    )


def searched(
    cluster: str, model: str, limit_s: float
) -> tuple[Problem, Profiles, Placement, float]:
    """A placement that is searched for now, and the seconds that it took."""
    problem, profiles = read_swarm(cluster_path(cluster), model)
    started_s = time.monotonic()
    placement = best_placement(
        problem,
        time_limit_s=limit_s,
        seed=0,
        spent=by_clock(limit_s),
        service=service_of(problem, profiles),
    )
    return problem, profiles, placement, time.monotonic() - started_s
