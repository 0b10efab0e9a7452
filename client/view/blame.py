"""Which peer is taken to be at fault where a session failed and several may be the reason. Pure.

A stage that says that its neighbour failed may lie, and a stage whose rows are refused may have got
them so: only the link between the two is known to be bad. One case says nothing of which end; the
end that is in a second case, with another peer, is the likelier one. So a peer that lies or fails
is found after few cases, and no peer alone can have another avoided for good.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Peers of which one at least failed a session."""

    joined_unix_s: Mapping[str, float]
    """Present life of each peer."""
    until_s: float
    turns: Counter[str] = field(default_factory=Counter)
    """How often each was taken to be at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameConfig:
    """How many losses are remembered, and for how long."""

    case_s: float = 600.0
    """Time for which a case counts: far longer than a peer that failed is avoided."""
    cases_max: int = 256


BLAME = BlameConfig()


class Blame:
    """The cases that one client remembers. Times are those of the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._cases: dict[frozenset[str], Case] = {}

    def at_fault(self, suspects: tuple[str, ...], lives: Mapping[str, float], now_s: float) -> str:
        """The one of ``suspects`` that is taken to be at fault; likelier ones come first.

        It is the one in most other cases; among equals, each in turn. ``lives``: when each peer
        that seems to be well joined, in Unix seconds. A suspect that is not among them is at
        fault, whatever the other cases say.
        """
        for suspect in suspects:
            if suspect not in lives:
                return suspect
        key = frozenset(suspects)
        self._cases = {
            peers: case
            for peers, case in self._cases.items()
            if now_s < case.until_s
            and all(lives.get(peer) == at_s for peer, at_s in case.joined_unix_s.items())
        }
        before = self._cases.pop(key, None)
        others = Counter(self._charges())
        case = Case(
            joined_unix_s={peer: lives[peer] for peer in suspects},
            until_s=now_s + BLAME.case_s,
            turns=Counter() if before is None else before.turns,
        )
        found = min(suspects, key=lambda peer: (-others[peer], case.turns[peer]))
        case.turns[found] += 1
        if len(self._cases) >= BLAME.cases_max:
            del self._cases[next(iter(self._cases))]  # the oldest
        self._cases[key] = case
        return found

    def cleared(self, lives: Mapping[str, float]) -> set[str]:
        """Forget the cases that are explained by a suspect who is not among ``lives``; returns the
        peers that were taken to be at fault in its place."""
        explained = {peers for peers in self._cases if not peers <= lives.keys()}
        cases = [self._cases.pop(peers) for peers in explained]
        return {peer for case in cases for peer in case.turns if peer in lives}

    def _charges(self) -> Iterator[str]:
        """The peers that explain each case: those of its peers that are in most cases."""
        counts = Counter(peer for peers in self._cases for peer in peers)
        for peers in self._cases:
            most = max(counts[peer] for peer in peers)
            yield from (peer for peer in peers if counts[peer] == most)
