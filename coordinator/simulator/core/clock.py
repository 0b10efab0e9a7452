"""A virtual clock: calls at given times, in order."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from coordinator.simulator.core.event_log import listened, log_event


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
        events, pop, noting = self._events, heapq.heappop, listened()
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
