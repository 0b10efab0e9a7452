"""Which full peers are asked for records. Pure: time and chance are passed in.

One helper cannot invent records, but it can hide them. Clients and light peers ask two at a time:
one of the addresses that the owner gave as long as one answers, and one of all that are known,
another one every few minutes, so that nobody who was lucky once goes on choosing what they see.
Full peers ask another one each time (:meth:`Helpers.drawn`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

KNOWN_MAX = 64
AVOID_S, AVOID_S_MAX = 2.0, 60.0
"""How long one that failed is left alone, doubled with each failure in a row."""
ROTATE_S = 180.0


class Chance(Protocol):
    """What is used of a random generator."""

    def choice(self, seq: Sequence[str]) -> str: ...

    def shuffle(self, x: list[str]) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Helper:
    addresses: tuple[str, ...]
    given: bool
    failures: int = 0
    until_s: float = -1e9


@dataclass(slots=True, kw_only=True)
class Helpers:
    """The full peers that are known, and which of them are asked now."""

    rng: Chance
    known_max: int = KNOWN_MAX
    """Helpers learnt from records; those that the owner gave are beyond it."""
    _known: dict[str, _Helper] = field(default_factory=dict)
    _living: frozenset[str] = frozenset()
    """Those that records spoke of when last learnt from."""
    _second: str | None = None
    _since_s: float = -1e9

    def give(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """One that the owner named."""
        self._known[peer_id] = _Helper(addresses=addresses, given=True)

    def learn(self, living: dict[str, tuple[str, ...]]) -> None:
        """All full peers that records speak of now; those that are gone are forgotten."""
        self._living = frozenset(living)
        for peer_id in [p for p, h in self._known.items() if not h.given and p not in living]:
            del self._known[peer_id]
        fresh = [peer_id for peer_id in sorted(living) if peer_id not in self._known]
        self.rng.shuffle(fresh)
        for peer_id, addresses in living.items():
            if peer_id in self._known and not self._known[peer_id].given:
                self._known[peer_id].addresses = addresses
        room = self.known_max - sum(not helper.given for helper in self._known.values())
        for peer_id in fresh[: max(0, room)]:
            self._known[peer_id] = _Helper(addresses=living[peer_id], given=False)

    def addresses(self, peer_id: str) -> tuple[str, ...]:
        """Where a helper is; none once it is forgotten."""
        helper = self._known.get(peer_id)
        return helper.addresses if helper is not None else ()

    def failed(self, peer_id: str, now_s: float) -> None:
        """It did not answer as it should."""
        helper = self._known.get(peer_id)
        if helper is not None:
            helper.failures += 1
            helper.until_s = now_s + min(AVOID_S * 2 ** (helper.failures - 1), AVOID_S_MAX)
        if peer_id == self._second:
            self._second = None

    def answered(self, peer_id: str) -> None:
        """It did."""
        helper = self._known.get(peer_id)
        if helper is not None:
            helper.failures = 0

    def drawn(self, now_s: float, count: int, tried: Collection[str] = ()) -> tuple[str, ...]:
        """Up to ``count`` at random, without ``tried`` and those that failed lately.

        Those that the owner gave count only while no others are known: they may serve other models,
        and everybody was given the same ones.
        """
        usable = [p for p, h in self._known.items() if p not in tried and h.until_s <= now_s]
        usable = [p for p in usable if not self._known[p].given or p in self._living] or usable
        self.rng.shuffle(usable)
        return tuple(usable[:count])

    def pair(self, now_s: float, tried: Collection[str] = ()) -> tuple[str, ...]:
        """The one or two to ask now, without ``tried``.

        Those that failed lately come last: a peer whose helpers all failed asks them again.
        """
        usable = [peer_id for peer_id in self._known if peer_id not in tried]
        resting = {p for p in usable if self._known[p].until_s > now_s}
        # The owner's first, in the order given; sorting is stable.
        ranked = sorted(usable, key=lambda p: (p in resting, not self._known[p].given))
        if not ranked:
            return ()
        first = ranked[0]
        others = [peer_id for peer_id in ranked[1:] if (peer_id in resting) == (first in resting)]
        if not others:
            return (first,)
        if self._second not in others or now_s - self._since_s > ROTATE_S:
            fresh = [peer_id for peer_id in others if peer_id != self._second] or others
            self._second, self._since_s = self.rng.choice(fresh), now_s
        return (first, self._second)
