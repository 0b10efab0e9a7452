"""Placements: every planner's answer goes through the one checker."""

import random
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planner.helix import helix_cpsat
from coordinator.evaluation.estimate import estimate
from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import check_plan, uncovered
from coordinator.planning.heuristics.heuristics import (
    chain,
    coverage,
    greedy,
    span_limits,
    span_max,
    spans_max,
)
from coordinator.planning.placement import (
    HEURISTICS,
    PLACEMENT,
    NoPlacementError,
    Placement,
    best_placement,
    make_plan,
    score,
    why_uncoverable,
)
from coordinator.problem.service import announced_service
from dht.messages.types import (
    RECORD_BOUNDS,
    PlanVersion,
    Problem,
    fits,
    layers_max,
    weight_bytes,
    with_layer_bytes,
)
from tests.examples import examples
from tests.unit.coordinator.problems import best_for


def plan_of(problem: Problem, placement: Placement):
    return make_plan(
        problem,
        placement,
        version=PlanVersion(term=1, counter=1),
        coordinator="p0",
        solve_s=0.0,
        now_unix_s=0.0,
    )


def can_cover(problem: Problem) -> bool:
    """By trying all orders of peers: slow, and certainly right."""
    layers = problem.model.layers
    for order in permutations(problem.nodes):
        ends = {0}
        for node in order:
            # A peer may take fewer layers than it can, so that the last has room for the head.
            ends |= {
                end
                for at in ends
                for end in range(at + 1, layers + 1)
                if fits(problem.model, node, at, end)
            }
        if layers in ends:
            return True
    return False


@examples(60)
@given(seed=st.integers(0, 10**6), peers=st.integers(1, 5), layers=st.integers(1, 8))
def test_coverage_is_exact_and_the_chain_finds_it(make, seed, peers, layers):
    problem = make.random_problem(seed, peers=peers, layers=layers)
    # Less memory makes the question harder.
    problem = replace(
        problem,
        nodes=tuple(replace(n, memory_bytes=n.memory_bytes // 2) for n in problem.nodes),
    )
    possible = can_cover(problem)
    for node in problem.nodes:
        most = [
            max(n for n in range(layers - at + 1) if not n or fits(problem.model, node, at, at + n))
            for at in range(layers)
        ]
        assert [span_max(problem, node, at) for at in range(layers)] == most
        assert spans_max(problem, node) == tuple(most)
    assert (coverage(problem).layers == layers) == possible
    assert (why_uncoverable(problem) is None) == possible
    spans = chain(problem)
    assert (spans is not None) == possible
    if spans is not None:
        assert not uncovered(spans, layers)
        nodes = {node.peer_id: node for node in problem.nodes}
        assert all(fits(problem.model, nodes[a.peer_id], a.start, a.end) for a in spans)


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    peers=st.integers(1, 5),
    sizes=st.lists(st.sampled_from([20, 90, 100]), min_size=1, max_size=8),
)
def test_layers_of_other_sizes_are_counted_as_they_are(make, seed, peers, sizes):
    """Nothing is placed that does not fit, and nothing is said to fit that does not."""
    layers = len(sizes)
    problem = make.random_problem(seed, peers=peers, layers=layers)
    spec = with_layer_bytes(problem.model, sizes)
    problem = replace(problem, model=spec)
    assert [weight_bytes(spec, at, at + 1) for at in range(layers)] == sizes
    for node in problem.nodes:
        longest = [
            max(n for n in range(layers - at + 1) if not n or fits(spec, node, at, at + n))
            for at in range(layers)
        ]
        assert spans_max(problem, node) == tuple(longest)
        assert layers_max(spec, node.memory_bytes, node.kv_tokens_min) == max(longest)
        reach = span_limits(problem, node)
        assert reach.whole == fits(spec, node, 0, layers)
        assert not reach.first or fits(spec, node, 0, reach.first)
        assert not reach.last or fits(spec, node, layers - reach.last, layers)
        count = reach.middle
        assert all(fits(spec, node, at, at + count) for at in range(1, layers - count) if count)
        longer = [fits(spec, node, at, at + count + 1) for at in range(1, layers - 1 - count)]
        assert not longer or not all(longer)
    if coverage(problem).layers == layers:
        assert can_cover(problem)
        spans = chain(problem)
        assert spans is not None
        best = best_for(problem)
        assert check_plan(plan_of(problem, best), problem) == []


def test_every_second_layer_counts_as_small_as_it_is(make):
    """Four large and four small layers fit on two peers that could hold five large ones at most."""
    sizes = [100, 20] * 4
    problem = make.problem([(300, 1.0), (300, 1.0)])
    plain = replace(problem.model, embed_bytes=10, head_bytes=10, kv_bytes_per_token_layer=0)
    uneven, alike = with_layer_bytes(plain, sizes), with_layer_bytes(plain, [100])
    assert why_uncoverable(replace(problem, model=uneven)) is None
    assert why_uncoverable(replace(problem, model=alike)) is not None


def test_many_kinds_of_layers_are_rounded_up(make):
    plain = make.problem([(300, 1.0)]).model
    spec = with_layer_bytes(plain, range(1, 101))
    assert spec.layer_bytes == 100
    assert len(spec.layer_sizes) <= RECORD_BOUNDS.layer_sizes_max
    counted = [spec.layer_sizes[kind] for kind in spec.layer_kinds]
    assert all(0 <= n - size < 7 for n, size in zip(counted, range(1, 101), strict=True))
    alike = with_layer_bytes(spec, [7, 7, 7])
    assert (alike.layer_bytes, alike.layer_sizes, alike.layer_kinds) == (7, (), b"")


@examples(25)
@given(seed=st.integers(0, 10**6), peers=st.integers(1, 9), layers=st.integers(1, 12))
def test_every_heuristic_passes_the_checker(make, seed, peers, layers):
    problem = make.random_problem(seed, peers=peers, layers=layers)
    for name, heuristic in HEURISTICS.items():
        spans = heuristic(problem)
        if spans is None or uncovered(spans, layers):
            continue
        assert check_plan(plan_of(problem, score(problem, spans, name)), problem) == []


@pytest.mark.parametrize("seed", range(4))
def test_the_best_is_valid_and_no_worse_than_any_heuristic(make, seed):
    problem = make.random_problem(seed + 100, peers=5, layers=8)
    best = best_for(problem)
    assert check_plan(plan_of(problem, best), problem) == []
    for name, heuristic in HEURISTICS.items():
        spans = heuristic(problem)
        if spans is not None and not uncovered(spans, 8):
            value = score(problem, spans, name, service=announced_service(problem)).value
            assert best.value >= 0.98 * value, name


@pytest.mark.parametrize("seed", range(20))
def test_without_any_time_it_serves_what_reviewers_ask_for(make, seed):
    """Else a coordinator on a busy machine would have its plan refused again and again."""
    rng = random.Random(seed)
    peers = [(rng.choice((450, 600, 1000)), rng.choice((50.0, 100.0))) for _ in range(6)]
    problem = make.problem(peers)
    spans = greedy(replace(problem, nodes=problem.nodes[1:]))
    assert spans is not None
    held = {a.peer_id: a for a in spans}
    nodes = tuple(replace(node, current=held.get(node.peer_id)) for node in problem.nodes)
    problem = replace(problem, nodes=nodes)
    service = announced_service(problem)
    best = best_placement(problem, time_limit_s=1.0, seed=1, spent=lambda: 1.0, service=service)
    anew = greedy(problem)
    assert anew is not None
    edges = solve_flow(problem, anew).edges
    yardstick = estimate(problem, anew, edges, service).tokens_per_s
    assert best.value >= PLACEMENT.value_within * yardstick


def test_the_exact_program_finds_the_best_of_a_small_case(make):
    """Two fast peers hold half each; the slow one is of no use in a chain of equals."""
    problem = make.problem([(480, 400.0), (480, 400.0), (480, 100.0)])
    spans = helix_cpsat.solve_by_cpsat(problem, time_limit_s=5.0, seed=0, hint=())
    assert spans is not None
    # [0,4) and [4,8) at 100 each; the third can only relieve one of them.
    assert score(problem, spans, "x").flow_tokens_per_s >= 100.0 - 1e-3


def test_tight_memory_is_covered_where_greedy_fails(make):
    # 8 layers, 50 extra at the start, 70 at the end: exactly one order fits.
    problem = make.problem([(350, 100.0), (200, 100.0), (370, 100.0)])
    assert greedy(problem) is None or uncovered(greedy(problem), 8) == ()
    best = best_for(problem)
    spans = sorted((a.start, a.end, a.peer_id) for a in best.assignments)
    assert spans == [(0, 3, "p0"), (3, 5, "p1"), (5, 8, "p2")]


def test_what_is_missing_is_named(make):
    problem = make.problem([(350, 100.0), (200, 100.0), (369, 100.0)])
    with pytest.raises(NoPlacementError, match=r"the 3 peers here .* at most 7 of 8 layers beside"):
        best_for(problem)
    with pytest.raises(NoPlacementError, match="the 0 peers here can hold at most 0 of 8"):
        best_for(replace(problem, nodes=()))


def test_idle_peers_become_spares(make):
    problem = make.problem([(1000, 1e6), (1000, 1e6), (150, 0.001)])
    best = best_for(problem)
    assert {a.peer_id for a in best.assignments} == {"p0", "p1", "p2"}


def test_who_holds_layers_is_not_moved_for_nothing(make):
    problem = make.problem([(450, 100.0), (450, 100.0), (470, 100.0)])
    now = {"p0": (0, 4), "p1": (0, 4), "p2": (4, 8)}
    nodes = tuple(
        replace(n, current=make.span(n.peer_id, *now[n.peer_id]), tokens_per_s=(100.0,) * 8)
        for n in problem.nodes
    )
    best = best_for(replace(problem, nodes=nodes), looks=None, seed=0)
    assert {a.peer_id: (a.start, a.end) for a in best.assignments} == now
    assert best.moved_layers == 0


def test_span_max_leaves_room_for_the_head(make):
    problem = make.problem([(350, 1.0)])
    assert span_max(problem, problem.nodes[0], 0) == 3
    assert span_max(problem, problem.nodes[0], 5) == 2  # three, but not with the head
    assert span_max(problem, problem.nodes[0], 6) == 2
