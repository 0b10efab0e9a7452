"""The estimate against runs of the simulator under the living rules, and its laws."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given

from bench.planner.pattern_cpsat import widest_chain
from bench.planner.stage_patterns import Terrain, place_chains
from coordinator.evaluation.estimate import ESTIMATE, _Network, estimate
from coordinator.evaluation.flow_shares import flow_shares, separate_parts, topological
from coordinator.evaluation.max_flow import solve_flow
from coordinator.planning.heuristics.heuristics import greedy
from coordinator.problem.service import Curve, service_from_rates
from coordinator.simulator.judge import judge
from dht.messages.types import Assignment, Problem
from tests.examples import examples
from tests.unit.coordinator.helix import problem_of, published, service_of
from tests.unit.coordinator.problems import model, node, problems, span

DEPTHS: dict[tuple[str, str], tuple[str | int, ...]] = {
    ("single24", "70b"): ("helix", "petals", 14, 20),
    ("geo24", "70b"): ("petals", "swarm", 12, 20),
    ("het42", "70b"): ("swarm", 12),
}
"""Placements by planner of Helix's artifact, or by the bound on stages of a widest chain."""


def spans_of(cluster: str, name: str, which: str | int) -> tuple[Assignment, ...]:
    if isinstance(which, str):
        return published(cluster, name, which)
    problem = problem_of(cluster, name)
    terrain = Terrain(problem)
    chain = widest_chain(terrain, terrain.counts(), which, seed=0)
    assert chain is not None
    return place_chains(terrain, [chain])


@pytest.mark.parametrize(("cluster", "name"), DEPTHS)
def test_it_is_near_a_simulated_run_and_ranks_as_it_does(cluster: str, name: str) -> None:
    problem, service = problem_of(cluster, name), service_of(cluster, name)
    estimated, served = [], []
    for which in DEPTHS[cluster, name]:
        spans = spans_of(cluster, name, which)
        edges = solve_flow(problem, spans).edges
        estimated.append(estimate(problem, spans, edges, service).tokens_per_s)
        served.append(judge(problem, service, spans, edges, virtual_s=30))
        assert 0.75 < estimated[-1] / served[-1] < 1.3, (which, estimated[-1], served[-1])
    pairs = list(combinations(zip(estimated, served, strict=True), 2))
    unlike = [pair for pair in pairs if abs(pair[0][1] - pair[1][1]) > 0.15 * pair[0][1]]
    assert all((a[0] < b[0]) == (a[1] < b[1]) for a, b in unlike), (estimated, served)


def test_more_room_and_faster_layers_never_serve_less() -> None:
    problem, service = problem_of("single24", "70b"), service_of("single24", "70b")
    spans = published("single24", "70b", "helix")
    edges = solve_flow(problem, spans).edges
    base = estimate(problem, spans, edges, service)
    roomier = {
        name: replace(m, kv=replace(m.kv, beside=tuple(1.5 * room for room in m.kv.beside)))
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


def test_an_uplink_is_one_station_for_all_its_links() -> None:
    """One stage sends to two; its uplink is as wide as either link, or as both together."""
    problem = Problem(
        model=replace(model(2), activation_bytes=1000),
        nodes=(node("a", [1e4]), node("b", [1e3]), node("c", [1e3])),
        default_bandwidth_bytes_per_s=1e6,
    )
    spans = [span("a", 0, 1), span("b", 1, 2), span("c", 1, 2)]
    edges = solve_flow(problem, spans).edges

    def served(**rates: float) -> float:
        nodes = (replace(problem.nodes[0], **rates), *problem.nodes[1:])  # type: ignore[arg-type]
        shared = replace(problem, nodes=nodes)
        return estimate(shared, spans, edges, service_from_rates(shared)).tokens_per_s

    free = served()
    assert served(up_bytes_per_s=1e9) == pytest.approx(free)
    assert served(down_bytes_per_s=1.0) == pytest.approx(free), "the first stage takes token ids"
    both, one = served(up_bytes_per_s=2e6), served(up_bytes_per_s=1e6)
    assert one < 0.7 * both
    assert both <= free * (1 + 1e-3)
    assert served(up_bytes_per_s=0.0) == 0


def test_decodes_cost_what_they_cost_at_the_contexts_of_the_workload() -> None:
    """A peer whose time grows with context serves less, and no more than that costs."""
    ns = 10**6
    problem = Problem(model=replace(model(2), context_tokens=4096), nodes=(node("a", [1e3, 500]),))
    spans = [span("a", 0, 2)]

    def served(far_ns: int) -> float:
        times = ((1, ns, far_ns), (256, 256 * ns, 256 * far_ns))
        nodes = (replace(problem.nodes[0], decode_layer_ns=times),)
        announced = replace(problem, nodes=nodes)
        return estimate(
            announced, spans, solve_flow(announced, spans).edges, service_from_rates(announced)
        ).tokens_per_s

    flat, steep = served(ns), served(2 * ns)
    assert 0.75 * flat < steep < 0.95 * flat


@pytest.mark.parametrize("roomy_bytes", [400, 6000, 40_000])
def test_routes_go_round_a_fast_peer_that_is_full(roomy_bytes: int) -> None:
    """Its flow is five sixths, its room for a few requests; the other's room is given."""
    kv = replace(model(2, kv_bytes=1), context_tokens=4096)
    times = {"a": 10**6, "b": 5 * 10**6, "c": 10**6}
    rooms = {"a": 6000, "b": roomy_bytes, "c": 10**6}
    nodes = tuple(
        replace(
            node(name, [1e9 / ns], memory_bytes=100 + rooms[name]),
            decode_layer_ns=((1, ns, ns), (256, 2 * ns, 2 * ns)),
        )
        for name, ns in times.items()
    )
    problem = Problem(model=kv, nodes=nodes, default_bandwidth_bytes_per_s=1e9)
    spans = [span("a", 0, 1), span("b", 0, 1), span("c", 1, 2)]
    edges, service = solve_flow(problem, spans).edges, service_from_rates(problem)
    estimated = estimate(problem, spans, edges, service).tokens_per_s
    served = judge(problem, service, spans, edges, virtual_s=60)
    assert 0.7 < estimated / served < 1.4, (estimated, served)


@pytest.mark.parametrize("pairs", [1, 30, 400])
def test_pairs_that_share_no_peer_add_up_however_many_they_are(pairs: int) -> None:
    nodes = tuple(node(f"{end}{at}", [10.0, 5.0]) for at in range(pairs) for end in "ab")
    problem = Problem(model=model(2), nodes=nodes, default_bandwidth_bytes_per_s=1e9)
    edges, spans = [], []
    for at in range(pairs):
        pair = [span(f"a{at}", 0, 1), span(f"b{at}", 1, 2)]
        edges += solve_flow(problem, pair).edges
        spans += pair
    service = service_from_rates(problem)
    alone = estimate(problem, spans[:2], edges[:3], service).tokens_per_s
    assert alone > 0
    assert estimate(problem, spans, edges, service).tokens_per_s == pytest.approx(pairs * alone)


@examples(40)
@given(problems(peers_max=4, layers_max=5))
def test_the_rate_fits_and_a_larger_one_does_not(problem: Problem) -> None:
    spans = greedy(problem)
    assume(spans is not None)
    held = {a.peer_id: a for a in spans}
    service = service_from_rates(problem)
    for part in separate_parts(flow_shares(solve_flow(problem, spans).edges)):
        for requests in (0.5, 8.0, 1000.0):
            order = topological(part, held)
            network = _Network(problem, held, order, part, service, requests)
            rate = network.most(0.0).tokens_per_s
            assert not rate or network.at(rate).load < 1
            larger = rate + 1.1 * ESTIMATE.precision * max(rate, 1e-6 * network.ceiling())
            assert larger >= network.ceiling() or network.at(larger).load >= 1
            assert network.most(0.9 * rate).tokens_per_s == pytest.approx(
                rate, rel=2 * ESTIMATE.precision
            )
