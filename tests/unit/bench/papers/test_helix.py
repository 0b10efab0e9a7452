"""The simulator against the figures of Helix's, on its own plans with its own scheduler."""

import json
from pathlib import Path

import pytest

from bench.papers.clusters import AZURE, REFERENCE, published
from bench.papers.full_load import offline
from coordinator.simulator.core.trace import as_in_papers, read_trace

CASES = {
    "geo24/70b/helix": 97.985,
    "geo24/70b/swarm": 41.605,
    "single24/70b/petals": 191.067,
    "single24/70b/helix": 252.08,
}


def test_expected_figures_are_those_of_the_reference_file() -> None:
    runs = json.loads(REFERENCE.read_text())["artifact_simulator_runs"]
    known = {round(run["decode_tps"], 3) for run in runs}
    assert {round(value, 3) for value in CASES.values()} <= known


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_published_plans_serve_what_helix_says_within_5_percent(case: str) -> None:
    trace = as_in_papers(read_trace(Path(AZURE).read_bytes()))
    problem, profiles, plan = published(case)
    report = offline(problem, profiles, plan, trace)
    assert report.decode_tokens_per_s == pytest.approx(CASES[case], rel=0.05)
    assert all(use.kv_peak <= 1 for use in report.peers.values())


@pytest.mark.slow
def test_three_replicas_of_30b_serve_what_helix_says_within_5_percent() -> None:
    trace = as_in_papers(read_trace(Path(AZURE).read_bytes()))
    total = 0.0
    for gpu in ("a100", "l4", "t4"):
        problem, profiles, plan = published(f"single24_sub_{gpu}/30b/helix")
        report = offline(problem, profiles, plan, trace)
        total += report.decode_tokens_per_s
    assert total == pytest.approx(339.6, rel=0.05)
