"""Chooses what the next engine step runs: decodes of all sessions, and a share of prefill. Pure.

A step's time grows with its rows, so prefill rows per step are bounded. Decodes are few rows each
and go first, but a waiting prefill always gets its share, so neither starves (Sarathi-Serve,
OSDI'24, §4; Orca, OSDI'22, §3). Of its kind, urgent work goes first (Llumnix, OSDI'24, §4.4), but
not in every step. A step takes no more decodes than serve the ring
(:mod:`coordinator.policies.batching.micro_batches`).
"""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from coordinator.policies.batching.micro_batches import MicroBatches, RingWork, row_share_of


class Work(RingWork, Protocol):
    """Rows of one session that a step runs together."""

    @property
    def tokens(self) -> int:
        """Number of rows."""
        ...

    @property
    def decodes(self) -> bool:
        """Whether the rows are one new token, with or without drafts behind it."""
        ...

    @property
    def background(self) -> bool:
        """Whether nobody waits for the rows."""
        ...

    @property
    def urgent(self) -> bool:
        """Whether the rows go before others for a while."""
        ...


AnyWork = TypeVar("AnyWork", bound=Work)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one step."""

    decodes_max: int = 256
    """Rows of decodes per step, with those that were drafted; a single larger one still runs."""
    prefill_tokens_max: int = 256
    """Prefill rows per step; a single larger chunk still runs, as the step's only prefill."""
    row_share: float = 0.0
    """What a further decode costs, as a share of what a step costs without any row
    (:func:`coordinator.policies.batching.micro_batches.row_share_of`); 0: all decodes that wait are
    run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """What a step may hold, and who waits for it."""

    prefill_tokens_least: int = 16
    prefill_tokens_most: int = 512
    decode_s_max: float = 0.1
    """Maximum time of a step that a decode waits for: ten tokens/s stay readable."""
    background_quiet_s: float = 0.05
    """Time without other work after which background work runs by itself: the next decode, which is
    on its way round the other stages, would have to wait for it."""
    urgent_steps: int = 2
    """Maximum number of steps in a row in which urgent work goes first. The next one is in order of
    arrival: whatever calls itself urgent, a third of the steps is as if nothing were."""


BATCHING = BatchingConfig()

LIMIT_ROWS = (1, 16, 32, 64, 128, 256, 512)
"""Rows of the steps whose times give a peer's limits where these are read off a curve."""


def limits_of(
    layer_s: Mapping[int, float],
    layers: int,
    decode_s_max: float = BATCHING.decode_s_max,
    *,
    decode_s: Mapping[int, float] | None = None,
) -> BatchLimits:
    """Limits from measurement: the most prefill rows whose step stays under ``decode_s_max``.

    ``layer_s``: seconds of one layer by number of rows of a prompt, ``decode_s`` by decodes (None:
    a step takes all decodes that wait). Other row counts are interpolated, or extrapolated from the
    two nearest points. On a machine too slow for the bound, prefill still gets
    ``BATCHING.prefill_tokens_least`` rows; otherwise a prompt would never end.
    """
    points = sorted(layer_s.items())
    best = BATCHING.prefill_tokens_least
    for rows in range(BATCHING.prefill_tokens_least, BATCHING.prefill_tokens_most + 1):
        if layers * seconds_at(points, rows) > decode_s_max:
            break
        best = rows
    return BatchLimits(prefill_tokens_max=best, row_share=row_share_of(decode_s or {}))


def seconds_at(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Time for ``rows`` rows, on the line through the two nearest measured points."""
    if len(points) == 1:
        return points[0][1] * max(1.0, rows / points[0][0])
    above = next((i for i, (at, _) in enumerate(points) if at >= rows), len(points) - 1)
    (low, low_s), (high, high_s) = points[max(0, above - 1)], points[max(1, above)]
    return max(0.0, low_s + (rows - low) * (high_s - low_s) / (high - low))


class Scheduler(Generic[AnyWork]):
    """Queues work in order of arrival; a step takes only a session's oldest item."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._busy_s = -math.inf
        self._queues: dict[Hashable, list[tuple[int, AnyWork]]] = {}
        self._arrivals = itertools.count()
        self._urgent_steps = 0
        self._micro = MicroBatches(limits.row_share)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def backlog_tokens(self) -> int:
        """Number of prefill rows that wait."""
        queued = (work for queue in self._queues.values() for _, work in queue)
        return sum(work.tokens for work in queued if not work.decodes)

    def add(self, work: AnyWork) -> None:
        """Queue ``work`` behind its session's earlier items."""
        queue, arrived = self._queues.get(work.session), (next(self._arrivals), work)
        if queue is None:  # a list: most hold one item, and are made anew for each decode
            self._queues[work.session] = [arrived]
        else:
            queue.append(arrived)

    def has(self, session: Hashable) -> bool:
        """Whether work of a session is queued."""
        return session in self._queues

    def drop(self, session: Hashable) -> None:
        """Forget a session's queued work."""
        self._queues.pop(session, None)
        self._micro.drop(session)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until background work may run; None if nothing is queued."""
        if not self._queues:
            return None
        return max(0.0, self._busy_s + BATCHING.background_quiet_s - now_s)

    def next_batch(self, now_s: float) -> list[AnyWork]:
        """Take the items of the next step from the queue; empty if none may run now.

        The first waiting prefill is always among them: the oldest urgent one, or the oldest, which
        comes first in one step of ``urgent_steps + 1`` at least, so every prefill gets its turn.
        Background work adds at most one item, to a step that runs anyway or while the engine is
        quiet.
        """
        queues = self._queues
        if not queues:
            self._micro.sessions_max(now_s)  # the step that ran has ended
            return []
        decodes: list[AnyWork] = []
        prefills: list[AnyWork] = []
        behind: AnyWork | None = None
        urgent = False
        for _, work in sorted([queue[0] for queue in queues.values()]):  # by arrival
            if work.background:
                behind = behind or work
                continue
            urgent = urgent or work.urgent
            (decodes if work.decodes else prefills).append(work)
        urgent_first = urgent and self._urgent_steps < BATCHING.urgent_steps
        if urgent_first:
            decodes.sort(key=_is_not_urgent)
            prefills.sort(key=_is_not_urgent)
        decoding = self._within_limits(decodes, now_s)
        chosen = list(decoding)
        budget = self._limits.prefill_tokens_max
        for at, work in enumerate(prefills):
            if at == 0 or work.tokens <= budget:
                chosen.append(work)
                budget -= work.tokens
        if chosen:
            self._busy_s = now_s
            self._urgent_steps = self._urgent_steps + 1 if urgent_first else 0
        if behind is not None and (chosen or now_s >= self._busy_s + BATCHING.background_quiet_s):
            chosen.append(behind)
        if chosen:
            self._micro.begins(decoding, now_s)
        for work in chosen:
            queue = queues[work.session]
            if len(queue) == 1:
                del queues[work.session]
            else:
                del queue[0]
        return chosen

    def _within_limits(self, decodes: list[AnyWork], now_s: float) -> list[AnyWork]:
        """The first of the decodes, as many as the step takes."""
        rows, most = self._limits.decodes_max, self._micro.sessions_max(now_s)
        for at, work in enumerate(decodes):
            tokens = work.tokens
            if at and (tokens > rows or at >= most):
                return decodes[:at]
            rows -= tokens
        return decodes


def _is_not_urgent(work: Work) -> bool:
    return not work.urgent
