"""Makes connections to local peers as slow as those between towns, by passing them on late.

A peer listens at one port and announces another (``node.join --announce``), where
:class:`SlowLinks` takes connections and holds back every byte, in both directions. Each direction
of a connection may also have a rate.
"""

import asyncio
import math
import socket
import threading
from collections import deque

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


class _End(asyncio.Protocol):
    """One end of a connection that is passed on: what comes here leaves late at the other end."""

    def __init__(self, links: "SlowLinks", other: "_End | None" = None) -> None:
        self._links = links
        self._ends = links.ends
        self._free_at_s = 0.0
        """When all that came so far has gone out at the link's rate."""
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[bytes | None] = deque()
        """What came, in order; None: the end."""
        self.other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ends.add(self)

    def data_received(self, data: bytes) -> None:
        self._pass_on(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends.discard(self)
        self._pass_on(None)

    def _pass_on(self, data: bytes | None) -> None:
        loop, links = asyncio.get_running_loop(), self._links
        self._waiting.append(data)
        self._free_at_s = max(loop.time(), self._free_at_s) + len(data or b"") / links.bytes_per_s
        loop.call_at(self._free_at_s + links.one_way_s, self._leave)

    def _leave(self) -> None:
        if self.other is None and self in self._ends:  # the other end is still being dialled
            asyncio.get_running_loop().call_later(self._links.one_way_s, self._leave)
            return
        data = self._waiting.popleft()
        if self.other is None:
            return
        if data is None:
            self.other.close()
        else:
            self.other.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class SlowLinks:
    """Passes connections on, from a thread of its own; use as a context manager."""

    def __init__(self, round_trip_s: float, bytes_per_s: float = math.inf) -> None:
        self.one_way_s = round_trip_s / 2
        self.bytes_per_s = bytes_per_s
        self.ends: set[_End] = set()
        """All ends that are open."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._dialling: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    def before(self, port: int) -> int:
        """A port at which connections to ``port`` of this machine arrive late."""

        def taken() -> _End:
            here = _End(self)
            task = self._loop.create_task(self._dial(here, port))
            self._dialling.add(task)
            task.add_done_callback(self._dialling.discard)
            return here

        async def listen() -> int:
            server = await self._loop.create_server(taken, HOST, 0)
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        return asyncio.run_coroutine_threadsafe(listen(), self._loop).result()

    async def _dial(self, here: _End, port: int) -> None:
        there = _End(self, here)
        try:
            await self._loop.create_connection(lambda: there, HOST, port)
        except OSError:
            here.close()
        else:
            here.other = there

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._dialling):
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        while self.ends:
            for end in list(self.ends):
                end.abort()
            await asyncio.sleep(0.01)

    def __enter__(self) -> "SlowLinks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
