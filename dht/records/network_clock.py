"""The network's time for who asks full peers: this machine's clock, unless theirs differ. Pure.

Records live for seconds, so a clock that is a minute off would show an empty network. Full peers
say their time with each answer. What they said is kept against a clock that never jumps and goes on
while the machine sleeps, so a correction outlives a jump of this machine's clock.

What most parties say counts, within ``CLOCK_S``; where as many say different things, what is
nearest to this machine's clock. So a helper that lies alone moves nothing while another agrees with
this machine's clock, and keeps no clock wrong that two others would correct. A party is an address
prefix of helpers that the owner named, since identities are free. All others are one party
together: they say themselves where they are. One party alone moves a clock by a day at most: it may
be the only one there is, and a clock that was set for another time zone is no further off.
"""

from collections.abc import Callable
from typing import ClassVar

from dht.budget import prefix_of

CLOCK_S = 10.0
"""Difference of clocks up to which this machine's counts as right: records have that much slack."""
HELPERS_MAX = 8
"""Number of helpers whose word is kept, the newest."""
STRANGERS = "strangers"
"""The party of helpers that the owner did not name."""


class NetworkClock:
    """Unix seconds as the network counts them."""

    ALONE_S_MAX: ClassVar = 86_400.0
    """Maximum correction on the word of one party."""

    def __init__(self, wall: Callable[[], float], steady: Callable[[], float]) -> None:
        """``wall`` is this machine's clock in Unix seconds, ``steady`` one that never jumps, and
        goes on while the machine sleeps."""
        self._wall = wall
        self._steady = steady
        self._said: dict[str, tuple[float, str]] = {}
        """Each helper's clock less ``steady``, and its party, by peer id; the newest last."""

    def heard(self, peer_id: str, theirs_unix_s: float, host: str | None = "") -> None:
        """A helper said what time it is. ``host`` is the address that the owner gave for it, ""
        where that is no IP address; None: the owner did not name it."""
        party = STRANGERS if host is None else prefix_of(host) or peer_id
        self._said.pop(peer_id, None)
        self._said[peer_id] = theirs_unix_s - self._steady(), party
        if len(self._said) > HELPERS_MAX:
            parties = [party for _, party in self._said.values()]
            most = max(parties, key=parties.count)  # the oldest of those that say the most
            del self._said[next(each for each, (_, party) in self._said.items() if party == most)]

    @property
    def behind_s(self) -> float:
        """Seconds by which this machine's clock is behind the network's, negative where it is
        ahead; 0 where they agree within ``CLOCK_S``."""
        behind_s, parties = self._found()
        return behind_s if parties > 1 or abs(behind_s) <= self.ALONE_S_MAX else 0.0

    def _found(self) -> tuple[float, int]:
        """By how much this machine's clock is behind by what counts, and how many say that."""
        own_s = self._wall() - self._steady()
        said = self._said.values()
        behind_s, parties = 0.0, 0
        for ahead_s, _ in said:
            agree = len({party for other_s, party in said if abs(other_s - ahead_s) <= CLOCK_S})
            if (agree, -abs(ahead_s - own_s)) > (parties, -abs(behind_s)):
                behind_s, parties = ahead_s - own_s, agree
        return (behind_s if abs(behind_s) > CLOCK_S else 0.0), parties

    def now(self) -> float:
        """The network's time, in Unix seconds."""
        return self._wall() + self.behind_s

    @property
    def note(self) -> str:
        """What is wrong with this machine's clock, for people; empty where it agrees."""
        apart_s, _ = self._found()
        if not apart_s:
            return ""
        way = "behind" if apart_s > 0 else "ahead of"
        return f"this machine's clock is {abs(apart_s):.0f} s {way} its peers': set it"
