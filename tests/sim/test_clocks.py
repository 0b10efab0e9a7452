"""A peer whose clock jumps: others have its records again at once, and its owner is told."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from dht.records.directory import Directory
from node.peer.announcer import LOOK_S, Announcer
from testing.network import MemoryNetwork
from tests.sim.paper_swarm import LAYERS, NETWORK, SPEC, answer_of, paper_swarm
from tests.sim.test_self_help import SETTLE_S, world

HOURS_S = 3600.0
PROMPT = tuple(range(30))


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("ahead_s", [50.0, 8 * HOURS_S])
async def test_a_clock_that_was_ahead_for_20_s(ahead_s: float) -> None:
    async with paper_swarm((0, 8)) as swarm:
        (peer,) = swarm.peers
        peer.tasks[1].cancel()  # its announcer tells of it instead
        jumps: list[float] = []
        directory = Directory(peer.transport, NETWORK, SPEC.key)
        shared: Any = {"transport": peer.transport, "stage": peer.stage}
        announcer = Announcer(
            **shared,
            directory=directory,
            record=replace(peer.record(), joined_unix_s=peer.transport.now() + ahead_s),
            every_s=15.0,
            on_jump=jumps.append,
        )
        reader = Directory(swarm.network.transport(), NETWORK, SPEC.key)
        peer.transport.clock_ahead_s = ahead_s
        await announcer.announce()
        peer.tasks.append(asyncio.create_task(announcer.run()))
        await asyncio.sleep(20.0)
        peer.transport.clock_ahead_s = 0.0
        await asyncio.sleep(2 * LOOK_S)
        assert peer.transport.peer_id in await reader.nodes()
        await asyncio.sleep(300.0)
        nodes = await reader.nodes()
        assert peer.transport.peer_id in nodes, "and it goes on"
        up_s = swarm.network.now() - nodes[peer.transport.peer_id].joined_unix_s
        assert up_s == pytest.approx(320.0, abs=10 * LOOK_S), "by a clock that is right now"
        assert jumps == [pytest.approx(-ahead_s)]


@pytest.mark.virtual(limit_s=600)
async def test_what_a_peer_stored_while_ahead_does_not_outlive_what_it_stores_now() -> None:
    network = MemoryNetwork(random.Random(0))
    author, reader = network.transport(), network.transport()
    key = f"{NETWORK}/{SPEC.key}/nodes"
    author.clock_ahead_s = 50.0
    await author.store(key, b"ahead", expires_unix_s=author.now() + 60)
    author.clock_ahead_s = 0.0
    await author.store(key, b"right", expires_unix_s=author.now() + 60)
    assert await reader.get(key) == {author.peer_id: b"right"}
    await asyncio.sleep(61)
    assert await reader.get(key) == {}


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("ahead_s", [8 * HOURS_S, -8 * HOURS_S])
@pytest.mark.parametrize("holders", [1, 2])
async def test_a_peer_whose_clock_is_wrong_ends_no_request(ahead_s: float, holders: int) -> None:
    """It cannot tell whether a client's grant is fresh: others are asked, or it is waited for."""
    async with paper_swarm(*[(0, LAYERS)] * holders) as swarm, swarm.client() as client:
        await client.generate(PROMPT, max_new_tokens=1)
        wrong = swarm.peers[0].transport
        wrong.clock_ahead_s = ahead_s
        asyncio.get_running_loop().call_later(20.0, setattr, wrong, "clock_ahead_s", 0.0)
        for _ in range(4):
            answer = await client.generate(PROMPT, max_new_tokens=5)
            assert answer.token_ids == answer_of(PROMPT, 5)


@pytest.mark.virtual(limit_s=3000)
async def test_a_clock_that_is_a_little_behind_is_no_loss_again_and_again() -> None:
    """Its records end early, and each gap made a plan without that peer: fifty in ten minutes."""
    async with world(LAYERS, LAYERS, LAYERS, LAYERS, seed=3) as swarm:
        await asyncio.sleep(400.0)
        leader, _, behind, _ = swarm.peers
        behind.transport.clock_ahead_s = -40.0
        await asyncio.sleep(100.0)

        def plans() -> int:
            return sum(name == "plan" for _, name, _ in leader.events)

        before = plans()
        await asyncio.sleep(600.0)
        now = plans()
        assert now - before <= 1
        assert swarm.covered()
        await swarm.kill(behind)
        await swarm.until(lambda: plans() > now, SETTLE_S)
