"""Max flow: small cases by hand, and networkx as the second opinion."""

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networkx.algorithms.flow import preflow_push

from coordinator.evaluation.max_flow import (
    capacities,
    mean_latency_s,
    paths,
    ring_latency_s,
    round_trips_s,
    solve_flow,
)
from coordinator.evaluation.plan_check import max_flow_tokens_per_s
from coordinator.planning.heuristics.heuristics import fill
from dht.messages.types import Link
from tests.examples import examples


def test_a_chain_serves_what_its_slowest_peer_does(make):
    problem = make.problem([(10_000, 100.0), (10_000, 60.0)])
    solution = solve_flow(problem, [make.span("p0", 0, 4), make.span("p1", 4, 8)])
    assert solution.flow_tokens_per_s == pytest.approx(15.0)
    assert {(e.tail, e.head) for e in solution.edges} == {
        ("source", "p0"),
        ("p0", "p1"),
        ("p1", "sink"),
    }


def test_a_link_limits_by_the_bytes_of_an_activation(make):
    problem = make.problem([(10_000, 1e6), (10_000, 1e6)], bandwidth=7000.0)
    solution = solve_flow(problem, [make.span("p0", 0, 4), make.span("p1", 4, 8)])
    assert solution.flow_tokens_per_s == pytest.approx(7.0)


def test_overlapping_layers_are_run_once(make):
    """Helix §4.3: j goes on from e_i where s_j <= e_i < e_j."""
    problem = make.problem([(10_000, 100.0), (10_000, 100.0)])
    overlapping = [make.span("p0", 0, 5), make.span("p1", 3, 8)]
    assert solve_flow(problem, overlapping).flow_tokens_per_s == pytest.approx(20.0)
    gap = [make.span("p0", 0, 4), make.span("p1", 5, 8)]
    assert solve_flow(problem, gap).flow_tokens_per_s == 0.0


def test_small_rates_keep_their_digits(make):
    problem = make.problem([(10_000, 1e6), (10_000, 0.0123456)])
    solution = solve_flow(problem, [make.span("p0", 0, 7), make.span("p1", 7, 8)])
    assert solution.flow_tokens_per_s == pytest.approx(0.0123456, rel=1e-4)


def test_a_ring_is_closed(make):
    problem = make.problem([(1, 1.0)] * 3)
    link = Link(source="p2", target="p0", bandwidth_bytes_per_s=1.0, rtt_s=0.2, measured_unix_s=0.0)
    problem = replace(problem, links=(link,), default_rtt_s=0.04)
    measured, default_rtt_s = round_trips_s(problem), problem.default_rtt_s
    assert ring_latency_s(measured, default_rtt_s, ["p0", "p1", "p2"]) == pytest.approx(
        0.02 + 0.02 + 0.1
    )
    assert ring_latency_s(measured, default_rtt_s, ["p0"]) == 0.0


@examples(60)
@given(seed=st.integers(0, 10**6), peers=st.integers(1, 9), layers=st.integers(1, 12))
def test_networkx_finds_the_same_flow(make, seed, peers, layers):
    problem = make.random_problem(seed, peers=peers, layers=layers)
    placed = fill(problem, ())
    solution = solve_flow(problem, placed)
    limits = capacities(problem, placed)
    graph = nx.DiGraph()
    graph.add_node(("source", "out"))
    graph.add_node(("sink", "in"))
    for tail, head, rate in limits.arcs():
        graph.add_edge(tail, head, capacity=int(rate * 1e6))
    expected = nx.maximum_flow_value(
        graph, ("source", "out"), ("sink", "in"), flow_func=preflow_push
    )
    assert solution.flow_tokens_per_s == pytest.approx(expected / 1e6, rel=1e-4, abs=1e-4)
    own = max_flow_tokens_per_s(limits)
    assert own == pytest.approx(solution.flow_tokens_per_s, rel=1e-6, abs=1e-6)
    assert all(e.tokens_per_s > 0 for e in solution.edges)
    routes = paths(solution.edges)
    assert sum(carried for _, carried in routes) == pytest.approx(
        solution.flow_tokens_per_s, rel=1e-6, abs=1e-9
    )
    assert mean_latency_s(problem, solution) >= 0
