"""Small problems, plans and records that the coordinator's tests build on."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dht.messages.types import (
    Assignment,
    FlowEdge,
    Link,
    ModelSpec,
    NodeRecord,
    Plan,
    PlannerNode,
    PlanVersion,
    Problem,
)
from tests.unit.records import record_of

MODEL = ModelSpec(
    name="tiny",
    root="f",
    layers=8,
    layer_bytes=100,
    embed_bytes=50,
    head_bytes=70,
    kv_bytes_per_token_layer=1,
    activation_bytes=1000,
    context_tokens=64,
    vocab=32,
)


def make_problem(
    peers: Sequence[tuple[int, float]], *, layers: int = 8, bandwidth: float = 1e9
) -> Problem:
    """Peers ``p0, p1, …`` as (memory in bytes, tokens/s with one layer); T_j falls as 1/j."""
    return Problem(
        model=replace(MODEL, layers=layers),
        nodes=tuple(
            PlannerNode(
                peer_id=f"p{index}",
                memory_bytes=memory,
                kv_tokens_min=0,
                tokens_per_s=tuple(rate / count for count in range(1, layers + 1)),
            )
            for index, (memory, rate) in enumerate(peers)
        ),
        default_bandwidth_bytes_per_s=bandwidth,
        client_bandwidth_bytes_per_s=1e9,
    )


def random_problem(seed: int, *, peers: int, layers: int) -> Problem:
    """Unequal peers and links; often, but not always, with room for the model."""
    rng = random.Random(seed)
    problem = make_problem(
        [(rng.randint(50, 100 * layers), rng.uniform(1, 1000)) for _ in range(peers)],
        layers=layers,
    )
    names = [node.peer_id for node in problem.nodes]
    links = tuple(
        Link(
            source=source,
            target=target,
            bandwidth_bytes_per_s=rng.uniform(1e3, 1e6),
            rtt_s=rng.uniform(0, 0.2),
            measured_unix_s=0.0,
        )
        for source in names
        for target in names
        if source != target and rng.random() < 0.8
    )
    return replace(problem, links=links)


def span(peer_id: str, start: int, end: int) -> Assignment:
    return Assignment(peer_id=peer_id, start=start, end=end)


def edge(tail: str, head: str, tokens_per_s: float) -> FlowEdge:
    return FlowEdge(tail=tail, head=head, tokens_per_s=tokens_per_s)


def make_plan_of(
    spans: Sequence[Assignment],
    edges: Sequence[FlowEdge],
    *,
    flow: float | None = None,
    layers: int = 8,
    version: PlanVersion | None = None,
) -> Plan:
    carried = sum(e.tokens_per_s for e in edges if e.tail == "source")
    return Plan(
        version=version or PlanVersion(term=1, counter=1),
        coordinator="p0",
        model=replace(MODEL, layers=layers),
        assignments=tuple(spans),
        edges=tuple(edges),
        flow_tokens_per_s=carried if flow is None else flow,
        bound_tokens_per_s=1e6,
        planner="test",
        solve_s=0.0,
        created_unix_s=0.0,
    )


def make_record(
    peer_id: str,
    start: int = 0,
    end: int = 0,
    *,
    rate: float = 100.0,
    layers: int = 8,
    memory: int = 600,
    joined_unix_s: float = 0.0,
) -> NodeRecord:
    return record_of(
        peer_id,
        start,
        end,
        model=replace(MODEL, layers=layers),
        memory_bytes=memory,
        tokens_per_s=tuple(rate / count for count in range(1, layers + 1)),
        joined_unix_s=joined_unix_s,
    )


class Make:
    """All of the above by one fixture."""

    problem = staticmethod(make_problem)
    random_problem = staticmethod(random_problem)
    span = staticmethod(span)
    edge = staticmethod(edge)
    plan = staticmethod(make_plan_of)
    record: Callable[..., NodeRecord] = staticmethod(make_record)
    model = MODEL


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make
