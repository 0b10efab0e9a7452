"""Requests of one client that wait for a route, those that looked longest ago first."""

import asyncio
from itertools import islice


class Waiting:
    """Who waits, and is woken before its time."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self, most_s: float) -> None:
        """Wait for ``most_s`` seconds, or until woken."""
        woken = asyncio.get_running_loop().create_future()
        self._waiting[woken] = None
        try:
            async with asyncio.timeout(most_s):
                await woken
        except TimeoutError:
            pass
        finally:
            self._waiting.pop(woken, None)

    def wake(self, count: int) -> None:
        """Let the first ``count`` look again."""
        for woken in list(islice(self._waiting, count)):
            del self._waiting[woken]
            if not woken.done():
                woken.set_result(None)
