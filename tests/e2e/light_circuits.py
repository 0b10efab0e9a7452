"""The light side of test_light_circuits: run as a process of its own, against full peers.

python -m tests.e2e.light_circuits CASE RELAY CALLED
"""

import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Awaitable, Callable

from dht.errors import NetworkError
from dht.identity.multiaddr import CIRCUIT
from dht.identity.peer_id import Identity
from dht.light.transport import LightTransport
from dht.transport.config import TransportConfig
from dht.transport.interface import Stream
from dht.transport.relay_reservation import reserve

ECHO, SINK, WHERE, CALL_ME, ABUSE_ME, REST = (
    f"/test/{name}/1" for name in ("echo", "sink", "where", "call-me", "abuse-me", "rest")
)
DRAWN = random.Random(1)
SIZES = (1, 100, (64 << 10) - 1, 1 << 20, 5 << 20)
STREAMS, BIG_BYTES = 8, 6 << 20
"""More than the windows of the streams and of the call on the way take."""
REST_S = 7.0
"""py-libp2p gives a stream up that takes nothing for 5 s; ours must not."""


async def echo(stream: Stream) -> None:
    assert stream.remote_host == "", "the relay's address was taken for the caller's"
    while True:
        size = int.from_bytes(await stream.read_exactly(4), "little")
        stream.write(await stream.read_exactly(size))
        await stream.drain()


async def echoed(stream: Stream) -> None:
    """What is sent comes back; more than a relay with libp2p's own limits passes on."""
    for size in SIZES:
        data = DRAWN.randbytes(size)
        stream.write(size.to_bytes(4, "little") + data)
        await stream.drain()
        assert await stream.read_exactly(size) == data
    await stream.close()


def id_of(address: str) -> str:
    return address.rsplit("/", 1)[1]


def through(relay: str, peer_id: str) -> tuple[str, ...]:
    return (f"{relay}{CIRCUIT}/p2p/{peer_id}",)


async def joined(relay: str) -> LightTransport:
    """A light peer that listens nowhere."""
    identity = Identity.generate()
    config = TransportConfig(identity=identity, client_mode=True, initial_peers=(relay,))
    return await LightTransport.create(config)


async def reserving(relay: str) -> LightTransport:
    light = await joined(relay)
    await light.serve(ECHO, echo)
    await reserve(light, id_of(relay), (relay,))
    return light


async def ask_relay(light: LightTransport, relay: str, protocol: str) -> None:
    """Have the other process do something to this peer, and wait until it is content."""
    stream = await light.open_stream(id_of(relay), protocol, addresses=(relay,))
    assert await stream.read_exactly(4) == b"done"
    await stream.close()


async def a_full_peer_calls(relay: str, called: str) -> None:
    light = await reserving(relay)
    try:
        await ask_relay(light, relay, CALL_ME)
        assert light.stream_errors.keys() <= {"NetworkError"}
    finally:
        await light.close()


async def a_light_peer_calls(relay: str, called: str) -> None:
    light, caller = await reserving(relay), await joined(relay)
    try:
        for _ in range(2):  # the second over the connection that is there
            where = through(relay, light.peer_id)
            await echoed(await caller.open_stream(light.peer_id, ECHO, addresses=where))
    finally:
        await caller.close()
        await light.close()


async def it_calls_a_full_peer(relay: str, called: str) -> None:
    light = await joined(relay)
    try:
        where = through(relay, id_of(called))
        await echoed(await light.open_stream(id_of(called), ECHO, addresses=where))
    finally:
        await light.close()


async def a_detour_is_left_where_there_is_a_way(relay: str, called: str) -> None:
    light = await joined(relay)

    async def is_direct(*addresses: str) -> bool:
        """Whether the other side sees where a new stream comes from."""
        stream = await light.open_stream(id_of(called), WHERE, addresses=addresses)
        seen = await stream.read_exactly(1)
        await stream.close()
        return seen == b"\1"

    try:
        where = through(relay, id_of(called))
        assert not await is_direct(*where)
        assert not await is_direct(*where), "it knows of no other way"
        async with asyncio.timeout(30):
            while not await is_direct(*where, called):  # noqa: ASYNC110  (no event tells)
                await asyncio.sleep(0.05)
    finally:
        await light.close()


async def who_is_called_and_rests_loses_nothing(relay: str, called: str) -> None:
    light, peer_id = await joined(relay), id_of(called)

    left_s = 0.0  # when a piece last left

    async def sent(stream: Stream) -> None:
        nonlocal left_s
        data = DRAWN.randbytes(BIG_BYTES)
        stream.write(hashlib.sha256(data).digest())
        for at in range(0, BIG_BYTES, 1 << 18):
            stream.write(data[at : at + (1 << 18)])
            await stream.drain()
            left_s = time.monotonic()
        assert await stream.read_exactly(4) == b"same"
        await stream.close()

    try:
        where = through(relay, peer_id)
        streams = [await light.open_stream(peer_id, SINK, addresses=where) for _ in range(STREAMS)]
        rest = await light.open_stream(id_of(relay), REST, addresses=(relay,))
        assert await rest.read_exactly(4) == b"rest"
        left_s = time.monotonic()
        sending = asyncio.gather(*(sent(stream) for stream in streams))
        while time.monotonic() < left_s + REST_S:
            assert not sending.done(), "nothing was held up"
            await asyncio.sleep(0.05)
        rest.write(b"\1")
        await sending
    finally:
        await light.close()


async def who_has_no_slot_is_not_reached(relay: str, called: str) -> None:
    light, caller = await joined(relay), await joined(relay)
    try:
        for peer_id in (light.peer_id, Identity.generate().peer_id, id_of(relay)):
            try:
                where = through(relay, peer_id)
                await caller.open_stream(peer_id, "/test/nothing/1", addresses=where)
            except NetworkError:
                continue
            raise AssertionError(f"{peer_id} was reached")
    finally:
        await caller.close()
        await light.close()


async def a_relay_that_talks_nonsense_harms_nothing(relay: str, called: str) -> None:
    light = await reserving(relay)
    try:
        await ask_relay(light, relay, ABUSE_ME)
        await ask_relay(light, relay, CALL_ME)
    finally:
        await light.close()


CASES: dict[str, Callable[[str, str], Awaitable[None]]] = {
    case.__name__: case
    for case in (
        a_full_peer_calls,
        a_light_peer_calls,
        it_calls_a_full_peer,
        a_detour_is_left_where_there_is_a_way,
        who_is_called_and_rests_loses_nothing,
        who_has_no_slot_is_not_reached,
        a_relay_that_talks_nonsense_harms_nothing,
    )
}


if __name__ == "__main__":
    asyncio.run(CASES[sys.argv[1]](*sys.argv[2:]))
