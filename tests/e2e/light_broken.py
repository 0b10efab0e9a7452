"""A light peer's connection that dies without a word, as when a laptop slept or a router forgot it.

python -m tests.e2e.light_broken CASE
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from libp2p.stream_muxer.yamux import yamux

from dht.budget import CONNECTIONS, Budget, Held
from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.light.bounds import BoundedYamux
from dht.light.host import HostConfig, LightHost

PROTOCOL = "/test/1"
LOCAL = ("/ip4/127.0.0.1/tcp/0",)
MORE_BYTES = 64 << 20
"""More than all windows and sockets on the way hold."""


class Wire:
    """TCP connections to a port, all of which can fall silent at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._forwarding: list[asyncio.Task[None]] = []
        self.connections = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a new connection."""
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        for ends in ((reader, back), (there, writer)):
            self._forwarding.append(asyncio.create_task(_forward(*ends)))

    def fall_silent(self) -> None:
        """Carry nothing more on what is connected; no side is told."""
        for task in self._forwarding:
            task.cancel()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


class Pair:
    """Two light peers' hosts and the wire between them."""

    def __init__(self, here: LightHost, there: LightHost, peer_id: str, wire: Wire) -> None:
        self._hosts = here, there
        self._peer_id = peer_id
        self.wire = wire
        self.where = ""

    def connections(self) -> list[int]:
        """How many connections each of the hosts has."""
        return [len(host._host.get_network().connections) for host in self._hosts]

    @property
    def held(self) -> Held:
        """What the called one counts of its connections."""
        return self._hosts[1]._budget.held(CONNECTIONS)

    async def open(self, protocol: str = PROTOCOL) -> Any:
        """A stream to the other one."""
        return await self._hosts[0].open(self._peer_id, protocol, (self.where,))


async def _echo(stream: Any) -> None:
    with suppress(NetworkError):
        while data := await stream.read_some(1 << 16):
            stream.write(data)
            await stream.drain()


async def _answers(stream: Any) -> bool:
    stream.write(b"a")
    return bool(await stream.read_exactly(1) == b"a")


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    """Two hosts, the second of which gives back what the first says."""
    echoes: set[asyncio.Task[None]] = set()
    there_id = Identity.generate()
    there = LightHost(
        there_id, lambda _, stream: echoes.add(asyncio.create_task(_echo(stream))), Budget()
    )
    quick = HostConfig(mute_s=1.0)
    here = LightHost(Identity.generate(), lambda *_: None, Budget(), quick)
    try:
        (bound,) = await there.start(LOCAL, limit_s=60)
        await here.start(LOCAL, limit_s=60)
        await there.serve(PROTOCOL)
        wire = Wire(int(bound.rpartition("/")[2]))
        server = await asyncio.start_server(wire.take, "127.0.0.1", 0)
        both = Pair(here, there, there_id.peer_id, wire)
        both.where = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
        yield both
    finally:
        for task in echoes:
            task.cancel()
        await here.stop()
        await there.stop()


async def one_that_rests() -> None:
    """The next stream goes over a new connection."""
    async with pair() as both:
        assert await _answers(await both.open())
        both.wire.fall_silent()
        assert await _answers(await both.open())
        assert both.wire.connections == 2


async def one_with_more_to_send() -> None:
    """Also where what was written before stands in the way."""
    async with pair() as both:
        busy = await both.open()
        assert await _answers(busy)
        both.wire.fall_silent()
        for _ in range(MORE_BYTES >> 16):
            busy.write(bytes(1 << 16))
        sending = asyncio.create_task(busy.drain())
        await asyncio.sleep(0)
        assert await _answers(await both.open())
        assert both.wire.connections == 2
        (failed,) = await asyncio.gather(sending, return_exceptions=True)
        assert isinstance(failed, NetworkError), "who wrote is told"


async def one_that_refuses_a_protocol() -> None:
    """A connection on which the other side answers stays, with the streams of others."""
    async with pair() as both:
        running = await both.open()
        assert await _answers(running)
        for _ in range(2):
            with suppress(NetworkError):
                await both.open("/test/not-spoken/1")
                raise AssertionError("nobody speaks that")
        assert await _answers(running)
        assert both.wire.connections == 1


async def one_that_nobody_uses() -> None:
    """It ends at both sides, so that they do not hold ever more of them; one that lives stays."""
    yamux.RTT_MEASURE_INTERVAL = 0.2
    BoundedYamux.silent_s = 3.0
    async with pair() as both:
        running = await both.open()
        await asyncio.sleep(2 * BoundedYamux.silent_s)
        assert await _answers(running), "it was pinged meanwhile"
        assert both.connections() == [1, 1]
        both.wire.fall_silent()
        while both.connections() != [0, 0]:  # noqa: ASYNC110  (libp2p tells none)
            await asyncio.sleep(0.1)
        while both.held.total:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        with suppress(NetworkError):
            await running.read_exactly(1)
            raise AssertionError("its streams end with it")


CASES = {
    each.__name__: each
    for each in (
        one_that_rests,
        one_with_more_to_send,
        one_that_refuses_a_protocol,
        one_that_nobody_uses,
    )
}

if __name__ == "__main__":
    asyncio.run(CASES[sys.argv[1]]())
