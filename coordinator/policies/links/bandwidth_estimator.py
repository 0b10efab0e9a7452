"""Estimates a link's bandwidth and round trip from acknowledgements, without probe traffic.

The method is BBR's (Cardwell et al., ACM Queue 2016): bandwidth is the maximum delivery rate of
about ten round trips, and the base round trip is the minimum of ten seconds. A rate sample taken
while the sender had nothing more to send is only a lower bound: it may raise the estimate and never
lowers it.

A reader that pauses now and then (a busy machine, Wi-Fi) acknowledges in bunches. A window of
bandwidth × base round trip would leave the link idle between bunches, so the measured rate would
fall, and the window with it, again and again. The window therefore adds the bytes that a bunch
acknowledged beyond the estimated rate (BBR's ``extra_acked``: Cardwell et al., IETF 105, 2019).
Pure: time is an argument, in microseconds.
"""

from collections import deque
from dataclasses import dataclass


class CreditError(ValueError):
    """The other side acknowledged bytes that were never sent, or took an acknowledgement back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A frame in flight, and the estimator's state when it left."""

    end_bytes: int
    """Total bytes sent, this frame included."""
    sent_us: int
    first_sent_us: int
    """When the newest frame had left of those delivered before this one left."""
    delivered_bytes: int
    delivered_us: int
    limited: bool
    """Whether the sender was the limit: nothing waited to be sent behind this frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryConfig:
    """How long samples of a link count, and how much may be in flight."""

    rounds: int = 10
    """Lifetime of a rate sample, in base round trips during which the link was the limit."""
    rate_life_us_min: int = 100_000
    """Minimum lifetime of a rate sample: a busy machine's shortest round trips are noise."""
    base_rtt_life_us: int = 10_000_000
    """Lifetime of the base round trip; then it is measured again over an emptied link."""
    startup_growth: float = 1.25
    """Rate ratio between rounds at or above which the start-up goes on."""
    startup_rounds: int = 3
    """Consecutive rounds below ``startup_growth`` that end the start-up."""
    bunch_rounds: int = 10
    """Lifetime of a bunch of acknowledgements, in round trips of data."""
    bunch_us_max: int = 100_000
    """Maximum allowance for a bunch, as time at the estimated bandwidth."""
    bunch_bytes_max: int = 2 << 20
    """Maximum allowance for a bunch in bytes: bounds what waits at the reader of a fast link."""
    rtt_initial_us: int = 100_000
    known_us: int = 300_000
    """Minimum time with the link as the limit before the estimate is published."""
    samples_max: int = 4096
    """Maximum number of frames in flight that are tracked; more than any window here allows."""


DELIVERY = DeliveryConfig()


class DeliveryEstimator:
    """One direction of one link, told of every frame that leaves and every acknowledgement."""

    def __init__(self) -> None:
        self._flight: deque[_Sent] = deque()
        self._first_sent_us = 0
        self._delivered_us = 0
        self._rates: deque[tuple[int, float]] = deque()  # (busy time, bytes/s), rates falling
        self.busy_us = 0
        """Time for which the link was the limit, since the stream began."""
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
        """The latest round trip, including the time data waited at the reader; 0: none yet."""

    @property
    def in_flight_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return self.sent_bytes - self.delivered_bytes

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The estimated bandwidth; 0 before the first acknowledgement."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def base_rtt_us(self) -> int:
        """The minimum round trip of the last ten seconds; ``rtt_initial_us`` before the first."""
        return DELIVERY.rtt_initial_us if self._base_us is None else self._base_us

    @property
    def bunch_bytes(self) -> int:
        """Bytes by which recent acknowledgements ran ahead of the rate: added to the window."""
        most = self.bandwidth_bytes_per_s * DELIVERY.bunch_us_max / 1e6
        return int(min(self._bunches[0][1], most, DELIVERY.bunch_bytes_max)) if self._bunches else 0

    @property
    def known(self) -> bool:
        """Whether the link was the limit for long enough to trust the estimate."""
        return not self.starting and self.busy_us >= DELIVERY.known_us

    @property
    def probing(self) -> bool:
        """Whether the window must be small now, to measure the round trip without our own queue:
        two round trips every ten seconds, and when the start-up ends."""
        return self._probe_bytes is not None

    @property
    def starting(self) -> bool:
        """Whether the rate still grows: the link's limit was not reached yet."""
        return self._flat_rounds < DELIVERY.startup_rounds

    def sent(self, size_bytes: int, now_us: int, *, limited: bool) -> None:
        """Record a frame of ``size_bytes`` that left; ``limited``: nothing waits behind it."""
        if not self._flight:
            self._first_sent_us = self._delivered_us = now_us
        self.sent_bytes += size_bytes
        if len(self._flight) < DELIVERY.samples_max:
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
        """Record that the other side has read ``total_bytes`` since the stream began.

        Raises CreditError where that exceeds the bytes sent or falls below an earlier total.
        """
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
        # Bunched acknowledgements would show a rate above the link's, so the rate is taken over the
        # longer of two intervals: that in which the bytes left and that in which they were
        # acknowledged.
        took_us = max(now_us - newest.delivered_us, newest.sent_us - newest.first_sent_us, 1)
        rate = (total_bytes - newest.delivered_bytes) / took_us * 1e6
        if not newest.limited:
            self.busy_us += min(since_us, self.rtt_us)
        self._take_rate(rate, limited=newest.limited)

    def _take_rtt(self, rtt_us: int, now_us: int) -> None:
        self.rtt_us = rtt_us
        if self._base_us is None or rtt_us <= self._base_us:
            self._base_us, self._base_at_us = rtt_us, now_us
        if self._probe_bytes is None:
            if now_us - self._base_at_us > DELIVERY.base_rtt_life_us:
                self._start_probe()
            return
        if self._probe_emptied:
            self._probe_best_us = min(rtt_us, self._probe_best_us or rtt_us)
        if self.delivered_bytes < self._probe_bytes:
            return
        if not self._probe_emptied:  # the queue is empty: frames sent from now on are measured
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
        if self._bunch_bytes <= due:  # nothing runs ahead of the rate: a new bunch begins
            self._bunch_since_us, self._bunch_bytes, due = now_us, 0, 0.0
        self._bunch_bytes += acked_bytes
        ahead = self._bunch_bytes - due
        while self._bunches and self._bunches[-1][1] <= ahead:
            self._bunches.pop()
        if not self._bunches or self._bunches[-1][0] < self._rounds:  # one per round: bounded
            self._bunches.append((self._rounds, ahead))
        while self._rounds - self._bunches[0][0] > DELIVERY.bunch_rounds:
            self._bunches.popleft()

    def _take_rate(self, rate: float, *, limited: bool) -> None:
        if limited and rate < self.bandwidth_bytes_per_s:
            return
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((self.busy_us, rate))
        life_us = max(
            DELIVERY.rounds * self.base_rtt_us, 2 * self.rtt_us, DELIVERY.rate_life_us_min
        )
        while len(self._rates) > 1 and self.busy_us - self._rates[0][0] > life_us:
            self._rates.popleft()

    def _next_round(self) -> None:
        """Count a round: one round trip's data was delivered."""
        self._round_ends_bytes = self.sent_bytes
        self._rounds += 1
        if not self.starting:
            return
        if self.bandwidth_bytes_per_s >= DELIVERY.startup_growth * self._full_rate:
            self._full_rate = self.bandwidth_bytes_per_s
            self._flat_rounds = 0
        elif self._full_rate:
            self._flat_rounds += 1
            if self._flat_rounds == DELIVERY.startup_rounds:
                self._start_probe()
