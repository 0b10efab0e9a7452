"""Turns to answer: what those who wait and leave cost the others."""

import asyncio
from typing import Any

from client.gateway.answering.turns import Turns


class Compared(asyncio.Future[Any]):
    """Counts how often futures are compared: a search does that with each that it passes."""

    count = 0
    __hash__ = asyncio.Future.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return self is other


async def test_who_hangs_up_leaves_without_a_search_among_those_who_wait() -> None:
    """A request may wait for 256 turns, and one who asks may have 256 requests: each that hung up
    had all the others searched 256 times, on the event loop."""
    loop = asyncio.get_running_loop()
    loop.create_future = lambda: Compared(loop=loop)  # type: ignore[method-assign]
    turns = Turns(4)
    waiting = [asyncio.create_task(turns.take("who", 60.0, lambda: True)) for _ in range(200)]
    await asyncio.sleep(0)
    Compared.count = 0
    for task in reversed(waiting):
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert Compared.count <= len(waiting)
    assert await turns.take("who", 60.0, lambda: True), "they left nothing behind"
