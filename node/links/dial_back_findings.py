"""What follows from what others found who dialled this peer back. Pure: time is an argument.

Anybody may lie about what it found. So nothing is concluded from one peer that did not get through,
and of each peer only the newest word counts.
"""

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dht.messages.peer import ReachAnswer
from dht.messages.types import Reach

NEWEST = 6
"""So many peers' words count, the newest: two looks at three each."""
KEPT_S = 3600.0
FAILED_MIN = 2
"""Fewer peers that did not get through mean nothing."""
OUTVOTED = 3
"""So many of them outweigh one that says it did, as a liar might."""
RETURN_MIN = 2
"""So many must get through before a closed peer counts as open, where others did not."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """The newest word of each peer that was asked, and what this peer makes of them."""

    closed: bool = False
    """Whether others cannot get through. Changes with :meth:`conclude` only."""
    _said: dict[str, tuple[ReachAnswer, float]] = field(default_factory=dict)

    def note(self, peer_id: str, answer: ReachAnswer | None, now_s: float) -> None:
        """What ``peer_id`` found; None and "cannot say" leave its last word standing."""
        if answer is None or answer.reached is None:
            return
        self._said.pop(peer_id, None)
        self._said[peer_id] = (answer, now_s)
        while len(self._said) > 2 * NEWEST:
            del self._said[next(iter(self._said))]

    @property
    def suspect(self) -> bool:
        """Whether a relay is worth having: somebody did not get through, and nobody did."""
        reached, failed = self.counts
        return self.closed or (failed > 0 and not reached)

    @property
    def counts(self) -> tuple[int, int]:
        """How many of the words that count say that they got through, and how many not."""
        counted = self._counted()
        reached = sum(bool(each.reached) for each in counted)
        return reached, len(counted) - reached

    @property
    def host(self) -> str:
        """The public address that those who got through dialled; empty where none is known.

        Where they differ, the one that most of them name.
        """
        hosts = [each.host for each in self._counted() if each.reached and is_public(each.host)]
        return Counter(hosts).most_common(1)[0][0] if hosts else ""

    def conclude(self, now_s: float, *, relayed: bool) -> Reach:
        """How others reach this peer; ``relayed``: a relay takes calls for it."""
        self._said = {p: said for p, said in self._said.items() if now_s - said[1] < KEPT_S}
        reached, failed = self.counts
        if self.closed:
            open_again = reached > failed and (reached >= RETURN_MIN or not failed)
            self.closed = not open_again
        else:
            self.closed = failed >= max(FAILED_MIN, OUTVOTED * reached)
        if reached and not self.closed:
            return Reach.DIRECT
        if relayed and self.suspect:
            return Reach.RELAYED
        return Reach.NONE if self.closed else Reach.UNKNOWN

    def _counted(self) -> Sequence[ReachAnswer]:
        """The words that count. A neighbour on the same local network gets through where the
        world does not, so it counts only where nobody looked from outside."""
        said = [answer for answer, _ in self._said.values()]
        outside = [answer for answer in said if is_public(answer.host)]
        return (outside or said)[-NEWEST:]


def is_public(host: str) -> bool:
    """Whether an IP address is one of the internet's."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False
