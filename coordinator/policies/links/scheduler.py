"""Schedules one peer's messages on the link to another: their order, and slices of bounded size.

On a volunteer's link a prompt's activations take seconds, a decode step's a few hundred
microseconds. Decodes therefore go first; prefill follows in frames of bounded size with a share of
its own, and bulk (KV that moves, weights) behind it. Bytes below this scheduler cannot be overtaken
any more, so credits bound them: the receiver returns credit when its application has read.

Pure: time is an argument, in microseconds; sizes are bytes.
"""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from coordinator.policies.links.bandwidth_estimator import CreditError, DeliveryEstimator


class TrafficClass(IntEnum):
    """Class of a message by what it carries; a smaller number is more urgent."""

    CONTROL = 0
    """Opens, closes, pings, ring tokens."""
    DECODE = 1
    PREFILL = 2
    BULK = 3
    """KV of sessions that move, weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The next bytes to write: ``[offset, offset + size)`` of message ``number``."""

    number: int
    traffic: TrafficClass
    offset: int
    size_bytes: int
    last: bool


@dataclass(slots=True, kw_only=True)
class _Message:
    number: int
    traffic: TrafficClass
    size_bytes: int
    sent_bytes: int = 0

    @property
    def rest_bytes(self) -> int:
        return self.size_bytes - self.sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Sizes of frames and windows, and the shares of classes."""

    frame_bytes_min: int = 4 << 10
    frame_bytes_max: int = 64 << 10
    frame_bytes_initial: int = 16 << 10
    frame_us: int = 1_500
    """Target time of one prefill frame on the link: the longest that a decode waits behind it."""
    window_gain: float = 1.25
    """Window of bulk in flight, as a multiple of bandwidth × base round trip. Above 1 it finds a
    link that became faster."""
    window_gain_starting: float = 2.5
    window_bytes_initial: int = 256 << 10
    urgent_bytes_max: int = 128 << 10
    """Maximum unread bytes beyond the window (two windows, if that is more). Beyond it even decodes
    wait here, where the other classes' shares still count."""
    prefill_share: float = 0.2
    """Share of the bytes for prefill while decodes wait too. Strict priority starves prefill near
    saturation."""
    bulk_share: float = 0.1
    """Share of bulk, of what decodes leave, while prefill waits too."""


class LinkScheduler:
    """One direction to one peer. Offer messages, ask for slices, report acknowledgements.

    Acknowledgements count the bytes of slices. Slices of a message come in order and without gaps;
    messages of one class come in the order in which they were offered.
    """

    def __init__(self, config: LinkConfig | None = None) -> None:
        self._config = config or LinkConfig()
        self.delivery = DeliveryEstimator()
        self._numbers = 0
        self._queues: dict[TrafficClass, deque[_Message]] = {
            traffic: deque() for traffic in TrafficClass
        }
        self._slow_sent = 0
        self._slow_released = 0
        self._owed = {TrafficClass.PREFILL: 0.0, TrafficClass.BULK: 0.0}
        self.queued_bytes = 0

    # Offers

    def offer(self, traffic: TrafficClass, size_bytes: int) -> int:
        """Queue a message; returns its number, which its slices carry."""
        if size_bytes < 1:
            raise ValueError("an empty message")
        self._numbers += 1
        message = _Message(number=self._numbers, traffic=traffic, size_bytes=size_bytes)
        self._queues[traffic].append(message)
        self.queued_bytes += size_bytes
        return message.number

    def waiting(self, traffic: TrafficClass) -> int:
        """Messages of a class that have not left wholly."""
        return len(self._queues[traffic])

    # Credits

    @property
    def frame_bytes(self) -> int:
        """The size of a prefill frame on this link now."""
        bandwidth = self.delivery.bandwidth_bytes_per_s
        if bandwidth <= 0:
            return self._config.frame_bytes_initial
        wanted = bandwidth * self._config.frame_us / 1e6
        return int(min(max(wanted, self._config.frame_bytes_min), self._config.frame_bytes_max))

    @property
    def window_bytes(self) -> int:
        """Prefill and bulk that may be in flight."""
        delivery, frame = self.delivery, self.frame_bytes
        bandwidth, least = delivery.bandwidth_bytes_per_s, 2 * frame
        if bandwidth <= 0:
            return max(self._config.window_bytes_initial, least)
        if delivery.probing:
            return least
        gain = self._config.window_gain_starting if delivery.starting else self._config.window_gain
        round_bytes = bandwidth * delivery.base_rtt_us / 1e6
        # A frame is acknowledged only when it was read whole, so one more must be on its way.
        return max(int(gain * round_bytes) + delivery.bunch_bytes + frame, least)

    @property
    def slow_in_flight_bytes(self) -> int:
        """Prefill and bulk on their way or held back by the peer; at most the window."""
        return self._slow_sent - self._slow_released

    def acknowledged(self, total_bytes: int, slow_bytes: int, now_us: int) -> None:
        """The peer has read ``total_bytes`` since the stream began and, of prefill and bulk, takes
        more than ``slow_bytes``: it may hold these credits back while it is behind with its work.

        Raises :class:`coordinator.policies.links.bandwidth_estimator.CreditError` for what cannot
        be; nothing changes then.
        """
        if not self._slow_released <= slow_bytes <= self._slow_sent:
            raise CreditError(
                f"credit for {slow_bytes} bytes after {self._slow_released}; {self._slow_sent}"
                " were sent"
            )
        self.delivery.acknowledged(total_bytes, now_us)
        self._slow_released = slow_bytes

    # Slices

    def next_slice(self, now_us: int, *, urgent_only: bool = False) -> Slice | None:
        """What to write now; None: nothing, until an offer or an acknowledgement.

        With ``urgent_only``, prefill and bulk wait.
        """
        if not self.queued_bytes:
            return None
        chosen, limit = self._choose(now_us, urgent_only)
        if chosen is None:
            return None
        return self._take(chosen, limit, now_us)

    def _head(self, *classes: TrafficClass) -> _Message | None:
        for traffic in classes:
            if self._queues[traffic]:
                return self._queues[traffic][0]
        return None

    def _choose(self, _now_us: int, urgent_only: bool) -> tuple[_Message | None, float]:
        """The message whose turn it is, and how many of its bytes may leave."""
        frame = self.frame_bytes
        urgent = self._head(TrafficClass.CONTROL, TrafficClass.DECODE)
        window = self.window_bytes
        if self.delivery.in_flight_bytes >= window + max(self._config.urgent_bytes_max, 2 * window):
            return None, 0.0
        room = self.slow_in_flight_bytes + frame <= window and not urgent_only
        slow = self._slow(frame) if room else None
        if urgent is None:
            return slow, frame
        if slow is not None and self._owed[TrafficClass.PREFILL] >= min(frame, slow.rest_bytes):
            return slow, frame
        return urgent, self._config.frame_bytes_max

    def _slow(self, frame: int) -> _Message | None:
        """The prefill or bulk message whose turn it is."""
        prefill, bulk = self._head(TrafficClass.PREFILL), self._head(TrafficClass.BULK)
        if prefill is None or bulk is None:
            return prefill or bulk
        return bulk if self._owed[TrafficClass.BULK] >= min(frame, bulk.rest_bytes) else prefill

    def _take(self, message: _Message, limit: float, now_us: int) -> Slice:
        size = int(min(message.rest_bytes, limit))
        offset = message.sent_bytes
        message.sent_bytes += size
        self.queued_bytes -= size
        last = message.rest_bytes == 0
        if last:
            self._queues[message.traffic].popleft()
        self._settle(message.traffic, size)
        if message.traffic >= TrafficClass.PREFILL:
            self._slow_sent += size
        self.delivery.sent(size, now_us, limited=self._limited())
        return Slice(
            number=message.number,
            traffic=message.traffic,
            offset=offset,
            size_bytes=size,
            last=last,
        )

    def _limited(self) -> bool:
        """Whether, from now on, the sender and not the link is the limit."""
        return self.queued_bytes == 0 and self.delivery.in_flight_bytes < self.window_bytes

    def _settle(self, traffic: TrafficClass, size: int) -> None:
        """Book what the classes behind are owed; never more than one frame, so that a decode
        is never behind more than one frame of theirs."""
        frame, prefill, bulk = self.frame_bytes, TrafficClass.PREFILL, TrafficClass.BULK
        if traffic <= TrafficClass.DECODE:
            self._owe(prefill, size, self._config.prefill_share, frame)
        else:
            self._owed[prefill] = max(0.0, self._owed[prefill] - size)
            if traffic is prefill:
                self._owe(bulk, size, self._config.bulk_share, frame)
            else:
                self._owed[bulk] = max(0.0, self._owed[bulk] - size)
        waiting = self.waiting(prefill), self.waiting(bulk)
        if not any(waiting):
            self._owed[prefill] = 0.0
        if not all(waiting):
            self._owed[bulk] = 0.0

    def _owe(self, traffic: TrafficClass, size: int, share: float, frame: int) -> None:
        grown = self._owed[traffic] + size * share / (1 - share)
        self._owed[traffic] = min(grown, float(frame))
