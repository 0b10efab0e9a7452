"""Fits the time of one layer between measured points, and estimates the fit's error. Pure.

Each measured batch has a straight line over the context, because reading its KV costs the same for
each token. Between batches the lines are interpolated, because kernels change with the number of
rows in ways that no single formula follows. Points that were left out of the fit give its error.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from dht.messages.types import RECORD_BOUNDS, LayerTimes

SECONDS_MIN = 1e-9
"""Minimum time of a layer; a fit below it is noise."""
DIGITS = 3
"""Significant digits of an announced time: more would be noise, and change with every join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time of one layer in a step of ``batch`` rows.

    These are a decode row for each of ``batch`` sessions that have ``context_tokens`` by then, or
    a chunk of ``batch`` tokens of a prompt, behind ``context_tokens`` of it.
    """

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Time of a layer for one batch size, linear in its sessions' context."""

    batch: int
    base_s: float
    token_s: float
    """Extra seconds for one more token of context in every session."""

    def seconds(self, context_tokens: float) -> float:
        return self.base_s + self.token_s * context_tokens


@dataclass(frozen=True, slots=True)
class LayerFit:
    """Lines in ascending order of their batch; at least one."""

    lines: tuple[Line, ...]

    @property
    def batch_max(self) -> int:
        """Largest batch that was measured."""
        return self.lines[-1].batch

    def seconds(self, batch: int, context_tokens: float) -> float:
        """One layer's time; beyond the largest measured batch it grows in proportion."""
        above = next((n for n, line in enumerate(self.lines) if line.batch >= batch), None)
        if above is None:
            last = self.lines[-1]
            return max(SECONDS_MIN, last.seconds(context_tokens) * batch / last.batch)
        high = self.lines[above]
        if above == 0:
            return max(SECONDS_MIN, high.seconds(context_tokens))
        low = self.lines[above - 1]
        low_s, high_s = low.seconds(context_tokens), high.seconds(context_tokens)
        share = (batch - low.batch) / (high.batch - low.batch)
        return max(SECONDS_MIN, low_s + share * (high_s - low_s))

    def errors(self, timings: Iterable[Timing]) -> list[float]:
        """Relative error of the fit at each point."""
        return [
            abs(self.seconds(timing.batch, timing.context_tokens) - timing.seconds) / timing.seconds
            for timing in timings
        ]


def fit(timings: Iterable[Timing]) -> LayerFit:
    """Fit a line through the points of each batch, each point weighted by its relative error.

    A batch measured at only one context takes its slope, per session, from the nearest batch
    measured at several. Raises ValueError without points.
    """
    ordered = sorted(timings, key=lambda timing: (timing.batch, timing.context_tokens))
    groups = {batch: list(of) for batch, of in groupby(ordered, key=lambda t: t.batch)}
    if not groups:
        raise ValueError("a fit needs a point at least")
    sloped = {
        batch: _line(of)
        for batch, of in groups.items()
        if len({timing.context_tokens for timing in of}) > 1
    }
    lines = []
    for batch, of in groups.items():
        if batch in sloped:
            lines.append(sloped[batch])
            continue
        nearest = min(sloped, key=lambda known: abs(known - batch), default=None)
        token_s = 0.0 if nearest is None else sloped[nearest].token_s * batch / nearest
        least = min(of, key=lambda timing: timing.seconds)
        base_s = max(0.0, least.seconds - token_s * least.context_tokens)
        lines.append(Line(batch=batch, base_s=base_s, token_s=token_s))
    return LayerFit(tuple(lines))


def _line(timings: Sequence[Timing]) -> Line:
    """The non-decreasing line with the least squared relative error."""
    weights = [timing.seconds**-2 for timing in timings]
    total = sum(weights)
    mean_c = sum(w * t.context_tokens for w, t in zip(weights, timings, strict=True)) / total
    mean_s = sum(w * t.seconds for w, t in zip(weights, timings, strict=True)) / total
    spread, joint = 0.0, 0.0
    for weight, timing in zip(weights, timings, strict=True):
        away = timing.context_tokens - mean_c
        spread += weight * away * away
        joint += weight * away * (timing.seconds - mean_s)
    token_s = min(max(0.0, joint / spread), mean_s / mean_c)  # slope and base stay at least 0
    return Line(batch=timings[0].batch, base_s=max(0.0, mean_s - token_s * mean_c), token_s=token_s)


def announced(found: LayerFit, count_max: int = RECORD_BOUNDS.layer_times_max) -> LayerTimes:
    """The fit as a record carries it: at most ``count_max`` of its lines, rounded.

    No time falls with rows or context. Of more lines, those are taken that keep the largest
    relative error at the others small: each turn takes the one at which it is largest.
    """
    lines = _rising(found.lines)
    kept = {0, len(lines) - 1}
    while len(kept) < min(count_max, len(lines)):
        part = LayerFit(tuple(lines[at] for at in sorted(kept)))
        errors = [_error(part, line) if at not in kept else -1.0 for at, line in enumerate(lines)]
        kept.add(errors.index(max(errors)))
    return tuple(
        (
            line.batch,
            _nanoseconds(line.base_s),
            _nanoseconds(line.seconds(RECORD_BOUNDS.far_tokens)),
        )
        for line in (lines[at] for at in sorted(kept))
    )


def _rising(lines: Sequence[Line]) -> list[Line]:
    """``lines`` without times that fall as rows grow: each time counts as the largest so far."""
    bases = accumulate((line.base_s for line in lines), max)
    slopes = accumulate((line.token_s for line in lines), max)
    return [
        Line(batch=line.batch, base_s=base_s, token_s=token_s)
        for line, base_s, token_s in zip(lines, bases, slopes, strict=True)
    ]


def _error(part: LayerFit, line: Line) -> float:
    """Largest relative error of ``part`` at a line's batch, without and with a long context."""
    return max(
        abs(part.seconds(line.batch, context) / max(SECONDS_MIN, line.seconds(context)) - 1)
        for context in (0, RECORD_BOUNDS.far_tokens)
    )


def _nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, rounded to ``DIGITS`` digits and within what a record may carry."""
    count = min(seconds * 1e9, float(RECORD_BOUNDS.nanoseconds_max))
    if count < 1:
        return 0
    return min(
        RECORD_BOUNDS.nanoseconds_max, int(round(count, DIGITS - 1 - math.floor(math.log10(count))))
    )
