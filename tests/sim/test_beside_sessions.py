"""What strangers draw beside sessions is bounded for all together, however many they are."""

import contextlib
import hashlib
import random
from dataclasses import replace

import pytest

from coordinator.plans.store import PlanStore
from dht.budget import PLAN_BYTES, RECORD_BYTES, REQUESTS, Budget
from dht.errors import NetworkError, PeerError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.peer import PlanRequest, RecordsFound, RecordsRequest
from dht.messages.session import Ping, Pong
from dht.records.directory import Directory
from dht.transport.interface import PLAN_PROTOCOL, RECORDS_PROTOCOL
from testing.network import MemoryNetwork, MemoryTransport
from tests.unit.dht.records.test_record_relay import KEY, World

pytestmark = pytest.mark.sim
CROWD = 64
BODY = bytes(1 << 20)
"""A plan's body; the largest have eight times as many bytes."""


async def drawn(asker: MemoryTransport, target: str, protocol: str, request: object) -> int:
    """Bytes of all answers to one peer that asks on stream after stream, until one is empty."""
    got_bytes = 0
    with contextlib.suppress(NetworkError, PeerError, TimeoutError):
        while True:
            stream = await asker.open_stream(target, protocol)
            for _ in range(32):
                await codec.send_frame(stream, request)
                frame = await codec.read_frame(stream)
                size_bytes = len(frame.body)
                if isinstance(frame.message, RecordsFound):
                    size_bytes = sum(map(len, frame.message.records))
                if not size_bytes:
                    return got_bytes
                got_bytes += size_bytes
            await stream.close()
    return got_bytes


@pytest.mark.virtual(limit_s=60)
async def test_strangers_draw_few_plan_bodies_and_a_neighbour_has_its_own() -> None:
    network = MemoryNetwork(random.Random(1))
    holder, neighbour = network.transport(), network.transport()
    budget = Budget(replace(PLAN_BYTES, all_burst=32 << 20, all_per_s=0))
    budget.parties.work = {neighbour.peer_id}.__contains__
    plans = PlanStore(holder, Directory(holder, "test", "model"), budget=budget)
    sha256 = hashlib.sha256(BODY).hexdigest()
    plans._bodies[sha256] = BODY
    await plans.serve()
    ask = PlanRequest(sha256=sha256)
    crowd = [network.transport() for _ in range(CROWD)]
    got = [await drawn(each, holder.peer_id, PLAN_PROTOCOL, ask) for each in crowd]
    assert 0 < sum(got) <= 16 << 20
    assert max(got) <= PLAN_BYTES.burst
    assert await drawn(neighbour, holder.peer_id, PLAN_PROTOCOL, ask) >= 15 << 20


@pytest.mark.virtual(limit_s=600)
async def test_strangers_draw_few_records_and_a_neighbour_has_its_own() -> None:
    budget = Budget(replace(RECORD_BYTES, all_burst=32e6, all_per_s=0))
    world = World(helpers=1, limits=budget)
    budget.parties.work = {world.light.peer_id}.__contains__
    await world.start()
    world.shelves[0].followed.add(KEY)
    for number in range(240):
        world.put(Identity(number.to_bytes(32, "big")), b"x" * 4000)
    await world.shelves[0].find_signed(KEY)
    ask, target = RecordsRequest(keys=(KEY,)), world.full[0].peer_id
    crowd = [world.network.transport() for _ in range(CROWD)]
    got = [await drawn(each, target, RECORDS_PROTOCOL, ask) for each in crowd]
    assert 0 < sum(got) <= 17e6, "half, and the answer that passes it"
    assert await drawn(world.light, target, RECORDS_PROTOCOL, ask) > 10e6


@pytest.mark.virtual(limit_s=60)
async def test_pings_without_end_are_refused_and_a_neighbours_answered() -> None:
    network = MemoryNetwork(random.Random(1))
    holder, neighbour = network.transport(), network.transport()
    budget = Budget(replace(REQUESTS, all_burst=1000, all_per_s=0))
    budget.parties.work = {neighbour.peer_id}.__contains__
    await PlanStore(holder, Directory(holder, "test", "model"), budget=budget).serve()

    async def pongs(asker: MemoryTransport) -> int:
        got = 0
        with contextlib.suppress(NetworkError):
            while True:
                stream = await asker.open_stream(holder.peer_id, PLAN_PROTOCOL)
                for _ in range(64):
                    await codec.send_frame(stream, Ping(nonce=1))
                    assert (await codec.read_frame(stream)).message == Pong(nonce=1)
                    got += 1
                await stream.close()
        return got

    got = [await pongs(network.transport()) for _ in range(CROWD)]
    assert 0 < sum(got) <= 500
    assert await pongs(neighbour) == REQUESTS.burst
