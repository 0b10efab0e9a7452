"""What the next engine step runs: decodes of all sessions, with a share for prefill.

Pure. A step's time grows with its rows, so prefill rows per step are bounded; decodes are one row
each and go first, but a waiting prefill always gets its share, so neither starves (Sarathi-Serve,
OSDI'24, §4; Orca, OSDI'22, §3).
"""

from collections import deque
from collections.abc import Callable, Iterator
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
    """Queues work in order of arrival; at most one item per session is in a step."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._decodes: deque[T] = deque()
        self._prefills: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._decodes) + len(self._prefills)

    def add(self, work: T) -> None:
        """Queue ``work`` behind its session's earlier items."""
        (self._decodes if work.tokens == 1 else self._prefills).append(work)

    def drop(self, key: str) -> int:
        """Forget a session's queued work; returns how many items that were."""
        before = len(self)
        self._decodes = deque(work for work in self._decodes if work.key != key)
        self._prefills = deque(work for work in self._prefills if work.key != key)
        return before - len(self)

    def next_batch(self) -> list[T]:
        """The items of the next step, which leave the queue; empty when nothing is queued."""
        chosen: dict[str, T] = {}
        prefilling = {work.key for work in self._prefills}
        _take(
            self._decodes,
            chosen,
            # A session's single row may follow chunks of its own that still wait.
            lambda work: len(chosen) < self._limits.decodes_max and work.key not in prefilling,
        )
        budget = self._limits.prefill_tokens_max
        first = True

        def may_run(work: T) -> bool:
            nonlocal budget, first
            if not first and work.tokens > budget:
                return False
            first = False
            budget -= work.tokens
            return True

        _take(self._prefills, chosen, may_run)
        return list(chosen.values())


def _take(queue: deque[T], chosen: dict[str, T], may_run: Callable[[T], bool]) -> None:
    """Move what may run from ``queue`` to ``chosen``; a session's later items stay in order."""
    kept: list[T] = []
    blocked: set[str] = set()
    for work in _drain(queue):
        if work.key not in chosen and work.key not in blocked and may_run(work):
            chosen[work.key] = work
        else:
            blocked.add(work.key)
            kept.append(work)
    queue.extend(kept)


def _drain(queue: deque[T]) -> Iterator[T]:
    while queue:
        yield queue.popleft()
