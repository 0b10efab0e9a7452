"""The network's time for who asks full peers: this machine's clock, unless theirs differ. Pure.

Records live for seconds, so a clock that is a minute off would show an empty network. Full peers
say their time with each answer. What they said is kept against a clock that never jumps, so a
correction outlives a jump of this machine's clock.

A helper that lies alone moves nothing while this machine's clock, or another helper's, is right:
of all that was said, what is nearest to this machine's clock counts.
"""

from collections.abc import Callable

CLOCK_S = 10.0
"""Difference of clocks up to which this machine's counts as right: records have that much slack."""
HELPERS_MAX = 8
"""Number of helpers whose word is kept, the newest."""


class NetworkClock:
    """Unix seconds as the network counts them."""

    def __init__(self, wall: Callable[[], float], steady: Callable[[], float]) -> None:
        """``wall`` is this machine's clock in Unix seconds, ``steady`` one that never jumps."""
        self._wall = wall
        self._steady = steady
        self._ahead_s: dict[str, float] = {}
        """Each helper's clock less ``steady``, by peer id; the newest last."""

    def heard(self, peer_id: str, theirs_unix_s: float) -> None:
        """A helper said what time it is."""
        self._ahead_s.pop(peer_id, None)
        self._ahead_s[peer_id] = theirs_unix_s - self._steady()
        if len(self._ahead_s) > HELPERS_MAX:
            del self._ahead_s[next(iter(self._ahead_s))]

    @property
    def behind_s(self) -> float:
        """Seconds by which this machine's clock is behind the network's, negative where it is
        ahead; 0 where they agree within ``CLOCK_S``."""
        own_s = self._wall() - self._steady()
        nearest_s = min((each - own_s for each in self._ahead_s.values()), key=abs, default=0.0)
        return nearest_s if abs(nearest_s) > CLOCK_S else 0.0

    def now(self) -> float:
        """The network's time, in Unix seconds."""
        return self._wall() + self.behind_s

    @property
    def note(self) -> str:
        """What is wrong with this machine's clock, for people; empty where it agrees."""
        apart_s = self.behind_s
        if not apart_s:
            return ""
        way = "behind" if apart_s > 0 else "ahead of"
        return f"this machine's clock is {abs(apart_s):.0f} s {way} its peers': set it"
