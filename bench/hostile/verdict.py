"""What an attack may cost, and whether it cost more. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most that an attack may cost the honest side."""

    peak_mib: float = 64.0
    """More memory of one process at any time, beyond what it takes without an attack."""
    after_mib: float = 8.0
    """More memory of one process that is left once what it collects has been collected."""
    ttft_times: float = 2.0
    """95th percentile of times to the first token, as a multiple of the one before."""
    slope_mib_per_min: float = 0.5
    """Growth of one process over the second half of a soak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answer as an honest caller saw it."""

    began_unix_s: float
    ttft_s: float | None
    failed: str | None
    """Why there was no answer, or not the one that the model gives."""
    planner: str = ""
    """The author of the plan that the caller's routes follow; empty: none, or not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one attack cost."""

    answers: int
    failed: tuple[str, ...]
    ttft_before_p95_s: float | None
    ttft_during_p95_s: float | None
    memory_mib: Mapping[str, tuple[float, float, float]]
    """By process: before, the largest during and after the attack, and what was left of it."""
    calm_mib: float
    """More memory of one process after as long without an attack: daemons grow by themselves."""
    ended: tuple[str, ...]
    """Processes that ended, and how."""
    joined: bool
    """Whether a newcomer joined and found the honest peers meanwhile."""
    peers: int
    following: int
    """Honest peers that serve and follow a plan at the end of the attack."""
    led_by_stranger: bool
    """Whether the honest peers follow an attacker as their coordinator."""
    steered: int
    """Answers whose callers followed an attacker's plan."""
    gained: int
    """What nobody may have (:class:`bench.hostile.attacker.Sent`)."""
    escapes: int
    """Characters that control a terminal, in what a command wrote."""

    @property
    def more_peak_mib(self) -> float:
        """Growth at the peak of the process that grew the most, in MiB."""
        return max((peak - before for before, peak, _ in self.memory_mib.values()), default=0.0)

    @property
    def more_after_mib(self) -> float:
        """Growth that was left in the process that kept the most, in MiB."""
        return left_mib(self.memory_mib)


def left_mib(memory_mib: Mapping[str, tuple[float, float, float]]) -> float:
    """Growth that is left in the process that kept the most (:attr:`Measured.memory_mib`)."""
    return max((after - before for before, _, after in memory_mib.values()), default=0.0)


def checks(measured: Measured, limits: Limits) -> dict[str, bool]:
    """Each condition, and whether it holds."""
    return {
        "answers": measured.answers > 0 and not measured.failed,
        "time": in_time(measured.ttft_before_p95_s, measured.ttft_during_p95_s, limits),
        "memory_peak": measured.more_peak_mib <= limits.peak_mib + measured.calm_mib,
        "memory_after": measured.more_after_mib <= limits.after_mib + measured.calm_mib,
        "processes": not measured.ended,
        "joining": measured.joined,
        "plans": measured.following == measured.peers and not measured.led_by_stranger,
        "clients_plans": not measured.steered,
        "gain": not measured.gained,
        "terminals": not measured.escapes,
    }


def in_time(before_s: float | None, during_s: float | None, limits: Limits) -> bool:
    """Whether first tokens came soon enough; not where there were none."""
    if before_s is None or during_s is None:
        return False
    return during_s <= limits.ttft_times * before_s


def row(measured: Measured, limits: Limits) -> dict[str, Any]:
    """The measurement with its verdict, as plain data."""
    found = checks(measured, limits)
    return {
        "ok": all(found.values()),
        "checks": found,
        "more_peak_mib": round(measured.more_peak_mib, 1),
        "more_after_mib": round(measured.more_after_mib, 1),
        **asdict(measured),
    }


def between(asked: Sequence[Asked], from_s: float, until_s: float) -> list[Asked]:
    """Answers that were begun within a stretch of Unix time."""
    return [each for each in asked if from_s <= each.began_unix_s < until_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How fast something grew, per minute, by a line through samples of it."""

    slope: float
    error: float
    """Standard error of the slope: what was held comes and goes."""

    def within(self, limit: float) -> bool:
        """Whether it is no faster than ``limit``, as far as the samples tell."""
        return self.slope - 2 * self.error <= limit


def growth_per_min(samples: Sequence[tuple[float, float]]) -> Growth:
    """Least-squares line through ``(seconds, value)`` pairs; 0 where there are too few."""
    if len(samples) < 3:
        return Growth(slope=0.0, error=0.0)
    mean_s = math.fsum(at for at, _ in samples) / len(samples)
    mean = math.fsum(value for _, value in samples) / len(samples)
    spread = math.fsum((at - mean_s) ** 2 for at, _ in samples)
    if not spread:
        return Growth(slope=0.0, error=0.0)
    slope = math.fsum((at - mean_s) * (value - mean) for at, value in samples) / spread
    left = math.fsum((value - mean - slope * (at - mean_s)) ** 2 for at, value in samples)
    error = math.sqrt(left / (len(samples) - 2) / spread)
    return Growth(slope=60.0 * slope, error=60.0 * error)
