"""What the next engine step runs: decodes of all sessions, with a share for prefill.

Pure. A step's time grows with its rows, so prefill rows per step are bounded; decodes are one row
each and go first, but a waiting prefill always gets its share, so neither starves (Sarathi-Serve,
OSDI'24, §4; Orca, OSDI'22, §3).
"""

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Work(Protocol):
    """What is queued: rows of one session."""

    @property
    def key(self) -> str: ...

    @property
    def tokens(self) -> int: ...


T = TypeVar("T", bound=Work)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one step."""

    decodes_max: int = 256
    prefill_tokens_max: int = 256
    """Prefill rows per step; a single larger chunk still runs, alone among prefills."""


class Batcher(Generic[T]):
    """Queues work in order of arrival; only a session's oldest item may be in a step."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._queues: dict[str, deque[tuple[int, T]]] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def add(self, work: T) -> None:
        """Queue ``work`` behind its session's earlier items."""
        self._queues.setdefault(work.key, deque()).append((next(self._arrivals), work))

    def drop(self, key: str) -> list[T]:
        """Forget a session's queued work and return it."""
        return [work for _, work in self._queues.pop(key, ())]

    def next_batch(self) -> list[T]:
        """The items of the next step, which leave the queue; empty when nothing is queued.

        The oldest waiting prefill is always among them, so each is in time the oldest.
        """
        heads = [queue[0] for queue in self._queues.values()]
        heads.sort(key=lambda head: head[0])
        chosen = [work for _, work in heads if work.tokens == 1][: self._limits.decodes_max]
        budget = self._limits.prefill_tokens_max
        first = True
        for _, work in heads:
            if work.tokens != 1 and (first or work.tokens <= budget):
                chosen.append(work)
                budget -= work.tokens
                first = False
        for work in chosen:
            queue = self._queues[work.key]
            queue.popleft()
            if not queue:
                del self._queues[work.key]
        return chosen
