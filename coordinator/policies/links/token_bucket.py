"""The owner's limits on the connection: an average rate, and bytes per month.

A decode frame is small, and delay on it costs every token, so decodes may run ahead of the rate by
a bounded debt, which prefill and bulk then wait off. All bytes are booked, so the average rate
holds whatever the traffic is.

Pure: time is an argument, in microseconds or Unix seconds; sizes are bytes.
"""

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """What may be sent at once above the rate."""

    burst_s: float = 0.05
    """Burst, in seconds at the rate: unused rate of this much time may be sent at once."""
    debt_s: float = 0.1
    """Maximum debt of decodes, in seconds at the rate."""
    burst_bytes_least: int = 16 << 10
    """Minimum burst and debt: one whole frame fits at the slowest rate."""


BUCKET = BucketConfig()


class Allowance:
    """A virtual schedule (GCRA) on which all bytes are booked.

    Its state is one time: when all booked bytes have passed at the rate. Asking does not change
    it, so a sender that waits as told is let through, despite rounding of floats.
    ``rate_bytes_per_s`` may be infinite: then nothing ever waits.
    """

    def __init__(self, rate_bytes_per_s: float = math.inf) -> None:
        if not rate_bytes_per_s > 0:
            raise ValueError(f"a rate of {rate_bytes_per_s} bytes/s")
        self.rate_bytes_per_s = rate_bytes_per_s
        frame_us = BUCKET.burst_bytes_least / rate_bytes_per_s * 1e6
        self._burst_us = max(BUCKET.burst_s * 1e6, frame_us)
        self._debt_us = max(BUCKET.debt_s * 1e6, frame_us)
        self._paid_at_us = -math.inf

    @property
    def limited(self) -> bool:
        """Whether there is a rate to keep."""
        return self.rate_bytes_per_s < math.inf

    def spend(self, size_bytes: int, now_us: int) -> None:
        """Book bytes that leave or arrive now, even if they should have waited."""
        if self.limited:
            begun_us = max(self._paid_at_us, now_us - self._burst_us)
            self._paid_at_us = begun_us + size_bytes / self.rate_bytes_per_s * 1e6

    def wait_us(self, now_us: int, *, urgent: bool = False) -> int:
        """Microseconds until the next bytes may leave; 0: now.

        ``urgent`` bytes (decodes) may use the debt.
        """
        free_at_us = self._paid_at_us - (self._debt_us if urgent else 0.0)
        return 0 if free_at_us <= now_us else math.ceil(free_at_us) - now_us


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthlyUse:
    """Bytes sent and received in one calendar month (UTC)."""

    month: str
    """The month, for example ``2026-11``."""
    used_bytes: int = 0
    before: "MonthlyUse | None" = None
    """The use of the month that counted before this one. A clock may be wrong for a while, such as
    before it is set at a start, and what was used must count again once it is right."""

    @classmethod
    def at(cls, unix_s: float) -> "MonthlyUse":
        """Nothing used yet in the month of ``unix_s``."""
        return cls(month=datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m"))

    def spent(self, size_bytes: int, unix_s: float) -> "MonthlyUse":
        """This month's use with ``size_bytes`` more; a new month starts from nothing."""
        now = MonthlyUse.at(unix_s)
        if self.month != now.month:
            known = self.before if self.before and self.before.month == now.month else now
            now = replace(known, before=replace(self, before=None))
        else:
            now = self
        return replace(now, used_bytes=now.used_bytes + size_bytes)

    @property
    def next_month(self) -> str:
        """The day on which the count restarts, for example ``2026-12-01``."""
        year, month = (int(part) for part in self.month.split("-"))
        return f"{year + month // 12}-{month % 12 + 1:02d}-01"
