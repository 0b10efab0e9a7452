"""Sends and reads frames over a stream, in the link scheduler's order.

The order is :mod:`coordinator.policies.links.scheduler`'s. :class:`LinkSender` cuts long frames
into parts, lets decodes overtake them, and keeps bytes in flight within the receiver's credits.
:class:`LinkReader` reassembles frames, counts what was read and says when to acknowledge. Both are
bounded: see the constants.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.policies.links.bandwidth_estimator import CreditError
from coordinator.policies.links.scheduler import LinkConfig, LinkScheduler, Slice, TrafficClass
from coordinator.policies.links.token_bucket import Allowance
from dht.budget import FRAME_BYTES, Budget
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.session import Activations, Delivered, FramePart
from dht.transport.frame_sender import SENDING
from dht.transport.interface import Stream

QUEUED_BYTES_MAX = 256 << 20
"""Maximum bytes waiting to be sent; beyond, the link is broken: its reader is as good as gone."""
PARTIAL_FRAMES_MAX = 8
"""Maximum number of unfinished frames at once: one per class, and some room."""


def traffic_of(message: object) -> TrafficClass:
    """Traffic class of a message whose sender gives none: rows by their number, others urgent."""
    if isinstance(message, Activations):
        decode = all(item.tokens == 1 + len(item.drafts) for item in message.items)
        return TrafficClass.DECODE if decode else TrafficClass.PREFILL
    return TrafficClass.CONTROL


@dataclass(slots=True, kw_only=True)
class _Queued:
    data: memoryview
    sessions: tuple[str, ...]


class LinkSender:
    """Writes frames to one stream in the scheduler's order; :meth:`send` never waits.

    Rows of one session always arrive in the order in which they were sent: its decode rows wait
    behind its own prefill if that is still queued. :meth:`run` must be running; it raises
    NetworkError if the stream is dead, the queue exceeds its bound or no credit comes. Writing
    waits for the allowance ``up``, which all links of a peer share and the stream itself draws
    from.
    """

    def __init__(
        self,
        stream: Stream,
        scheduler: LinkScheduler,
        now_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
        up: Allowance | None = None,
    ) -> None:
        self._stream = stream
        self._up = up or Allowance()
        self._now_us = now_us
        self._queued: dict[int, _Queued] = {}
        self._slow_sessions: Counter[str] = Counter()
        self._undrained_bytes = 0
        self._wake = asyncio.Event()
        self._broken: str | None = None
        self._told_us = now_us()
        """When the reader said last what it has read, or nothing waited for that."""
        self.scheduler = scheduler

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait behind a slow link."""
        return self.scheduler.queued_bytes

    def send(
        self,
        message: object,
        body: bytes | memoryview = b"",
        *,
        traffic: TrafficClass | None = None,
    ) -> None:
        """Queue one frame and write what may leave. Errors are raised by :meth:`run`."""
        kind = traffic_of(message) if traffic is None else traffic
        sessions: tuple[str, ...] = ()
        if isinstance(message, Activations):
            sessions = tuple(f"{item.session}/{item.attempt}" for item in message.items)
            if kind is TrafficClass.DECODE and any(self._slow_sessions[key] for key in sessions):
                kind = TrafficClass.PREFILL
            if kind >= TrafficClass.PREFILL:
                self._slow_sessions.update(sessions)
            else:
                sessions = ()
        data = memoryview(codec.encode_frame(message, body))
        if self.queued_bytes == 0:
            self._told_us = self._now_us()
        number = self.scheduler.offer(kind, len(data))
        self._queued[number] = _Queued(data=data, sessions=sessions)
        if self.queued_bytes > QUEUED_BYTES_MAX:
            self._broken = f"{self.queued_bytes} bytes queued, nothing is read"
        self._pump()
        self._wake.set()

    def acknowledged(self, delivered: Delivered) -> None:
        """Take the peer's credit; :class:`dht.messages.codec.MalformedError` if impossible."""
        try:
            self.scheduler.acknowledged(delivered.total_bytes, delivered.slow_bytes, self._now_us())
        except CreditError as error:
            raise codec.MalformedError(str(error)) from error
        self._told_us = self._now_us()
        self._pump()
        self._wake.set()

    def _pump(self) -> None:
        while self._undrained_bytes <= SENDING.undrained_bytes_max:
            now_us = self._now_us()
            if self._up.wait_us(now_us, urgent=True):
                return
            urgent_only = self._up.wait_us(now_us) > 0
            piece = self.scheduler.next_slice(now_us, urgent_only=urgent_only)
            if piece is None:
                return
            data = self._frame(piece)
            self._stream.write(data)
            self._undrained_bytes += len(data)

    def _frame(self, piece: Slice) -> bytes:
        queued = self._queued[piece.number]
        if piece.last:
            del self._queued[piece.number]
            if queued.sessions:
                self._slow_sessions -= Counter(queued.sessions)
            if piece.offset == 0 and piece.traffic <= TrafficClass.DECODE:
                return bytes(queued.data)
        part = FramePart(
            number=piece.number,
            offset=piece.offset,
            total_bytes=len(queued.data),
            slow=piece.traffic >= TrafficClass.PREFILL,
        )
        return codec.encode_frame(part, queued.data[piece.offset : piece.offset + piece.size_bytes])

    async def run(self) -> None:
        """Drain and write on until the stream dies or the caller cancels."""
        while True:
            try:
                async with asyncio.timeout(self._look_again_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._check()
            self._pump()
            while self._undrained_bytes:
                try:
                    async with asyncio.timeout(SENDING.stalled_s):
                        await self._stream.drain()
                except TimeoutError:
                    raise NetworkError(
                        f"no credit for {SENDING.stalled_s:.0f} s,"
                        " and nothing more fits into the stream"
                    ) from None
                self._undrained_bytes = 0
                self._check()
                self._pump()

    def _look_again_s(self) -> float | None:
        """Seconds to sleep without news, until the allowance permits more or the link may have
        stalled; None: until news."""
        if not self.queued_bytes:
            return None
        now_us = self._now_us()
        wait_us = self._up.wait_us(now_us, urgent=True) or self._up.wait_us(now_us)
        if not wait_us:
            return SENDING.stalled_s / 4
        self._told_us = now_us  # this peer's owner delays the bytes, not the receiver
        return wait_us / 1e6

    def _check(self) -> None:
        if self._broken is not None:
            raise NetworkError(self._broken)
        waited_s = (self._now_us() - self._told_us) / 1e6
        if self.queued_bytes and waited_s > SENDING.stalled_s:
            raise NetworkError(f"no credit for {waited_s:.0f} s, {self.queued_bytes} bytes wait")


@dataclass(slots=True, kw_only=True)
class _Partial:
    data: bytearray
    total_bytes: int
    slow: bool


class LinkReader:
    """Reads whole frames from a stream whose sender is a :class:`LinkSender`.

    Each class has at most one unfinished frame. More than ``PARTIAL_FRAMES_MAX`` of them, or any
    other breach of the rules, raises MalformedError. ``budget`` is shared with other streams;
    :meth:`close` gives back this reader's part.
    """

    def __init__(self, stream: Stream, budget: Budget | None = None) -> None:
        self._stream = stream
        self._room = (budget or Budget()).held(FRAME_BYTES).of(stream.remote_peer_id)
        self._partial: dict[int, _Partial] = {}
        self._said_bytes = 0
        self._said_slow_bytes = 0
        self._acknowledged_bytes_min = LinkConfig().frame_bytes_min
        self._part_read = False
        self.total_bytes = 0
        """Bytes read of frames and of parts' bodies, as the sender's scheduler counts them."""
        self.slow_bytes = 0

    async def read(self, *, limit_bytes: int = codec.FRAME_BOUNDS.bytes_max) -> codec.Frame | None:
        """The next whole frame, or None after a part of one. Raises as `codec.read_frame`."""
        frame = await codec.read_frame(self._stream, limit_bytes=limit_bytes, room=self._room)
        if isinstance(frame.message, FramePart):
            self._part_read = True
            return self._take(frame.message, frame.body)
        self.total_bytes += frame.size_bytes
        return frame

    def _take(self, part: FramePart, body: bytes | memoryview) -> codec.Frame | None:
        size = len(body)
        partial = self._partial.get(part.number)
        if partial is None:
            if part.offset != 0:
                raise codec.MalformedError(f"part at {part.offset} of a frame that never began")
            if len(self._partial) >= PARTIAL_FRAMES_MAX:
                raise codec.MalformedError(
                    f"more than {PARTIAL_FRAMES_MAX} frames in parts at once"
                )
            partial = self._partial[part.number] = _Partial(
                data=bytearray(), total_bytes=part.total_bytes, slow=part.slow
            )
        have = len(partial.data)
        if size == 0 or part.offset != have or have + size > partial.total_bytes:
            raise codec.MalformedError(
                f"part [{part.offset}, {part.offset + size}) of {partial.total_bytes} bytes,"
                f" {have} are here"
            )
        if (part.total_bytes, part.slow) != (partial.total_bytes, partial.slow):
            raise codec.MalformedError("a part contradicts the one before")
        self._room.take(size)
        partial.data += body
        self.total_bytes += size
        if partial.slow:
            self.slow_bytes += size
        if len(partial.data) < partial.total_bytes:
            return None
        del self._partial[part.number]
        self._room.give_back(partial.total_bytes)
        whole = codec.decode_frame(memoryview(partial.data))
        if isinstance(whole.message, FramePart):
            raise codec.MalformedError("a part within a part")
        return whole

    @property
    def unfinished(self) -> bool:
        return bool(self._partial)

    def close(self) -> None:
        """Drop unfinished frames."""
        size = sum(len(partial.data) for partial in self._partial.values())
        self._partial.clear()
        self._room.give_back(size)

    @property
    def holds(self) -> bool:
        """Whether credit is held back that the sender may wait for."""
        return self._said_slow_bytes < self.slow_bytes

    def acknowledgement(self, *, hold: bool = False, due: bool = False) -> Delivered | None:
        """Acknowledgement to send now; None while it is not worth a frame, unless it is ``due``.

        With ``hold``, it gives no further credit for prefill and bulk, because this peer is behind.
        """
        released = self._said_slow_bytes if hold else self.slow_bytes
        worth = (
            due
            or self._part_read
            or self.total_bytes - self._said_bytes >= self._acknowledged_bytes_min
            or released > self._said_slow_bytes
        )
        if not worth:
            return None
        self._part_read = False
        self._said_bytes, self._said_slow_bytes = self.total_bytes, released
        return Delivered(total_bytes=self.total_bytes, slow_bytes=released)
