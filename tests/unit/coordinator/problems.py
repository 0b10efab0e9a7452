"""Problems for the planner's tests: written by hand, or made by hypothesis."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, permutations, product
from typing import Any

from hypothesis import strategies as st
from ortools.math_opt.python import mathopt

from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.placement import Placement, best_placement, make_plan
from coordinator.problem.service import announced_service
from dht.messages.types import (
    Assignment,
    Link,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlannerNode,
    PlanVersion,
    Problem,
    SharedUplink,
    fits,
    with_layer_bytes,
)
from tests.unit.records import record_of

LAYER_BYTES = 100
SOLVERS: dict[str, Any] = {"GLOP": mathopt.IncrementalSolver, "CP-SAT": mathopt}
"""Whose ``solve`` the master problem calls, by the solver of OR-Tools that runs there."""


def model(
    layers: int, *, embed_bytes: int = 0, head_bytes: int = 0, kv_bytes: int = 0
) -> ModelSpec:
    """A model whose layers weigh 100 bytes and whose tokens take 10 bytes on a link."""
    return ModelSpec(
        name="toy",
        root="f00d",
        layers=layers,
        layer_bytes=LAYER_BYTES,
        embed_bytes=embed_bytes,
        head_bytes=head_bytes,
        kv_bytes_per_token_layer=kv_bytes,
        activation_bytes=10,
        context_tokens=1024,
        vocab=100,
    )


def node(
    peer_id: str,
    rates: Sequence[float],
    *,
    memory_bytes: int | None = None,
    current: tuple[int, int] | None = None,
    own_model: ModelSpec | None = None,
) -> PlannerNode:
    """A peer that has room for as many layers as it has rates, unless told otherwise."""
    return PlannerNode(
        peer_id=peer_id,
        memory_bytes=LAYER_BYTES * len(rates) if memory_bytes is None else memory_bytes,
        kv_tokens_min=0,
        tokens_per_s=tuple(rates),
        current=None if current is None else span(peer_id, *current),
        own_model=own_model,
    )


def steady(rate: float, layers: int) -> list[float]:
    """T_j of a peer whose time grows with the layers it holds."""
    return [rate / count for count in range(1, layers + 1)]


def span(peer_id: str, start: int, end: int) -> Assignment:
    return Assignment(peer_id=peer_id, start=start, end=end)


def link(source: str, target: str, tokens_per_s: float, *, rtt_s: float = 0.01) -> Link:
    """A link that carries this many of the toy model's tokens per second."""
    return Link(
        source=source,
        target=target,
        bandwidth_bytes_per_s=10 * tokens_per_s,
        rtt_s=rtt_s,
        measured_unix_s=0.0,
    )


def plan_of(problem: Problem, spans: Sequence[Assignment], planner: str = "test") -> Plan:
    """The plan of these spans with its max flow."""
    return make_plan(
        problem,
        Placement(assignments=tuple(spans), flow_tokens_per_s=0.0, planner=planner),
        version=PlanVersion(term=1, counter=1),
        coordinator="a",
        solve_s=0.0,
        now_unix_s=0.0,
    )


def record(
    peer_id: str,
    start: int,
    end: int,
    *,
    rates: Sequence[float] = (10.0,),
    state: NodeState = NodeState.SERVING,
    layers: int = 12,
) -> NodeRecord:
    """What a peer announces that serves ``[start, end)``."""
    return record_of(
        peer_id, start, end, model=model(layers), tokens_per_s=tuple(rates), state=state
    )


def ends_after(looks: int) -> Callable[[], float]:
    """A planner's clock, by which the time is over after this many looks at it: the same work in
    every run, on any machine."""
    steps = count()
    return lambda: next(steps) / looks


def best_for(
    problem: Problem, *, looks: int | None = 60, seed: int = 1, **options: Any
) -> Placement:
    """The planner's answer to what peers announce, after a number of looks at the clock; None: once
    it has done all that it does without a clock."""
    return best_placement(
        problem,
        time_limit_s=1.0,
        seed=seed,
        spent=None if looks is None else ends_after(looks),
        service=announced_service(problem),
        **options,
    )


@st.composite
def problems(
    draw: st.DrawFn, *, peers_max: int = 6, layers_max: int = 8, shared: bool = False
) -> Problem:
    """Small clusters of unlike peers: slow links, little room, quantised, known connections; and
    ``shared`` ones."""
    spec = model(
        draw(st.integers(1, layers_max)),
        embed_bytes=draw(st.sampled_from([0, 30, 150])),
        head_bytes=draw(st.sampled_from([0, 30, 150])),
    )
    if draw(st.booleans()):  # every second layer, or any, is small
        sizes = draw(st.sampled_from([(LAYER_BYTES, 20), (20, 20, LAYER_BYTES)])) * spec.layers
        spec = with_layer_bytes(spec, sizes[: spec.layers])
    names = [f"p{index}" for index in range(draw(st.integers(1, peers_max)))]
    in_4_bits = with_layer_bytes(spec, [LAYER_BYTES // 4])
    rate = st.floats(0.5, 1000.0, allow_nan=False)
    own_rate = st.none() | st.none() | st.floats(0.0, 5000.0)
    nodes = [
        replace(
            node(
                name,
                sorted(draw(st.lists(rate, min_size=1, max_size=spec.layers)), reverse=True),
                memory_bytes=draw(st.integers(0, LAYER_BYTES * (spec.layers + 4))),
                own_model=draw(st.sampled_from([None, in_4_bits])),
            ),
            up_bytes_per_s=draw(own_rate),
            down_bytes_per_s=draw(own_rate),
            uplink=draw(st.sampled_from(["", "home", "home", "away"])) if shared else "",
        )
        for name in names
    ]
    uplinks = [
        SharedUplink(name=name, up_bytes_per_s=draw(own_rate), down_bytes_per_s=draw(own_rate))
        for name in ("home", "away") * shared
    ]
    pairs = list(permutations(names, 2))
    measured = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8)) if pairs else []
    links = [link(*pair, draw(st.floats(0.0, 500.0))) for pair in measured]
    return Problem(model=spec, nodes=tuple(nodes), links=tuple(links), uplinks=tuple(uplinks))


@st.composite
def placed(draw: st.DrawFn, *, shared: bool = False) -> tuple[Problem, tuple[Assignment, ...]]:
    """A problem, and any spans at all that its peers' profiles allow."""
    problem = draw(problems(shared=shared))
    spans = []
    for peer in problem.nodes:
        start = draw(st.integers(0, problem.model.layers - 1))
        most = min(len(peer.tokens_per_s), problem.model.layers - start)
        count = draw(st.integers(0, most))
        if count:
            spans.append(span(peer.peer_id, start, start + count))
    return problem, tuple(spans)


def every_placement(problem: Problem) -> Iterator[tuple[Assignment, ...]]:
    """All placements that cover the model."""
    layers = problem.model.layers
    choices = [
        [None]
        + [
            span(peer.peer_id, start, end)
            for start in range(layers)
            for end in range(start + 1, layers + 1)
            if fits(problem.model, peer, start, end)
        ]
        for peer in problem.nodes
    ]
    for chosen in product(*choices):
        spans = tuple(a for a in chosen if a is not None)
        if spans and not uncovered(spans, layers):
            yield spans


def brute_force_flow(problem: Problem) -> float:
    """The largest flow of any placement that covers the model, by trying all."""
    flows = (solve_flow(problem, spans).flow_tokens_per_s for spans in every_placement(problem))
    return max(flows, default=0.0)
