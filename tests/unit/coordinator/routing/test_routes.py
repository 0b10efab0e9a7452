"""Routes: weighted round-robin over a plan's flow, and the way without a plan."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.routes import NoRoute, Router, Wheel, missing_layers, route_from_records
from dht.messages.types import Assignment, NodeRecord, NodeState, Plan, Problem, RouteStage
from tests.examples import examples
from tests.unit.coordinator.problems import model, node, placed, plan_of, record, span


def serving(plan: Plan, *, without: Iterable[str] = ()) -> dict[str, NodeRecord]:
    """Every peer of the plan serves what it was given."""
    return {
        a.peer_id: record(a.peer_id, a.start, a.end, layers=plan.model.layers)
        for a in plan.assignments
        if a.peer_id not in set(without)
    }


def two_by_three() -> Plan:
    """Stage one: a (6) and b (3); stage two: c (5), d (3) and e (1)."""
    problem = Problem(
        model=model(2),
        nodes=tuple(
            node(name, [rate]) for name, rate in [("a", 6), ("b", 3), ("c", 5), ("d", 3), ("e", 1)]
        ),
    )
    firsts = [span(name, 0, 1) for name in "ab"]
    return plan_of(problem, [*firsts, *(span(name, 1, 2) for name in "cde")])


def peers(route: tuple[RouteStage, ...] | NoRoute) -> list[str]:
    assert not isinstance(route, NoRoute), route
    return [stage.peer_id for stage in route]


def check_route(route: tuple[RouteStage, ...], usable: dict[str, NodeRecord], layers: int) -> None:
    assert route[0].start == 0
    assert route[-1].end == layers
    assert all(before.end == after.start for before, after in pairwise(route))
    assert all(usable[stage.peer_id].holds(stage.start, stage.end) for stage in route)


class TestWheel:
    @given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    @examples(100)
    def test_one_turn_of_the_wheel_is_exactly_the_weights(self, weights: list[int]) -> None:
        wheel = Wheel({str(index): weight for index, weight in enumerate(weights)})
        drawn: Counter[str] = Counter()
        for _ in range(sum(weights)):
            names = wheel.order()
            wheel.draw(names[0], names)
            drawn[names[0]] += 1
        assert drawn == {str(index): weight for index, weight in enumerate(weights)}

    def test_draws_are_interleaved(self) -> None:
        wheel = Wheel({"a": 2, "b": 1})
        drawn = []
        for _ in range(6):
            drawn.append(wheel.order()[0])
            wheel.draw(drawn[-1], "ab")
        assert drawn == ["a", "b", "a", "a", "b", "a"]


class TestRouter:
    def test_draws_follow_the_flow_within_one_round(self) -> None:
        plan = two_by_three()
        router, usable = Router(plan), serving(plan)
        routes = [peers(router.next_route(usable)) for _ in range(9)]
        drawn = Counter(name for route in routes for name in route)
        want = {e.head: e.tokens_per_s for e in plan.edges if e.tail == "source"}
        assert all(abs(drawn[name] - want[name]) <= 1 for name in want)
        second = Counter(route[1] for route in routes)
        assert all(abs(second[name] - rate) <= 2 for name, rate in {"c": 5, "d": 3, "e": 1}.items())

    def test_a_masked_peer_is_passed_over(self) -> None:
        plan = two_by_three()
        usable = serving(plan, without=["a", "c"])
        router = Router(plan)
        # b has flow to some of the second stage only: routes exist where the flow says so.
        onward = {e.head for e in plan.edges if e.tail == "b"} - {"c"}
        route = router.next_route(usable)
        if onward:
            assert peers(route)[0] == "b"
        else:
            assert isinstance(route, NoRoute)

    def test_a_peer_that_comes_back_gets_its_share_and_no_burst(self) -> None:
        problem = Problem(model=model(1), nodes=(node("a", [5]), node("b", [5])))
        plan = plan_of(problem, [span("a", 0, 1), span("b", 0, 1)])
        router = Router(plan)
        for _ in range(100):
            assert peers(router.next_route(serving(plan, without=["b"]))) == ["a"]
        drawn = [peers(router.next_route(serving(plan)))[0] for _ in range(10)]
        assert Counter(drawn) == {"a": 5, "b": 5}

    def test_a_dead_end_is_backed_out_of(self) -> None:
        # All of a's flow goes on to c, all of b's to d; c is gone, though a comes first in turn.
        problem = Problem(
            model=model(2),
            nodes=tuple(
                node(name, [rate]) for name, rate in zip("abcd", [9, 2, 9, 2], strict=True)
            ),
        )
        plan = plan_of(
            problem, [span("a", 0, 1), span("b", 0, 1), span("c", 1, 2), span("d", 1, 2)]
        )
        ways = {(e.tail, e.head) for e in plan.edges}
        usable = serving(plan, without=["c"])
        router = Router(plan)
        for _ in range(5):
            first, second = peers(router.next_route(usable))
            assert (first, second) in ways
            assert second == "d"

    def test_peers_that_hold_other_layers_than_planned_are_not_used(self) -> None:
        plan = two_by_three()
        usable = serving(plan) | {name: record(name, 0, 1, layers=2) for name in "cde"}
        assert isinstance(Router(plan).next_route(usable), NoRoute)

    def test_only_serving_peers_are_used(self) -> None:
        plan = two_by_three()
        usable = serving(plan) | {
            name: record(name, 0, 1, layers=2, state=NodeState.LOADING) for name in "ab"
        }
        route = Router(plan).next_route(usable)
        assert isinstance(route, NoRoute)
        assert "no route" in route.reason

    def test_a_draw_that_finds_nothing_takes_no_turn(self) -> None:
        plan = two_by_three()
        one, other = Router(plan), Router(plan)
        one.next_route({})
        usable = serving(plan)
        assert [one.next_route(usable) for _ in range(9)] == [
            other.next_route(usable) for _ in range(9)
        ]

    def test_layers_that_two_hold_are_run_by_the_earlier(self) -> None:
        problem = Problem(model=model(4), nodes=(node("a", [9, 9, 9]), node("b", [9, 9, 9])))
        plan = plan_of(problem, [span("a", 0, 3), span("b", 1, 4)])
        assert Router(plan).next_route(serving(plan)) == (
            RouteStage(peer_id="a", start=0, end=3),
            RouteStage(peer_id="b", start=3, end=4),
        )

    @pytest.mark.property
    @given(placed())
    @examples(100)
    def test_every_route_of_every_plan_runs_each_layer_once(
        self, case: tuple[Problem, tuple[Assignment, ...]]
    ) -> None:
        problem, spans = case
        plan = plan_of(problem, [s for s in spans if _fits(problem, s)])
        usable = serving(plan)
        router = Router(plan)
        for _ in range(10):
            route = router.next_route(usable)
            if isinstance(route, NoRoute):
                assert plan.flow_tokens_per_s == 0
                return
            check_route(route, usable, problem.model.layers)


def _fits(problem: Problem, wanted: Assignment) -> bool:
    from dht.messages.types import fits

    peer = next(n for n in problem.nodes if n.peer_id == wanted.peer_id)
    return fits(problem.model, peer, wanted.start, wanted.end)


class TestMissingLayers:
    @given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.booleans())))
    @examples(200)
    def test_exactly_those_that_no_serving_peer_holds(
        self, holders: list[tuple[int, int, bool]]
    ) -> None:
        nodes = {
            str(index): record(
                str(index), start, end, state=NodeState.SERVING if up else NodeState.LOADING
            )
            for index, (start, end, up) in enumerate(holders)
        }
        held = {layer for start, end, up in holders if up for layer in range(start, min(end, 12))}
        gaps = missing_layers(nodes, 12)
        assert {layer for start, end in gaps for layer in range(start, end)} == set(
            range(12)
        ) - held
        assert all(before[1] < after[0] for before, after in pairwise(gaps))


class TestRouteFromRecords:
    def test_fewer_and_faster_stages_win(self) -> None:
        rates = [12 / count for count in range(1, 13)]
        nodes = {
            "slow": record("slow", 0, 12, rates=[rate / 10 for rate in rates]),
            "a": record("a", 0, 6, rates=rates),
            "b": record("b", 6, 12, rates=rates),
        }
        route = route_from_records(nodes, 12)
        assert peers(route) == ["a", "b"]

    def test_a_peer_is_entered_in_the_middle_of_its_range(self) -> None:
        nodes = {"a": record("a", 0, 5), "b": record("b", 2, 12)}
        assert route_from_records(nodes, 12) == (
            RouteStage(peer_id="a", start=0, end=5),
            RouteStage(peer_id="b", start=5, end=12),
        )

    def test_it_says_which_layers_are_missing(self) -> None:
        nodes = {"a": record("a", 0, 5), "b": record("b", 7, 12)}
        route = route_from_records(nodes, 12)
        assert isinstance(route, NoRoute)
        assert route.missing == ((5, 7),)

    def test_a_peer_of_unknown_or_no_speed_is_better_than_none(self) -> None:
        nodes = {"a": record("a", 0, 5, rates=()), "b": record("b", 5, 12, rates=[0.0])}
        assert peers(route_from_records(nodes, 12)) == ["a", "b"]

    @given(
        st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=8),
        st.lists(st.floats(0.0, 100.0), min_size=8, max_size=8),
    )
    @examples(200)
    def test_a_route_is_found_exactly_when_every_layer_is_held(
        self, spans: list[tuple[int, int]], rates: list[float]
    ) -> None:
        nodes = {
            str(index): record(str(index), start, min(12, start + count), rates=[rates[index]])
            for index, (start, count) in enumerate(spans)
        }
        route = route_from_records(nodes, 12)
        if missing_layers(nodes, 12):
            assert isinstance(route, NoRoute)
        else:
            assert not isinstance(route, NoRoute)
            check_route(route, nodes, 12)
