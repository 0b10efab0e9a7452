"""The independent checker: it passes what planners make and catches every kind of broken plan."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given

from coordinator.evaluation.plan_check import check_plan, check_shape, uncovered
from coordinator.planning.placement import HEURISTICS
from dht.messages.types import SINK, SOURCE, FlowEdge, Plan, Problem
from tests.unit.coordinator.problems import model, node, plan_of, problems, span

PROBLEM = Problem(
    model=model(4, head_bytes=100),
    nodes=(node("a", [9, 8]), node("b", [9, 5], memory_bytes=300), node("c", [4, 4, 4])),
)
SPANS = (span("a", 0, 2), span("b", 2, 4), span("c", 0, 2))


def sound() -> Plan:
    return plan_of(PROBLEM, SPANS)


def edge(tail: str, head: str, rate: float) -> FlowEdge:
    return FlowEdge(tail=tail, head=head, tokens_per_s=rate)


def scaled(plan: Plan, factor: float) -> Plan:
    """The same plan with every flow multiplied."""
    return replace(
        plan,
        edges=tuple(replace(e, tokens_per_s=e.tokens_per_s * factor) for e in plan.edges),
        flow_tokens_per_s=plan.flow_tokens_per_s * factor,
    )


def test_layers_without_a_holder_are_those_in_no_span() -> None:
    for spans in product(product(range(-1, 5), range(6)), repeat=2):
        held = {layer for start, end in spans for layer in range(start, end)}
        found = uncovered([span(f"{at}", *each) for at, each in enumerate(spans)], 4)
        assert {layer for start, end in found for layer in range(start, end)} == set(
            range(4)
        ) - held


def with_first_edge(plan: Plan, rate: float) -> Plan:
    return replace(plan, edges=(replace(plan.edges[0], tokens_per_s=rate), *plan.edges[1:]))


SHAPELESS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "range beyond the model": (
        lambda p: replace(p, assignments=(*SPANS[:2], span("c", 3, 5))),
        "is given [3, 5) of 4 layers",
    ),
    "empty range": (
        lambda p: replace(p, assignments=(*SPANS[:2], span("c", 1, 1))),
        "is given [1, 1)",
    ),
    "gap": (
        lambda p: replace(p, assignments=(span("a", 0, 1), *SPANS[1:2])),
        "nobody holds layers ((1, 2),)",
    ),
    "nobody at all": (
        lambda p: replace(p, assignments=(), edges=(), flow_tokens_per_s=0.0),
        "nobody holds layers ((0, 4),)",
    ),
    "a peer twice": (
        lambda p: replace(p, assignments=(*SPANS, span("a", 2, 4))),
        "a peer is given layers twice",
    ),
    "a peer named as the source": (
        lambda p: replace(p, assignments=(*SPANS, span(SOURCE, 0, 2))),
        "a peer is named",
    ),
    "flow not conserved": (
        lambda p: replace(p, edges=p.edges[1:]),
        "tokens/s",
    ),
    "flow overstated without edges": (
        lambda p: replace(p, flow_tokens_per_s=2 * p.flow_tokens_per_s),
        "the flow is said to be",
    ),
    "flow that is not a number": (
        lambda p: replace(p, flow_tokens_per_s=math.nan),
        "the flow is said to be nan",
    ),
    "infinite flow": (
        lambda p: replace(p, flow_tokens_per_s=math.inf),
        "the flow is said to be inf",
    ),
    "edge that is not a number": (lambda p: with_first_edge(p, math.nan), "cannot carry flow"),
    "negative edge": (lambda p: with_first_edge(p, -1.0), "cannot carry flow"),
    "edge to a stranger": (
        lambda p: replace(p, edges=(*p.edges, edge("a", "z", 1.0))),
        "the edge a to z cannot carry flow",
    ),
    "edge backwards": (
        lambda p: replace(p, edges=(*p.edges, edge("b", "a", 1.0))),
        "the edge b to a cannot carry flow",
    ),
    "edge into the middle from the source": (
        lambda p: replace(p, edges=(*p.edges, edge(SOURCE, "b", 1.0))),
        "the edge source to b cannot carry flow",
    ),
    "edge to the sink from the middle": (
        lambda p: replace(p, edges=(*p.edges, edge("a", SINK, 1.0))),
        "the edge a to sink cannot carry flow",
    ),
    "edge from source to sink": (
        lambda p: replace(p, edges=(*p.edges, edge(SOURCE, SINK, 1.0))),
        "the edge source to sink cannot carry flow",
    ),
    "edge twice": (
        lambda p: replace(
            p,
            edges=tuple(
                half
                for e in p.edges
                for half in 2 * (replace(e, tokens_per_s=e.tokens_per_s / 2),)
            ),
        ),
        "twice",
    ),
}  # fmt: skip


class TestShape:
    def test_a_sound_plan_passes(self) -> None:
        assert check_shape(sound()) == []
        assert check_plan(sound(), PROBLEM) == []

    @pytest.mark.parametrize("kind", SHAPELESS)
    def test_it_catches(self, kind: str) -> None:
        break_it, complaint = SHAPELESS[kind]
        wrong = check_shape(break_it(sound()))
        assert any(complaint in line for line in wrong), wrong

    def test_uncovered_ranges_are_exact(self) -> None:
        spans = [span("a", 1, 2), span("b", 4, 5)]
        assert uncovered(spans, 6) == ((0, 1), (2, 4), (5, 6))


class TestAgainstTheProblem:
    def test_memory_exceeded(self) -> None:
        tight = replace(PROBLEM, nodes=(*PROBLEM.nodes[:1], node("b", [9, 5]), PROBLEM.nodes[2]))
        assert check_plan(sound(), tight) == ["[2, 4) does not fit b"]

    def test_unknown_peer(self) -> None:
        assert "c is not known" in check_plan(sound(), replace(PROBLEM, nodes=PROBLEM.nodes[:2]))

    def test_more_than_a_peer_can_do(self) -> None:
        wrong = check_plan(scaled(sound(), 2.0), PROBLEM)
        assert any("b carries" in line for line in wrong), wrong

    def test_more_than_a_link_can_do(self) -> None:
        slow = replace(PROBLEM, default_bandwidth_bytes_per_s=1.0)
        wrong = check_plan(sound(), slow)
        assert any("carries more than its 0.1 tokens/s" in line for line in wrong), wrong

    def test_less_than_the_placement_could_do(self) -> None:
        wrong = check_plan(scaled(sound(), 0.5), PROBLEM)
        assert any("could serve" in line for line in wrong), wrong

    @given(problems())
    def test_what_planners_make_passes(self, problem: Problem) -> None:
        for name, heuristic in HEURISTICS.items():
            spans = heuristic(problem)
            if spans is not None:
                assert check_plan(plan_of(problem, spans, name), problem) == []
