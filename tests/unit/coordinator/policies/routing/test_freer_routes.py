"""Turns go to freer holders: evenly on old announcements, and to nobody for what it says alone."""

import heapq
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.policies.routing.balance import load_of
from coordinator.policies.routing.routes import FREER, NoRoute, Router, Wheel
from dht.messages.types import NodeRecord, Plan
from tests.examples import examples

NEED_TOKENS = 100
HOLDERS = 4


def free(record: NodeRecord) -> float:
    return load_of(record).freeness


@pytest.fixture
def plan(make):
    """Four holders of each half, all alike."""
    firsts, seconds = ([f"{half}{n}" for n in range(HOLDERS)] for half in "ab")
    spans = [make.span(n, 0, 4) for n in firsts] + [make.span(n, 4, 8) for n in seconds]
    edges = [make.edge("source", n, 10.0) for n in firsts]
    edges += [make.edge(a, b, 2.5) for a, b in itertools.product(firsts, seconds)]
    edges += [make.edge(n, "sink", 10.0) for n in seconds]
    return make.plan(spans, edges)


@pytest.fixture
def nodes(make, plan):
    return {
        a.peer_id: replace(make.record(a.peer_id, a.start, a.end), kv_tokens_free=10_000)
        for a in plan.assignments
    }


def drawn(plan: Plan, nodes: dict[str, NodeRecord], clients: int, each: int) -> Counter[str]:
    """How often each peer is on the routes of clients that know nothing of each other."""
    found = Counter[str]()
    for client in range(clients):
        router = Router(plan, f"client {client}", free)
        for _ in range(each):
            route = router.next_route(nodes)
            assert not isinstance(route, NoRoute)
            found.update(stage.peer_id for stage in route)
    return found


@pytest.mark.parametrize(("clients", "each"), [(3000, 1), (30, 100), (1, 3000)])
def test_who_claims_to_be_free_gets_twice_its_share_at_most(plan, nodes, clients, each):
    share = clients * each / HOLDERS
    honest = drawn(plan, nodes, clients, each)
    assert all(abs(honest[name] - share) < 0.15 * share for name in nodes)
    busy = {n: replace(r, sessions=20, kv_tokens_free=1000) for n, r in nodes.items()}
    liars = {n: replace(busy[n], sessions=0, kv_tokens_free=1 << 50) for n in ("a0", "b0")}
    lied = drawn(plan, busy | liars, clients, each)
    for liar in liars:
        assert 1.5 * share < lied[liar] < 2 * share
    for name in busy.keys() - liars.keys():
        assert lied[name] > share / 2, "the others still have what both looks give them"


@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=6),
    st.integers(1, 5),
    st.floats(0, 1, exclude_max=True),
)
@example([1, 1, 3, 20, 20], 1, 0.0)
@examples(60)
def test_names_that_lie_together_get_twice_their_share_at_most(
    numbers: list[int], liars: int, begin: float
) -> None:
    weights = {index: float(weight) for index, weight in enumerate(numbers)}
    wheel, turns, got = Wheel[int](begin, 1.0 - begin / 2), 2000, 0
    for _ in range(turns):
        got += next(wheel.order(weights, lambda name: 1e15 if name < liars else 1.0)) < liars
        wheel.turn()
    share = sum(numbers[:liars]) / sum(numbers)
    assert abs(got / turns - (2 * share - share**2)) < 0.02
    assert got <= 2 * share * turns + 1, "two wheels leave a turn over"


def test_small_differences_move_no_turn(plan, nodes):
    a_bit = {n: replace(r, kv_tokens_free=10_000 + i) for i, (n, r) in enumerate(nodes.items())}
    assert drawn(plan, a_bit, 50, 1) == drawn(plan, nodes, 50, 1)
    full = {n: replace(r, kv_tokens_free=0, kv_tokens_wanted=500) for n, r in nodes.items()}
    assert drawn(plan, full, 50, 1) == drawn(plan, nodes, 50, 1)
    much = nodes | {"a0": replace(nodes["a0"], kv_tokens_free=int(10_000 * FREER) + 1)}
    assert drawn(plan, much, 50, 1)["a0"] > drawn(plan, nodes, 50, 1)["a0"]


Choice = Callable[[int, dict[str, NodeRecord]], list[str]]


def sessions_apart(choose: Choice, nodes: dict[str, NodeRecord], old_s: float, seed: int) -> float:
    """Mean distance of the busiest holder of a half from the idlest, in sessions.

    Sessions come and go at random, about ten at each peer, and every record is up to ``old_s`` old.
    """
    rng = random.Random(seed)
    told, now = dict(nodes), dict.fromkeys(nodes, 0)
    due = {name: rng.uniform(0, old_s) for name in nodes}
    ends: list[tuple[float, tuple[str, ...]]] = []
    at_s, apart = 0.0, []
    for number in range(1500):
        at_s += rng.expovariate(1.0)
        while ends and ends[0][0] <= at_s:
            for name in heapq.heappop(ends)[1]:
                now[name] -= 1
        for name, held in now.items():
            if due[name] <= at_s:
                due[name] = at_s + old_s
                left = 10_000 - NEED_TOKENS * held
                told[name] = replace(told[name], sessions=held, kv_tokens_free=max(0, left))
        route = choose(number, told)
        for name in route:
            now[name] += 1
        heapq.heappush(ends, (at_s + rng.expovariate(1 / (10 * HOLDERS)), tuple(route)))
        if number > 200:
            for half in "ab":
                held_here = [now[f"{half}{n}"] for n in range(HOLDERS)]
                apart.append(max(held_here) - min(held_here))
    return statistics.fmean(apart)


@pytest.mark.parametrize("old_s", [5.0, 15.0])
def test_old_announcements_even_sessions_out_and_draw_no_herd(plan, nodes, old_s):
    """Simulated: every session is a fresh client's first."""

    def of(freeness: Callable[[NodeRecord], float] | None) -> Choice:
        def choose(number: int, told: dict[str, NodeRecord]) -> list[str]:
            route = Router(plan, f"client {number}", freeness).next_route(told)
            assert not isinstance(route, NoRoute)
            return [stage.peer_id for stage in route]

        return choose

    def herd(number: int, told: dict[str, NodeRecord]) -> list[str]:
        return [
            max((f"{half}{n}" for n in range(HOLDERS)), key=lambda name: free(told[name]))
            for half in "ab"
        ]

    def mean(choose: Choice) -> float:
        return statistics.fmean(sessions_apart(choose, nodes, old_s, seed) for seed in range(3))

    by_turns, by_looks, by_herd = mean(of(None)), mean(of(free)), mean(herd)
    assert by_looks < 0.85 * by_turns
    assert by_looks < by_herd


def test_a_holder_that_joins_empty_gets_more_than_its_share_until_it_is_as_full(plan, nodes):
    busy = {n: replace(r, sessions=20, kv_tokens_free=1000) for n, r in nodes.items()}
    joined = busy | {"a3": nodes["a3"]}
    assert drawn(plan, joined, 400, 1)["a3"] > 1.5 * 100
    assert abs(drawn(plan, busy, 400, 1)["a3"] - 100) < 30
