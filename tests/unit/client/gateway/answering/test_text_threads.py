"""Threads for texts: whose work comes next."""

import asyncio
import threading

import pytest

from client.gateway.answering.text_threads import THREADS, TextThreads


@pytest.mark.parametrize("size", [1, THREADS.long_size])
async def test_who_asks_for_much_keeps_nobody_else_waiting(size: int) -> None:
    """Requests that take 5 s each were worked on in the order in which they came."""
    threads, order = TextThreads(), []
    begun, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(60.0)

    async def ask(who: str) -> None:
        await threads.run(size, lambda: order.append(who), who)

    held = [
        asyncio.create_task(threads.run(size, hold, "many"))
        for _ in range(max(THREADS.short_threads, THREADS.long_threads))
    ]
    await begun.wait()
    many = [asyncio.create_task(ask("many")) for _ in range(10)]
    await asyncio.sleep(0)
    one = asyncio.create_task(ask("one"))
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(*held, *many, one)
    assert order.index("one") <= len(held)
