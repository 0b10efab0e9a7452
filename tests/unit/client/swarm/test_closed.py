"""A swarm that was left says so at once, whoever still asks it."""

import asyncio

import pytest

from client.errors import ClosedError
from tests.sim.paper_swarm import paper_swarm


@pytest.mark.virtual(limit_s=600)
async def test_answers_end_as_the_swarm_is_left_and_none_begins_after_that() -> None:
    told: list[str] = []
    async with paper_swarm((0, 4), (4, 8)) as peers:
        async with peers.client(on_status=told.append) as swarm:
            told.clear()  # whose word the model is taken at
            running = swarm.stream([1, 2, 3], max_new_tokens=100)
            asked = asyncio.create_task(swarm.generate([1, 2, 3], max_new_tokens=100))
            await anext(running)
        loop = asyncio.get_running_loop()
        left_s = loop.time()
        with pytest.raises(ClosedError):
            await asked
        with pytest.raises(ClosedError):
            await anext(running)
        for after in (swarm.generate([1, 2, 3]), swarm.reader.refresh()):
            with pytest.raises(ClosedError):
                await after
        assert loop.time() - left_s < 1.0
    assert told == []  # nothing of it is the peers' fault
