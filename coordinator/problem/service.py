"""What peers can do and what is asked of them: the input of the estimate beside a problem."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from dht.messages.types import LayerTimes, PlannerNode, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What clients ask for, and how much KV room the scheduler fills.

    The defaults are the conversations of Azure's 2023 trace and the offline constants of Helix's
    simulator: a request reserves (input + ``reserve_tokens``) in every layer, and new ones start
    while the fullest peer's room is used up to ``kv_high_water``.
    """

    input_tokens: float = 763.0
    input_deviation: float = 445.0
    output_tokens: float = 232.0
    reserve_tokens: float = 240.0
    kv_high_water: float = 0.8
    requests_max: float = math.inf
    """Requests in flight at most, where the load is less than what KV room admits."""


def workload_within(context_tokens: int, workload: Workload | None = None) -> Workload:
    """The workload, scaled down to what fits a model's context where that is short."""
    load = workload or Workload()
    longest = load.input_tokens + max(load.output_tokens, load.reserve_tokens)
    scale = min(1.0, context_tokens / longest)
    return replace(
        load,
        input_tokens=load.input_tokens * scale,
        input_deviation=load.input_deviation * scale,
        output_tokens=load.output_tokens * scale,
        reserve_tokens=load.reserve_tokens * scale,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds that a layer takes for so many tokens, piecewise linear through measured points."""

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, tokens: float) -> float:
        """Seconds for ``tokens`` (extended along the last piece)."""
        xs, ys = self.tokens, self.seconds
        if len(xs) == 1:
            return ys[0]
        right = bisect_right(xs, tokens, 1, len(xs) - 1)
        x0, y0 = xs[right - 1], ys[right - 1]
        found = y0 + (ys[right] - y0) * (tokens - x0) / (xs[right] - x0)
        return found if found > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpeed:
    """What the estimate knows of a peer beyond its T_j."""

    decode: Curve
    """Per layer, by tokens in the batch."""
    prompt: Curve
    """Per layer, by prompt tokens in the batch."""
    kv_layer_tokens: tuple[float, ...]
    """KV room, in tokens × layers, when j layers are held, at index j - 1."""
    prompts_per_step: int = 1
    step_overhead_s: float = 0.0
    stretch: tuple[float, ...] = ()
    """How many times a layer's time is longer when j layers are held, at index j - 1; else 1."""
    overhead_s_per_byte: float = 0.0
    """Per byte of activations that come in or go out, beside the link's own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the estimate needs beyond a problem: the peers' machines and the load."""

    machines: Mapping[str, PeerSpeed]
    workload: Workload = field(default_factory=Workload)
    hub_delay_s: Mapping[str, float] = field(default_factory=dict)
    """One way between a peer and the host that every token passes on its way from the last stage
    to the first, as in Helix. Where a peer is not named, its ring closes directly."""

    def kv_tokens(self, peer_id: str, layers: int) -> float:
        """Tokens that a peer has KV room for while it holds so many layers."""
        rooms = self.machines[peer_id].kv_layer_tokens
        return rooms[min(layers, len(rooms)) - 1] / layers if rooms and layers > 0 else 0.0


DECODES_MEASURED = 16.0
"""Batch at which peers usually reach their T_j."""
DECODE_FIXED = 0.5
"""Share of such a step that one token alone would take: weights are read once per batch."""
PROMPT_TOKEN = 0.25
"""A prompt's token costs so much of a decoded one: a prompt reads the weights once."""
UNLIMITED_LAYER_TOKENS = 1e15
STRETCH_MAX = 1e6
SLOW_MAX = 1000.0
"""A row alone takes so many times as long as one of the fullest batch, at most: whoever announces
great rates and endless times would draw layers by the one and stop all plans by the other."""


def service_from_rates(problem: Problem, workload: Workload | None = None) -> Service:
    """What can be said of peers by T_j, memory and what they announce of their layers' times.

    A layer's time for a token is 1 / max_j(j × T_j); where a peer announces no times, the shape
    over batches is typical of GPUs (constants above). No announced time makes a peer faster than
    its T_j, which are what is checked and capped. KV room is what memory leaves beside the weights,
    at the larger end of the model; without a size of KV entries it is taken as unlimited.
    """
    return Service(
        machines={node.peer_id: _machine_from_rates(problem, node) for node in problem.nodes},
        workload=workload or Workload(),
    )


def announced_service(problem: Problem) -> Service:
    """The same for a living swarm, whose requests are no longer than the model's context."""
    return service_from_rates(problem, workload_within(problem.model.context_tokens))


def _machine_from_rates(problem: Problem, node: PlannerNode) -> PeerSpeed:
    model = node.own_model or problem.model
    best = max((j * rate for j, rate in enumerate(node.tokens_per_s, start=1)), default=0.0)
    token_s = 1.0 / best if best > 0 else 1e3
    step_s = DECODES_MEASURED * token_s
    slope_s = (1 - DECODE_FIXED) * token_s
    ends = max(model.embed_bytes, model.head_bytes)
    each = model.kv_bytes_per_token_layer
    typical = Curve(
        tokens=(0.0, DECODES_MEASURED),
        seconds=(DECODE_FIXED * step_s, DECODE_FIXED * step_s + DECODES_MEASURED * slope_s),
    )
    typical_prompt = Curve(tokens=(0.0, 1.0), seconds=(0.0, PROMPT_TOKEN * token_s))
    return PeerSpeed(
        decode=_announced(node.decode_layer_s, token_s, SLOW_MAX * token_s) or typical,
        prompt=_announced(node.prompt_layer_s, 0.0, SLOW_MAX * token_s) or typical_prompt,
        kv_layer_tokens=tuple(
            max(0.0, node.memory_bytes - j * model.layer_bytes - ends) / each
            if each
            else UNLIMITED_LAYER_TOKENS
            for j in range(1, max(1, len(node.tokens_per_s)) + 1)
        ),
        stretch=tuple(
            min(STRETCH_MAX, best / max(1e-9, j * rate))
            for j, rate in enumerate(node.tokens_per_s, start=1)
        ),
    )


def _announced(times: LayerTimes, row_least_s: float, row_most_s: float) -> Curve | None:
    """Announced times as a curve, each row within these bounds; None where there is none.

    Beyond what was measured a layer takes in proportion to its rows.
    """
    rows = [count for count, _ in times]
    if not times or any(a >= b for a, b in pairwise(rows)):
        return None
    seconds = [min(max(took_s, count * row_least_s), count * row_most_s) for count, took_s in times]
    seconds = list(accumulate(seconds, max))
    return Curve(tokens=(*map(float, rows), 2.0 * rows[-1]), seconds=(*seconds, 2.0 * seconds[-1]))
