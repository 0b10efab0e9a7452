"""The checker: a good plan passes, each kind of broken one is named."""

import math
from dataclasses import replace

import pytest

from coordinator.evaluation.plan_check import check_plan, check_shape, uncovered


@pytest.fixture
def problem(make):
    return make.problem([(470, 100.0), (470, 100.0), (470, 100.0)])


@pytest.fixture
def plan(make):
    return make.plan(
        [make.span("p0", 0, 4), make.span("p1", 4, 8), make.span("p2", 4, 8)],
        [
            make.edge("source", "p0", 25.0),
            make.edge("p0", "p1", 10.0),
            make.edge("p0", "p2", 15.0),
            make.edge("p1", "sink", 10.0),
            make.edge("p2", "sink", 15.0),
        ],
    )


def test_a_good_plan_passes(plan, problem):
    assert check_plan(plan, problem) == []


def with_edge(plan, index, **changes):
    edges = list(plan.edges)
    edges[index] = replace(edges[index], **changes)
    return replace(plan, edges=tuple(edges))


def with_span(plan, index, **changes):
    spans = list(plan.assignments)
    spans[index] = replace(spans[index], **changes)
    return replace(plan, assignments=tuple(spans))


SHAPE = {
    "a gap": (lambda p: with_span(p, 0, end=3), "nobody holds layers"),
    "beyond the end": (lambda p: with_span(p, 1, end=9), "of 8 layers"),
    "empty": (lambda p: with_span(p, 1, start=4, end=4), "is given"),
    "twice": (lambda p: with_span(p, 2, peer_id="p1"), "twice"),
    "reserved name": (lambda p: with_span(p, 2, peer_id="sink"), "named like an end"),
    "nan flow": (lambda p: replace(p, flow_tokens_per_s=math.nan), "the flow is said to be nan"),
    "infinite bound": (
        lambda p: replace(p, bound_tokens_per_s=math.inf),
        "the bound is said to be inf",
    ),
    "nan edge": (lambda p: with_edge(p, 1, tokens_per_s=math.nan), "cannot carry"),
    "negative edge": (lambda p: with_edge(p, 1, tokens_per_s=-1.0), "cannot carry"),
    "unknown end": (lambda p: with_edge(p, 1, head="p9"), "cannot carry"),
    "backwards": (lambda p: with_edge(p, 1, tail="p1", head="p0"), "cannot carry"),
    "source in the middle": (lambda p: with_edge(p, 0, head="p1"), "cannot carry"),
    "out of the sink": (lambda p: with_edge(p, 1, tail="sink"), "cannot carry"),
    "not conserved": (lambda p: with_edge(p, 1, tokens_per_s=11.0), "takes"),
    "flow overstated": (lambda p: replace(p, flow_tokens_per_s=30.0), "the flow is said"),
    "edge twice": (lambda p: replace(p, edges=(*p.edges, p.edges[0])), "listed twice"),
}


@pytest.mark.parametrize("name", SHAPE)
def test_shape(name, plan):
    mutate, reason = SHAPE[name]
    assert any(reason in wrong for wrong in check_shape(mutate(plan)))


def test_a_peer_that_is_not_there(plan, problem):
    gone = replace(problem, nodes=problem.nodes[:2])
    assert "p2 is not known" in check_plan(plan, gone)


def test_memory(plan, problem):
    small = replace(problem.nodes[1], memory_bytes=469)
    nodes = (problem.nodes[0], small, problem.nodes[2])
    assert "[4, 8) does not fit p1" in check_plan(plan, replace(problem, nodes=nodes))


def test_another_model(plan, problem):
    other = replace(problem, model=replace(problem.model, layer_bytes=99))
    assert "it is for another model" in check_plan(plan, other)


def test_a_peer_over_its_capacity(plan, problem):
    slow = replace(problem.nodes[2], tokens_per_s=tuple(40.0 / j for j in range(1, 9)))
    nodes = (*problem.nodes[:2], slow)
    wrong = check_plan(plan, replace(problem, nodes=nodes))
    assert any("p2 carries 15.0, more than its 10.0" in reason for reason in wrong)


def test_a_link_over_its_capacity(plan, problem):
    wrong = check_plan(plan, replace(problem, default_bandwidth_bytes_per_s=12_000.0))
    assert any("p0 to p2 carries more than its 12.0" in reason for reason in wrong)


def test_a_flow_below_what_the_placement_serves(make, problem):
    plan = make.plan(
        [make.span("p0", 0, 4), make.span("p1", 4, 8)],
        [make.edge("source", "p0", 5.0), make.edge("p0", "p1", 5.0), make.edge("p1", "sink", 5.0)],
    )
    wrong = check_plan(plan, problem)
    assert any("could serve 25.000" in reason for reason in wrong)


def test_uncovered_ranges(make):
    assert uncovered([make.span("a", 1, 3), make.span("b", 5, 6)], 8) == ((0, 1), (3, 5), (6, 8))
