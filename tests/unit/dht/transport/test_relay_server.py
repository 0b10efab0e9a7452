"""A relay of ours: for whom it passes calls on, how much, and what counts as lent."""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from dht.budget import RELAY_BYTES, RELAY_CALLS, RELAY_SLOTS, Budget
from dht.errors import NetworkError
from dht.identity.peer_id import peer_id_bytes
from dht.messages import codec
from dht.transport.interface import RELAY_PROTOCOL, RELAY_STOP_PROTOCOL, Stream
from dht.transport.metered import ByteMeter
from dht.transport.relay_messages import (
    HopRequest,
    HopType,
    Status,
    StopType,
    _framed,
    _number,
    connect_message,
    hop_request,
    read_message,
    status_of,
    with_status,
)
from dht.transport.relay_reservation import granted_by, reserve
from dht.transport.relay_server import RelayServer, RelayServerConfig
from testing.network import MemoryNetwork, MemoryTransport

ENOUGH = 1 << 20


class World:
    """A relay, one that nobody reaches, and somebody who calls it."""

    def __init__(self, budget: Budget | None = None, *, offers: bool = True) -> None:
        self.network = MemoryNetwork(random.Random(1))
        self.relay, self.closed, self.caller = (self.network.transport() for _ in range(3))
        self.budget = budget or Budget()
        self.meter = ByteMeter(self.sent, self.received)
        self.lent_bytes = 0
        self.server = RelayServer(
            self.relay,
            self.budget,
            offers=offers,
            metered=lambda stream: self.meter.stream(RELAY_STOP_PROTOCOL, stream),
        )

    def sent(self, count: int) -> None:
        self.lent_bytes += count

    received = sent

    async def start(self) -> None:
        async def serve(stream: Stream) -> None:
            await self.server.serve(self.meter.stream(RELAY_PROTOCOL, stream, served=True))

        await self.relay.serve(RELAY_PROTOCOL, serve)
        await self.closed.serve(RELAY_STOP_PROTOCOL, self.echo)

    async def echo(self, stream: Stream) -> None:
        """Take a call as libp2p does, and send back whatever comes."""
        await read_message(stream)
        stream.write(_framed(_number(1, 1) + _number(4, Status.OK)))
        while True:
            stream.write(await stream.read_some(ENOUGH))
            await stream.drain()

    async def call(self, caller: MemoryTransport | None = None) -> tuple[int, Stream]:
        stream = await (caller or self.caller).open_stream(self.relay.peer_id, RELAY_PROTOCOL)
        stream.write(connect_message(HopType.CONNECT, peer_id_bytes(self.closed.peer_id)))
        return granted_by(await read_message(stream)).status, stream


@pytest.mark.virtual(limit_s=60)
async def test_a_peer_with_a_slot_is_called_and_all_bytes_count_as_lent() -> None:
    world = World()
    await world.start()
    await reserve(world.closed, world.relay.peer_id, ())
    status, stream = await world.call()
    assert status == Status.OK
    data = random.Random(1).randbytes(300_000)
    stream.write(data)
    assert await stream.read_exactly(len(data)) == data
    assert world.lent_bytes >= 4 * len(data), "in and out, there and back"
    assert world.meter.purposes == {"relay": world.lent_bytes}
    await stream.close()


@pytest.mark.virtual(limit_s=60)
async def test_strangers_are_passed_on_by_no_peer() -> None:
    world = World()
    world.budget.parties.needs_relay = lambda peer_id: False
    await world.start()
    with pytest.raises(NetworkError, match=f"status {Status.DENIED}"):
        await reserve(world.closed, world.relay.peer_id, ())
    status, _ = await world.call()
    assert status == Status.NO_SLOT
    asleep = World(offers=False)
    await asleep.start()
    with pytest.raises(NetworkError, match=f"status {Status.DENIED}"):
        await reserve(asleep.closed, asleep.relay.peer_id, ())


@pytest.mark.virtual(limit_s=600)
async def test_bytes_above_the_rate_wait_and_none_is_lost() -> None:
    rate = replace(RELAY_BYTES, per_s=50_000.0, burst=200_000.0)
    world = World(Budget(rate))
    await world.start()
    await reserve(world.closed, world.relay.peer_id, ())
    _, stream = await world.call()
    data, clock = random.Random(1).randbytes(600_000), asyncio.get_running_loop()
    began_s = clock.time()
    stream.write(data)
    assert await stream.read_exactly(len(data)) == data
    expected_s = (2 * len(data) - rate.burst) / rate.per_s
    assert clock.time() - began_s == pytest.approx(expected_s, rel=0.1)
    await stream.close()


@pytest.mark.virtual(limit_s=600)
async def test_who_calls_many_peers_takes_no_more_than_one_share() -> None:
    """A caller's bytes count as those of whom it calls do: peers to call cost nothing."""
    rate = replace(RELAY_BYTES, per_s=50_000.0, burst=200_000.0)
    world = World(Budget(rate))
    await world.start()
    others = [world.network.transport() for _ in range(4)]
    data, clock = random.Random(1).randbytes(100_000), asyncio.get_running_loop()
    streams = []
    for each in others:
        await each.serve(RELAY_STOP_PROTOCOL, world.echo)
        await reserve(each, world.relay.peer_id, ())
        stream = await world.caller.open_stream(world.relay.peer_id, RELAY_PROTOCOL)
        stream.write(connect_message(HopType.CONNECT, peer_id_bytes(each.peer_id)))
        assert granted_by(await read_message(stream)).status == Status.OK
        streams.append(stream)
    began_s = clock.time()
    for stream in streams:
        stream.write(data)
    for stream in streams:
        assert await stream.read_exactly(len(data)) == data
        await stream.close()
    expected_s = (len(others) * 2 * len(data) - rate.burst) / rate.per_s
    assert clock.time() - began_s == pytest.approx(expected_s, rel=0.1)


@pytest.mark.virtual(limit_s=60)
async def test_free_identities_leave_calls_and_slots_to_peers_that_are_known() -> None:
    budget = Budget(replace(RELAY_CALLS, in_all=16), replace(RELAY_SLOTS, in_all=16))
    world = World(budget)
    known = {world.caller.peer_id, world.closed.peer_id}
    budget.parties.work = known.__contains__
    await world.start()
    crowd = [world.network.transport() for _ in range(64)]
    took = [0, 0]
    for each in crowd:
        with suppress(NetworkError):
            await reserve(each, world.relay.peer_id, ())
            took[0] += 1
    await reserve(world.closed, world.relay.peer_id, ())
    for each in crowd:
        status, _ = await world.call(each)
        took[1] += status == Status.OK
    assert took == [8, 8]
    status, _ = await world.call()
    assert status == Status.OK


@pytest.mark.virtual(limit_s=2 * RelayServerConfig().idle_s)
async def test_slots_and_calls_end() -> None:
    world = World()
    await world.start()
    await reserve(world.closed, world.relay.peer_id, ())
    status, stream = await world.call()
    assert status == Status.OK
    stream.write(b"x")
    assert await stream.read_exactly(1) == b"x"
    with pytest.raises(NetworkError):
        await stream.read_exactly(1)  # nobody says anything
    assert world.budget.held(RELAY_CALLS).total == 0
    assert not world.server.slots
    assert RelayServerConfig().idle_s > RelayServerConfig().slot_s
    status, _ = await world.call()
    assert status == Status.NO_SLOT
    await reserve(world.closed, world.relay.peer_id, ())
    world.network.kill(world.closed.peer_id)
    status, _ = await world.call()
    assert status == Status.FAILED
    assert world.budget.held(RELAY_CALLS).total == 0


@pytest.mark.parametrize(
    "words",
    [b"\x00", b"\x02\x08\x02", b"\x05hello", b"\xff" * 11, b"\x80\x80\x80\x01", b"\x02\x12"],
)
@pytest.mark.virtual(limit_s=120)
async def test_nonsense_ends_its_stream_alone(words: bytes) -> None:
    world = World()
    await world.start()
    stream = await world.caller.open_stream(world.relay.peer_id, RELAY_PROTOCOL)
    stream.write(words)
    with pytest.raises((NetworkError, codec.MalformedError, TimeoutError)):
        async with asyncio.timeout(60):
            await stream.read_exactly(1)
    await reserve(world.closed, world.relay.peer_id, ())
    assert set(world.relay.stream_errors) <= {"MalformedError", "NetworkError", "TimeoutError"}


def test_messages_are_those_of_libp2p() -> None:
    caller = b"\x00\x24" + bytes(36)
    assert hop_request(b"\x08\x00") == HopRequest(kind=HopType.RESERVE)
    assert hop_request(connect_message(StopType.CONNECT, caller)[1:]).peer == caller
    assert with_status(2, Status.OK) == b"\x04\x08\x02\x28\x64"
    assert status_of(b"\x08\x01\x20\x64") == Status.OK
    assert granted_by(with_status(2, Status.OK, 1_700_000_000)[1:]).is_enough
