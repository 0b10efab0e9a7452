"""Sees a clock that jumps: it was set, or the machine slept. Pure.

Records expire by the clock. Those that a peer announced under another clock are refused by others,
or have expired, so the peer announces again.
"""

from dataclasses import dataclass

JUMP_S = 5.0
"""Difference between the wall clock's and the steady clock's progress from one look to the next
that is a jump; a time server slews by less than a millisecond a second."""


@dataclass(slots=True)
class ClockWatch:
    """Compares the wall clock with a steady one, look by look."""

    _apart_s: float | None = None

    def look(self, wall_s: float, steady_s: float) -> float:
        """The jump of the wall clock since the last look in seconds, negative where it was set
        back; 0.0 where there was none."""
        before_s, self._apart_s = self._apart_s, wall_s - steady_s
        if before_s is None or abs(self._apart_s - before_s) < JUMP_S:
            return 0.0
        return self._apart_s - before_s


def jump_text(jump_s: float) -> str:
    """What the owner is told of a jump."""
    size, unit = abs(jump_s), "s"
    if size >= 7200:
        size, unit = size / 3600, "hours"
    way = "ahead" if jump_s > 0 else "back"
    return (
        f"Your clock jumped {size:.0f} {unit} {way} (it was set, or the machine slept): announcing"
        " again"
    )
