"""What a caller hears while something is waited for."""

import asyncio
from collections.abc import Awaitable, Callable

from client.swarm.narrator import SILENT_S, Narrator
from testing.clock import run_virtual


def heard_of(body: Callable[[Narrator], Awaitable[None]]) -> list[tuple[float, str]]:
    """What a narrator tells during ``body``, and when."""
    heard: list[tuple[float, str]] = []

    async def timed() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await body(Narrator(lambda line: heard.append((loop.time() - began_s, line))))

    run_virtual(timed(), limit_s=100.0)
    return heard


def test_no_wait_is_silent_and_no_line_comes_without_need() -> None:
    async def body(narrator: Narrator) -> None:
        with narrator.waiting(lambda: "no token yet"):
            await asyncio.sleep(1.9)
            narrator("a peer left")
            await asyncio.sleep(2.5 * SILENT_S)
        narrator.heard()
        with narrator.waiting(lambda: "no second token yet"):
            await asyncio.sleep(SILENT_S / 2)
        await asyncio.sleep(10 * SILENT_S)  # nothing is waited for

    assert heard_of(body) == [
        (1.9, "a peer left"),
        (4.9, "still waiting after 5 s: no token yet"),
        (7.9, "still waiting after 8 s: no token yet"),
    ]


def test_short_waits_in_a_row_are_no_silence() -> None:
    async def body(narrator: Narrator) -> None:
        for what in ("first", "second", "third"):
            with narrator.waiting(lambda: what):  # noqa: B023  (asked within the context only)
                await asyncio.sleep(1.9)

    assert heard_of(body) == [(3.0, "still waiting after 1 s: second")]


def test_who_begins_to_wait_after_a_pause_is_not_told_at_once() -> None:
    async def body(narrator: Narrator) -> None:
        with narrator.waiting(lambda: "entering"):
            await asyncio.sleep(1.0)
        await asyncio.sleep(60.0)
        with narrator.waiting(lambda: "no token yet"):
            await asyncio.sleep(4.0)

    assert heard_of(body) == [(64.0, "still waiting after 3 s: no token yet")]


def test_many_answers_that_wait_for_the_same_are_told_of_once() -> None:
    async def body(narrator: Narrator) -> None:
        for _ in range(50):
            narrator("waiting: layer 2 is held by nobody that can be reached")
            narrator("waiting: layer 2 is being loaded by 1 peer")
            await asyncio.sleep(1.3)

    assert [line for _, line in heard_of(body)] == [
        "waiting: layer 2 is held by nobody that can be reached",
        "waiting: layer 2 is being loaded by 1 peer",
    ]
