"""The time of one answer alone, on swarms small enough to calculate by hand."""

import math
from dataclasses import replace

import pytest

from coordinator.evaluation.one_answer import AnswerTimes, one_answer_s, tokens_per_s_for, worth
from coordinator.problem.service import Curve, KvCapacity, PeerSpeed, Service
from dht.messages.types import Assignment, FlowEdge, Link, ModelSpec, PlannerNode, Problem

MODEL = ModelSpec(
    name="tiny",
    root="",
    layers=4,
    layer_bytes=100,
    embed_bytes=0,
    head_bytes=0,
    kv_bytes_per_token_layer=1,
    activation_bytes=0,
    context_tokens=64,
    vocab=64,
)


def swarm(rtt_s: float, **layer_s: float) -> tuple[Problem, Service]:
    """Peers with a layer's time each, and links of ``rtt_s`` between all."""
    nodes = [
        PlannerNode(peer_id=p, memory_bytes=400, kv_tokens_min=0, tokens_per_s=(1.0,) * 4)
        for p in layer_s
    ]
    machines = {
        p: PeerSpeed(
            decode=Curve(tokens=(1.0,), seconds=(each_s,)),
            prompt=Curve(tokens=(1.0,), seconds=(each_s,)),
            kv=KvCapacity(beside=(1.0,)),
            step_overhead_s=0.005,
        )
        for p, each_s in layer_s.items()
    }
    return (
        Problem(model=MODEL, nodes=tuple(nodes), default_rtt_s=rtt_s, token_bytes=0),
        Service(machines=machines),
    )


def holds(**spans: tuple[int, int]) -> tuple[Assignment, ...]:
    return tuple(Assignment(peer_id=p, start=a, end=b) for p, (a, b) in spans.items())


def alone_s(problem: Problem, spans: tuple[Assignment, ...], service: Service) -> float:
    """The time along all edges that are possible."""
    edges = [
        FlowEdge(tail=a.peer_id, head=b.peer_id, tokens_per_s=1.0)
        for a in spans
        for b in spans
        if b.start <= a.end < b.end
    ]
    return one_answer_s(AnswerTimes(problem, service), spans, edges)


def test_an_answer_alone_takes_the_quickest_ring() -> None:
    problem, service = swarm(0.04, a=0.01, b=0.01, c=0.02)
    alone = alone_s(problem, holds(a=(0, 4)), service)
    assert alone == pytest.approx(0.005 + 0.04), "no hop to oneself"
    both = holds(a=(0, 2), b=(2, 4), c=(2, 4))
    assert alone_s(problem, both, service) == pytest.approx(2 * 0.005 + 0.04 + 0.04)
    links = tuple(
        Link(source=x, target=y, bandwidth_bytes_per_s=1e9, rtt_s=0.0, measured_unix_s=1.0)
        for x, y in ("ac", "ca")
    )
    linked = replace(problem, links=links)
    assert alone_s(linked, both, service) == pytest.approx(2 * 0.005 + 0.02 + 0.04)


def test_layers_that_two_hold_are_run_once() -> None:
    problem, service = swarm(0.0, a=0.01, b=0.001)
    spans = holds(a=(0, 3), b=(1, 4))
    assert alone_s(problem, spans, service) == pytest.approx(0.01 + 3 * 0.01 + 0.001)


def test_layers_that_nobody_holds_make_no_answer() -> None:
    problem, service = swarm(0.0, a=0.01)
    assert alone_s(problem, holds(a=(0, 3)), service) == math.inf
    assert alone_s(problem, (), service) == math.inf


def test_a_ring_follows_the_flow_and_pays_for_its_bytes() -> None:
    problem, service = swarm(0.0, a=0.01, b=0.01, c=0.001)
    problem = replace(
        problem,
        model=replace(MODEL, activation_bytes=1000),
        token_bytes=10,
        default_bandwidth_bytes_per_s=1e5,
    )
    spans = holds(a=(0, 2), b=(2, 4), c=(2, 4))
    edges = [FlowEdge(tail="a", head="b", tokens_per_s=1.0)]
    found = one_answer_s(AnswerTimes(problem, service), spans, edges)
    assert found == pytest.approx(2 * 0.005 + 4 * 0.01 + 0.01 + 0.0001), "not over c"


def test_the_worth_weighs_both_and_is_undone() -> None:
    assert worth(80.0, 0.1, 0.0) == 80.0
    assert worth(80.0, 0.1, 0.25) == pytest.approx(80**0.75 * 10**0.25)
    assert worth(80.0, math.inf, 0.25) == 0.0
    assert tokens_per_s_for(worth(80.0, 0.1, 0.25), 0.1, 0.25) == pytest.approx(80.0)
    assert tokens_per_s_for(7.0, math.inf, 0.25) == math.inf
