"""The estimate's input beside a problem: the speed of the peers' machines, and the workload."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import add

from coordinator.problem.config import ASSUMED
from dht.messages.types import (
    RECORD_BOUNDS,
    LayerTimes,
    ModelSpec,
    PlannerNode,
    Problem,
    mean_layer_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The length of clients' requests, and how many of them there are.

    The defaults are the conversations of Azure's 2023 trace, and what stages charge for them
    (:mod:`coordinator.policies.admission.room`).
    """

    input_tokens: float = 763.0
    input_deviation: float = 445.0
    output_tokens: float = 232.0
    kv_tokens: float = 1220.0
    """KV that a session in flight is charged with on each layer, in tokens: what it was promised,
    or holds beyond that. More than a request's mean: long answers are in flight for longer."""
    requests_max: float = math.inf
    """Maximum requests in flight, where the load is below what KV room admits."""
    answer_weight: float = 0.0
    """Weight of the speed of one answer alone beside the throughput under full load, in what
    placements are worth (:func:`coordinator.evaluation.one_answer.worth`): 0 in a full swarm, and
    below 1."""


def workload_within(context_tokens: int) -> Workload:
    """The usual workload, scaled down to fit a model's context where that is short."""
    load = Workload()
    scale = min(1.0, context_tokens / load.kv_tokens)
    return replace(
        load,
        input_tokens=load.input_tokens * scale,
        input_deviation=load.input_deviation * scale,
        output_tokens=load.output_tokens * scale,
        kv_tokens=load.kv_tokens * scale,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A layer's time in seconds by rows and context, piecewise linear through measured points."""

    tokens: tuple[float, ...]
    """Rows of a step: sessions that decode, or tokens of a prompt's chunk."""
    seconds: tuple[float, ...]
    """Times without context before these rows; or at any, where ``context_s`` is empty."""
    context_s: tuple[float, ...] = ()
    """Extra seconds, at each point, for one more token of context in every session."""

    def at_context(self, context_tokens: float) -> "Curve":
        """The curve of sessions that all have ``context_tokens`` before the step's rows."""
        if not self.context_s:
            return self
        extra = (context_tokens * each for each in self.context_s)
        return Curve(tokens=self.tokens, seconds=tuple(map(add, self.seconds, extra)))

    def at(self, tokens: float, context_tokens: float = 0.0) -> float:
        """Seconds for ``tokens`` rows, extrapolated along the last piece."""
        if context_tokens and self.context_s:
            return self.at_context(context_tokens).at(tokens)
        xs, ys = self.tokens, self.seconds
        if len(xs) == 1:
            return ys[0]
        right = bisect_right(xs, tokens, 1, len(xs) - 1)
        x0, y0 = xs[right - 1], ys[right - 1]
        found = y0 + (ys[right] - y0) * (tokens - x0) / (xs[right] - x0)
        return found if found > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """A peer's KV room in tokens × layers, by the layers that it holds."""

    beside: tuple[float, ...]
    """Room beside j layers in the middle of the model, at index j - 1; the last one repeats."""
    first: float = 0.0
    """Room that is taken by what the model has before its first layer, where that layer is held."""
    last: float = 0.0
    """Room that is taken by what the model has behind its last layer, where that layer is held."""
    tokens_min: int = 0
    """Minimum room in tokens: spans that fit have it."""

    def of(self, start: int, end: int, layers: int) -> float:
        """Room while layers ``[start, end)`` of ``layers`` are held."""
        held = max(1, end - start)
        room = self.beside[min(held, len(self.beside)) - 1]
        room -= self.first if start == 0 else 0.0
        room -= self.last if end == layers else 0.0
        return max(held * self.tokens_min, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpeed:
    """A peer's times and KV room, which the estimate needs beyond its T_j."""

    decode: Curve
    """Decode time per layer, by sessions in the batch and their context."""
    prompt: Curve
    """Prefill time per layer, by tokens of the chunk and those of the prompt before it."""
    kv: KvCapacity
    step_overhead_s: float = 0.0
    stretch: tuple[float, ...] = ()
    """Factor on a layer's time while j layers are held, at index j - 1; empty: 1."""
    overhead_s_per_byte: float = 0.0
    """Time per byte of activations received, on top of the link's own time."""

    def stretch_of(self, layers: int) -> float:
        """Factor on a layer's time while ``layers`` layers are held."""
        return stretched(self.stretch, layers)

    def prompt_s(self, tokens: float, chunk_tokens: float) -> float:
        """Seconds per layer of a whole prompt in chunks, each with the chunks before as context."""
        chunk = min(tokens, chunk_tokens)
        return tokens / chunk * self.prompt.at(chunk, (tokens - chunk) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The estimate's input beyond a problem: the peers' machines and the workload."""

    machines: Mapping[str, PeerSpeed]
    workload: Workload = field(default_factory=Workload)
    hub_delay_s: Mapping[str, float] = field(default_factory=dict)
    """One-way delay between a peer and the host that every token passes on its way from the last
    stage to the first, as in Helix. The ring of a peer that is not named closes directly."""

    def kv_tokens(self, peer_id: str, layers: int) -> float:
        """KV capacity of a peer in tokens while it holds ``layers`` layers in the middle."""
        return self.machines[peer_id].kv.of(1, 1 + layers, 2 + layers) / layers


def stretched(factors: tuple[float, ...], layers: int) -> float:
    """The factor at ``layers`` layers, at index ``layers`` - 1; the last one repeats; none: 1."""
    return factors[min(layers, len(factors)) - 1] if factors else 1.0


def service_from_rates(problem: Problem, workload: Workload | None = None) -> Service:
    """The service derived from peers' T_j, memory and announced layer times.

    A layer's time for a token is 1 / max_j(j × T_j); where a peer announces no times, the shape
    over batches is typical of GPUs (constants above). Announced times cannot make a peer faster
    than its T_j, which are checked and capped. Without a size of KV entries, KV room counts as
    unlimited (:func:`kv_capacity`).
    """
    return Service(
        machines={node.peer_id: _machine_from_rates(problem, node) for node in problem.nodes},
        workload=workload or Workload(),
    )


def announced_service(problem: Problem) -> Service:
    """:func:`service_from_rates` for a living swarm: requests fit the model's context."""
    return service_from_rates(problem, workload_within(problem.model.context_tokens))


def kv_capacity(model: ModelSpec, node: PlannerNode) -> KvCapacity:
    """The KV room that a peer's memory leaves beside its layers."""
    each, weights = model.kv_bytes_per_token_layer, mean_layer_bytes(model)
    if not each:
        return KvCapacity(beside=(ASSUMED.unlimited_layer_tokens,))
    return KvCapacity(
        beside=tuple(
            (node.memory_bytes - j * weights) / each
            for j in range(1, max(1, len(node.tokens_per_s)) + 1)
        ),
        first=model.embed_bytes / each,
        last=model.head_bytes / each,
        tokens_min=node.kv_tokens_min,
    )


def _machine_from_rates(problem: Problem, node: PlannerNode) -> PeerSpeed:
    model = node.own_model or problem.model
    best = max((j * rate for j, rate in enumerate(node.tokens_per_s, start=1)), default=0.0)
    token_s = 1.0 / best if best > 0 else 1e3
    step_s = ASSUMED.decodes_measured * token_s
    slope_s = (1 - ASSUMED.decode_fixed) * token_s
    typical = Curve(
        tokens=(0.0, ASSUMED.decodes_measured),
        seconds=(
            ASSUMED.decode_fixed * step_s,
            ASSUMED.decode_fixed * step_s + ASSUMED.decodes_measured * slope_s,
        ),
    )
    typical_prompt = Curve(tokens=(0.0, 1.0), seconds=(0.0, ASSUMED.prompt_token * token_s))
    decode = _announced(node.decode_layer_ns, token_s, ASSUMED.slow_max * token_s)
    # Rates with more layers fall because fewer sessions have KV room beside them, which measured
    # times by batch, and the room, already say.
    factors = () if decode is not None else _factors(best, node.tokens_per_s)
    return PeerSpeed(
        decode=decode or typical,
        prompt=_announced(node.prompt_layer_ns, 0.0, ASSUMED.slow_max * token_s) or typical_prompt,
        kv=kv_capacity(model, node),
        stretch=factors,
    )


def _factors(best: float, rates: Sequence[float]) -> tuple[float, ...]:
    """Factors on a layer's time with j layers that a peer's T_j imply, ``best`` being the largest
    j × T_j."""
    return tuple(
        min(ASSUMED.stretch_max, best / max(1e-9, j * rate))
        for j, rate in enumerate(rates, start=1)
    )


def _announced(times: LayerTimes, row_least_s: float, row_most_s: float) -> Curve | None:
    """The curve of announced times; None: no times.

    The time per row at ``ASSUMED.context_typical`` is within the bounds, and no time falls with
    rows or context. Fewer rows than were measured take as long as the fewest, because a step reads
    the weights once; beyond the last point, time is proportional to rows.
    """
    rows = [count for count, _, _ in times]
    if not times or any(a >= b for a, b in pairwise(rows)):
        return None
    contexts_s, seconds = [], []
    for count, near_ns, far_ns in times:
        least_s, most_s = count * row_least_s, count * row_most_s
        context_s = min(
            max(0, far_ns - near_ns) * 1e-9 / RECORD_BOUNDS.far_tokens,
            most_s / ASSUMED.context_typical,
        )
        typical_s = min(max(near_ns * 1e-9 + ASSUMED.context_typical * context_s, least_s), most_s)
        contexts_s.append(context_s)
        seconds.append(max(0.0, typical_s - ASSUMED.context_typical * context_s))
    seconds = list(accumulate(seconds, max))
    contexts_s = list(accumulate(contexts_s, max))
    return Curve(
        tokens=(0.0, *map(float, rows), 2.0 * rows[-1]),
        seconds=(seconds[0], *seconds, 2.0 * seconds[-1]),
        context_s=(contexts_s[0], *contexts_s, 2.0 * contexts_s[-1]),
    )
