"""In-process streams, and handlers of incoming streams, shared by the transport adapters."""

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dht.budget import STREAMS, Budget
from dht.errors import NetworkError, PeerError
from dht.messages.codec import OtherVersionError, encode_frame
from dht.messages.peer import OtherVersion
from dht.transport.interface import Stream, StreamHandler
from dht.transport.other_versions import OtherVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeConfig:
    """How much waits in a pipe, and how long a stream is heard out."""

    bytes_max: int = 256 << 10
    """Unread bytes above which a writer's drain waits."""
    heard_limit_s: float = 10.0
    """Time for which a stream whose handler has returned waits for the other side to close it."""
    unheard_bytes: int = 64 << 10
    unheard_reads: int = 16
    """Size and number of reads that drop what the other side sends meanwhile: 1 MiB at most."""
    reads_a_turn: int = 16
    """Reads of one stream after which others get the event loop: eight small frames, which take
    some 0.1 ms."""


PIPES = PipeConfig()

_log = logging.getLogger(__name__)


class ReadTurns:
    """Lets others have the event loop between a stream's reads.

    A read of bytes that have come does not wait. So all small frames of a full buffer would be
    handled in one go, thousands of them, and those of hundreds of streams one after the other.
    """

    def __init__(self) -> None:
        self._reads = 0

    async def take(self) -> None:
        """Count a read, which is about to begin."""
        self._reads += 1
        if self._reads % PIPES.reads_a_turn == 0:
            await asyncio.sleep(0)


class Pipe:
    """One direction of an in-process stream: ordered bytes with back-pressure and an end.

    ``carry(data, deliver)`` decides when written bytes arrive; without it they arrive at once.
    After a break, the next read or drain of either side fails.
    """

    def __init__(
        self,
        carry: Callable[[bytes, Callable[[], None]], None] | None = None,
        *,
        unread_bytes_max: int = PIPES.bytes_max,
    ) -> None:
        self._carry = carry
        self._unread_bytes_max = unread_bytes_max
        self._chunks: deque[bytes] = deque()
        self._taken_bytes = 0
        """Bytes of the first chunk that were read: it is not copied for each small read."""
        self._turns = ReadTurns()
        self.unread_bytes = 0
        """Bytes that have arrived and were not read."""
        self._in_flight_bytes = 0
        self._wanted_bytes = 0
        self._ended: str | None = None
        self._reader_gone: str | None = None
        self._broken: str | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def write(self, data: bytes) -> None:
        if self._broken is None and data:
            self._in_flight_bytes += len(data)
            self._send(data, lambda: self._arrive(bytes(data)))

    def end(self, reason: str, then: Callable[[], None]) -> None:
        """End the pipe: reads fail once all earlier bytes are read; ``then`` runs on arrival."""

        def arrive() -> None:
            self._ended = self._ended or reason
            self._wake()
            then()

        self._send(b"", arrive)

    def stop_reading(self, reason: str) -> None:
        """Stop reading: reads fail and arriving bytes are dropped, unknown to the writer."""
        self._reader_gone = self._reader_gone or reason
        self._chunks.clear()
        self.unread_bytes = self._taken_bytes = 0
        self._wake()

    def break_off(self, reason: str) -> None:
        """Fail both sides now; unread bytes are lost."""
        self._broken = self._broken or reason
        self._chunks.clear()
        self.unread_bytes = self._taken_bytes = self._in_flight_bytes = 0
        self._wake()

    async def read_exactly(self, count: int) -> bytes:
        await self._turns.take()
        self._wanted_bytes = count
        try:
            self._wake()  # a writer that waits for room may have it now
            while self.unread_bytes < count or self._broken or self._reader_gone:
                reason = self._broken or self._reader_gone or self._ended
                if reason is not None:
                    raise NetworkError(reason)
                await self._wait()
        finally:
            self._wanted_bytes = 0
        data = self._take(count)
        self._wake()
        return data

    async def drain(self) -> None:
        while True:
            if self._broken is not None:
                raise NetworkError(self._broken)
            unread = self.unread_bytes + self._in_flight_bytes
            # A reader may wait for more than the limit: both sides must not wait for each other.
            if unread <= max(self._unread_bytes_max, self._wanted_bytes):
                return
            await self._wait()

    def _send(self, data: bytes, deliver: Callable[[], None]) -> None:
        if self._carry is None:
            deliver()
        else:
            self._carry(data, deliver)

    def _arrive(self, data: bytes) -> None:
        if self._broken is None:
            self._in_flight_bytes -= len(data)
            if self._reader_gone is None:
                self.unread_bytes += len(data)
                self._chunks.append(data)
            self._wake()

    def _take(self, count: int) -> bytes:
        self.unread_bytes -= count
        parts: list[bytes] = []
        while count:
            first = self._chunks[0]
            parts.append(first[self._taken_bytes : self._taken_bytes + count])
            count -= len(parts[-1])
            self._taken_bytes += len(parts[-1])
            if self._taken_bytes == len(first):
                self._chunks.popleft()
                self._taken_bytes = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class PipeStream:
    """A :class:`dht.transport.interface.Stream` over two pipes of this process."""

    def __init__(self, remote_peer_id: str, incoming: Pipe, outgoing: Pipe) -> None:
        self.remote_peer_id = remote_peer_id
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False
        self.remote_host = ""
        self.on_close: Callable[[], None] | None = None
        """Callback for the close of this end, called once."""

    async def read_exactly(self, count: int) -> bytes:
        return await self._incoming.read_exactly(count)

    async def read_some(self, most: int) -> bytes:
        first = await self.read_exactly(1)
        rest = min(most - 1, self._incoming.unread_bytes)
        return first + (await self.read_exactly(rest) if rest else b"")

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._outgoing.write(data)

    async def drain(self) -> None:
        if self._closed:
            raise NetworkError("the stream is closed")
        await self._outgoing.drain()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.on_close is not None:
            self.on_close()
        self._incoming.stop_reading("the stream is closed")
        # The other side learns when the end arrives that nobody reads its writes any more.
        self._outgoing.end(
            "the other side closed the stream",
            lambda: self._incoming.break_off("the other side closed the stream"),
        )

    def break_off(self, reason: str) -> None:
        """Fail both directions on both sides, as a lost connection does."""
        self._incoming.break_off(reason)
        self._outgoing.break_off(reason)


def stream_pair(near_peer_id: str, far_peer_id: str) -> tuple[PipeStream, PipeStream]:
    """The near and the far end of a stream within this process."""
    there, back = Pipe(), Pipe()
    return PipeStream(far_peer_id, back, there), PipeStream(near_peer_id, there, back)


async def until_closed(stream: Stream) -> None:
    """Wait until the other side closes the stream, ``PIPES.heard_limit_s`` at most.

    It has then read all that was written here, or wants no more. Closing first could lose written
    bytes: hivemind's daemon resets a stream that is closed while the other side writes, sometimes
    also otherwise, and a reset overtakes bytes that were not read yet.
    """
    with suppress(NetworkError, TimeoutError):
        async with asyncio.timeout(PIPES.heard_limit_s):
            await stream.drain()
            for _ in range(PIPES.unheard_reads):
                await stream.read_exactly(PIPES.unheard_bytes)


class StreamHandlers:
    """Runs one handler per incoming stream in a task of its own; an error ends that stream alone.

    ``errors`` counts failed streams by the type of the error. Faults of peers and of the network,
    and time-outs, are logged at debug level; any other error is a fault of ours and is logged with
    its traceback.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.by_protocol: dict[str, StreamHandler] = {}
        self.errors: Counter[str] = Counter()
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that runs replay
        self.versions = OtherVersions()
        self.called_s = -math.inf
        """When another peer opened a stream last, by the loop's clock."""
        self.known_called_s = -math.inf
        """When one that is no stranger did."""
        self.budget = budget or Budget()
        self._streams = self.budget.held(STREAMS)

    def open_to_self(self, peer_id: str, protocol: str) -> Stream:
        """A stream of this peer to itself, within the process."""
        handler = self.by_protocol.get(protocol)
        if handler is None:
            raise NetworkError(f"this peer does not serve {protocol}")
        near, far = stream_pair(peer_id, peer_id)
        self.adopt(self.run(handler, far))
        return near

    def start(self, handler: StreamHandler, stream: Stream) -> None:
        """Handle ``stream``, which another peer opened, in a new task."""
        self.called_s = asyncio.get_running_loop().time()
        if self.budget.parties.knows(stream.remote_peer_id):
            self.known_called_s = self.called_s
        self.adopt(self.run(handler, stream))

    def adopt(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run ``work`` in a task that :meth:`close` ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def run(self, handler: StreamHandler, stream: Stream) -> None:
        """Handle ``stream`` and close it; raises nothing but a cancellation."""
        peer_id = stream.remote_peer_id
        self.budget.parties.met(peer_id, stream.remote_host)
        try:
            if not self._streams.take(peer_id):
                return
            try:
                await self._handle(handler, stream)
                await until_closed(stream)
            finally:
                self._streams.give_back(peer_id)
        except (PeerError, NetworkError, TimeoutError) as error:
            self.errors[type(error).__name__] += 1
            _log.debug("stream of %s ended: %s", peer_id, error)
        except Exception as error:  # noqa: BLE001  (one stream must not end the process)
            self.errors[type(error).__name__] += 1
            _log.exception("the handler of a stream of %s failed", peer_id)
        finally:
            await stream.close()

    async def _handle(self, handler: StreamHandler, stream: Stream) -> None:
        """Handle ``stream``; who speaks another version is told so, or would only see it close."""
        try:
            await handler(stream)
        except OtherVersionError as error:
            self.errors[type(error).__name__] += 1
            self.versions.note(stream.remote_peer_id, error.theirs)
            stream.write(encode_frame(OtherVersion()))

    async def close(self) -> None:
        """Cancel every handler and wait until all have ended."""
        await asyncio.gather(*self.cancel(), return_exceptions=True)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel every handler except a calling one; returns their tasks."""
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        return tasks
