"""Routes: weighted round-robin over a plan's flow, and the way without a plan."""

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.routing.routes import (
    ALMOST_ONE,
    SEARCH,
    NoRoute,
    Router,
    Wheel,
    _contenders,
    _layer_s,
    begin_of,
    missing_layers,
    route_from_records,
)
from dht.messages.types import (
    RECORD_BOUNDS,
    Assignment,
    NodeRecord,
    NodeState,
    Plan,
    Problem,
    RouteStage,
)
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


def apart(turns: int) -> float:
    """Greatest distance from its share that any arc may have after a number of golden turns."""
    return 1.1 + 0.4 * math.log(turns)


class TestWheel:
    @given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 40))
    def test_over_even_begins_every_turn_falls_by_the_weights(
        self, numbers: list[int], turn: int
    ) -> None:
        weights = {str(index): float(weight) for index, weight in enumerate(numbers)}
        clients, drawn = 200, Counter[str]()
        for client in range(clients):
            wheel = Wheel[str](client / clients)
            for _ in range(turn):
                wheel.turn()
            drawn[next(wheel.order(weights))] += 1
        total = sum(numbers)
        assert all(abs(drawn[n] - clients * w / total) <= 1 + 1e-6 for n, w in weights.items())

    @given(
        st.lists(st.integers(1, 20), min_size=1, max_size=6),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 300),
    )
    def test_after_any_number_of_turns_each_has_had_its_share(
        self, numbers: list[int], begin: float, turns: int
    ) -> None:
        weights = {str(index): float(weight) for index, weight in enumerate(numbers)}
        wheel, drawn = Wheel[str](begin), Counter[str]()
        for _ in range(turns):
            drawn[next(wheel.order(weights))] += 1
            wheel.turn()
        total = sum(numbers)
        assert all(abs(drawn[n] - turns * w / total) < apart(turns) for n, w in weights.items())

    @given(st.floats(0, 1, exclude_max=True), st.integers(3, 9))
    def test_turns_are_interleaved(self, begin: float, names: int) -> None:
        wheel, drawn = Wheel[int](begin), []
        for _ in range(100):
            drawn.append(next(wheel.order(dict.fromkeys(range(names), 1.0))))
            wheel.turn()
        assert all(one != other for one, other in pairwise(drawn))

    @given(st.lists(st.integers(1, 20), min_size=2, max_size=5))
    def test_who_is_passed_over_leaves_its_turns_to_all_others(self, numbers: list[int]) -> None:
        weights = {str(index): float(weight) for index, weight in enumerate(numbers)}
        clients, drawn = 300, Counter[tuple[str, str]]()
        for client in range(clients):
            order = list(Wheel[str](client / clients).order(weights))
            assert sorted(order) == sorted(weights)
            drawn[order[0], order[1]] += 1
        total = sum(numbers)
        for one, other in permutations(weights, 2):
            share = weights[one] / total * weights[other] / (total - weights[one])
            assert abs(drawn[one, other] - clients * share) <= 2 + 1e-6

    def test_names_without_weight_come_last(self) -> None:
        assert list(Wheel[str](0.9).order({"b": 0.0, "a": 0.0, "c": 1.0})) == ["c", "a", "b"]
        assert list(Wheel[str]().order({})) == []

    @given(
        st.lists(st.floats(0, RECORD_BOUNDS.rate_max), min_size=1, max_size=6), st.integers(0, 1000)
    )
    @examples(100)
    def test_any_weights_give_each_name_once(self, numbers: list[float], turns: int) -> None:
        weights = {str(index): weight for index, weight in enumerate(numbers)}
        wheel = Wheel[str](ALMOST_ONE)
        for _ in range(turns):
            wheel.turn()
        assert sorted(wheel.order(weights)) == sorted(weights)

    def test_begins_are_even_over_identities_and_independent_of_each_other(self) -> None:
        cells = Counter[tuple[int, int]]()
        clients = 9000
        for client in range(clients):
            one, other = (begin_of(f"client {client}", name) for name in ("one", "other"))
            cells[int(3 * one), int(3 * other)] += 1
        expected = clients / 9
        assert len(cells) == 9
        assert sum((n - expected) ** 2 / expected for n in cells.values()) < 26.1, "p = 0.001"


class TestRouter:
    @pytest.mark.parametrize("turns", [9, 90, 900])
    def test_draws_of_one_client_follow_the_flow(self, turns: int) -> None:
        plan = two_by_three()
        router, usable = Router(plan), serving(plan)
        routes = [peers(router.next_route(usable)) for _ in range(turns)]
        drawn = Counter(name for route in routes for name in route)
        shares = {"a": 6, "b": 3, "c": 5, "d": 3, "e": 1}
        first = apart(turns)
        for name in "ab":
            assert abs(drawn[name] - turns * shares[name] / 9) < first
        for name in "cde":  # turns of a's wheel and of b's, each of which had its share
            assert abs(drawn[name] - turns * shares[name] / 9) < 3 * first

    def test_first_draws_of_many_clients_follow_the_flow(self) -> None:
        plan = two_by_three()
        usable, clients = serving(plan), 900
        routes = [peers(Router(plan, f"client {n}").next_route(usable)) for n in range(clients)]
        drawn = Counter(name for route in routes for name in route)
        for name, rate in {"a": 6, "b": 3, "c": 5, "d": 3, "e": 1}.items():
            share = rate / 9
            noise = math.sqrt(clients * share * (1 - share))
            assert abs(drawn[name] - clients * share) < 3.5 * noise
        ways = {(e.tail, e.head) for e in plan.edges if e.tail in "ab"}
        assert {tuple(route) for route in routes} == ways, "every way is taken"

    def test_a_client_begins_each_plan_elsewhere(self) -> None:
        plan = two_by_three()
        usable, begun = serving(plan), set()
        for counter in range(20):
            version = replace(plan.version, counter=counter)
            router = Router(replace(plan, version=version), "client")
            begun.add(tuple(peers(router.next_route(usable))))
        assert len(begun) > 3

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
        drawn = Counter(peers(router.next_route(serving(plan)))[0] for _ in range(10))
        assert abs(drawn["b"] - 5) < apart(10)

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

    @given(placed())
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
    @examples(100)
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
    @examples(100)
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


def test_among_thousands_of_peers_a_search_looks_at_the_fastest_of_each_layer() -> None:
    """Identities are free: 4,096 of them had each request of a gateway search for 0.14 s."""
    rng, layers = random.Random(1), 12
    nodes: dict[str, NodeRecord] = {}
    for number in range(SEARCH.all_max * 4):
        start = rng.randrange(layers)
        end = rng.randrange(start + 1, layers + 1)
        rates = [rng.uniform(1, 99) / count for count in range(1, layers + 1)]
        nodes[f"p{number}"] = record(f"p{number}", start, end, rates=rates)
    looked_at = _contenders(nodes, 0, layers)
    assert len(looked_at) <= layers * SEARCH.holders_max
    for layer in range(layers):
        holders = [each for each in nodes.values() if each.start <= layer < each.end]
        assert min(holders, key=_layer_s) in looked_at
    route = route_from_records(nodes, layers)
    assert isinstance(route, tuple)
    assert [route[0].start, route[-1].end] == [0, layers]
    few = dict(list(nodes.items())[: SEARCH.all_max])
    assert list(_contenders(few, 0, layers)) == list(few.values()), "few are all looked at"
