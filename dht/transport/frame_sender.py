"""Sends frames on a stream without waiting, with a bounded queue."""

import asyncio
from collections import deque
from dataclasses import dataclass

from dht.errors import NetworkError
from dht.messages import codec
from dht.transport.interface import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class SendConfig:
    """How much waits for a reader, and how long."""

    undrained_bytes_max: int = 256 << 10
    """Maximum bytes written and not yet taken by the transport."""
    room_bytes: int = 64 << 10
    """Queued bytes above which no more requests are read from the other side, which reads no
    answers."""
    queued_bytes_max: int = 16 << 20
    """Maximum queued bytes: about 8,000 tokens with scores that a client may be behind."""
    stalled_s: float = 30.0
    """Time without a read, or without credit, after which a reader of what waits counts as gone."""


SENDING = SendConfig()


class FrameSender:
    """Writes frames to one stream in order; :meth:`send` never waits.

    A frame goes to the transport at once while little is undrained (the decode path), and queues
    behind a drain otherwise. A reader for which more than ``SENDING.queued_bytes_max`` wait, or
    that reads nothing for ``SENDING.stalled_s``, counts as gone: its queue is dropped. :meth:`run`
    must be running for queued frames to leave; it raises NetworkError when the stream is dead.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._queue: deque[bytes] = deque()
        self._undrained_bytes = 0
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self._broken: str | None = None
        self.queued_bytes = 0

    def send(self, message: object, body: bytes | memoryview = b"") -> None:
        """Queue or write one frame. :meth:`run` raises the errors."""
        if self._broken is not None:
            return
        frame = codec.encode_frame(message, body)
        if self._queue or self._undrained_bytes > SENDING.undrained_bytes_max:
            self._queue.append(frame)
            self.queued_bytes += len(frame)
            if self.queued_bytes > SENDING.queued_bytes_max:
                self._broken = f"{self.queued_bytes} bytes queued, nothing is read"
                self._queue.clear()
                self.queued_bytes = 0
        else:
            self._write(frame)
        self._wake.set()

    async def room(self) -> None:
        """Wait until at most ``SENDING.room_bytes`` are queued; raises NetworkError after
        ``SENDING.stalled_s``."""
        while self.queued_bytes > SENDING.room_bytes:
            self._left.clear()
            try:
                async with asyncio.timeout(SENDING.stalled_s):
                    await self._left.wait()
            except TimeoutError:
                raise NetworkError(f"no answer was read for {SENDING.stalled_s:.0f} s") from None

    def _write(self, frame: bytes) -> None:
        self._stream.write(frame)
        self._undrained_bytes += len(frame)

    async def run(self) -> None:
        """Drain and flush until the stream dies or the task is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue or self._undrained_bytes or self._broken is not None:
                if self._broken is not None:
                    raise NetworkError(self._broken)
                try:
                    async with asyncio.timeout(SENDING.stalled_s):
                        await self._stream.drain()
                except TimeoutError:
                    raise NetworkError(f"nothing was read for {SENDING.stalled_s:.0f} s") from None
                self._undrained_bytes = 0
                while self._queue and self._undrained_bytes <= SENDING.undrained_bytes_max:
                    frame = self._queue.popleft()
                    self.queued_bytes -= len(frame)
                    self._write(frame)
                self._left.set()
