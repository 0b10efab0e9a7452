"""Which changes of figures are worth another look of the planner."""

from dataclasses import replace

import pytest

from coordinator.problem.alike import alike
from dht.messages.types import Assignment, Link, Problem
from tests.unit.coordinator.problems import model, node, steady

LINK = Link(source="a", target="b", bandwidth_bytes_per_s=1e6, rtt_s=0.02, measured_unix_s=1.0)
A = replace(node("a", steady(10, 4)), decode_layer_ns=((1, 100, 200),), up_bytes_per_s=1e6)
PROBLEM = Problem(model=model(4), nodes=(A, node("b", steady(10, 4))), links=(LINK,))


def with_a(**fields: object) -> Problem:
    return replace(PROBLEM, nodes=(replace(A, **fields), PROBLEM.nodes[1]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        replace(PROBLEM, links=(replace(LINK, measured_unix_s=9.0, rtt_s=0.018),)),
        replace(PROBLEM, links=(replace(LINK, bandwidth_bytes_per_s=1.2e6),)),
        with_a(tokens_per_s=tuple(1.1 * rate for rate in A.tokens_per_s)),
        with_a(decode_layer_ns=((1, 110, 180),)),
        with_a(decode_layer_ns=((1, 100, 200), (8, 300, 400))),
        with_a(up_bytes_per_s=0.9e6),
    ],
)
def test_what_is_measured_again_changes_nothing(other: Problem) -> None:
    assert alike(PROBLEM, other)
    assert alike(other, PROBLEM)


@pytest.mark.parametrize(
    "other",
    [
        replace(PROBLEM, links=()),
        replace(PROBLEM, links=(replace(LINK, bandwidth_bytes_per_s=2e6),)),
        replace(PROBLEM, nodes=PROBLEM.nodes[:1]),
        with_a(tokens_per_s=tuple(1.4 * rate for rate in A.tokens_per_s)),
        with_a(tokens_per_s=A.tokens_per_s[:3]),
        with_a(decode_layer_ns=((1, 100, 300),)),
        with_a(up_bytes_per_s=None),
        with_a(memory_bytes=1),
        with_a(current=Assignment(peer_id="a", start=0, end=2)),
    ],
)
def test_another_swarm_is_another_problem(other: Problem) -> None:
    assert not alike(PROBLEM, other)
    assert not alike(other, PROBLEM)
