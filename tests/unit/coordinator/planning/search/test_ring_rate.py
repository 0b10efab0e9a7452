"""The quick guess at what a chain serves, against the estimate that it stands for."""

import statistics
from dataclasses import replace
from itertools import combinations

import pytest

from bench.planner.announced import announced_problem
from bench.planner.clusters import load
from coordinator.evaluation.estimate import estimate
from coordinator.evaluation.max_flow import balanced_flow
from coordinator.planning.heuristics.peer_regions import regions
from coordinator.planning.search.chain_dp import Chain, Row, orders
from coordinator.planning.search.ring_rate import RingRates
from coordinator.problem.service import announced_service, service_from_rates
from dht.messages.types import Problem
from tests.unit.coordinator.problems import link, model, node, span, steady


def chains_of(problem: Problem) -> list[Chain]:
    """Chains of several depths over the same peers."""
    found: dict[Chain, None] = {}
    for order in list(orders(problem.nodes, regions(problem)))[:2]:
        row = Row(problem, order)
        most = max(sum(n.tokens_per_s[0] for n in problem.nodes), 1e-9)
        chains = [row.chain(most * 0.8**step) for step in range(4, 30, 4)]
        found |= dict.fromkeys(chain for chain in chains if chain is not None)
    return list(found)


@pytest.mark.parametrize(
    "cluster", ["homes-04", "homes-16", "helix-10", "single24/30b", "geo24/70b"]
)
def test_the_rate_is_near_the_estimate_and_ranks_as_it_does(cluster: str) -> None:
    problem = announced_problem(*load(cluster))
    service = announced_service(problem)
    rates, pairs = RingRates(problem, service), []
    for chain in chains_of(problem):
        served = estimate(problem, chain, balanced_flow(problem, chain).edges, service)
        if served.tokens_per_s > 0:
            pairs.append((rates(chain), served.tokens_per_s))
    assert len(pairs) >= 4
    ratios = [served / rate for rate, served in pairs]
    assert 0.85 < statistics.median(ratios) < 1.15
    assert all(0.6 < ratio < 1.4 for ratio in ratios), ratios
    for (rate, served), (other_rate, other_served) in combinations(pairs, 2):
        if max(served, other_served) > 1.25 * min(served, other_served):
            assert (rate < other_rate) == (served < other_served)


def test_a_long_link_and_a_narrow_one_cost_what_they_hold_up() -> None:
    peers = tuple(node(name, steady(1000, 4)) for name in "ab")
    near = Problem(
        model=replace(model(8), kv_bytes_per_token_layer=1),
        nodes=tuple(replace(n, memory_bytes=100_000) for n in peers),
        links=(link("a", "b", 1e6, rtt_s=0.001), link("b", "a", 1e6, rtt_s=0.001)),
    )
    chain = (span("a", 0, 4), span("b", 4, 8))

    def rate(problem: Problem) -> float:
        return RingRates(problem, service_from_rates(problem))(chain)

    far = replace(near, links=(link("a", "b", 1e6, rtt_s=1.0), link("b", "a", 1e6, rtt_s=1.0)))
    narrow = replace(near, links=(link("a", "b", 20.0, rtt_s=0.001), near.links[1]))
    assert rate(near) > 0
    assert rate(far) < 0.9 * rate(near)
    assert rate(narrow) < 20.0 < rate(near)


def test_without_room_for_a_session_nothing_is_served() -> None:
    problem = Problem(model=model(4), nodes=(node("a", steady(9, 4)),))
    service = service_from_rates(problem)
    none = replace(service.machines["a"].kv, beside=(0.0,), tokens_min=0)
    machine = replace(service.machines["a"], kv=none)
    assert RingRates(problem, replace(service, machines={"a": machine}))((span("a", 0, 4),)) == 0.0


def test_a_slow_peer_beside_a_quick_one_gets_few_sessions() -> None:
    """It has as much room for KV, but what holds it up does not hold up all."""
    speeds = {"quick": 100, "slow": 5, "last": 100}
    problem = Problem(
        model=replace(model(8), kv_bytes_per_token_layer=1),
        nodes=tuple(
            replace(node(name, steady(speed, 4)), memory_bytes=100_000)
            for name, speed in speeds.items()
        ),
    )
    rates = RingRates(problem, service_from_rates(problem))
    quick, slow, last = span("quick", 0, 4), span("slow", 0, 4), span("last", 4, 8)
    assert rates((quick, slow, last)) > 0.6 * rates((quick, last))
