"""The shell around :mod:`coordinator.links.scheduler`: one peer's frames to another over a stream.

:class:`LinkSender` cuts long frames into parts, lets decodes overtake them and keeps what is on
its way within the receiver's credits. :class:`LinkReader` puts frames together again, counts what
was read and says when to acknowledge. Both are bounded: see the constants.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.links.bandwidth_estimator import CreditError
from coordinator.links.scheduler import FRAME_BYTES_MIN, LinkScheduler, Slice, TrafficClass
from coordinator.links.token_bucket import Allowance
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.session import Activations, Delivered, FramePart
from dht.transport.interface import Stream

UNDRAINED_BYTES_MAX = 256 << 10
"""Written and not yet taken by the transport."""
QUEUED_BYTES_MAX = 256 << 20
"""Waiting to be sent; beyond, the channel is broken: a reader that slow is as good as gone."""
STALLED_S = 30.0
"""A peer that gives no credit for so long while prefill waits is as good as gone."""
PARTIAL_FRAMES_MAX = 8
"""Frames that may be under way in parts at once: one per class, and some room."""
PARTIAL_BYTES_PER_PEER_MAX = 64 << 20
"""Unfinished frames of all streams of one peer: 1,024 tokens of a wide model are 16 MiB."""
PARTIAL_BYTES_MAX = 256 << 20
"""Unfinished frames of all peers together: identities cost nothing."""


def traffic_of(message: object) -> TrafficClass:
    """The class of a message whose sender does not say: rows by their number, others urgent."""
    if isinstance(message, Activations):
        decode = all(item.tokens == 1 for item in message.items)
        return TrafficClass.DECODE if decode else TrafficClass.PREFILL
    return TrafficClass.CONTROL


@dataclass(slots=True, kw_only=True)
class _Queued:
    data: memoryview
    sessions: tuple[str, ...]


class LinkSender:
    """Writes frames to one stream in the scheduler's order; :meth:`send` never waits.

    Rows of one session always arrive in the order in which they were sent: its decode rows wait
    behind its own prefill, should that still be queued. :meth:`run` must be running; it raises
    NetworkError when the stream is dead, the queue beyond its bound or no credit comes. What is
    written waits for ``up``, which all links of a peer share and the stream itself draws from.
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
        self._credit_us = now_us()
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
        """Queue one frame and write what may leave. Errors show in :meth:`run`."""
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
            self._credit_us = self._now_us()
        number = self.scheduler.offer(kind, len(data))
        self._queued[number] = _Queued(data=data, sessions=sessions)
        if self.queued_bytes > QUEUED_BYTES_MAX:
            self._broken = f"{self.queued_bytes} bytes queued, nothing is read"
        self._pump()
        self._wake.set()

    def acknowledged(self, delivered: Delivered) -> None:
        """The peer read on. Raises :class:`dht.messages.codec.MalformedError` for what cannot
        be."""
        before = self.scheduler.slow_in_flight_bytes
        try:
            self.scheduler.acknowledged(delivered.total_bytes, delivered.slow_bytes, self._now_us())
        except CreditError as error:
            raise codec.MalformedError(str(error)) from error
        if self.scheduler.slow_in_flight_bytes < before:
            self._credit_us = self._now_us()
        self._pump()
        self._wake.set()

    def _pump(self) -> None:
        while self._undrained_bytes <= UNDRAINED_BYTES_MAX:
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
                    async with asyncio.timeout(STALLED_S):
                        await self._stream.drain()
                except TimeoutError:
                    raise NetworkError(
                        f"no credit for {STALLED_S:.0f} s, and nothing more fits into the stream"
                    ) from None
                self._undrained_bytes = 0
                self._check()
                self._pump()

    def _look_again_s(self) -> float | None:
        """How long to sleep without news: until the allowance lets more leave, or may stall."""
        if not self.queued_bytes:
            return None
        now_us = self._now_us()
        wait_us = self._up.wait_us(now_us, urgent=True) or self._up.wait_us(now_us)
        if not wait_us:
            return STALLED_S / 4
        self._credit_us = now_us  # it is this peer's owner who keeps the bytes waiting
        return wait_us / 1e6

    def _check(self) -> None:
        if self._broken is not None:
            raise NetworkError(self._broken)
        waited_s = (self._now_us() - self._credit_us) / 1e6
        if self.queued_bytes and waited_s > STALLED_S:
            raise NetworkError(f"no credit for {waited_s:.0f} s, {self.queued_bytes} bytes wait")


@dataclass(slots=True, kw_only=True)
class _Partial:
    data: bytearray
    total_bytes: int
    slow: bool


class PartialBytes:
    """Accounts for unfinished frames, by peer and in all."""

    def __init__(self) -> None:
        self._by_peer: Counter[str] = Counter()
        self._all = 0

    def take(self, peer_id: str, size: int) -> None:
        """Raises NetworkError where there is no room for ``size`` bytes more."""
        if self._by_peer[peer_id] + size > PARTIAL_BYTES_PER_PEER_MAX:
            raise NetworkError(f"over {PARTIAL_BYTES_PER_PEER_MAX} bytes of unfinished frames")
        if self._all + size > PARTIAL_BYTES_MAX:
            raise NetworkError("no room for further unfinished frames now")
        self._by_peer[peer_id] += size
        self._all += size

    def give_back(self, peer_id: str, size: int) -> None:
        self._all -= size
        self._by_peer[peer_id] -= size
        if not self._by_peer[peer_id]:
            del self._by_peer[peer_id]


class LinkReader:
    """Reads whole frames from a stream whose sender is a :class:`LinkSender`.

    At most one frame per class is under way in parts: more than ``PARTIAL_FRAMES_MAX``, or what
    else does not fit the rules, raises MalformedError. ``budget`` is shared with the readers of
    other streams; :meth:`close` gives back what this one holds of it.
    """

    def __init__(self, stream: Stream, budget: PartialBytes | None = None) -> None:
        self._stream = stream
        self._budget = budget or PartialBytes()
        self._partial: dict[int, _Partial] = {}
        self._said_bytes = 0
        self._said_slow_bytes = 0
        self._part_read = False
        self.total_bytes = 0
        """Of frames and of parts' bodies, as the sender's scheduler counts them."""
        self.slow_bytes = 0

    async def read(self, *, limit_bytes: int = codec.FRAME_BYTES_MAX) -> codec.Frame | None:
        """The next whole frame, or None after a part of one. Raises as :func:`wire.read_frame`."""
        frame = await codec.read_frame(self._stream, limit_bytes=limit_bytes)
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
        self._budget.take(self._stream.remote_peer_id, size)
        partial.data += body
        self.total_bytes += size
        if partial.slow:
            self.slow_bytes += size
        if len(partial.data) < partial.total_bytes:
            return None
        del self._partial[part.number]
        self._budget.give_back(self._stream.remote_peer_id, partial.total_bytes)
        whole = codec.decode_frame(memoryview(partial.data))
        if isinstance(whole.message, FramePart):
            raise codec.MalformedError("a part within a part")
        return whole

    @property
    def unfinished(self) -> bool:
        """Whether a frame is under way in parts."""
        return bool(self._partial)

    def close(self) -> None:
        """Forget what is unfinished."""
        size = sum(len(partial.data) for partial in self._partial.values())
        self._partial.clear()
        self._budget.give_back(self._stream.remote_peer_id, size)

    @property
    def holds(self) -> bool:
        """Whether credit was held back that the sender may wait for."""
        return self._said_slow_bytes < self.slow_bytes

    def acknowledgement(self, *, hold: bool = False) -> Delivered | None:
        """What to tell the sender now; None while it is not worth a frame.

        With ``hold``, no further credit is given for prefill and bulk: this peer is behind.
        """
        released = self._said_slow_bytes if hold else self.slow_bytes
        worth = (
            self._part_read
            or self.total_bytes - self._said_bytes >= FRAME_BYTES_MIN
            or released > self._said_slow_bytes
        )
        if not worth:
            return None
        self._part_read = False
        self._said_bytes, self._said_slow_bytes = self.total_bytes, released
        return Delivered(total_bytes=self.total_bytes, slow_bytes=released)
