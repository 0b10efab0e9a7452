"""What a link carries, estimated from acknowledged delivery alone: no added traffic.

Bandwidth is the greatest delivery rate of about ten round trips, the base round trip the least of
ten seconds (the model of BBR: Cardwell et al., ACM Queue 2016). A sample that was taken while the
sender had nothing more to send says only that the link carries at least so much: it may raise the
estimate and never lowers it.

Where the reader looks away now and then (a busy machine, Wi-Fi), acknowledgements come in bunches,
and a window of bandwidth × base round trip would leave the link idle in between: the rate falls,
the window with it, and so on. What came in a bunch beyond the estimated rate is therefore allowed
in flight on top (BBR's ``extra_acked``: Cardwell et al., IETF 105, 2019). Pure: time is an
argument, in microseconds.
"""

from collections import deque
from dataclasses import dataclass

ROUNDS = 10
"""A delivery rate counts for so many base round trips in which the link was the limit…"""
RATE_LIFE_US_MIN = 100_000
"""…and for so long at least, because a busy machine's shortest round trips are noise."""
BASE_RTT_LIFE_US = 10_000_000
"""The least round trip counts for so long; then it is measured anew over an emptied link."""
STARTUP_GROWTH = 1.25
"""While a round still raises the rate by so much, the link's limit was not reached yet."""
STARTUP_ROUNDS = 3
"""So many rounds without that growth end the start-up."""
BUNCH_ROUNDS = 10
"""A bunch of acknowledgements counts for so many round trips of data…"""
BUNCH_US_MAX = 100_000
"""…for what the link carries in so long at most…"""
BUNCH_BYTES_MAX = 2 << 20
"""…and for so much, which bounds what waits at a reader on a fast link."""
RTT_INITIAL_US = 100_000
KNOWN_US = 300_000
"""Of saturation, after which the estimate is worth telling others."""
SAMPLES_MAX = 4096
"""Frames in flight that are remembered; more than any window here lets out."""


class CreditError(ValueError):
    """The other side acknowledged bytes that were never sent, or took an acknowledgement back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A frame in flight and what was known when it left."""

    end_bytes: int
    """Bytes sent up to and with this frame."""
    sent_us: int
    first_sent_us: int
    """When the frame left whose delivery opened this one's interval."""
    delivered_bytes: int
    delivered_us: int
    limited: bool
    """Nothing more waited behind it: the sender, not the link, was the limit."""


class DeliveryEstimator:
    """One direction of one link. Feed it every frame that leaves and every acknowledgement."""

    def __init__(self) -> None:
        self._flight: deque[_Sent] = deque()
        self._first_sent_us = 0
        self._delivered_us = 0
        self._rates: deque[tuple[int, float]] = deque()  # (busy time, bytes/s), rates falling
        self._busy_us = 0
        self._base_us: int | None = None
        self._base_at_us = 0
        self._probe_bytes: int | None = None
        self._probe_emptied = False
        self._probe_best_us: int | None = None
        self._round_ends_bytes = 0
        self._full_rate = 0.0
        self._flat_rounds = 0
        self._rounds = 0
        self._bunch_since_us = 0
        self._bunch_bytes = 0
        self._bunches: deque[tuple[int, float]] = deque()  # (round, bytes), bytes falling
        self.sent_bytes = 0
        self.delivered_bytes = 0
        self.rtt_us = 0
        """The latest round trip, the reader's waiting included; 0 before the first."""

    @property
    def in_flight_bytes(self) -> int:
        """Sent and not acknowledged."""
        return self.sent_bytes - self.delivered_bytes

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The estimate; 0 before the first acknowledgement."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def base_rtt_us(self) -> int:
        """The least round trip of the last ten seconds; an assumed one before the first."""
        return RTT_INITIAL_US if self._base_us is None else self._base_us

    @property
    def bunch_bytes(self) -> int:
        """How far acknowledgements lately ran ahead of the rate: to be allowed in flight, too."""
        most = self.bandwidth_bytes_per_s * BUNCH_US_MAX / 1e6
        return int(min(self._bunches[0][1], most, BUNCH_BYTES_MAX)) if self._bunches else 0

    @property
    def known(self) -> bool:
        """Whether the link was the limit for long enough to say what it carries."""
        return not self.starting and self._busy_us >= KNOWN_US

    @property
    def probing(self) -> bool:
        """Whether little may be in flight now, so that the round trip can be seen without our own
        queue: two round trips every ten seconds, and when the start-up ends."""
        return self._probe_bytes is not None

    @property
    def starting(self) -> bool:
        """Whether the link's limit was not reached yet."""
        return self._flat_rounds < STARTUP_ROUNDS

    def sent(self, size_bytes: int, now_us: int, *, limited: bool) -> None:
        """A frame of ``size_bytes`` left; ``limited``: nothing more waits to be sent."""
        if not self._flight:
            self._first_sent_us = self._delivered_us = now_us
        self.sent_bytes += size_bytes
        if len(self._flight) < SAMPLES_MAX:
            self._flight.append(
                _Sent(
                    end_bytes=self.sent_bytes,
                    sent_us=now_us,
                    first_sent_us=self._first_sent_us,
                    delivered_bytes=self.delivered_bytes,
                    delivered_us=self._delivered_us,
                    limited=limited,
                )
            )

    def acknowledged(self, total_bytes: int, now_us: int) -> None:
        """The other side has read ``total_bytes`` since the stream began. Raises CreditError."""
        if total_bytes > self.sent_bytes:
            raise CreditError(f"{total_bytes} bytes acknowledged, {self.sent_bytes} were sent")
        if total_bytes < self.delivered_bytes:
            raise CreditError(f"{total_bytes} bytes acknowledged after {self.delivered_bytes}")
        newest: _Sent | None = None
        while self._flight and self._flight[0].end_bytes <= total_bytes:
            newest = self._flight.popleft()
        self._take_bunch(total_bytes - self.delivered_bytes, now_us)
        self.delivered_bytes = total_bytes
        if newest is None:
            return
        since_us = now_us - self._delivered_us
        self._delivered_us = now_us
        self._first_sent_us = newest.sent_us
        self._take_rtt(max(1, now_us - newest.sent_us), now_us)
        if newest.delivered_bytes >= self._round_ends_bytes:
            self._next_round()
        # Acknowledgements that arrive bunched would show a rate that no link had: the longer of
        # the times in which the bytes left and arrived counts.
        took_us = max(now_us - newest.delivered_us, newest.sent_us - newest.first_sent_us, 1)
        rate = (total_bytes - newest.delivered_bytes) / took_us * 1e6
        if not newest.limited:
            self._busy_us += min(since_us, self.rtt_us)
        self._take_rate(rate, limited=newest.limited)

    def _take_rtt(self, rtt_us: int, now_us: int) -> None:
        self.rtt_us = rtt_us
        if self._base_us is None or rtt_us <= self._base_us:
            self._base_us, self._base_at_us = rtt_us, now_us
        if self._probe_bytes is None:
            if now_us - self._base_at_us > BASE_RTT_LIFE_US:
                self._start_probe()
            return
        if self._probe_emptied:
            self._probe_best_us = min(rtt_us, self._probe_best_us or rtt_us)
        if self.delivered_bytes < self._probe_bytes:
            return
        if not self._probe_emptied:  # what was queued is gone: what leaves from now on tells
            self._probe_emptied = True
            self._probe_bytes = self.sent_bytes + 1
        elif self._probe_best_us is not None:
            self._base_us, self._base_at_us = self._probe_best_us, now_us
            self._probe_bytes = None

    def _start_probe(self) -> None:
        self._probe_bytes = self.sent_bytes
        self._probe_emptied = False
        self._probe_best_us = None

    def _take_bunch(self, acked_bytes: int, now_us: int) -> None:
        due = self.bandwidth_bytes_per_s * (now_us - self._bunch_since_us) / 1e6
        if self._bunch_bytes <= due:  # what runs ahead is counted from when nothing did
            self._bunch_since_us, self._bunch_bytes, due = now_us, 0, 0.0
        self._bunch_bytes += acked_bytes
        ahead = self._bunch_bytes - due
        while self._bunches and self._bunches[-1][1] <= ahead:
            self._bunches.pop()
        if not self._bunches or self._bunches[-1][0] < self._rounds:  # one a round: bounded
            self._bunches.append((self._rounds, ahead))
        while self._rounds - self._bunches[0][0] > BUNCH_ROUNDS:
            self._bunches.popleft()

    def _take_rate(self, rate: float, *, limited: bool) -> None:
        if limited and rate < self.bandwidth_bytes_per_s:
            return
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((self._busy_us, rate))
        life_us = max(ROUNDS * self.base_rtt_us, 2 * self.rtt_us, RATE_LIFE_US_MIN)
        while len(self._rates) > 1 and self._busy_us - self._rates[0][0] > life_us:
            self._rates.popleft()

    def _next_round(self) -> None:
        """A round trip's worth of data was delivered."""
        self._round_ends_bytes = self.sent_bytes
        self._rounds += 1
        if not self.starting:
            return
        if self.bandwidth_bytes_per_s >= STARTUP_GROWTH * self._full_rate:
            self._full_rate = self.bandwidth_bytes_per_s
            self._flat_rounds = 0
        elif self._full_rate:
            self._flat_rounds += 1
            if self._flat_rounds == STARTUP_ROUNDS:
                self._start_probe()
