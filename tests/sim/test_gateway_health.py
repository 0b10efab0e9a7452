"""The gateway's own knowledge of whether the swarm is well, before any request fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from client import Swarm
from client.errors import no_route_text
from coordinator.policies.failure.pinger import BY_CLIENTS
from coordinator.policies.routing.affinity import Route
from coordinator.policies.routing.routes import NoRoute
from tests.sim.paper_swarm import PaperSwarm, answer_of, paper_swarm
from tests.sim.test_sessions import until

KILLED_S = BY_CLIENTS.every_s + (BY_CLIENTS.silent_misses - 1) * BY_CLIENTS.again_s
"""docs/gateway.md: pings of a killed peer fail at once,"""
FROZEN_S = KILLED_S + BY_CLIENTS.silent_misses * BY_CLIENTS.answer_s
"""those of one that is frozen or cut off when their time is over."""
PROMPT = (1, 2, 3)


@asynccontextmanager
async def pinged(swarm: PaperSwarm) -> AsyncIterator[Swarm]:
    async with swarm.client(wait_s=0.0, pings_always=True) as client:
        yield client


def route_of(swarm: Swarm) -> Route | NoRoute:
    return swarm.view.answering_route(asyncio.get_running_loop().time())


async def seconds_until(swarm: Swarm, *, well: bool) -> float:
    loop = asyncio.get_running_loop()
    since_s = loop.time()
    await until(lambda: isinstance(route_of(swarm), NoRoute) is not well)
    return loop.time() - since_s


def why(swarm: Swarm) -> str:
    route = route_of(swarm)
    assert isinstance(route, NoRoute)
    return no_route_text(route)


@pytest.mark.virtual(limit_s=120)
async def test_a_holder_that_is_killed_or_frozen_is_missed_although_its_record_lives_on() -> None:
    async with paper_swarm((0, 4), (4, 8)) as swarm, pinged(swarm) as client:
        await asyncio.sleep(1)
        route = route_of(client)
        assert not isinstance(route, NoRoute)
        assert len(route) == 2
        first, second = swarm.peers
        swarm.freeze(first)
        assert await seconds_until(client, well=False) <= FROZEN_S + 0.2
        assert why(client) == "layers 0-3 are held by nobody that can be reached"
        swarm.network.thaw(first.peer_id)
        assert (
            await seconds_until(client, well=True) <= BY_CLIENTS.every_s + BY_CLIENTS.answer_s + 0.2
        )
        swarm.kill(second)
        assert await seconds_until(client, well=False) <= KILLED_S + 0.2
        assert second.peer_id in client.view.nodes, "its record would have called it well"
        assert why(client) == "layers 4-7 are held by nobody that can be reached"


@pytest.mark.virtual(limit_s=120)
async def test_who_asks_whether_it_is_well_takes_no_requests_second_chance() -> None:
    """Asked every moment, it once kept requests from trying the only holder again."""
    async with paper_swarm((0, 8)) as swarm, pinged(swarm) as client:
        swarm.cut(swarm.peers[0])
        running = asyncio.create_task(client.generate(PROMPT, max_new_tokens=2))
        await asyncio.wait([running])
        assert running.exception() is not None
        swarm.network.heal()
        await seconds_until(client, well=True)
        for _ in range(10):
            route_of(client)
        answer = await client.generate(PROMPT, max_new_tokens=2)
        assert answer.token_ids == answer_of(PROMPT, 2)
