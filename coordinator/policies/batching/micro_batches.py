"""Decides how many decodes a step takes, so that the stages of a ring work at the same time. Pure.

Decodes that arrive together run together and leave together. What waits for a step joins the next,
until all sessions of a ring go round as one batch, and one stage works while all others wait. So
the ring's last stage cuts them into *micro-batches*, as pipelines do that keep one for each stage
(GPipe, NeurIPS'19; vLLM's pipeline parallelism).

How many is best nobody here knows beforehand: a stage that takes longer than the others would put
small batches together again, and only be later for it. But rows say how long stages computed them
and how long they waited there. While they hardly wait, the last stage makes one micro-batch more;
where they wait for long, fewer. There are at most as many as shorten a turn among equal stages:
with n sessions in k micro-batches, a step takes fixed + row × n / k, and a micro-batch finds the
stage at work with a chance of k × step / turn and waits for half a step then, which is shortest at
k = sqrt(2 × row / fixed × n × turn / step). Where rows cost nothing, that is one.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

ROWS_COMPARED = 64
"""Rows of the largest step from which the cost of a row is told."""


class RingWork(Protocol):
    """A decode, as this module looks at it."""

    @property
    def session(self) -> Hashable:
        """The session; its items keep their order."""
        ...

    @property
    def ring_s(self) -> tuple[float, float] | None:
        """At a ring's last stage: the time for which the stages before computed the rows, and for
        which these waited there, in seconds; None elsewhere."""
        ...


def row_share_of(layer_s: Mapping[int, float]) -> float:
    """What a further decode costs, as a share of what a step costs without any row.

    ``layer_s``: seconds of one layer by number of rows; 0 where they do not tell.
    """
    points = sorted(each for each in layer_s.items() if 0 < each[0] <= ROWS_COMPARED)
    if len(points) < 2:
        return 0.0
    (a, a_s), (b, b_s) = points[0], points[-1]
    row_s = max(0.0, (b_s - a_s) / (b - a))
    fixed_s = a_s - a * row_s
    return row_s / fixed_s if fixed_s > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchConfig:
    """When more micro-batches pay, and how they are compared."""

    keeps_up: float = 3.0
    """Minimum ratio of a step's decodes to those that come while it runs: a last stage that is at
    work most of the time cuts nothing."""
    step_share: float = 0.1
    """Share of the newest step in the mean time of a step."""
    turn_step: float = 1.05
    """Ratio by which a session's turn moves the median turn."""
    turn_s_min: float = 1e-6
    waits_low: float = 0.15
    """Mean share of its time at the stages before that a token waits for steps there, below which
    there may be more micro-batches. What other peers say of it counts by session, not by
    seconds."""
    waits_high: float = 0.25
    """Such a share above which there are too many."""
    more: float = 0.25
    """By how much the number of micro-batches rises in a turn."""
    fewer: float = 0.7
    """The ratio by which it falls in a turn."""
    gone_turns: float = 4.0
    """Turns without a decode after which a session no longer counts."""


MICRO_BATCHES = MicroBatchConfig()


class MicroBatches:
    """The limit on a stage's decodes, from its steps and its sessions' turns so far."""

    def __init__(self, row_share: float) -> None:
        """``row_share``: as :func:`row_share_of` returns it."""
        self._row_share = row_share
        self._parts = 1.0
        self._step_s: float | None = None
        self._turn_s: float | None = None
        self._shares: list[float] = []
        self._last: dict[Hashable, float] = {}
        self._looked_s = 0.0
        self._began_s: float | None = None

    def sessions_max(self, now_s: float) -> float:
        """Maximum sessions whose decodes the step that begins now takes."""
        if self._began_s is not None:
            took_s, self._began_s = now_s - self._began_s, None
            mean_s = took_s if self._step_s is None else self._step_s
            self._step_s = mean_s + MICRO_BATCHES.step_share * (took_s - mean_s)
        if not (self._row_share and self._step_s and self._turn_s):
            return math.inf
        if now_s - self._looked_s > self._turn_s:
            self._look(now_s, self._turn_s, self._step_s)
        if self._parts == 1:
            return math.inf
        sessions = len(self._last)
        coming = sessions * self._step_s / self._turn_s
        return math.ceil(max(1.0, sessions / self._parts, MICRO_BATCHES.keeps_up * coming))

    def _look(self, now_s: float, turn_s: float, step_s: float) -> None:
        """Choose the number of micro-batches by what the last turn's tokens waited."""
        self._looked_s, since_s = now_s, now_s - MICRO_BATCHES.gone_turns * turn_s
        self._last = {key: at_s for key, at_s in self._last.items() if at_s > since_s}
        shares, self._shares = self._shares, []
        if not shares:  # not the last stage
            return
        waited = fmean(shares)
        if waited > MICRO_BATCHES.waits_high:
            self._parts *= MICRO_BATCHES.fewer
        elif waited < MICRO_BATCHES.waits_low:
            self._parts += MICRO_BATCHES.more
        best = math.sqrt(2 * self._row_share * len(self._last) * turn_s / step_s)
        self._parts = max(1.0, min(self._parts, best))

    def begins(self, decodes: Iterable[RingWork], now_s: float) -> None:
        self._began_s = now_s
        last, turn_s, least_s = self._last, self._turn_s, MICRO_BATCHES.turn_s_min
        longer, shorter = MICRO_BATCHES.turn_step, 1 / MICRO_BATCHES.turn_step
        for work in decodes:
            session, ring_s = work.session, work.ring_s
            before_s = last.get(session)
            last[session] = now_s
            if ring_s is not None and (whole_s := ring_s[0] + ring_s[1]) > 0:
                self._shares.append(ring_s[1] / whole_s)
            if before_s is None:
                continue
            took_s = max(now_s - before_s, least_s)
            if turn_s is None:
                turn_s = took_s
            else:
                turn_s *= longer if took_s > turn_s else shorter
        self._turn_s = turn_s

    def drop(self, session: Hashable) -> None:
        self._last.pop(session, None)
