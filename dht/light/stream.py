"""Bridges a libp2p stream between two event loops: trio carries its bytes, asyncio uses it.

Each side writes only its own state (deques are thread-safe, every counter has one writer) and wakes
the other side only when that waits, so a busy stream costs few hand-overs. The bytes between the
two sides are bounded in both directions.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import trio

from dht.errors import NetworkError
from dht.transport.streams import Pipe

WINDOW_LOOKS_S = (0.001, 0.05)
"""Pause between two looks at a closed send window: at first, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """Sizes and times of a stream between two event loops."""

    read_bytes: int = 256 << 10
    unread_bytes_max: int = 1 << 20
    """Bytes received and not read above which trio stops reading, so the sender's window closes."""
    unsent_bytes_max: int = 256 << 10
    """Bytes written and not sent above which a drain waits."""
    chunk_bytes: int = 128 << 10
    close_limit_s: float = 1.0
    """Maximum time that closing a stream waits for its written bytes to leave."""
    flush_limit_s: float = 60.0
    goodbye_limit_s: float = 10.0
    """Time for which a closed stream waits for the other side to close it, before it is reset."""


BRIDGE = BridgeConfig()


class BridgedStream:
    """A :class:`dht.transport.interface.Stream` over a py-libp2p stream, run by :meth:`carry`."""

    def __init__(
        self,
        remote_peer_id: str,
        net_stream: Any,
        loop: asyncio.AbstractEventLoop,
        token: trio.lowlevel.TrioToken,
        *,
        remote_host: str = "",
    ) -> None:
        self.remote_peer_id = remote_peer_id
        self.remote_host = remote_host
        self._net = net_stream
        self._loop = loop
        self._token = token
        # Written by asyncio
        self._incoming = Pipe()
        self._closed = False
        self._written_bytes = 0
        self._read_bytes = 0
        self._wanted_bytes = 0
        self._sent = asyncio.Event()
        self._draining = False
        # Written by trio
        self._sent_bytes = 0
        self._received_bytes = 0
        self._more_to_send = trio.Event()
        self._more_room = trio.Event()
        # Shared
        self._outgoing: deque[bytes] = deque()
        self._arrived: deque[bytes] = deque()
        self._told = False
        """Whether a call of :meth:`_take_arrived` is under way to asyncio."""
        self._idle = False
        """Whether trio waits for bytes to send."""
        self._paused = False
        """Whether trio waits for room to receive."""
        self._broken: str | None = None
        self._ended: str | None = None

    # asyncio's side

    async def read_exactly(self, count: int) -> bytes:
        self._wanted_bytes = count
        if self._paused:
            self._in_trio(self._more_room_now)
        data = await self._incoming.read_exactly(count)
        self._wanted_bytes = 0
        self._read_bytes += count
        if self._paused:
            self._in_trio(self._more_room_now)
        return data

    async def read_some(self, most: int) -> bytes:
        first = await self.read_exactly(1)
        rest = min(most - 1, self._incoming.unread_bytes)
        return first + (await self.read_exactly(rest) if rest else b"")

    def write(self, data: bytes) -> None:
        if self._closed or self._broken is not None or not data:
            return
        self._outgoing.append(bytes(data))
        self._written_bytes += len(data)
        if self._idle:
            self._idle = False
            self._in_trio(self._send_now)

    async def drain(self) -> None:
        while True:
            if self._broken is not None or self._closed:
                why = self._broken or "closed"
                raise NetworkError(f"stream of peer {self.remote_peer_id} is gone: {why}")
            self._sent.clear()
            self._draining = True
            if self._unsent_bytes <= BRIDGE.unsent_bytes_max and self._broken is None:
                self._draining = False
                return
            await self._sent.wait()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._incoming.stop_reading("the stream is closed")
        self._sent.set()
        self._in_trio(self._close_now)
        with suppress(TimeoutError):
            async with asyncio.timeout(BRIDGE.close_limit_s):
                while self._unsent_bytes and self._broken is None:
                    self._sent.clear()
                    self._draining = True
                    if self._unsent_bytes and self._broken is None:
                        await self._sent.wait()

    def abandon(self) -> None:
        """Close a stream that nobody uses, without waiting."""
        self._closed = True
        self._in_trio(self._close_now)

    @property
    def _unsent_bytes(self) -> int:
        return self._written_bytes - self._sent_bytes

    def _take_arrived(self) -> None:
        self._told = False
        while self._arrived:
            self._incoming.write(self._arrived.popleft())
        if self._broken is not None:
            self._incoming.end(self._broken, lambda: None)
            self._sent.set()
        elif self._ended is not None:
            self._incoming.end(self._ended, lambda: None)

    def _in_trio(self, call: Callable[[], None]) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(call)

    # trio's side

    async def carry(self) -> None:
        """Move bytes both ways until the stream has ended; raises nothing but a cancellation."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive)
                if await self._send():
                    # All bytes have left, but a reset now could overtake them at the other side.
                    await self._net.close_write()
                    with trio.move_on_after(BRIDGE.goodbye_limit_s):
                        while self._ended is None and self._broken is None:
                            await self._wait_for_more()
                nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001  (whatever py-libp2p raises ends this stream)
            self._break(f"{type(error).__name__} {error}".strip())
        finally:
            self._break("it has ended")
            with trio.move_on_after(BRIDGE.goodbye_limit_s, shield=True), suppress(Exception):
                await self._net.reset()

    async def _receive(self) -> None:
        try:
            while True:
                await self._wait_for_room()
                data = await self._net.read(BRIDGE.read_bytes)
                if not data:
                    break
                self._received_bytes += len(data)
                if self._closed:
                    self._read_bytes = self._received_bytes  # nobody reads any more
                else:
                    self._arrived.append(data)
                    self._tell()
            self._ended = f"peer {self.remote_peer_id} closed the stream"
        except Exception as error:  # noqa: BLE001
            if type(error).__name__ == "StreamEOF":
                self._ended = f"peer {self.remote_peer_id} closed the stream"
            else:
                self._break(f"{type(error).__name__} {error}".strip())
        self._tell()
        self._send_now()

    async def _wait_for_room(self) -> None:
        while self._is_full and not self._closed:
            self._more_room = trio.Event()
            self._paused = True
            # Check again, now that the reader can see that trio waits.
            if self._is_full and not self._closed:
                await self._more_room.wait()
            self._paused = False

    @property
    def _unread_bytes(self) -> int:
        return self._received_bytes - self._read_bytes

    @property
    def _is_full(self) -> bool:
        return self._unread_bytes > max(BRIDGE.unread_bytes_max, self._wanted_bytes)

    async def _send(self) -> bool:
        """Send written bytes until the stream is closed; returns False when it broke before."""
        give_up_s: float | None = None
        while self._broken is None:
            if self._outgoing:
                if self._closed and give_up_s is None:
                    give_up_s = trio.current_time() + BRIDGE.flush_limit_s
                await self._send_chunk(self._next_chunk(), give_up_s)
            elif self._closed:
                return True
            else:
                await self._wait_for_more()
        return False

    async def _wait_for_more(self) -> None:
        self._more_to_send = trio.Event()
        self._idle = True
        # Check again, now that the writer can see that trio waits.
        if not self._outgoing and (not self._closed or self._ended is None):
            await self._more_to_send.wait()
        self._idle = False

    def _next_chunk(self) -> bytes:
        first = self._outgoing.popleft()
        if len(first) >= BRIDGE.chunk_bytes or not self._outgoing:
            return first
        parts, size_bytes = [first], len(first)
        while self._outgoing and size_bytes + len(self._outgoing[0]) <= BRIDGE.chunk_bytes:
            parts.append(self._outgoing.popleft())
            size_bytes += len(parts[-1])
        return b"".join(parts)

    async def _send_chunk(self, chunk: bytes, give_up_s: float | None) -> None:
        muxed, view = self._net.muxed_stream, memoryview(chunk)
        look_s = WINDOW_LOOKS_S[0]
        while view:
            if self._broken is not None:
                return
            # py-libp2p gives up a stream whose window stays closed for 5 s. The reader may only be
            # slow, so nothing is written that exceeds the window.
            if muxed.send_window <= 0 and not muxed.send_closed and not muxed.closed:
                if give_up_s is not None and trio.current_time() > give_up_s:
                    self._break("the other side reads nothing")
                    return
                await trio.sleep(look_s)
                look_s = min(2 * look_s, WINDOW_LOOKS_S[1])
                continue
            look_s = WINDOW_LOOKS_S[0]
            size_bytes = min(len(view), max(1, muxed.send_window), BRIDGE.chunk_bytes)
            # A cancelled half of a write would garble the connection for all its streams.
            with trio.CancelScope(shield=True):
                await self._net.write(bytes(view[:size_bytes]))
            view = view[size_bytes:]
            self._sent_bytes += size_bytes
            if self._draining:
                self._draining = False
                self._in_asyncio(self._sent.set)

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = f"stream of peer {self.remote_peer_id} broke: {reason}"
            self._outgoing.clear()
            self._tell()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._in_asyncio(self._take_arrived)

    def _in_asyncio(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)

    def _send_now(self) -> None:
        self._more_to_send.set()

    def _more_room_now(self) -> None:
        self._more_room.set()

    def _close_now(self) -> None:
        self._more_room.set()
        self._more_to_send.set()
