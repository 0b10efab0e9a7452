"""Who waits for a route is woken in the order in which they began to wait."""

import asyncio

from client.session.driver import turn_or
from client.view.waiting import Waiting
from testing.clock import run_virtual

MOST_S = 10.0


def test_the_first_to_wait_are_woken_and_the_others_wait_on() -> None:
    async def scenario() -> dict[str, float]:
        loop, waiting = asyncio.get_running_loop(), Waiting()
        over_s: dict[str, float] = {}

        async def wait(name: str) -> None:
            await turn_or(MOST_S, waiting)
            over_s[name] = loop.time()

        began_s = loop.time()
        tasks = {name: asyncio.create_task(wait(name)) for name in "abcd"}
        await asyncio.sleep(1.0)
        tasks["a"].cancel()
        await asyncio.sleep(1.0)
        waiting.wake(2)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        waiting.wake(2)
        await turn_or(1.0, waiting)
        over_s["later"] = loop.time()
        return {name: at_s - began_s for name, at_s in over_s.items()}

    over_s = run_virtual(scenario(), limit_s=100)
    assert over_s == {"b": 2.0, "c": 2.0, "d": MOST_S, "later": MOST_S + 1.0}
