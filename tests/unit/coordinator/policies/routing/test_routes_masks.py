"""Routes: proportions, masks, backing out of dead ends, and exactly which layers are missing."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from coordinator.policies.routing.routes import (
    NoRoute,
    Router,
    Wheel,
    missing_layers,
    route_from_records,
)
from dht.messages.types import NodeState, RouteStage


def stage(peer_id: str, start: int, end: int) -> RouteStage:
    return RouteStage(peer_id=peer_id, start=start, end=end)


@pytest.fixture
def plan(make):
    """a [0, 4); b and c [4, 8); d [2, 6) goes on to e [6, 8)."""
    return make.plan(
        [
            make.span("a", 0, 4),
            make.span("b", 4, 8),
            make.span("c", 4, 8),
            make.span("d", 2, 6),
            make.span("e", 6, 8),
        ],
        [
            make.edge("source", "a", 60.0),
            make.edge("a", "b", 30.0),
            make.edge("a", "c", 20.0),
            make.edge("a", "d", 10.0),
            make.edge("b", "sink", 30.0),
            make.edge("c", "sink", 20.0),
            make.edge("d", "e", 10.0),
            make.edge("e", "sink", 10.0),
        ],
    )


@pytest.fixture
def nodes(make, plan):
    return {a.peer_id: make.record(a.peer_id, a.start, a.end) for a in plan.assignments}


def test_a_wheel_interleaves():
    """Weights 3, 2, 1, in proportion and mixed."""
    wheel, drawn = Wheel(), []
    for _ in range(12):
        drawn.append(next(wheel.order({"x": 3.0, "y": 2.0, "z": 1.0})))
        wheel.turn()
    assert "".join(drawn) == "xyxzxxyxzyxy"


def test_draws_follow_the_flow(plan, nodes):
    router = Router(plan)
    drawn = Counter(router.next_route(nodes)[1].peer_id for _ in range(60))
    assert all(abs(drawn[name] - n) < 2 for name, n in {"b": 30, "c": 20, "d": 10}.items())


def test_overlapping_layers_are_run_by_the_earlier_stage(plan, nodes):
    for name in "bc":
        del nodes[name]
    assert Router(plan).next_route(nodes) == (stage("a", 0, 4), stage("d", 4, 6), stage("e", 6, 8))


def test_masked_peers_are_passed_over(plan, nodes):
    router = Router(plan)
    del nodes["b"]
    routes = [router.next_route(nodes) for _ in range(30)]
    assert Counter(route[1].peer_id for route in routes) == {"c": 20, "d": 10}


def test_a_peer_that_returns_does_not_get_all_missed_turns_at_once(plan, nodes):
    router = Router(plan)
    without = {name: record for name, record in nodes.items() if name != "b"}
    for _ in range(500):
        router.next_route(without)
    drawn = Counter(router.next_route(nodes)[1].peer_id for _ in range(12))
    assert drawn["b"] <= 9
    assert drawn["c"] >= 2


def test_a_dead_end_is_backed_out_of(plan, nodes):
    del nodes["e"]
    router = Router(plan)
    routes = [router.next_route(nodes) for _ in range(50)]
    assert {route[1].peer_id for route in routes} == {"b", "c"}


def test_a_record_that_holds_less_than_the_plan_says_is_masked(plan, nodes):
    nodes["b"] = replace(nodes["b"], start=5)
    nodes["c"] = replace(nodes["c"], state=NodeState.DRAINING)
    route = Router(plan).next_route(nodes)
    assert [s.peer_id for s in route] == ["a", "d", "e"]


def test_no_way_through_the_plan(plan, nodes):
    del nodes["a"]
    answer = Router(plan).next_route(nodes)
    assert isinstance(answer, NoRoute)
    assert "no route" in answer.reason


def test_many_layered_dead_ends_end_quickly(make):
    """Ten stages of ten peers, the last stage gone: 10^10 paths, each peer tried once."""
    names = [[f"{depth}-{i}" for i in range(10)] for depth in range(10)]
    spans = [make.span(n, d, d + 1) for d, row in enumerate(names) for n in row]
    edges = [make.edge("source", n, 1.0) for n in names[0]]
    edges += [
        make.edge(a, b, 0.1) for row, after in itertools.pairwise(names) for a in row for b in after
    ]
    edges += [make.edge(n, "sink", 1.0) for n in names[-1]]
    plan = make.plan(spans, edges, layers=10)
    nodes = {a.peer_id: make.record(a.peer_id, a.start, a.end, layers=10) for a in spans}
    assert len(Router(plan).next_route(nodes)) == 10
    for name in names[-1]:
        del nodes[name]
    assert isinstance(Router(plan).next_route(nodes), NoRoute)


def test_a_chain_longer_than_a_session_may_have_is_no_route(make):
    spans = [make.span(f"n{i}", i, i + 1) for i in range(200)]
    ends = ["source", *(a.peer_id for a in spans), "sink"]
    edges = [make.edge(a, b, 1.0) for a, b in itertools.pairwise(ends)]
    nodes = {a.peer_id: make.record(a.peer_id, a.start, a.end, layers=200) for a in spans}
    plan = make.plan(spans, edges, layers=200)
    assert isinstance(Router(plan).next_route(nodes), NoRoute)
    assert isinstance(route_from_records(nodes, 200), NoRoute)


def test_missing_layers_are_exact(make):
    nodes = {"a": make.record("a", 1, 3), "b": make.record("b", 5, 6), "c": make.record("c")}
    assert missing_layers(nodes, 8) == ((0, 1), (3, 5), (6, 8))
    answer = route_from_records(nodes, 8)
    assert answer == NoRoute(
        reason="some layers are held by nobody", missing=((0, 1), (3, 5), (6, 8))
    )
    assert route_from_records({}, 8).missing == ((0, 8),)


def test_records_alone_give_the_fastest_route(make):
    nodes = {
        "slow": make.record("slow", 0, 8, rate=1.0),
        "a": make.record("a", 0, 5, rate=1000.0),
        "b": make.record("b", 3, 8, rate=1000.0),
    }
    assert route_from_records(nodes, 8) == (stage("a", 0, 5), stage("b", 5, 8))
    nodes["whole"] = make.record("whole", 0, 8, rate=1000.0)
    assert route_from_records(nodes, 8) == (stage("whole", 0, 8),)
