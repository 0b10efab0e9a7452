"""What a stranger makes a light peer's host hold: run as a process of its own.

python -m tests.e2e.light_bounds CASE
"""

import asyncio
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from dht.budget import CONNECTIONS, HANDSHAKES, UNREAD_BYTES, Budget
from dht.identity.peer_id import Identity
from dht.light.host import LightHost
from node.sessions.session_table import SessionTable

PROTOCOL = "/test/1"
MULTISTREAM = b"/multistream/1.0.0\n"
DATA_FRAME = "!BBHII"
PIECE = bytes(60_000)
LONG_BYTES = 64 << 20
"""More than sockets hold."""


class Victim:
    """A light peer's host whose streams nobody reads."""

    def __init__(self, *limits: Any) -> None:
        self.budget = Budget(*limits)
        self.came = 0
        self.address = ""
        self.port = 0

    async def __aenter__(self) -> "Victim":
        identity = Identity.generate()
        self._host = LightHost(identity, lambda *_: self._count(), self.budget)
        (bound,) = await self._host.start(("/ip4/127.0.0.1/tcp/0",), limit_s=20)
        await self._host.serve(PROTOCOL)
        self.address = f"{bound}/p2p/{identity.peer_id}"
        self.port = int(bound.rpartition("/")[2])
        return self

    def _count(self) -> None:
        self.came += 1

    async def __aexit__(self, *_: object) -> None:
        await self._host.stop()

    def connect(self) -> socket.socket:
        """A connection with nothing said."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


def line(text: bytes) -> bytes:
    assert len(text) < 128
    return bytes([len(text)]) + text


def read_line(connection: socket.socket) -> bytes:
    """One line, or nothing at the end."""
    size = connection.recv(1)
    return connection.recv(size[0]) if size else b""


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it says before."""
    try:
        while connection.recv(1 << 16):
            pass
    except OSError:
        return not isinstance(sys.exception(), TimeoutError)
    return True


async def in_trio(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run trio beside this loop."""
    return await asyncio.to_thread(trio.run, work, *arguments)


async def stranger(address: str, act: Callable[[Any, Any], Any]) -> None:
    """A stock host, connected to ``address``; then ``act(host, connection)``."""
    host = new_host(key_pair=create_new_key_pair())
    async with host.run(listen_addrs=[]):
        info = info_from_p2p_addr(Multiaddr(address))
        await host.connect(info)
        (connection,) = host.get_network().get_connections(info.peer_id)
        try:
            await act(host, connection)
        finally:
            await connection.muxed_conn.close()


async def a_first_line_without_end() -> None:
    """Nobody who has not shown who he is has a long line read."""

    def send(victim: Victim, size: bytes) -> int:
        sent = 0
        with victim.connect() as connection, suppress(OSError):
            connection.sendall(size)
            while sent < LONG_BYTES:
                sent += connection.send(bytes(1 << 16))
        return sent

    async with Victim() as victim:
        for size in (b"\xff\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x10"):
            assert await asyncio.to_thread(send, victim, size) < LONG_BYTES


async def a_first_line_that_is_no_text() -> None:
    async with Victim() as victim:
        for said in (line(b"\xff\xfe\n"), line(b"x"), b"\x00", b"\xff" * 11):
            with victim.connect() as connection:
                connection.sendall(said)
                assert await asyncio.to_thread(is_closed, connection), said
        await in_trio(stranger, victim.address, nothing)


async def nothing(_: Any, __: Any) -> None:
    pass


async def plain_text() -> None:
    """A connection whose peer proves nothing, or that has no windows, is not to be had."""
    async with Victim() as victim:
        for protocol in (b"/plaintext/2.0.0\n", b"/secio/1.0.0\n", b"/tls/1.0.0\n"):
            with victim.connect() as connection:
                connection.sendall(line(MULTISTREAM) + line(protocol))
                assert read_line(connection) == MULTISTREAM
                assert read_line(connection) == b"na\n", protocol


async def beyond_its_window() -> None:
    """Who ignores a stream's window loses the connection."""
    sent = 0

    async def flood(host: Any, connection: Any) -> None:
        nonlocal sent
        stream = await host.new_stream(connection.muxed_conn.peer_id, [PROTOCOL])
        muxed = stream.muxed_stream
        head = struct.pack(DATA_FRAME, 0, 0, 0, muxed.stream_id, len(PIECE))
        with suppress(Exception):
            # py-libp2p takes frames for a closed connection without a word.
            while sent < LONG_BYTES and not muxed.conn.event_closed.is_set():
                await muxed.conn._write_frame(head + PIECE)
                sent += len(PIECE)
        await connection.muxed_conn.event_closed.wait()

    async with Victim() as victim:
        await in_trio(stranger, victim.address, flood)
        assert 256 << 10 <= sent < LONG_BYTES
        await in_trio(stranger, victim.address, nothing)


async def many_streams_unread() -> None:
    """Within its windows, too, a peer has a bounded part unread."""
    sent = 0
    room = replace(UNREAD_BYTES, per_peer=4 << 20, in_all=6 << 20)

    async def fill(host: Any, connection: Any) -> None:
        nonlocal sent
        peer = connection.muxed_conn.peer_id
        with suppress(Exception):
            for _ in range(100):
                stream = await host.new_stream(peer, [PROTOCOL])
                await stream.write(bytes(256 << 10))
                sent += 256 << 10
        await connection.muxed_conn.event_closed.wait()

    async with Victim(room) as victim:
        victim.budget.parties.work = SessionTable().knows  # as a stage does
        # Of each stream trio reads one MiB on behalf of who reads nothing.
        victim._host._accept = hold
        await in_trio(stranger, victim.address, fill)
        assert 1 << 20 <= sent <= 8 << 20
        assert victim.budget.refused["unread_bytes"]


async def what_has_ended_holds_nothing() -> None:
    """Bytes that nobody read count no more once their connection is over."""

    async def leave(host: Any, connection: Any) -> None:
        stream = await host.new_stream(connection.muxed_conn.peer_id, [PROTOCOL])
        await stream.write(bytes(200 << 10))
        while not victim.budget.held(UNREAD_BYTES).total >= 200 << 10:  # noqa: ASYNC110
            await trio.sleep(0.01)

    async with Victim() as victim:
        victim._host._accept = hold
        for _ in range(4):
            await in_trio(stranger, victim.address, leave)
        await in_trio(stranger, victim.address, nothing)
        assert victim.budget.held(UNREAD_BYTES).total < 200 << 10


async def who_reads_nothing() -> None:
    """A connection whose other side reads nothing any more ends at once when it is to end."""
    ended = threading.Event()

    async def stay(_: Any, __: Any) -> None:
        await trio.to_thread.run_sync(ended.wait)

    async with Victim() as victim:
        libp2p = victim._host._host

        async def let_go() -> None:
            ((peer_id, (connection,)),) = libp2p.get_network().connections.items()
            connection.muxed_conn.secured_conn._connection.write = hold
            with trio.fail_after(10):
                await libp2p.disconnect(peer_id)
            assert connection.muxed_conn.event_closed.is_set()
            assert not libp2p.get_network().get_connections(peer_id)

        with_it = asyncio.create_task(in_trio(stranger, victim.address, stay))
        try:
            while not libp2p.get_network().connections:  # noqa: ASYNC110  (libp2p tells none)
                await asyncio.sleep(0.01)
            await victim._host._call(let_go)
        finally:
            ended.set()
            await with_it


async def the_budget_alone() -> None:
    """Nothing else bounds connections: py-libp2p's own limits are lower, and the same for all."""
    async with Victim() as victim:
        assert victim._host._host.get_network()._resource_manager is None


async def hold(*_: Any) -> None:
    """A stream whose bytes stay in py-libp2p."""
    await trio.sleep_forever()


async def silent_connections() -> None:
    few = replace(HANDSHAKES, per_peer=4)
    async with Victim(few) as victim:
        held = [victim.connect() for _ in range(4)]
        for each in held:
            assert await asyncio.to_thread(each.recv, 1), "it is greeted"
        with victim.connect() as one_more:
            assert await asyncio.to_thread(is_closed, one_more)
        for each in held:
            assert await asyncio.to_thread(is_closed, each), "none may be silent for ever"
        await in_trio(stranger, victim.address, nothing)


async def connections_that_come_and_go() -> None:
    """What ended counts no more; what is open does."""
    few = replace(CONNECTIONS, per_peer=3)
    async with Victim(few) as victim:
        for _ in range(8):
            await in_trio(stranger, victim.address, nothing)
            while victim.budget.held(CONNECTIONS).total:  # noqa: ASYNC110  (libp2p tells none)
                await asyncio.sleep(0.01)


async def what_is_pushed() -> None:
    """What a peer says of itself is not kept."""
    ended = threading.Event()

    async def push(host: Any, connection: Any) -> None:
        with suppress(Exception):
            stream = await host.new_stream(connection.muxed_conn.peer_id, [ID_PUSH])
            await stream.write(b"\x05")
            return
        ended.set()

    async with Victim() as victim:
        await in_trio(stranger, victim.address, push)
        assert ended.is_set(), "that protocol is not spoken"
        assert not victim._host._host._identify_tasks


async def whatever_comes() -> None:
    """No bytes, before a handshake or in frames after it, end the host or keep others out."""
    rng = random.Random(1)

    async def frames(_: Any, connection: Any) -> None:
        secured = connection.muxed_conn.secured_conn
        with suppress(Exception):
            for _ in range(30):
                size = rng.choice((0, 0, 1, 12, 300, 1 << 18))
                said = rng.choice((size, size, 0, 1 << 20, (1 << 32) - 1))
                head = (0, rng.randrange(5), rng.randrange(16), rng.randrange(6), said)
                await secured.write(struct.pack(DATA_FRAME, *head) + rng.randbytes(size))

    def strangers(victim: Victim) -> None:
        for _ in range(40):
            with victim.connect() as connection, suppress(OSError):
                connection.sendall(line(MULTISTREAM) + line(b"/noise\n")[: rng.randrange(9)])
                connection.sendall(rng.randbytes(rng.choice((0, 1, 2, 34, 70_000))))

    async with Victim() as victim:
        await asyncio.to_thread(strangers, victim)
        for _ in range(10):
            await in_trio(stranger, victim.address, frames)
        await in_trio(stranger, victim.address, nothing)
        assert not victim._host.ended.is_set()


CASES = {
    each.__name__: each
    for each in (
        a_first_line_without_end,
        a_first_line_that_is_no_text,
        plain_text,
        beyond_its_window,
        many_streams_unread,
        what_has_ended_holds_nothing,
        who_reads_nothing,
        the_budget_alone,
        silent_connections,
        connections_that_come_and_go,
        what_is_pushed,
        whatever_comes,
    )
}

if __name__ == "__main__":
    asyncio.run(CASES[sys.argv[1]]())
