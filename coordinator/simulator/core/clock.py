"""A virtual clock: calls at given times, in order. What it does can be logged, one line for each
event: two runs of one seed must give the same lines.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from zlib import crc32

Tell = Callable[[str], None]
"""A callback for one line, without its line end."""
_TOLD: ContextVar[Tell | None] = ContextVar("told", default=None)


@contextmanager
def recorded(tell: Tell) -> Iterator[None]:
    """Call ``tell`` with the events of all simulations within the context."""
    token = _TOLD.set(tell)
    try:
        yield
    finally:
        _TOLD.reset(token)


def log_event(what: str, *details: object) -> None:
    """Log one event. Bytes appear as their length and checksum, other details as text."""
    tell = _TOLD.get()
    if tell is not None:
        tell(" ".join([what, *map(_text, details)]))


def _text(detail: object) -> str:
    if isinstance(detail, bytes | bytearray | memoryview):
        return f"{len(detail)}:{crc32(detail):08x}"
    return str(detail)


class Clock:
    """Runs calls at their times; calls of one time run in the order in which they were made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._sequence = itertools.count()

    def at(self, at_s: float, call: Callable[[Any], None], what: Any) -> None:
        """Call ``call(what)`` at a time that is not in the past."""
        heapq.heappush(self._events, (at_s, next(self._sequence), call, what))

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call ``call()`` at a time that is not in the past."""
        heapq.heappush(self._events, (at_s, next(self._sequence), _plain, call))

    def pass_until(self, until_s: float) -> int:
        """Run all calls up to a time; returns their number."""
        events, pop, noting = self._events, heapq.heappop, _TOLD.get() is not None
        count = 0
        while events and events[0][0] <= until_s:
            now_s, number, call, what = pop(events)
            if noting:
                log_event(f"{now_s:.6f} {number} {call.__name__}")
            self.now_s = now_s
            count += 1
            call(what)
        self.now_s = max(self.now_s, until_s)
        return count


def _plain(call: Callable[[], None]) -> None:
    call()
