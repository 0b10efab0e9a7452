"""Decides when the owner lends nothing of the machine, and when it is free again. Pure.

The input is what was seen of the machine, with the time; the output is a decision with its reason.
:mod:`node.owner.machine_watch` looks at the machine, :mod:`node.peer.peer` drains and comes back.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MINUTES_OF_DAY = 24 * 60
"""Fixed by the clock."""
_WINDOW = re.compile(r"([01]\d|2[0-4]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A half-open part of the day, in minutes since midnight; wraps if ``end <= start``."""

    start: int
    end: int

    def holds(self, minute: int) -> bool:
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


def window_of(text: str) -> Window:
    """Parse ``HH:MM-HH:MM``; raises ValueError with the reason."""
    found = _WINDOW.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time of day such as 22:00-07:30")
    hours_from, minutes_from, hours_to, minutes_to = (int(part) for part in found.groups())
    start, end = 60 * hours_from + minutes_from, 60 * hours_to + minutes_to
    if start >= MINUTES_OF_DAY or end > MINUTES_OF_DAY or start == end:
        raise ValueError(f"{text!r} is no part of a day; 00:00-24:00 is all of it")
    return Window(start=start, end=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class UseConfig:
    """Conditions that make a peer step aside. By default there are none."""

    idle_only: bool = False
    """Step aside for other programs' work on the device, or somebody at the keyboard."""
    processes: frozenset[str] = frozenset()
    """Program names in lower case; the peer steps aside while any of them runs."""
    windows: tuple[Window, ...] = ()
    """Times of day to serve in; empty means always."""
    mains_only: bool = False
    """Step aside while the machine runs on its battery."""
    busy_share: float = 0.25
    """CPU share of other programs, over all cores, above which the machine counts as used."""
    input_s: float = 120.0
    """Time since the last keyboard input below which the user counts as present."""
    ahead_s: float = 5.0
    """Time by which an input's may be ahead of the clock, as the kernel rounds it. One that is
    further ahead was written before the clock was set back."""
    busy_for_s: float = 6.0
    """How long other work must last before it counts; programs, windows, input count at once."""
    calm_for_s: float = 60.0
    """How long the machine must be free before the peer comes back."""

    @property
    def watches(self) -> bool:
        """Whether any condition needs a look at the machine."""
        return self.idle_only or self.mains_only or bool(self.processes) or bool(self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Result of one look at the machine. None: cannot be seen here."""

    minute: int
    """Minute of the local day."""
    others_share: float = 0.0
    """CPU share, over all cores, of programs other than this peer's."""
    others_on_gpu: bool = False
    input_ago_s: float | None = None
    processes: frozenset[str] = frozenset()
    """Names of the running programs, in lower case."""
    on_battery: bool = False
    month_used: str = ""
    """Why nothing is left of the month's traffic; "": something is, or it has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAside:
    """Decision to drain and free the memory."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComeBack:
    """Decision to serve again."""


def why_aside(config: UseConfig, seen: Seen) -> tuple[str, bool] | None:
    """Why the owner lends nothing now, and whether that counts at once; None if it is free."""
    if seen.month_used:
        return seen.month_used, True
    if config.windows and not any(window.holds(seen.minute) for window in config.windows):
        return "it is not the time of day to serve in", True
    running = sorted(config.processes & seen.processes)
    if running:
        return f"{running[0]} runs", True
    if config.mains_only and seen.on_battery:
        return "this machine runs on its battery", True
    if not config.idle_only:
        return None
    if seen.input_ago_s is not None and seen.input_ago_s < config.input_s:
        return "somebody uses this machine", True
    if seen.others_on_gpu:
        return "another program uses the GPU", False
    if seen.others_share > config.busy_share:
        return f"other programs use {seen.others_share:.0%} of the CPU", False
    return None


@dataclass(slots=True, kw_only=True)
class OwnerUse:
    """Turns looks at the machine into decisions to step aside or come back, without flapping."""

    config: UseConfig
    aside: bool = False
    _busy_since_s: float | None = field(default=None)
    _calm_since_s: float | None = field(default=None)

    def step(self, seen: Seen, now_s: float) -> StepAside | ComeBack | None:
        """Decision after one look; None if nothing changes."""
        why = why_aside(self.config, seen)
        if why is None:
            self._busy_since_s = None
            since_s = self._calm_since_s = _first(self._calm_since_s, now_s)
            if self.aside and now_s - since_s >= self.config.calm_for_s:
                self.aside = False
                return ComeBack()
            return None
        reason, at_once = why
        self._calm_since_s = None
        since_s = self._busy_since_s = _first(self._busy_since_s, now_s)
        if not self.aside and (at_once or now_s - since_s >= self.config.busy_for_s):
            self.aside = True
            return StepAside(reason=reason)
        return None


def _first(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s


def names_of(programs: Iterable[str]) -> frozenset[str]:
    """Program names in the form that is compared: lower case, without Windows' ``.exe``."""
    return frozenset(name.lower().removesuffix(".exe") for name in programs if name)
