"""Measures how fast this machine is: tokens/s as a function of the layers held (T_j, Helix §4.2).

One layer with random weights is timed at several batches and contexts, and for several chunks of a
prompt, in real steps but without what a step does beside its layers: it is done once for all layers
held, and on a GPU it can take longer than one. Where a model mixes layers (dense and of experts,
linear and full attention), one of each kind is timed, and the mean by their numbers counts.
:mod:`node.profiling.layer_fit` fits the times between the points, and points left out of the fit
give its error. The cost of the model's head stays out of the profile: it is one matrix product at
one peer of the route.

``python -m node.profile MODEL`` prints what a peer here would announce.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from coordinator.policies.batching.scheduler import BATCHING
from dht.errors import UserError
from node.device.tensors import wait_for
from node.engine.engine import Engine, WorkItem
from node.kv.export import KvRows
from node.profiling.layer_fit import Timing
from node.profiling.layer_rates import BATCHES, CHUNK_CONTEXTS, CHUNKS, CONTEXTS, Profile, rates


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfileConfig:
    """How layers are timed; times in seconds."""

    point_tokens_max: int = 1 << 16
    """Maximum sum of the contexts at a point: the KV of more would take longer to fill than to
    time."""
    timings_least: int = 3
    timings_max: int = 64
    timing_budget_s: float = 0.1
    """Time limit for the batches of one context, in each of two passes. Other processes only ever
    add to a timing, so the minimum of many is the machine's own."""
    empty_timings: int = 16
    """Timings, at a number of rows, of what a run does beside its layer, before a layer is timed:
    taken for too long, it makes the layer too quick, and the quickest timing counts."""
    empty_share_max: float = 0.9
    """Maximum share of a timing that is taken for what a run does beside its layer."""
    passes: int = 2
    kinds_timed: int = 3
    """Maximum number of kinds of layers that are timed: the most frequent ones."""


PROFILING = LayerProfileConfig()

CHECKS = ((2, 512), (8, 1), (4, 1024), (48, 512))
"""``(batch, context)`` points that are timed only to find the fit's error."""
Point = tuple[int, int]
"""(batch, context in tokens)."""


def points_within(kv_tokens: int, page_tokens: int, context_max: int) -> tuple[Point, ...]:
    """The points, checks included, that fit in KV and in the model's context; at least one."""
    grid = sorted({(b, c) for b in BATCHES for c in CONTEXTS} | set(CHECKS))
    return tuple(
        (batch, context)
        for batch, context in grid
        if (batch, context) == (1, 1)
        or (
            context <= context_max
            and batch * context <= PROFILING.point_tokens_max
            and batch * -(-context // page_tokens) * page_tokens <= kv_tokens
        )
    )


def layers_to_time(engine: Engine) -> dict[int, int]:
    """A layer of each of the most frequent kinds, the most frequent first, and how many layers of
    the kind there are; middle ones if possible, which need no embedding or head."""
    layers = engine.spec.layers
    kinds = {n: engine.layout.layer_kind(n) for n in (range(1, layers - 1) if layers > 2 else (0,))}
    first = {kind: index for index, kind in reversed(kinds.items())}
    return {
        first[kind]: count
        for kind, count in Counter(kinds.values()).most_common(PROFILING.kinds_timed)
    }


def room_for_timing(engine: Engine) -> int:
    """KV tokens that ``engine`` has room for beside any layer that is timed."""
    return min(engine.kv_tokens_beside(index, index + 1) for index in layers_to_time(engine))


def feasible(engine: Engine, kv_tokens: int) -> tuple[Point, ...]:
    """The points at which ``engine`` can be timed with this KV room."""
    return points_within(kv_tokens, engine.config.page_tokens, engine.spec.context_tokens)


class TimedLayer(Protocol):
    """One layer on a device that can be timed, with KV room for its sessions."""

    kv_tokens: int
    page_tokens: int
    context_tokens: int
    """Maximum context of the model."""

    def sessions(self, count: int, context: int) -> AbstractContextManager[Callable[[int], float]]:
        """Hold ``count`` sessions of ``context`` tokens; the callable times one decode of the first
        sessions, whose number it takes, in seconds."""
        ...

    def chunk_s(self, before: int, tokens: int) -> float:
        """Time a prompt's chunk of ``tokens`` behind ``before`` of its tokens."""
        ...


class EngineLayer:
    """A layer of an engine, filled with random numbers so that no weights need to be here yet."""

    def __init__(self, engine: Engine, index: int, clock: Callable[[], float]) -> None:
        self._engine, self._index, self._clock = engine, index, clock
        self.kv_tokens = engine.kv_tokens_beside(index, index + 1)
        self.page_tokens = engine.config.page_tokens
        self.context_tokens = engine.spec.context_tokens
        engine.load(index, index + 1, made_up=True)
        self._layers_s = 0.0
        self._empty_s: dict[int, float] = {}
        """Minimum seconds of no layers, by rows."""

    @contextmanager
    def sessions(self, count: int, context: int) -> Iterator[Callable[[int], float]]:
        """See :meth:`TimedLayer.sessions`; raises UserError if a step fails."""
        names = [f"profile-{n}" for n in range(count)]
        context = max(context, 2 if self._engine.layout.structure.keeps_state else 1)
        try:
            self._hold(names, context - 1, rows=1)
            items = [
                self._item(name, context - 1, row[None])
                for name, row in zip(names, self._hidden(count), strict=True)
            ]
            # The same position again and again: its KV is overwritten.
            yield lambda batch: self._time(items[:batch])
        finally:
            for name in names:
                self._engine.kv.free(name)

    def chunk_s(self, before: int, tokens: int) -> float:
        """See :meth:`TimedLayer.chunk_s`; raises UserError if the step fails."""
        self._hold(["prefill"], before, rows=tokens)
        took_s = self._time([self._item("prefill", before, self._hidden(tokens))])
        self._engine.kv.free("prefill")
        return took_s

    def _hold(self, names: Sequence[str], context: int, *, rows: int) -> None:
        """Reserve KV for sessions with ``context`` tokens of zeros written, and ``rows`` more.

        Where layers keep a state, the first token of the first session runs, and its state is
        copied: its size does not depend on a context's length, and a first token may take a
        thousand times as long as a later one.
        """
        kv = self._engine.kv
        refused = [kv.reserve(name, context + rows) for name in names]
        if context > 0 and not any(refused):
            begun = ""
            if self._engine.layout.structure.keeps_state:
                begun, *names = names
                self._step([self._item(begun, 0, self._hidden(1))])
                if context > 1:
                    refused.append(kv.put_made_up(begun, self._empty_kv(1, context)))
            zeros = self._empty_kv(0, context)
            refused += [kv.put_made_up(name, zeros, like=begun) for name in names]
        if any(refused):
            raise UserError(f"a layer could not be timed: {next(filter(None, refused))}")

    def _item(self, name: str, position: int, hidden: torch.Tensor) -> WorkItem:
        index = self._index
        return WorkItem(session=name, start=index, end=index + 1, position=position, hidden=hidden)

    def _hidden(self, rows: int) -> torch.Tensor:
        structure = self._engine.layout.structure
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(rows, structure.row_width, generator=generator)
        return structure.trial_rows(self._index, numbers)

    def _empty_kv(self, position: int, end: int) -> KvRows:
        layout = self._engine.layout
        parts = layout.structure.kv_shapes[self._index].parts
        return KvRows(
            start=self._index,
            end=self._index + 1,
            position=position,
            layers=(
                tuple(torch.zeros(end - position, *part, dtype=layout.dtype) for part in parts),
            ),
        )

    def _time(self, items: Sequence[WorkItem]) -> float:
        self._layers_s = 0.0
        forward = self._engine.loaded.forward
        vars(forward)["run"] = partial(self._timed, forward.run)
        try:
            self._step(items)
        finally:
            del vars(forward)["run"]
        return self._layers_s

    def _step(self, items: Sequence[WorkItem]) -> None:
        for result in self._engine.step(items):
            if result.error is not None:
                raise UserError(f"a layer could not be timed: {result.error}")

    def _timed(
        self, run: Callable[..., torch.Tensor], start: int, end: int, *given: Any
    ) -> torch.Tensor:
        """Run the layer within a step, and add what it takes beyond no layer at all: rows are
        staged for a GPU's graph once, whatever the number of layers."""
        took_s, made = self._took_s(partial(run, start, end, *given))
        if self._engine.device.type == "cuda" and self._engine.layout.structure.packed:
            rows = given[1].shape[0]
            for _ in range(1 if rows in self._empty_s else PROFILING.empty_timings):
                empty_s, _ = self._took_s(partial(run, start, start, *given))
                self._empty_s[rows] = min(empty_s, self._empty_s.get(rows, math.inf))
            took_s -= min(self._empty_s[rows], PROFILING.empty_share_max * took_s)
        self._layers_s += took_s
        return made

    def _took_s(self, run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
        device = self._engine.device
        wait_for(device)
        started_s = self._clock()
        made = run()
        wait_for(device)
        return self._clock() - started_s, made


def measure(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> Profile:
    """Time a layer of each kind of ``engine``."""
    counts = layers_to_time(engine)
    return _mean(
        {measure_layer(EngineLayer(engine, index, clock), clock): n for index, n in counts.items()}
    )


def _mean(profiles: Mapping[Profile, int]) -> Profile:
    """The mean of profiles by their weights, at the points that all of them have."""
    total = sum(profiles.values())

    def mean(timings: Callable[[Profile], tuple[Timing, ...]]) -> tuple[Timing, ...]:
        seconds = [
            ({(t.batch, t.context_tokens): t.seconds for t in timings(each)}, weight)
            for each, weight in profiles.items()
        ]
        return tuple(
            Timing(
                batch=batch,
                context_tokens=context,
                seconds=sum(known[batch, context] * weight for known, weight in seconds) / total,
            )
            for batch, context in seconds[0][0]
            if all((batch, context) in known for known, _ in seconds)
        )

    return Profile(
        points=mean(lambda each: each.points),
        checks=mean(lambda each: each.checks),
        prefills=mean(lambda each: each.prefills),
        kv_tokens=min(each.kv_tokens for each in profiles),
    )


def measure_layer(layer: TimedLayer, clock: Callable[[], float]) -> Profile:
    """Time a layer at all points that its KV room allows.

    Batches are timed in turn and contexts in two passes, so that a busy moment affects all of them.
    """
    by_context: dict[int, list[int]] = {}
    for batch, context in points_within(layer.kv_tokens, layer.page_tokens, layer.context_tokens):
        by_context.setdefault(context, []).append(batch)
    seconds: dict[Point, float] = {}
    for _ in range(PROFILING.passes):
        for context, batches in by_context.items():
            with layer.sessions(max(batches), context) as step_s:
                for batch, took_s in _time_batches(step_s, batches, clock).items():
                    known_s = seconds.get((batch, context), math.inf)
                    seconds[batch, context] = min(known_s, took_s)
    timed = [Timing(batch=b, context_tokens=c, seconds=s) for (b, c), s in seconds.items()]
    return Profile(
        points=tuple(t for t in timed if (t.batch, t.context_tokens) not in CHECKS),
        checks=tuple(t for t in timed if (t.batch, t.context_tokens) in CHECKS),
        prefills=tuple(_time_chunks(layer)),
        kv_tokens=layer.kv_tokens,
    )


def _time_batches(
    step_s: Callable[[int], float], batches: Sequence[int], clock: Callable[[], float]
) -> dict[int, float]:
    """Minimum seconds of a step by batch."""
    timed = []
    for batch in batches:
        timed.append(batch)
        if _is_long(partial(step_s, batch)):
            break
    seconds = dict.fromkeys(timed, math.inf)
    started_s = clock()
    for timing in range(PROFILING.timings_max):
        if timing >= PROFILING.timings_least and clock() - started_s > PROFILING.timing_budget_s:
            break
        for batch in timed:
            seconds[batch] = min(seconds[batch], step_s(batch))
    return seconds


def _time_chunks(layer: TimedLayer) -> Iterable[Timing]:
    """A layer's times for chunks of a prompt, without and with some of the prompt before them.

    What has no room in KV or in the model's context is left out.
    """
    for before in CHUNK_CONTEXTS:
        for tokens in CHUNKS:
            if before + tokens > min(layer.context_tokens, layer.kv_tokens):
                break
            time_once = partial(layer.chunk_s, before, tokens)
            long = _is_long(time_once)
            timings = range(1 if long else PROFILING.timings_least)
            seconds = min(time_once() for _ in timings)
            yield Timing(batch=tokens, context_tokens=before, seconds=seconds)
            if long:
                break


def _is_long(timed: Callable[[], float]) -> bool:
    """Whether one layer's step takes longer than a stage allows itself: larger ones never run.

    The first step of a size warms up, so a long one gets a second try.
    """
    return timed() > BATCHING.decode_s_max and timed() > BATCHING.decode_s_max


def tokens_per_s(engine: Engine, profile: Profile) -> tuple[float, ...]:
    """T_j for j = 1 to the maximum number of layers that fit, at a typical context."""
    return rates(profile, engine.spec, engine.config.memory_bytes, engine.layers_max)
