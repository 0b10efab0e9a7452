"""Concludes from dial-backs whether others can reach this peer. Pure: time is an argument.

Any peer may lie about what it found. So a single failed dial-back proves nothing, and only the
newest answer of each peer counts.
"""

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dht.messages.peer import ReachAnswer
from dht.messages.types import Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsConfig:
    """How long what a dial-back found is kept."""

    newest: int = 6
    """Number of newest answers that count: two looks at three peers each."""
    kept_s: float = 3600.0
    failed_min: int = 2
    """Minimum number of failed dial-backs from which anything is concluded."""
    outvoted: int = 3
    """Number of failed dial-backs that outweigh one success, which a liar might report."""
    return_min: int = 2
    """Minimum number of successes before a closed peer counts as open, if others failed."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """The newest answer of each peer that was asked, and what this peer concludes."""

    closed: bool = False
    """Whether others cannot get through; only :meth:`conclude` changes it."""
    config: FindingsConfig = field(default_factory=FindingsConfig)
    _said: dict[str, tuple[ReachAnswer, float]] = field(default_factory=dict)

    def note(self, peer_id: str, answer: ReachAnswer | None, now_s: float) -> None:
        """Record the answer of ``peer_id``; None and "cannot say" leave its last one standing."""
        if answer is None or answer.reached is None:
            return
        self._said.pop(peer_id, None)
        self._said[peer_id] = (answer, now_s)
        while len(self._said) > 2 * self.config.newest:
            del self._said[next(iter(self._said))]

    @property
    def suspect(self) -> bool:
        """Whether a relay is worth having: a dial-back failed, and none succeeded."""
        reached, failed = self.counts
        return self.closed or (failed > 0 and not reached)

    @property
    def counts(self) -> tuple[int, int]:
        """Number of successes and of failures among the answers that count."""
        counted = self._counted()
        reached = sum(bool(each.reached) for each in counted)
        return reached, len(counted) - reached

    @property
    def host(self) -> str:
        """Public address that successful dial-backs used; empty if unknown.

        If they differ, the most frequent address.
        """
        hosts = [each.host for each in self._counted() if each.reached and is_public(each.host)]
        return Counter(hosts).most_common(1)[0][0] if hosts else ""

    def conclude(self, now_s: float, *, relayed: bool) -> Reach:
        """How others reach this peer; ``relayed``: whether a relay takes calls for it."""
        self._said = {
            p: said for p, said in self._said.items() if now_s - said[1] < self.config.kept_s
        }
        reached, failed = self.counts
        if self.closed:
            open_again = reached > failed and (reached >= self.config.return_min or not failed)
            self.closed = not open_again
        else:
            self.closed = failed >= max(self.config.failed_min, self.config.outvoted * reached)
        if reached and not self.closed:
            return Reach.DIRECT
        if relayed and self.suspect:
            return Reach.RELAYED
        return Reach.NONE if self.closed else Reach.UNKNOWN

    def _counted(self) -> Sequence[ReachAnswer]:
        """The answers that count.

        A neighbour on the same local network gets through where peers outside cannot, so its answer
        counts only if nobody looked from outside.
        """
        said = [answer for answer, _ in self._said.values()]
        outside = [answer for answer in said if is_public(answer.host)]
        return (outside or said)[-self.config.newest :]


def is_public(host: str) -> bool:
    """Whether ``host`` is a public IP address, without the zone that may follow it: any text."""
    try:
        return "%" not in host and ipaddress.ip_address(host).is_global
    except ValueError:
        return False
