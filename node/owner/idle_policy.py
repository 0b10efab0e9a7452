"""When a volunteer's machine is wanted by its owner, and when it is free again.

Pure: what was seen of the machine goes in with the time, a decision with its reason comes out.
:mod:`node.owner.machine_watch` looks at the machine, :mod:`node.peer.peer` drains and comes back.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MINUTES_OF_DAY = 24 * 60
_WINDOW = re.compile(r"([01]\d|2[0-4]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of the day in minutes since midnight, half-open; ``end <= start`` wraps around it."""

    start: int
    end: int

    def holds(self, minute: int) -> bool:
        """Whether ``minute`` of the day is in it."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


def window_of(text: str) -> Window:
    """``HH:MM-HH:MM`` as a window; raises ValueError with what is wrong."""
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
    """What makes a peer step aside. By default nothing does."""

    idle_only: bool = False
    """Other programs' work on the device, or somebody at the keyboard."""
    processes: frozenset[str] = frozenset()
    """Names of programs, in lower case; one that runs is enough."""
    windows: tuple[Window, ...] = ()
    """Times of day to serve in; none means always."""
    busy_share: float = 0.25
    """Of all cores' time: what others may use on an idle machine."""
    input_s: float = 120.0
    """Somebody who typed within so long is still there."""
    busy_for_s: float = 6.0
    """Other work must last so long; programs, windows and input count at once."""
    calm_for_s: float = 60.0
    """All must be calm for so long before the peer comes back."""

    @property
    def watches(self) -> bool:
        """Whether there is anything to look at."""
        return self.idle_only or bool(self.processes) or bool(self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one look at the machine found. None: cannot be seen here."""

    minute: int
    """Of the local day."""
    others_share: float = 0.0
    """Share of all cores' time that went to programs other than this peer's."""
    others_on_gpu: bool = False
    input_ago_s: float | None = None
    processes: frozenset[str] = frozenset()
    """Names of what runs, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAside:
    """Drain and free the memory."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComeBack:
    """Serve again."""


def why_aside(config: UseConfig, seen: Seen) -> tuple[str, bool] | None:
    """Why the owner wants the machine now, and whether that counts at once; None: it is free."""
    if config.windows and not any(window.holds(seen.minute) for window in config.windows):
        return "it is not the time of day to serve in", True
    running = sorted(config.processes & seen.processes)
    if running:
        return f"{running[0]} runs", True
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
    """Turns looks at the machine into steps aside and returns, without flapping."""

    config: UseConfig
    aside: bool = False
    _busy_since_s: float | None = field(default=None)
    _calm_since_s: float | None = field(default=None)

    def step(self, seen: Seen, now_s: float) -> StepAside | ComeBack | None:
        """What to do after one look; None: nothing changes."""
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
    """Programs' names as they are compared: in lower case, without Windows' ending."""
    return frozenset(name.lower().removesuffix(".exe") for name in programs if name)
