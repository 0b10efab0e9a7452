"""What a caller hears while something is waited for."""

import asyncio

from client.swarm.narrator import SILENT_S, Narrator
from dht.simulated.clock import run_virtual


def test_no_wait_is_silent_and_nothing_is_said_twice_in_a_row() -> None:
    heard: list[tuple[float, str]] = []

    async def body() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        narrator = Narrator(lambda line: heard.append((loop.time() - began_s, line)))
        with narrator.waiting(lambda: "no token yet"):
            await asyncio.sleep(3.0)
            narrator("a peer left")
            await asyncio.sleep(2.5 * SILENT_S)
        with narrator.waiting(lambda: "no second token yet"):
            await asyncio.sleep(SILENT_S / 2)
        await asyncio.sleep(10 * SILENT_S)  # nothing is waited for

    run_virtual(body(), limit_s=100.0)
    assert heard == [
        (3.0, "a peer left"),
        (7.0, "still waiting after 7 s: no token yet"),
        (11.0, "still waiting after 11 s: no token yet"),
    ]
