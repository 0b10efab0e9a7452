"""What strangers may take of this process: per peer and all together, in one place. Pure.

Identities cost nothing, so each limit per peer needs one for all peers. Above a limit a peer's
newest is refused; everybody else goes on. The table in docs/threat-model.md names all of them.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dht.errors import NetworkError

NAMES_MAX = 4096
"""Maximum peers whose rates are remembered; the one unused for longest is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A limit on what is held at one time."""

    name: str
    unit: str
    per_peer: int
    in_all: int
    crowded: int | None = None
    """Amount held by all from which on a peer with ``when_crowded`` gets no more; None: never."""
    when_crowded: int = 0
    per_stranger: int | None = None
    """Maximum of a peer that :attr:`Held.knows` does not know; None: the same as for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A limit on what is taken: per second on average, and at once."""

    name: str
    unit: str
    per_s: float = math.inf
    burst: float = math.inf
    all_per_s: float = math.inf
    all_burst: float = math.inf


Limit = Amount | RateLimit

STREAMS = Amount(name="streams", unit="", per_peer=256, in_all=4096, crowded=2048, when_crowded=8)
"""Incoming streams: each holds two descriptors of this machine. A gateway has two per session, 64
sessions at most; when many are open, 8 are a hop, a probe, records, a session or two."""
FRAME_BYTES = Amount(
    name="frame_bytes",
    unit="MiB",
    per_peer=64 << 20,
    in_all=256 << 20,
    crowded=192 << 20,
    when_crowded=1 << 20,
    per_stranger=2 << 20,
)
"""Bytes of unfinished frames on streams to a stage; 1,024 tokens of a wide model are 16 MiB. A peer
without a session here sends nothing longer than an open with its history, 1.25 MiB."""
PINGS = RateLimit(name="pings", unit="", per_s=128, burst=1024)
"""Pings on streams to a stage: a gateway sends one in 2 s on each of its 128."""
HANDSHAKES = Amount(name="handshakes", unit="", per_peer=16, in_all=256)
"""Connections to a light peer that have not shown yet whose they are, by address: a handshake has
5 s. (Full peers' connections are the daemon's.)"""
CONNECTIONS = Amount(
    name="connections", unit="", per_peer=256, in_all=1024, crowded=768, when_crowded=16
)
"""Connections to a light peer, by address: a gateway's users share one."""
UNREAD_BYTES = Amount(
    name="unread_bytes",
    unit="MiB",
    per_peer=64 << 20,
    in_all=256 << 20,
    crowded=192 << 20,
    when_crowded=1 << 20,
)
"""Bytes that came to a light peer and that nothing has read, and 4 KiB for each open stream. A
stream's window is 16 MiB at most."""
RECORD_STREAMS = Amount(name="record_streams", unit="", per_peer=4, in_all=512)
RECORD_REQUESTS = RateLimit(name="record_requests", unit="", per_s=20, burst=200)
RECORD_BYTES = RateLimit(name="record_bytes", unit="MB", per_s=1e6, burst=16e6)
RECORD_STORES = RateLimit(name="record_stores", unit="", per_s=2, burst=32)
RECORD_SEARCHES = RateLimit(
    name="record_searches", unit="", per_s=5, burst=20, all_per_s=50, all_burst=200
)
"""Searches of the DHT: a tenth of all for each peer; a burst is four kinds of records of five
models."""
DHT_PINGS = RateLimit(name="dht_pings", unit="", per_s=0.5, burst=16, all_per_s=64, all_burst=512)
"""Nodes called back on their wish, once when they join and again when they greet."""
DHT_STORES = RateLimit(name="dht_stores", unit="", per_s=64, burst=1024)
"""Records that a peer stores here; at once as many as a neighbour hands over to a newcomer."""
DHT_STORE_BYTES = RateLimit(
    name="dht_store_bytes",
    unit="MiB",
    per_s=1 << 20,
    burst=16 << 20,
    all_per_s=16 << 20,
    all_burst=64 << 20,
)
"""Bytes of requests to store, before any of them is read; the handed over records of a whole guard
are 16 MiB."""
DHT_BULK_STORES = RateLimit(name="dht_bulk_stores", unit="", all_per_s=512, all_burst=4096)
"""Records in requests of more than a peer's own: each costs the check of a signature."""
DHT_FIND_BYTES = RateLimit(
    name="dht_find_bytes",
    unit="MiB",
    per_s=1 << 20,
    burst=16 << 20,
    all_per_s=16 << 20,
    all_burst=64 << 20,
)
DHT_FOUND_BYTES = RateLimit(
    name="dht_found_bytes",
    unit="MiB",
    per_s=1 << 20,
    burst=16 << 20,
    all_per_s=16 << 20,
    all_burst=64 << 20,
)
"""Bytes of a peer's answers to this peer's searches: as much as it would give by its own rates."""
DIALS_BACK_OPEN = Amount(name="dials_back_open", unit="", per_peer=16, in_all=16)
DIALS_BACK = RateLimit(name="dials_back", unit="", per_s=0.05, burst=3, all_per_s=2, all_burst=20)
DIALS_BACK_TO = RateLimit(name="dials_back_to", unit="", per_s=0.05, burst=3)
"""Dials to one address, for all peers that ask."""
DIALS = RateLimit(name="dials", unit="", per_s=1, burst=16, all_per_s=8, all_burst=64)
"""Dials, for a client, of peers that were not reached at the last try."""
LAYER_CHECKS = RateLimit(
    name="layer_checks", unit="", per_s=0.1, burst=4, all_per_s=1, all_burst=16
)
"""Requests to run a few rows through a few layers: neighbours ask before they give up layers."""
TEXT_STREAMS = Amount(name="text_streams", unit="", per_peer=2, in_all=32)
"""Streams that ask for a model's text files."""
TEXT_BYTES = RateLimit(
    name="text_bytes",
    unit="MiB",
    per_s=1 << 20,
    burst=96 << 20,
    all_per_s=4 << 20,
    all_burst=192 << 20,
)
"""Text files given: at once as much as the largest model has, then a trickle."""
LIMITS: tuple[Limit, ...] = (
    STREAMS,
    FRAME_BYTES,
    PINGS,
    HANDSHAKES,
    CONNECTIONS,
    UNREAD_BYTES,
    RECORD_STREAMS,
    RECORD_REQUESTS,
    RECORD_BYTES,
    RECORD_STORES,
    RECORD_SEARCHES,
    DHT_PINGS,
    DHT_STORES,
    DHT_STORE_BYTES,
    DHT_BULK_STORES,
    DHT_FIND_BYTES,
    DHT_FOUND_BYTES,
    DIALS_BACK_OPEN,
    DIALS_BACK,
    DIALS_BACK_TO,
    DIALS,
    LAYER_CHECKS,
    TEXT_STREAMS,
    TEXT_BYTES,
)


class Held:
    """Amounts of one resource that peers hold now."""

    def __init__(self, limit: Amount) -> None:
        self.limit = limit
        self.knows: Callable[[str], bool] = lambda peer_id: True
        """Whether a peer may hold more than a stranger; asked only where it would."""
        self.by_peer: Counter[str] = Counter()
        self.total = 0
        self.refused = 0

    def take(self, peer_id: str, amount: int = 1) -> bool:
        """Add ``amount`` to what the peer holds if there is room; returns whether there was."""
        limit, holds = self.limit, self.by_peer[peer_id] + amount
        crowded = limit.crowded is not None and self.total >= limit.crowded
        most = limit.when_crowded if crowded else limit.per_peer
        if limit.per_stranger is not None and most >= holds > limit.per_stranger:
            most = most if self.knows(peer_id) else limit.per_stranger
        if holds > most or self.total + amount > limit.in_all:
            self.refused += 1
            self._forget(peer_id)
            return False
        self.by_peer[peer_id] = holds
        self.total += amount
        return True

    def give_back(self, peer_id: str, amount: int = 1) -> None:
        """Subtract ``amount`` from what the peer holds."""
        self.by_peer[peer_id] -= amount
        self.total -= amount
        self._forget(peer_id)

    def of(self, peer_id: str) -> "Share":
        """One peer's share, which raises NetworkError where there is no room."""
        return Share(self, peer_id)

    def _forget(self, peer_id: str) -> None:
        if not self.by_peer[peer_id]:
            del self.by_peer[peer_id]


@dataclass(frozen=True, slots=True)
class Share:
    """One peer's part in what is held."""

    held: Held
    peer_id: str

    def take(self, amount: int) -> None:
        """Take ``amount``; raises NetworkError with the reason where there is no room."""
        if not self.held.take(self.peer_id, amount):
            raise NetworkError(f"no room for more {self.held.limit.name} of this peer now")

    def give_back(self, amount: int) -> None:
        """Give ``amount`` back."""
        self.held.give_back(self.peer_id, amount)


@dataclass(slots=True)
class Buckets:
    """Token buckets that allow each name ``per_s`` on average and ``burst`` at once."""

    per_s: float
    burst: float
    names_max: int = NAMES_MAX
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, name: str, count: float, now_s: float) -> bool:
        """Take ``count`` tokens of ``name`` if there are enough; returns whether there were."""
        if self.burst == math.inf:
            return True
        left, since_s = self._buckets.pop(name, (self.burst, now_s))
        left = min(self.burst, left + max(0.0, now_s - since_s) * self.per_s)
        fits = count <= left
        self._buckets[name] = (left - count if fits else left, now_s)
        if len(self._buckets) > self.names_max:  # forget the name unused for longest
            del self._buckets[next(iter(self._buckets))]
        return fits

    def charge(self, name: str, count: float, now_s: float) -> None:
        """Take ``count`` tokens even if fewer are left, for what has been spent already."""
        if not self.take(name, count, now_s):
            left, _ = self._buckets[name]
            self._buckets[name] = (left - count, now_s)


class Taken:
    """What peers took of one resource lately, against its rates."""

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        self._peers = Buckets(limit.per_s, limit.burst)
        self._all = Buckets(limit.all_per_s, limit.all_burst)
        self.refused = 0

    def take(self, peer_id: str, count: float, now_s: float) -> bool:
        """Take ``count`` for a peer if its rate and that of all allow; returns whether they did.

        The peer's own rate comes first: what is above it takes nothing from the others.
        """
        if self._peers.take(peer_id, count, now_s) and self._all.take("", count, now_s):
            return True
        self.refused += 1
        return False

    def charge(self, peer_id: str, count: float, now_s: float) -> None:
        """Take ``count`` even above the rate, for what has been spent already."""
        self._peers.charge(peer_id, count, now_s)
        self._all.charge("", count, now_s)


class Budget:
    """All limits of one process, each with its meter."""

    def __init__(self, *changed: Limit) -> None:
        """``changed`` limits replace the defaults of the same names."""
        limits = {each.name: each for each in (*LIMITS, *changed)}
        self._held = {n: Held(each) for n, each in limits.items() if isinstance(each, Amount)}
        self._taken = {n: Taken(each) for n, each in limits.items() if isinstance(each, RateLimit)}

    def held(self, limit: Amount) -> Held:
        """The meter of what is held."""
        return self._held[limit.name]

    def rate(self, limit: RateLimit) -> Taken:
        """The meter of what is taken per second."""
        return self._taken[limit.name]

    @property
    def refused(self) -> dict[str, int]:
        """How often each limit refused something, by its name; without those that never did."""
        meters: list[Held | Taken] = [*self._held.values(), *self._taken.values()]
        return {each.limit.name: each.refused for each in meters if each.refused}
