"""Streams between a light peer (py-libp2p, a process of its own) and a full one (the daemon)."""

import asyncio
import hashlib
import random

import pytest

from dht.daemon.transport import HivemindTransport
from dht.identity.peer_id import Identity
from dht.transport.config import TransportConfig
from dht.transport.interface import Stream
from tests.e2e.light import needs_libp2p, run_light
from tests.e2e.light_streams import (
    ARRIVED,
    BIG_BYTES,
    CALL,
    CALL_ME,
    CASES,
    ECHO,
    HEAR_ME,
    LAST,
    SINK,
    SLOW_S,
    SLOW_SINK,
    SOURCE,
    hear,
    last_word,
)

DRAWN = random.Random(1)
pytestmark = [pytest.mark.e2e, needs_libp2p]


async def echo(stream: Stream) -> None:
    while True:
        size = int.from_bytes(await stream.read_exactly(4), "little")
        stream.write(await stream.read_exactly(size))
        await stream.drain()


class FullPeer:
    """What the light side talks to."""

    def __init__(self, transport: HivemindTransport) -> None:
        self.transport = transport
        self._arrived = False

    async def start(self) -> None:
        for protocol, handler in (
            (ECHO, echo),
            (SINK, self.sink),
            (SLOW_SINK, self.slow_sink),
            (SOURCE, self.source),
            (ARRIVED, self.arrived),
            (CALL_ME, self.call),
            (LAST, last_word),
            (HEAR_ME, self.hear),
        ):
            await self.transport.serve(protocol, handler)

    async def _takes_whole(self, stream: Stream, rest_s: float) -> bool:
        size = int.from_bytes(await stream.read_exactly(4), "little")
        digest = await stream.read_exactly(32)
        await asyncio.sleep(rest_s)
        return hashlib.sha256(await stream.read_exactly(size)).digest() == digest

    async def sink(self, stream: Stream) -> None:
        self._arrived = await self._takes_whole(stream, 0.0)

    async def slow_sink(self, stream: Stream) -> None:
        assert await self._takes_whole(stream, SLOW_S)
        stream.write(b"same")
        await stream.drain()

    async def source(self, stream: Stream) -> None:
        data = DRAWN.randbytes(BIG_BYTES)
        stream.write(hashlib.sha256(data).digest() + data)
        await stream.read_exactly(1)
        await stream.close()

    async def arrived(self, stream: Stream) -> None:
        stream.write(bytes([self._arrived]))
        await stream.drain()

    async def hear(self, stream: Stream) -> None:
        """Hear the light peer's last words."""
        where, peer_id = (await self._address(stream),), stream.remote_peer_id
        await hear(lambda: self.transport.open_stream(peer_id, LAST, addresses=where))
        stream.write(b"done")

    async def _address(self, stream: Stream) -> str:
        size = int.from_bytes(await stream.read_exactly(4), "little")
        return (await stream.read_exactly(size)).decode()

    async def call(self, stream: Stream) -> None:
        """Call the light peer back, on several streams at once."""
        address = await self._address(stream)
        peer_id = stream.remote_peer_id

        async def one(number: int) -> None:
            back = await self.transport.open_stream(peer_id, CALL, addresses=(address,))
            for size in (1, 5000, 300_000):
                data = bytes([number]) * size
                back.write(size.to_bytes(4, "little") + data)
                await back.drain()
                assert await back.read_exactly(size) == data
            await back.close()

        await asyncio.gather(*(one(number) for number in range(20)))
        stream.write(b"done")
        await stream.drain()


@pytest.mark.parametrize("case", CASES)
async def test_streams_of_a_light_and_a_full_peer(case: str) -> None:
    transport = await HivemindTransport.create(
        TransportConfig(identity=Identity.generate(), host="127.0.0.1")
    )
    try:
        await FullPeer(transport).start()
        light = ["tests.e2e.light_streams", case, transport.addresses[0]]
        await asyncio.to_thread(run_light, light)
    finally:
        await transport.close()
