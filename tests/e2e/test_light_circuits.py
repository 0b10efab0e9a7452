"""Calls through the relay of a full peer's daemon, to and from light peers that listen nowhere."""

import asyncio
import contextlib
import hashlib
import os
import signal

import pytest

from dht.daemon.transport import HivemindTransport
from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.transport.config import TransportConfig
from dht.transport.interface import Stream
from dht.transport.relay_reservation import reserve
from tests.e2e.light import needs_libp2p, run_light
from tests.e2e.light_circuits import (
    ABUSE_ME,
    BIG_BYTES,
    CALL_ME,
    CASES,
    ECHO,
    REST,
    SINK,
    WHERE,
    echoed,
    through,
)

pytestmark = [pytest.mark.e2e, needs_libp2p]
STOP = "/libp2p/circuit/relay/0.2.0/stop"
NONSENSE = (
    b"",
    b"\x00",
    b"\x02\x08\x01",  # a status, nobody having asked
    b"\x05hello",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x80\x80\x80\x01" + bytes(100),  # 2 MiB are to follow
    b"\x04\x08\x00\x12\x00" + b"GET / HTTP/1.1\r\n\r\n",  # a call that secures nothing
)


class FullSide:
    """A relay, and another full peer that has a slot there."""

    def __init__(self, relay: HivemindTransport, caller: HivemindTransport) -> None:
        self.relay, self.caller = relay, caller
        self.address = relay.addresses[0]

    async def start(self) -> None:
        await self.caller.serve(ECHO, self.echo)
        await self.relay.serve(CALL_ME, self.call)
        await self.relay.serve(ABUSE_ME, self.abuse)
        await self.caller.serve(SINK, self.sink)
        await self.relay.serve(REST, self.rest)
        await self.caller.serve(WHERE, self.where)
        await reserve(self.caller, self.relay.peer_id, (self.address,))

    async def echo(self, stream: Stream) -> None:
        while True:
            size = int.from_bytes(await stream.read_exactly(4), "little")
            stream.write(await stream.read_exactly(size))
            await stream.drain()

    async def where(self, stream: Stream) -> None:
        stream.write(bytes([bool(stream.remote_host)]))

    async def sink(self, stream: Stream) -> None:
        digest = await stream.read_exactly(32)
        data = await stream.read_exactly(BIG_BYTES)
        stream.write(b"same" if hashlib.sha256(data).digest() == digest else b"lost")

    async def rest(self, stream: Stream) -> None:
        """Freeze who is called until the other side has waited for long enough."""
        os.kill(self.caller.daemon_pid, signal.SIGSTOP)
        stream.write(b"rest")
        await stream.drain()
        try:
            await stream.read_exactly(1)
        finally:
            os.kill(self.caller.daemon_pid, signal.SIGCONT)

    async def call(self, asked: Stream) -> None:
        light, where = asked.remote_peer_id, through(self.address, asked.remote_peer_id)

        async def one() -> None:
            await echoed(await self.caller.open_stream(light, ECHO, addresses=where))

        await asyncio.gather(*(one() for _ in range(4)))
        asked.write(b"done")

    async def abuse(self, asked: Stream) -> None:
        """Say nonsense where a call would come in; every such stream ends."""

        async def one(words: bytes) -> None:
            stream = await self.relay.open_stream(asked.remote_peer_id, STOP)
            with contextlib.suppress(NetworkError):
                stream.write(words)
                await stream.drain()
                while True:
                    await stream.read_exactly(1)
            await stream.close()

        await asyncio.gather(*(one(words) for words in NONSENSE))
        asked.write(b"done")


@pytest.mark.parametrize("case", CASES)
async def test_calls_through_a_relay(case: str) -> None:
    relay = await HivemindTransport.create(
        TransportConfig(
            identity=Identity.generate(), host="127.0.0.1", nat_traversal=True, relays=True
        )
    )
    try:
        caller = await HivemindTransport.create(
            TransportConfig(
                identity=Identity.generate(),
                host="127.0.0.1",
                nat_traversal=True,
                initial_peers=relay.addresses,
            )
        )
        try:
            full = FullSide(relay, caller)
            await full.start()
            light = ["tests.e2e.light_circuits", case]
            light += [full.address, caller.addresses[0]]
            await asyncio.to_thread(run_light, light)
        finally:
            await caller.close()
    finally:
        await relay.close()
