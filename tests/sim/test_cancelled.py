"""An answer that is cancelled ends at once, whatever else happens at that moment."""

import asyncio

import pytest

from client.session import driver
from tests.sim.paper_swarm import paper_swarm
from tests.sim.test_sessions import held, until

pytestmark = pytest.mark.sim


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("event", [1, 3, 10])
@pytest.mark.parametrize("ticks", [0, 1, 2])
async def test_cancelled_as_an_event_arrives(
    monkeypatch: pytest.MonkeyPatch, event: int, ticks: int
) -> None:
    loop = asyncio.get_running_loop()
    seen = 0
    post = driver.SessionDriver._post

    def cancel(ticks_left: int) -> None:
        if ticks_left:
            loop.call_soon(cancel, ticks_left - 1)
        else:
            asking.cancel()

    def posted(self: driver.SessionDriver, happened: object) -> None:
        nonlocal seen
        seen += 1
        post(self, happened)  # type: ignore[arg-type]
        if seen == event:
            cancel(ticks)

    monkeypatch.setattr(driver.SessionDriver, "_post", posted)
    async with paper_swarm((0, 4), (4, 8)) as swarm, swarm.client() as client:
        asking = asyncio.create_task(client.generate(tuple(range(20)), max_new_tokens=200))
        await asyncio.wait({asking})
        assert asking.cancelled()
        await until(lambda: held(swarm) == 0)
