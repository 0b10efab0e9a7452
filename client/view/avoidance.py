"""Which peers a client passes over for a while, because they failed or had no room. Pure.

A peer that failed is avoided for longer each time in a row: the DHT still shows one that died or
froze for as long as its record lives. Avoiding is a preference: where there is no route without
such a peer, it gets a second chance before its time is over, one request at a time. A peer that is
full said when it expects to have room; until then nobody here asks it, which costs it nothing.
For a while after that, one request at a time asks it and waits; the others take it as full at once,
because it may be too busy to say no to all of them soon. Each that it takes lets one more ask at a
time, until it refuses one, as TCP's slow start does.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from dht.messages.types import NodeRecord
from dht.process.newest import Newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoided:
    """A peer that failed ``times`` in a row."""

    until_s: float
    again_s: float
    """Time from which on it may be tried where there is no other."""
    joined_unix_s: float
    times: int
    full: bool
    """Whether it merely had no room; nothing is wrong with it then."""
    urgent: bool = False
    """Whether it had no room even for an urgent session."""
    reason: str = ""


@dataclass(slots=True)
class _Crowd:
    """What is known of a peer that lacked room lately."""

    until_s: float
    asking_max: int
    """Requests of this client that may wait for the peer's answer at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AvoidConfig:
    """For how long a peer that failed is avoided."""

    factor_max: int = 8
    try_s: float = 0.25
    """Time for which a peer that was full is taken as full still, while one request tries it."""
    crowded_s: float = 5.0
    """Time after a refusal for lack of room in which other clients are taken to want the peer,
    too."""
    asking_first: int = 1
    """Requests of this client that may wait for the answer of such a peer at a time, until it takes
    one."""
    woken: int = 2
    """Waiting requests that look for a route again as soon as a peer took one: its place among
    those that ask is free, and there is one more."""
    proven_max: int = 1024
    avoided_max: int = 4096
    """Maximum peers that are remembered as having failed, the newest: identities are free, and a
    gateway runs for months. As many are in the records at a time."""
    second_chance_s: float = 2.0
    """Time before a peer that failed is tried again, even where there is no other."""


AVOIDING = AvoidConfig()


class Avoidance:
    """The peers that one client avoids. Times are those of the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._peers: dict[str, Avoided] = {}
        self._proven: Newest[str, None] = Newest(AVOIDING.proven_max)
        self._crowds: dict[str, _Crowd] = {}
        self._unanswered: Counter[str] = Counter()

    def avoids(
        self,
        record: NodeRecord,
        now_s: float,
        *,
        urgent: bool = False,
        full: bool = False,
        second_chance: bool = False,
    ) -> bool:
        """Whether to pass ``record``'s peer over. One that says that it joined anew is forgiven one
        failure; one that goes on failing is held to its past whatever it says.

        With ``full``, peers without room do not count as avoided, with ``urgent`` those without
        room for others; with ``second_chance``, those that failed a little while ago do not.
        """
        if not (full or urgent) and self._is_crowded(record.peer_id, now_s):
            return True
        avoided = self._peers.get(record.peer_id)
        if avoided is None:
            return False
        if record.joined_unix_s > avoided.joined_unix_s and avoided.times == 1:
            return False
        if avoided.full and (full or (urgent and not avoided.urgent)):
            return False
        if second_chance and not avoided.full and now_s >= avoided.again_s:
            return False
        return now_s < avoided.until_s

    def add(
        self,
        peer_id: str,
        for_s: float,
        now_s: float,
        *,
        joined_unix_s: float,
        full: bool = False,
        urgent: bool = False,
        reason: str = "",
    ) -> None:
        """Avoid a peer for ``for_s``, twice as long each time in a row that it failed."""
        if full:
            crowd = _Crowd(now_s + AVOIDING.crowded_s, AVOIDING.asking_first)
            later = {name: each for name, each in self._crowds.items() if each.until_s > now_s}
            self._crowds = {**later, peer_id: crowd}
        before = self._peers.pop(peer_id, None)
        times = 1
        if not full:
            self._proven.pop(peer_id, None)
        if before is not None and not full:
            times = before.times + 1
        factor = min(2 ** (times - 1), AVOIDING.factor_max)
        self._peers[peer_id] = Avoided(
            until_s=now_s + factor * for_s,
            again_s=now_s + min(factor * AVOIDING.second_chance_s, factor * for_s),
            joined_unix_s=joined_unix_s,
            times=times,
            full=full,
            urgent=urgent,
            reason=reason,
        )
        if len(self._peers) > AVOIDING.avoided_max:
            del self._peers[next(iter(self._peers))]

    def reason(self, peer_id: str, now_s: float) -> str:
        """Why a peer is avoided now; empty where it is not, or nobody said."""
        avoided = self._peers.get(peer_id)
        return "" if avoided is None or now_s >= avoided.until_s else avoided.reason

    def trying(self, peer_ids: Iterable[str], now_s: float) -> None:
        """Let one request find out whether peers are well or have room again: to refuse many at
        once would keep the peers from their work."""
        for peer_id in peer_ids:
            avoided = self._peers.get(peer_id)
            if avoided is None:
                continue
            if not avoided.full:
                again_s = now_s + AVOIDING.second_chance_s
                self._peers[peer_id] = replace(avoided, again_s=again_s)
            elif now_s >= avoided.until_s:
                self._peers[peer_id] = replace(avoided, until_s=now_s + AVOIDING.try_s)

    def asked(self, peer_ids: Iterable[str]) -> None:
        """A new session waits for what these peers say."""
        self._unanswered.update(peer_ids)

    def answered(self, peer_ids: Collection[str], *, had_room: bool = False) -> None:
        """They said it, or nobody waits for it any more; ``had_room``: they took the session, for
        which they kept no room from others."""
        self._unanswered.subtract(peer_ids)
        self._unanswered += Counter()  # forgets those that nobody waits for
        for peer_id in peer_ids if had_room else ():
            self._forget(peer_id, full=True)
            if (crowd := self._crowds.get(peer_id)) is not None:
                crowd.asking_max += 1

    def _is_crowded(self, peer_id: str, now_s: float) -> bool:
        crowd = self._crowds.get(peer_id)
        return (
            crowd is not None
            and now_s < crowd.until_s
            and self._unanswered[peer_id] >= crowd.asking_max
        )

    def worked(self, peer_ids: Iterable[str]) -> None:
        """Peers that delivered are no longer held to their past.

        That they deliver to one session says nothing of room for another.
        """
        for peer_id in peer_ids:
            self._proven[peer_id] = None
            self.forgive(peer_id)

    def forgive(self, peer_id: str) -> None:
        """No longer avoid a peer that failed; that it was full may still be so."""
        self._forget(peer_id, full=False)

    def _forget(self, peer_id: str, *, full: bool) -> None:
        avoided = self._peers.get(peer_id)
        if avoided is not None and avoided.full is full:
            del self._peers[peer_id]

    def is_proven(self, peer_id: str) -> bool:
        """Whether a peer delivered, and has not failed since."""
        return peer_id in self._proven

    def room_after_s(self, peer_ids: Iterable[str], now_s: float) -> float:
        """Seconds until the first of these peers that is full expects to have room; 0: none is."""
        full = []
        for peer_id in peer_ids:
            avoided = self._peers.get(peer_id)
            if avoided is not None and avoided.full and avoided.until_s > now_s:
                full.append(avoided.until_s - now_s)
            elif self._is_crowded(peer_id, now_s):
                full.append(AVOIDING.try_s)
        return min(full, default=0.0)
