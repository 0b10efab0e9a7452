"""Measures how fast this machine is: tokens/s as a function of the layers held (T_j, Helix §4.2).

One layer with random weights is timed at several batches and contexts, and for several chunks of a
prompt. :mod:`node.profiling.layer_fit` fits the times between the points, and points left out of
the fit give its error. The cost of the model's head stays out of the profile: it is one matrix
product at one peer of the route.

``python -m node.profile MODEL`` prints what a peer here would announce.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dht.errors import UserError
from dht.messages.types import LAYER_TIMES_MAX, LayerTimes
from node.engine.engine import Engine, WorkItem
from node.kv.export import KvRows
from node.model.layer_range import kv_shape
from node.profiling.layer_fit import LayerFit, Timing, fit

STEP_OVERHEAD_S = 0.002
"""Overhead per step, whatever it runs: receiving, queueing, sending."""
SESSION_TOKENS = 512
"""Typical length of a session, which bounds the batch by KV room; half of it is its context."""
BATCHES = (1, 4, 16)
CONTEXTS = (1, 512, 2048)
CHECKS = ((2, 512), (8, 1), (4, 1024))
"""``(batch, context)`` points that are timed only to find the fit's error."""
PREFILLS = (32, 128, 256)
"""Timed chunks of a prompt, in tokens."""
TIMINGS_MIN = 3
TIMINGS_MAX = 64
TIMING_BUDGET_S = 0.1
"""Time limit for the batches of one context, in each of two passes. Other processes only ever add
to a timing, so the minimum of many is the machine's own."""
PASSES = 2

Point = tuple[int, int]
"""(batch, context in tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured times of one layer."""

    points: tuple[Timing, ...]
    """Times of decode rows, by batch and context."""
    checks: tuple[Timing, ...]
    """Times of decode rows that are left out of the fit."""
    prefills: tuple[Timing, ...]
    """Times of one session's chunks of ``context_tokens`` tokens."""

    @property
    def fit(self) -> LayerFit:
        """Fit of the layer's time between the points."""
        return fit(self.points)

    @property
    def fit_error(self) -> float | None:
        """Largest relative error at the points left out of the fit; None without any."""
        return max(self.fit.errors(self.checks), default=None)

    @property
    def decode_times(self) -> LayerTimes:
        """Decode times to announce: a layer's seconds by batch, at a typical context."""
        batches = sorted({timing.batch for timing in self.points})[:LAYER_TIMES_MAX]
        return tuple((batch, self.fit.seconds(batch, SESSION_TOKENS / 2)) for batch in batches)

    @property
    def prompt_times(self) -> LayerTimes:
        """Prompt times to announce: a layer's seconds by tokens."""
        ordered = sorted(self.prefills, key=lambda timing: timing.context_tokens)
        return tuple((each.context_tokens, each.seconds) for each in ordered[:LAYER_TIMES_MAX])

    def layer_s(self) -> dict[int, float]:
        """Seconds of one layer by rows, at a typical context; they bound a step's rows."""
        decodes = {
            batch: self.fit.seconds(batch, SESSION_TOKENS / 2)
            for batch in sorted({timing.batch for timing in self.points})
        }
        return {**decodes, **{each.context_tokens: each.seconds for each in self.prefills}}


def points_within(kv_tokens: int, page_tokens: int, context_max: int) -> tuple[Point, ...]:
    """The points, checks included, that fit in KV and in the model's context; at least one."""
    grid = sorted({(b, c) for b in BATCHES for c in CONTEXTS} | set(CHECKS))
    return tuple(
        (batch, context)
        for batch, context in grid
        if (batch, context) == (1, 1)
        or (
            context <= context_max and batch * -(-context // page_tokens) * page_tokens <= kv_tokens
        )
    )


def layer_to_time(engine: Engine) -> int:
    """Index of the layer to time; a middle one if possible, which needs no embedding or head."""
    return 1 if engine.spec.layers > 2 else 0


def feasible(engine: Engine) -> tuple[Point, ...]:
    """The points at which ``engine`` can be timed."""
    index = layer_to_time(engine)
    kv_tokens = engine.kv_tokens_beside(index, index + 1)
    return points_within(kv_tokens, engine.config.page_tokens, engine.spec.context_tokens)


def measure(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> Profile:
    """Time one layer, filled with random numbers so that no weights need to be here yet.

    Batches are timed in turn and contexts in two passes, so that a busy moment affects all of them.
    """
    index = layer_to_time(engine)
    engine.load(index, index + 1, made_up=True)
    by_context: dict[int, list[int]] = {}
    for batch, context in feasible(engine):
        by_context.setdefault(context, []).append(batch)
    seconds: dict[Point, float] = {}
    for _ in range(PASSES):
        for context, batches in by_context.items():
            for batch, took_s in _time_batches(engine, index, context, batches, clock).items():
                known_s = seconds.get((batch, context), math.inf)
                seconds[batch, context] = min(known_s, took_s)
    timed = [Timing(batch=b, context_tokens=c, seconds=s) for (b, c), s in seconds.items()]
    return Profile(
        points=tuple(t for t in timed if (t.batch, t.context_tokens) not in CHECKS),
        checks=tuple(t for t in timed if (t.batch, t.context_tokens) in CHECKS),
        prefills=tuple(_time_prefills(engine, clock)),
    )


def _time_batches(
    engine: Engine, index: int, context: int, batches: Sequence[int], clock: Callable[[], float]
) -> dict[int, float]:
    """Minimum seconds of a step by batch, with sessions of ``context`` tokens."""
    names = [f"profile-{n}" for n in range(max(batches))]
    try:
        for name in names:
            refused = engine.reserve(name, context)
            if refused is None and context > 1:
                refused = engine.import_kv(name, _empty_kv(engine, index, context - 1))
            if refused is not None:
                raise UserError(f"a layer could not be timed: {refused}")
        rows = _rows(engine, max(batches))
        items = [
            WorkItem(
                session=name, start=index, end=index + 1, position=context - 1, hidden=row[None]
            )
            for name, row in zip(names, rows, strict=True)
        ]
        for batch in batches:  # the first step of a size warms up
            _time_items(engine, items[:batch], clock)
        seconds = dict.fromkeys(batches, math.inf)
        started_s = clock()
        for timing in range(TIMINGS_MAX):
            if timing >= TIMINGS_MIN and clock() - started_s > TIMING_BUDGET_S:
                break
            for batch in batches:  # the same position again: its KV is overwritten
                seconds[batch] = min(seconds[batch], _time_items(engine, items[:batch], clock))
    finally:
        for name in names:
            engine.free(name)
    return seconds


def _rows(engine: Engine, rows: int) -> torch.Tensor:
    width = engine.spec.activation_bytes // engine.layout.dtype.itemsize
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def _empty_kv(engine: Engine, index: int, tokens: int) -> KvRows:
    kv_heads, key_width, value_width = kv_shape(engine.layout, index)
    dtype = engine.layout.dtype
    return KvRows(
        start=index,
        end=index + 1,
        position=0,
        keys=(torch.zeros(tokens, kv_heads, key_width, dtype=dtype),),
        values=(torch.zeros(tokens, kv_heads, value_width, dtype=dtype),),
    )


def _time_prefills(engine: Engine, clock: Callable[[], float]) -> Iterable[Timing]:
    """One layer's times for chunks of a prompt; chunks without room in KV are left out."""
    start, end = engine.held
    for tokens in (tokens for tokens in PREFILLS if tokens <= engine.spec.context_tokens):
        item = WorkItem(
            session="prefill", start=start, end=end, position=0, hidden=_rows(engine, tokens)
        )
        least_s = math.inf
        for timing in range(1 + TIMINGS_MIN):  # the first one warms up
            if engine.reserve(item.session, tokens) is not None:
                return
            took_s = _time_items(engine, [item], clock)
            least_s = min(least_s, took_s) if timing else math.inf
            engine.free(item.session)
        yield Timing(batch=1, context_tokens=tokens, seconds=least_s)


def _time_items(engine: Engine, items: Sequence[WorkItem], clock: Callable[[], float]) -> float:
    started_s = clock()
    for result in engine.step(items):
        if result.error is not None:
            raise UserError(f"a layer could not be timed: {result.error}")
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return clock() - started_s


def tokens_per_s(engine: Engine, profile: Profile) -> tuple[float, ...]:
    """T_j for j = 1 to the maximum number of layers that fit, at a typical context."""
    layer = profile.fit
    return tuple(
        best_rate(layer, layers, _sessions(engine, layers), SESSION_TOKENS / 2)
        for layers in range(1, engine.layers_max + 1)
    )


def _sessions(engine: Engine, layers: int) -> int:
    """Number of typical sessions that fit in memory beside ``layers`` layers; at least one."""
    spec = engine.spec
    free = engine.config.memory_bytes - layers * spec.layer_bytes
    tokens = max(0, free) // (spec.kv_bytes_per_token_layer * layers)
    return max(1, tokens // SESSION_TOKENS)


def best_rate(layer: LayerFit, layers: int, sessions: int, context_tokens: float) -> float:
    """Maximum tokens/s over batches b of up to ``sessions``: b / (overhead + layers × t(b)).

    Only batches up to the largest measured one count.
    """
    return max(
        rate(layer, layers, batch, context_tokens)
        for batch in range(1, min(sessions, layer.batch_max) + 1)
    )


def rate(layer: LayerFit, layers: int, batch: int, context_tokens: float) -> float:
    """Tokens/s of a peer with ``layers`` layers that decodes ``batch`` sessions at a time."""
    return batch / (STEP_OVERHEAD_S + layers * layer.seconds(batch, context_tokens))
