"""Chains cut from peers in a row: valid, the fewest stages, and good before any solver is asked."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.search.chain_dp import Chain, Row, chains_by_dp
from coordinator.planning.search.chain_judge import Judge
from coordinator.problem.service import service_from_rates
from dht.messages.types import Problem, fits
from tests.examples import examples
from tests.unit.coordinator.helix import problem_of, service_of
from tests.unit.coordinator.problems import model, node, problems, span, steady


def test_the_fewest_stages_at_a_flow() -> None:
    peers = tuple(node(name, steady(12, 6)) for name in "abcd")
    row = Row(Problem(model=model(6), nodes=peers), peers)
    assert row.chain(2.0) == tuple(span(name, 0, 6) for name in "abcd")
    assert row.chain(4.0) == tuple(span(name, 0, 6) for name in "abcd")
    # Eight layers: nobody holds them all. At 4 tokens/s a peer holds three, two side by side six.
    larger = Row(Problem(model=model(8), nodes=peers), peers)
    chain = larger.chain(4.0)
    assert chain is not None
    assert sorted({(a.start, a.end) for a in chain}) == [(0, 4), (4, 8)]
    assert larger.chain(6.1) is None
    doubled = larger.chain(0.1, peers_min=2)
    assert doubled is not None
    assert all(sum(a.start <= ly < a.end for a in doubled) >= 2 for ly in range(8))


@examples(40)
@given(problems(), st.floats(0.1, 300.0), st.integers(1, 2))
def test_chains_fit_cover_and_carry_their_flow(problem: Problem, flow: float, least: int) -> None:
    chain = Row(problem, problem.nodes).chain(flow, least)
    if chain is None:
        return
    carries(problem, chain, flow)


def carries(problem: Problem, chain: Chain, flow: float) -> None:
    """Check that a chain fits, covers the model, and carries the flow where links are free."""
    nodes = {peer.peer_id: peer for peer in problem.nodes}
    assert all(fits(problem.model, nodes[a.peer_id], a.start, a.end) for a in chain)
    assert not uncovered(chain, problem.model.layers)
    unlimited = (replace(n, up_bytes_per_s=None, down_bytes_per_s=None) for n in problem.nodes)
    free = replace(
        problem,
        links=(),
        uplinks=(),
        nodes=tuple(unlimited),
        client_bandwidth_bytes_per_s=1e12,
        default_bandwidth_bytes_per_s=1e12,
    )
    assert solve_flow(free, chain).flow_tokens_per_s >= flow * (1 - 1e-6)


@examples(60)
@given(problems(), st.floats(0.1, 300.0), st.integers(1, 2), st.lists(st.floats(0, 9), min_size=9))
def test_the_cheapest_chain_is_valid_and_no_dearer_than_the_shortest(
    problem: Problem, flow: float, least: int, costs: list[float]
) -> None:
    row = Row(problem, problem.nodes)
    prices = {peer.peer_id: cost for peer, cost in zip(problem.nodes, costs, strict=False)}

    def price(chain: Chain) -> float:
        return sum(prices.get(a.peer_id, 0.0) for a in chain)

    cheapest, shortest = row.cheapest(flow, prices, least), row.chain(flow, least)
    if shortest is not None:
        assert cheapest is not None
        assert price(cheapest) <= price(shortest) + 1e-6
    if cheapest is not None:
        carries(problem, cheapest, flow)


def test_a_dear_peer_is_left_out_where_others_will_do() -> None:
    peers = tuple(node(name, steady(12, 6)) for name in "abcd")
    row = Row(Problem(model=model(6), nodes=peers), peers)
    for dear in "abcd":
        chain = row.cheapest(1.0, {name: 9.0 if name == dear else 1.0 for name in "abcd"})
        assert chain is not None
        assert len(chain) == 1
        assert chain[0].peer_id != dear
    two = row.cheapest(1.0, {"a": 1.0, "b": 9.0, "c": 1.0, "d": 1.0}, peers_min=2)
    assert two is not None
    assert {a.peer_id for a in two} == {"c", "d"}, "neighbours alone share a stage"


@pytest.mark.parametrize(("cluster", "size", "served"), [("single24", "30b", 340.0)])
def test_what_rows_give_is_near_the_best_that_is_known(cluster, size, served) -> None:
    """Without a solver or a clock; the best known after 30 s are 356 tokens/s."""
    problem, service = problem_of(cluster, size), service_of(cluster, size)
    judge = Judge(problem, service)
    found = chains_by_dp(problem, judge=judge, go_on=lambda judged: judged < 120)
    assert max(judge(chains) for chains in found) >= served


@pytest.mark.parametrize("peers_min", [1, 2])
def test_a_ladder_skips_only_flows_without_a_chain(peers_min) -> None:
    problem = problem_of("single24", "30b")
    row = Row(problem, problem.nodes)
    flows = [5_000.0 * 0.85**step for step in range(40)]
    each = [row.chain(flow, peers_min) for flow in flows]
    assert {chain is None for chain in each} == {True, False}, "only some flows have a chain"
    assert list(row.ladder(flows, peers_min)) == [chain for chain in each if chain is not None]


def test_nothing_fits_nowhere() -> None:
    problem = Problem(model=model(2), nodes=(node("a", [1.0], memory_bytes=10),))
    service = service_from_rates(problem)
    found = chains_by_dp(problem, judge=Judge(problem, service), go_on=lambda judged: True)
    assert list(found) == []


def test_chains_are_judged_one_by_one_and_remembered() -> None:
    peers = tuple(node(name, steady(12, 6)) for name in "abcd")
    problem = Problem(model=model(6), nodes=peers)
    judge = Judge(problem, service_from_rates(problem))
    one, other = (span("a", 0, 6), span("b", 0, 6)), (span("c", 0, 3), span("d", 3, 6))
    alone = judge((one,)), judge((other,))
    assert judge((one, other)) == pytest.approx(sum(alone))
    fresh = Judge(problem, service_from_rates(problem))
    assert fresh((one, other), 2 * sum(alone)) <= sum(alone), "two unknown ones are not pruned"
    third = (span("c", 0, 4), span("d", 4, 6))
    assert judge((one, third), 2 * sum(alone)) == 0.0
    assert judge((one, third)) > alone[0]
