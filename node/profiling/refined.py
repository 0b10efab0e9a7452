"""Refines a layer's measured times by the steps of a peer that serves. Pure.

A profile is made before a peer serves, in a quiet moment and of one layer alone. Real steps tell
how far it is off, but some are outliers, and a busy minute says little of the next hour. So only
the median of each minute counts. A quarter of its difference is taken over, at most 5% a minute,
and the whole correction stays within bounds. Times are announced anew only once they are off by a
tenth, since every new figure may move a plan.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dht.messages.types import LayerTimes
from node.profiling.layer_fit import LayerFit, announced


@dataclass(frozen=True, slots=True, kw_only=True)
class RefinedConfig:
    """How real steps refine announced times."""

    window_s: float = 60.0
    steps_least: int = 20
    """Minimum steps of a size in a window: the median of fewer is chance."""
    steps_max: int = 256
    """Maximum steps of a size that are kept of a window, the newest."""
    gain: float = 0.25
    """Share of a window's difference that is taken over."""
    told_apart: float = 1.1
    """Ratio of a time to the announced one from which on times are announced anew."""


REFINED = RefinedConfig()

MOVE_MAX = math.log(1.05)
"""Maximum move of a correction in a window, as a logarithm, like all of these."""
CORRECTION_MAX = math.log(4.0)
"""Maximum correction of a measured time, either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """A step that ran rows of one sort only: decodes of sessions, or one prompt's chunk."""

    decodes: bool
    rows: int
    context_tokens: float
    """Mean context of the sessions, or tokens of the prompt before the chunk."""
    layers: int
    seconds: float


class RefinedFit:
    """A fit with a correction for each of its lines."""

    def __init__(self, measured: LayerFit) -> None:
        self._measured = measured
        count = len(measured.lines)
        self._corrections = [0.0] * count
        self._known = [False] * count
        self._window: list[deque[float]] = [deque(maxlen=REFINED.steps_max) for _ in range(count)]
        self._told: LayerTimes = announced(measured)

    def see(self, rows: int, context_tokens: float, layer_s: float) -> None:
        """Take one layer's time in a step. A step beyond the measured sizes says nothing."""
        lines = self._measured.lines
        if not (1 <= rows <= lines[-1].batch and 0 < layer_s < math.inf):
            return
        nearest = min(range(len(lines)), key=lambda at: abs(math.log(lines[at].batch / rows)))
        expected_s = self._measured.seconds(rows, context_tokens)
        self._window[nearest].append(math.log(layer_s / expected_s))

    def end_window(self) -> None:
        """Take over what the window's steps say, and begin the next one."""
        for at, seen in enumerate(self._window):
            if len(seen) >= REFINED.steps_least:
                move = REFINED.gain * (statistics.median(seen) - self._corrections[at])
                moved = self._corrections[at] + min(max(move, -MOVE_MAX), MOVE_MAX)
                self._corrections[at] = min(max(moved, -CORRECTION_MAX), CORRECTION_MAX)
                self._known[at] = True
            seen.clear()

    def times(self) -> LayerTimes:
        """Times to announce: the last announced ones until one of them is off by
        ``REFINED.told_apart``."""
        now = announced(self._corrected())
        before = {rows: ns for rows, *ns in self._told}
        same = before.keys() == {rows for rows, _, _ in now} and all(
            max(a, b) <= REFINED.told_apart * min(a, b)
            for rows, *ns in now
            for a, b in zip(ns, before[rows], strict=True)
        )
        if not same:
            self._told = now
        return self._told

    def _corrected(self) -> LayerFit:
        """The fit with each line's correction, or that of the nearest line that has one."""
        known = [at for at, found in enumerate(self._known) if found]
        lines = []
        for at, line in enumerate(self._measured.lines):
            nearest = min(known, key=lambda other: abs(other - at), default=at)
            factor = math.exp(self._corrections[nearest])
            lines.append(replace(line, base_s=factor * line.base_s, token_s=factor * line.token_s))
        return LayerFit(tuple(lines))


class RefinedTimes:
    """A peer's announced times: decodes and, where they were measured, prompts."""

    def __init__(self, decode: LayerFit, prompt: LayerFit | None) -> None:
        self._decode = RefinedFit(decode)
        self._prompt = None if prompt is None else RefinedFit(prompt)
        self._window_ends_s = -math.inf

    def take(self, steps: Sequence[StepSeen], now_s: float) -> None:
        """Take steps as they ran until ``now_s``; called several times a window."""
        for step in steps:
            fit = self._decode if step.decodes else self._prompt
            if fit is not None and step.layers > 0:
                fit.see(step.rows, step.context_tokens, step.seconds / step.layers)
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + REFINED.window_s
            self._decode.end_window()
            if self._prompt is not None:
                self._prompt.end_window()

    @property
    def decode_times(self) -> LayerTimes:
        return self._decode.times()

    @property
    def prompt_times(self) -> LayerTimes:
        return () if self._prompt is None else self._prompt.times()
