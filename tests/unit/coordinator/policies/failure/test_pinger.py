"""Pings: who falls silent is known soon, and one slow peer hides no other."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from coordinator.policies.failure.pinger import BY_CLIENTS, BY_PEERS, Pinger, answering
from dht.messages.peer import PEER_BOUNDS
from dht.transport.interface import Stream
from node.links.probe import ProbeServer
from testing.clock import run_virtual
from testing.network import MemoryNetwork, MemoryTransport


async def peers_of(network: MemoryNetwork, count: int) -> list[MemoryTransport]:
    peers = [network.transport() for _ in range(count)]
    for peer in peers:
        await ProbeServer(peer).start()
    return peers


@pytest.mark.virtual(limit_s=60)
async def test_a_killed_and_a_frozen_peer_are_silent_soon_and_one_that_thaws_is_not() -> None:
    network = MemoryNetwork(random.Random(1))
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    pinger = Pinger(network.transport(), BY_CLIENTS, changed.set)
    killed, frozen, well = await peers_of(network, 3)
    pinger.watch({peer.peer_id: () for peer in (killed, frozen, well)})
    await asyncio.sleep(1)
    assert all(pinger.state_of(p.peer_id).answered_unix_s for p in (killed, frozen, well))

    async def until_silent(peer_id: str, limit_s: float) -> None:
        since_s = loop.time()
        while not pinger.state_of(peer_id).silent:
            changed.clear()
            await changed.wait()
        assert loop.time() - since_s <= limit_s

    network.freeze(frozen.peer_id)
    network.kill(killed.peer_id)
    misses = BY_CLIENTS.silent_misses
    killed_s = BY_CLIENTS.every_s + (misses - 1) * BY_CLIENTS.again_s
    await until_silent(killed.peer_id, killed_s + 0.1)
    await until_silent(frozen.peer_id, killed_s + misses * BY_CLIENTS.answer_s)
    assert pinger.state_of(well.peer_id).misses == 0
    network.thaw(frozen.peer_id)
    changed.clear()
    await changed.wait()
    assert not pinger.state_of(frozen.peer_id).silent
    assert pinger.state_of(killed.peer_id).silent
    pinger.watch({well.peer_id: ()})
    assert pinger.state_of(killed.peer_id).answered_unix_s is None, "it is watched no more"
    await pinger.close()


@pytest.mark.virtual(limit_s=60)
async def test_many_peers_are_asked_less_often() -> None:
    network = MemoryNetwork(random.Random(1))
    pinger = Pinger(network.transport(), BY_CLIENTS)
    peers = await peers_of(network, 400)
    pinger.watch({peer.peer_id: () for peer in peers})
    await asyncio.sleep(1)
    first = pinger.state_of(peers[0].peer_id).answered_unix_s
    await asyncio.sleep(400 * BY_CLIENTS.share_s - 2)
    assert pinger.state_of(peers[0].peer_id).answered_unix_s == first
    await asyncio.sleep(2)
    assert pinger.state_of(peers[0].peer_id).answered_unix_s != first
    await pinger.close()


def test_a_kept_stream_carries_many_pings_and_is_opened_again_where_the_peer_ended_it() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(1))
        transport, opened = network.transport(), 0
        opening = transport.open_stream

        async def counted(*args: Any, **named: Any) -> Stream:
            nonlocal opened
            opened += 1
            return await opening(*args, **named)

        transport.open_stream = counted  # type: ignore[method-assign]
        (peer,) = await peers_of(network, 1)
        pinger = Pinger(transport, replace(BY_PEERS, protocol=BY_CLIENTS.protocol))
        pinger.watch({peer.peer_id: ()})
        await asyncio.sleep(PEER_BOUNDS.requests_max * BY_PEERS.every_s - 1)
        assert opened == 1
        await asyncio.sleep(PEER_BOUNDS.requests_max * BY_PEERS.every_s)
        assert opened == 2
        assert pinger.state_of(peer.peer_id).misses == 0
        await pinger.close()

    run_virtual(scenario(), limit_s=1000)


@pytest.mark.virtual(limit_s=60)
async def test_of_those_that_may_have_failed_the_frozen_one_is_known_at_once() -> None:
    network = MemoryNetwork(random.Random(1))
    client, loop = network.transport(), asyncio.get_running_loop()
    killed, frozen, well = await peers_of(network, 3)
    everybody = {peer.peer_id: () for peer in (killed, frozen, well)}
    assert await answering(client, BY_CLIENTS, everybody, 1.5, 0.4) == set(everybody)
    network.freeze(frozen.peer_id)
    network.kill(killed.peer_id)
    begun_s = loop.time()
    assert await answering(client, BY_CLIENTS, everybody, 1.5, 0.4) == {well.peer_id}
    assert loop.time() - begun_s < 0.6
    begun_s = loop.time()
    assert await answering(client, BY_CLIENTS, {frozen.peer_id: ()}, 1.5, 0.4) == set()
    assert loop.time() - begun_s < 1.6
    network.thaw(frozen.peer_id)
