"""Tells a caller what is waited for, so that no wait is a silent one."""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from client.errors import StatusCallback
from dht.process.news import News

SILENT_S = 3.0
"""Maximum time in seconds without a word while something is waited for."""
WAITING = "waiting: "
"""How lines begin that say what stands in the way of answers."""
PAUSE_S = 0.1
"""Maximum time in seconds between two waits that count as one: nothing was done in between."""


class Narrator:
    """A status callback that speaks by itself where nobody else does.

    It passes lines on to ``tell``. Within :meth:`waiting` it adds one of its own whenever neither a
    line nor what is waited for came for ``SILENT_S``. Waits that follow each other count as one.
    """

    def __init__(self, tell: StatusCallback) -> None:
        self._tell = tell
        self._heard_s = -math.inf
        """When the caller heard of something last or began to wait, by the loop's clock."""
        self._waited_s = -math.inf
        """When the last wait ended."""
        self._news = News()

    def __call__(self, line: str) -> None:
        """Tell ``line``, unless it is told of late: many answers wait for the same."""
        now_s = asyncio.get_running_loop().time()
        if not line.startswith(WAITING) or self._news.takes_again(line, now_s):
            self.heard()
            self._tell(line)

    def heard(self) -> None:
        """Note that something came."""
        self._heard_s = asyncio.get_running_loop().time()

    @contextmanager
    def waiting(self, for_what: Callable[[], str]) -> Iterator[None]:
        """Within the context, ``for_what`` is waited for, and told with the seconds it took."""
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        if since_s > self._waited_s + PAUSE_S:
            self.heard()
        timer: asyncio.TimerHandle | None = None

        def listen() -> None:
            nonlocal timer
            timer = loop.call_at(self._heard_s + SILENT_S, speak)

        def speak() -> None:
            now_s = loop.time()
            if now_s >= self._heard_s + SILENT_S:
                self(f"still waiting after {now_s - since_s:.0f} s: {for_what()}")
            listen()

        listen()
        try:
            yield
        finally:
            self._waited_s = loop.time()
            if timer is not None:
                timer.cancel()
