"""The estimate against what Helix's event simulator served (decode tokens/s, offline)."""

from dataclasses import replace

import pytest

from coordinator.evaluation.estimate import estimate
from coordinator.evaluation.max_flow import solve_flow
from coordinator.heuristics.peer_classes import peer_classes, regions
from coordinator.problem.service import Curve
from coordinator.search.pattern_cpsat import Limits, widest_chain
from coordinator.search.stage_patterns import Terrain, place_chains
from dht.messages.types import Assignment
from tests.unit.coordinator.helix import problem_of, published, service_of

SIMULATED = {
    ("single24", "70b"): {
        "helix": 252.1,
        "petals": 191.1,
        12: 251.4,
        14: 278.4,
        20: 241.5,
        24: 222,
    },
    ("geo24", "70b"): {"helix": 98.0, "petals": 66.6, "swarm": 41.6, 12: 127.8, 20: 156.6},
    ("het42", "70b"): {"helix": 645.3, "swarm": 536.4, 12: 712.6, 16: 677.2, 42: 496.5},
}
"""By planner of the artifact, or by the bound on stages of a widest chain of patterns."""


def spans_of(cluster: str, name: str, which: str | int) -> tuple[Assignment, ...]:
    if isinstance(which, str):
        return published(cluster, name, which)
    problem = problem_of(cluster, name)
    terrain = Terrain(problem, peer_classes(problem, regions(problem)), lambda kind, layers: 1e9)
    chain = widest_chain(terrain, terrain.counts(), Limits(stages_max=which), seed=0)
    assert chain is not None
    return place_chains(terrain, [chain])


@pytest.mark.parametrize(("cluster", "name"), SIMULATED)
def test_it_is_near_the_event_simulation_and_ranks_depth_as_it_does(
    cluster: str, name: str
) -> None:
    problem, service = problem_of(cluster, name), service_of(cluster, name)
    estimated = {}
    for which, served in SIMULATED[cluster, name].items():
        spans = spans_of(cluster, name, which)
        found = estimate(problem, spans, solve_flow(problem, spans).edges, service)
        estimated[which] = found.tokens_per_s
        assert 0.7 * served < found.tokens_per_s < 1.4 * served, which
    depths = [which for which in estimated if isinstance(which, int)]
    by_simulation = sorted(depths, key=lambda d: SIMULATED[cluster, name][d])
    assert sorted(depths, key=lambda d: estimated[d]) == by_simulation


@pytest.mark.parametrize(("cluster", "served"), [("single24", 339.6), ("geo24", 232.7)])
def test_three_replicas_add_up(cluster: str, served: float) -> None:
    total = 0.0
    for gpu in ("a100", "l4", "t4"):
        part = f"{cluster}_sub_{gpu}"
        problem, spans = problem_of(part, "30b"), published(part, "30b", "helix")
        edges = solve_flow(problem, spans).edges
        total += estimate(problem, spans, edges, service_of(part, "30b")).tokens_per_s
    assert total == pytest.approx(served, rel=0.1)


def test_more_room_and_faster_layers_never_serve_less() -> None:
    problem, service = problem_of("single24", "70b"), service_of("single24", "70b")
    spans = published("single24", "70b", "helix")
    edges = solve_flow(problem, spans).edges
    base = estimate(problem, spans, edges, service)
    roomier = {
        name: replace(m, kv_layer_tokens=tuple(1.5 * room for room in m.kv_layer_tokens))
        for name, m in service.machines.items()
    }
    faster = {
        name: replace(m, decode=replace(m.decode, seconds=tuple(s / 2 for s in m.decode.seconds)))
        for name, m in service.machines.items()
    }
    for machines in (roomier, faster):
        better = estimate(problem, spans, edges, replace(service, machines=machines))
        assert better.tokens_per_s > base.tokens_per_s


def test_few_requests_are_served_at_the_pace_of_the_ring() -> None:
    problem, service = problem_of("single24", "70b"), service_of("single24", "70b")
    spans = published("single24", "70b", "helix")
    edges = solve_flow(problem, spans).edges
    light = replace(service, workload=replace(service.workload, requests_max=4.0))
    few = estimate(problem, spans, edges, light)
    assert few.requests <= 4.0
    in_flight = few.token_time_s + few.prompt_time_s / service.workload.output_tokens
    assert few.tokens_per_s == pytest.approx(few.requests / in_flight, rel=1e-6)
    assert few.token_time_s < estimate(problem, spans, edges, service).token_time_s


def test_nothing_flows_nothing_is_served() -> None:
    problem, service = problem_of("single24", "70b"), service_of("single24", "70b")
    assert estimate(problem, (), (), service).tokens_per_s == 0


def test_curves_are_linear_between_points_and_along_the_last_piece() -> None:
    curve = Curve(tokens=(0.0, 2.0, 4.0), seconds=(0.0, 1.0, 4.0))
    assert [curve.at(x) for x in (0, 1, 2, 3, 4, 5)] == [0.0, 0.5, 1.0, 2.5, 4.0, 5.5]
    assert Curve(tokens=(1.0,), seconds=(2.0,)).at(7) == 2.0
