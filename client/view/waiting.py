"""Requests of one client that wait for a route, those that looked longest ago first. Pure."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice


class Waiting:
    """Who waits, and is woken before its time."""

    def __init__(self) -> None:
        self._wakes: dict[Callable[[], object], None] = {}

    @contextmanager
    def listed(self, wake: Callable[[], object]) -> Iterator[None]:
        """Within the block, ``wake`` is called once it is this request's turn to look again."""
        self._wakes[wake] = None
        try:
            yield
        finally:
            self._wakes.pop(wake, None)

    def wake(self, count: int) -> None:
        """Let the first ``count`` look again."""
        for wake in list(islice(self._wakes, count)):
            del self._wakes[wake]
            wake()
