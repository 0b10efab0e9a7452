"""Chooses the full peers that are asked for records. Pure: time and chance are passed in.

A helper cannot invent records, but it can hide them. Clients and light peers ask two at a time: one
that the owner named, as long as one of these answers, and one drawn from all that are known, which
changes every few minutes, so that no helper goes on choosing what they see. Full peers ask a
different one each time (:meth:`Helpers.drawn`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConfig:
    """How many helpers are known, and how long each is used or avoided."""

    known_max: int = 64
    avoid_s: float = 2.0
    avoid_s_max: float = 60.0
    """Time for which a helper that failed is avoided: at first, and at most; it doubles with each
    failure in a row."""
    rotate_s: float = 180.0


CHOOSING = ChoiceConfig()


class Chance(Protocol):
    """The methods of a random generator that are used."""

    def choice(self, seq: Sequence[str]) -> str: ...

    def shuffle(self, x: list[str]) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Helper:
    addresses: tuple[str, ...]
    given: bool
    pause_s: float = 0.0
    """For how long the last failure has it avoided; 0: it answered since."""
    until_s: float = -1e9


@dataclass(slots=True, kw_only=True)
class Helpers:
    """The known full peers, and the choice of those to ask now."""

    rng: Chance
    known_max: int = CHOOSING.known_max
    """Maximum helpers learnt from records, in addition to those that the owner named."""
    _known: dict[str, _Helper] = field(default_factory=dict)
    _living: frozenset[str] = frozenset()
    """Full peers named in the records last learnt from."""
    _second: str | None = None
    _since_s: float = -1e9

    def give(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """Add a helper that the owner named."""
        self._known[peer_id] = _Helper(addresses=addresses, given=True)

    def learn(self, living: dict[str, tuple[str, ...]]) -> None:
        """Learn all full peers that records name now; helpers that are gone are forgotten.

        Where records name nobody any more, this peer was cut off: those named last stay known, and
        are asked again.
        """
        if not living:
            return
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
        """The addresses of a helper; none once it is forgotten."""
        helper = self._known.get(peer_id)
        return helper.addresses if helper is not None else ()

    def failed(self, peer_id: str, now_s: float) -> None:
        """Record that a helper did not answer as it should."""
        helper = self._known.get(peer_id)
        if helper is not None:
            longer_s = max(CHOOSING.avoid_s, 2 * helper.pause_s)
            helper.pause_s = min(longer_s, CHOOSING.avoid_s_max)
            helper.until_s = now_s + helper.pause_s
        if peer_id == self._second:
            self._second = None

    def answered(self, peer_id: str) -> None:
        helper = self._known.get(peer_id)
        if helper is not None:
            helper.pause_s = 0.0

    def drawn(self, now_s: float, count: int, tried: Collection[str] = ()) -> tuple[str, ...]:
        """Up to ``count`` helpers at random, without ``tried`` and those that failed lately.

        Helpers that the owner named and that no record names count only while no others are known:
        they may serve other models, and all peers were given the same ones.
        """
        usable = [p for p, h in self._known.items() if p not in tried and h.until_s <= now_s]
        usable = [p for p in usable if not self._known[p].given or p in self._living] or usable
        self.rng.shuffle(usable)
        return tuple(usable[:count])

    def pair(self, now_s: float, tried: Collection[str] = ()) -> tuple[str, ...]:
        """The one or two helpers to ask now, without ``tried``.

        Helpers that failed lately come last: a peer whose helpers all failed asks them again.
        """
        usable = [peer_id for peer_id in self._known if peer_id not in tried]
        resting = {p for p in usable if self._known[p].until_s > now_s}
        # The owner's helpers first, in the order given; sorting is stable.
        ranked = sorted(usable, key=lambda p: (p in resting, not self._known[p].given))
        if not ranked:
            return ()
        first = ranked[0]
        others = [peer_id for peer_id in ranked[1:] if (peer_id in resting) == (first in resting)]
        if not others:
            return (first,)
        if self._second not in others or now_s - self._since_s > CHOOSING.rotate_s:
            fresh = [peer_id for peer_id in others if peer_id != self._second] or others
            self._second, self._since_s = self.rng.choice(fresh), now_s
        return (first, self._second)
