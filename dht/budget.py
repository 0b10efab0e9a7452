"""What strangers may take of this process: per peer and all together, in one place. Pure.

Identities cost nothing, so no share counts identities alone. Each limit per peer has one for its
address prefix and one for all peers, and the last part of what there is for all goes to peers that
this process knows: by work that it does for them, or because they were here before
(:class:`Parties`). Above a limit a peer's newest is refused; everybody else goes on. The table in
docs/threat-model.md names all of them; :mod:`dht.transport.channels` says which bounds which
protocol.
"""

import ipaddress
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from dht.errors import NetworkError

NAMES_MAX = 4096
"""Maximum peers whose rates and address prefixes are remembered."""
FORGOTTEN = "forgotten"
"""Stands for the prefix of peers whose own was forgotten for others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How what there is for all is shared among peers whose identities are free."""

    strangers: float = 0.5
    """Part of what there is for all that is given out while anybody asks; the rest is for peers
    that are known. Half, so that a crowd of newcomers costs those at work here no more."""
    before_s: float = 300.0
    """Time since which a peer's announcement has been seen here when it counts as here before: most
    volunteers who leave do so sooner, and new names must be kept up for as long."""
    prefix_peers: int = 8
    """Number of peers whose limits all strangers of one address prefix have together: a household
    or a laboratory behind one router is no larger, mostly."""
    ipv4_bits: int = 24
    """Length of the prefix of an IPv4 address: the least that is routed by itself."""
    ipv6_bits: int = 48
    """Length of the prefix of an IPv6 address: what one subscriber may get (RFC 6177)."""
    household_bits: int = 64
    """Length of the prefix of an IPv6 address that counts as one where connections are counted: the
    least that anybody gets."""


SHARES = Shares()


class Parties:
    """Who the peers are that take something: which of them are known, and where they come from."""

    def __init__(self) -> None:
        self.work: Callable[[str], bool] = lambda peer_id: True
        """Whether this process works for a peer, or did so lately. Asked only above a share, and,
        as ``before``, in any thread: light peers' connections are another's."""
        self.before: Callable[[str], bool] = lambda peer_id: False
        """Whether a peer was here before, as this process saw itself."""
        self.member: Callable[[str], bool] = lambda peer_id: True
        """Whether a peer announces that it serves this peer's model."""
        self.needs_relay: Callable[[str], bool] = lambda peer_id: True
        """Whether a peer is one of the network that others cannot reach directly."""
        self._prefixes: dict[str, str] = {}
        self._of_prefix: dict[str, dict[str, None]] = {}
        """The peers of each prefix, the one met last at the end."""

    def trust_nobody(self) -> None:
        """Take all for strangers, until somebody can tell who is known."""
        self.work = self.member = self.needs_relay = lambda peer_id: False

    def knows(self, peer_id: str) -> bool:
        """Whether a peer may have more than strangers."""
        return self.work(peer_id) or self.before(peer_id)

    def met(self, peer_id: str, host: str) -> None:
        """Note the IP address that a peer's stream comes from; "" where it is unknown.

        Of ``NAMES_MAX`` peers it is remembered; then the prefix with the most forgets its oldest.
        """
        if prefix := prefix_of(host):
            self._forget(peer_id)
            self._prefixes[peer_id] = prefix
            self._of_prefix.setdefault(prefix, {})[peer_id] = None
            if len(self._prefixes) > NAMES_MAX:
                most = max(self._of_prefix, key=lambda each: len(self._of_prefix[each]))
                self._forget(next(iter(self._of_prefix[most])))

    def _forget(self, peer_id: str) -> None:
        if prefix := self._prefixes.pop(peer_id, ""):
            del self._of_prefix[prefix][peer_id]
            if not self._of_prefix[prefix]:
                del self._of_prefix[prefix]

    def came_from(self, peer_id: str) -> str:
        """The address prefix that a peer's streams come from; "" where none is remembered."""
        return self._prefixes.get(peer_id, "")

    def prefix(self, peer_id: str) -> str:
        """The address prefix that a peer's streams come from; "" where it is unknown.

        While so many are remembered that some were forgotten, all unknown ones are one party.
        """
        crowded = len(self._prefixes) >= NAMES_MAX
        return self._prefixes.get(peer_id, FORGOTTEN if crowded else "")

    def account(self, peer_id: str) -> str:
        """The name under which a peer's fair share counts: its address prefix, where it is known.

        That a peer was here before changes nothing: any number of names can be announced.
        """
        return self.prefix(peer_id) or peer_id


def prefix_of(host: str) -> str:
    """The address prefix of an IP address that counts as one party.

    "" for loopback, where all peers are one machine's, and for what is no address.
    """
    address = ip_of(host)
    if address is None or address.is_loopback:
        return ""
    bits = SHARES.ipv4_bits if address.version == 4 else SHARES.ipv6_bits
    return str(ipaddress.ip_network((address, bits), strict=False))


def neighbourhood_of(host: str) -> str:
    """Whose connections count together: an IPv4 address, or a household's network of IPv6.

    "" for what is no address.
    """
    address = ip_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, SHARES.household_bits), strict=False))
    return str(address or "")


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address, of IPv4 where IPv6 only wraps it; None for what is none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


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
    """Maximum of a peer that is not known; None: the same as for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A limit on what is taken: per second on average, and at once."""

    name: str
    unit: str
    per_s: float = math.inf
    burst: float = math.inf
    all_per_s: float = math.inf
    all_burst: float = math.inf
    stranger_burst: float | None = None
    """Maximum at once for a peer that is not known; None: the same as for others."""


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
ROW_BYTES = Amount(name="row_bytes", unit="MiB", per_peer=320 << 20, in_all=1 << 30)
"""Bytes of rows that came from a stage and wait for this one's engine. Credit keeps honest ones far
below that; for a session that moves here, a stage sends what it has logged, 256 MiB at most."""
PINGS = RateLimit(name="pings", unit="", per_s=256, burst=2048, all_per_s=4096, all_burst=32768)
"""Pings on streams to a stage: a gateway sends them on each of its 128 streams."""
OPENS = RateLimit(name="opens", unit="", per_s=64, burst=512, all_per_s=1024, all_burst=8192)
"""Opens of sessions, of which each takes the check of a signature, and a refusal is signed: a first
stage passes on those of all its clients, some a second."""
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
REQUESTS = RateLimit(name="requests", unit="", per_s=32, burst=256, all_per_s=1024, all_burst=8192)
"""Small requests on streams of probes, plans, text files, layers and dials back: a coordinator and
the next in line ping each peer of a plan (:mod:`coordinator.policies.failure.pinger`)."""
PROBE_BYTES = RateLimit(
    name="probe_bytes",
    unit="KiB",
    per_s=1 << 14,
    burst=8 << 20,
    all_per_s=1 << 18,
    all_burst=160 << 20,
    stranger_burst=1 << 18,
)
"""Bytes sent so that others measure their link from here. A neighbour takes 6.7 MB at most every 20
minutes, and 20 neighbours come at once where a network is founded. Peers that hold no part of the
model get the first probe and a spare one, from which ``join --test`` sees a slow link."""
PLAN_BYTES = RateLimit(
    name="plan_bytes",
    unit="KiB",
    per_s=1 << 16,
    burst=16 << 20,
    all_per_s=4 << 20,
    all_burst=128 << 20,
)
"""Bodies of plans given: two of the largest at once."""
RECORD_STREAMS = Amount(name="record_streams", unit="", per_peer=4, in_all=512)
RECORD_REQUESTS = RateLimit(
    name="record_requests", unit="", per_s=20, burst=200, all_per_s=2000, all_burst=20000
)
RECORD_BYTES = RateLimit(
    name="record_bytes", unit="MB", per_s=1e6, burst=16e6, all_per_s=8e6, all_burst=128e6
)
"""Records given, and looked at for somebody: as much to all as eight askers may take."""
RECORD_STORES = RateLimit(
    name="record_stores", unit="", per_s=2, burst=32, all_per_s=200, all_burst=3200
)
RECORD_SEARCHES = RateLimit(
    name="record_searches", unit="", per_s=5, burst=20, all_per_s=50, all_burst=200
)
"""Searches of the DHT: a tenth of all for each peer; a burst is four kinds of records of five
models."""
DHT_PINGS = RateLimit(name="dht_pings", unit="", per_s=0.5, burst=16, all_per_s=64, all_burst=512)
"""Nodes called back on their wish, once when they join and again when they greet."""
DHT_STORES = RateLimit(
    name="dht_stores", unit="", per_s=64, burst=1024, all_per_s=2048, all_burst=16384
)
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
DHT_FIND_BYTES = replace(DHT_STORE_BYTES, name="dht_find_bytes")
DHT_FOUND_BYTES = replace(DHT_STORE_BYTES, name="dht_found_bytes")
"""Bytes of a peer's answers to this peer's searches: as much as it would give by its own rates."""
DIALS_BACK_OPEN = Amount(name="dials_back_open", unit="", per_peer=2, in_all=16)
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
RELAY_SLOTS = Amount(name="relay_slots", unit="", per_peer=1, in_all=64)
"""Peers that this one relays for."""
RELAY_CALLS = Amount(name="relay_calls", unit="", per_peer=4, in_all=256)
"""Calls through this relay, by the peer that calls."""
RELAY_BYTES = RateLimit(
    name="relay_bytes",
    unit="MiB",
    per_s=1 << 19,
    burst=32 << 20,
    all_per_s=2 << 20,
    all_burst=128 << 20,
)
"""Bytes passed on, both ways, for each peer that holds a slot and each that calls one: rows of
tokens, and at once those of a long prompt. What is above waits."""
LIMITS = tuple(each for each in tuple(globals().values()) if isinstance(each, Limit))
"""All of the above."""


class Held:
    """Amounts of one resource that peers hold now."""

    def __init__(self, limit: Amount, parties: Parties | None = None) -> None:
        self.limit = limit
        self._parties = parties or Parties()
        self.by_peer: Counter[str] = Counter()
        self._prefixes: dict[str, str] = {}
        """The prefix under which each peer's part is counted."""
        self._by_prefix: Counter[str] = Counter()
        self.total = 0
        self.refused = 0

    def take(self, peer_id: str, amount: int = 1) -> bool:
        """Add ``amount`` to what the peer holds if there is room; returns whether there was."""
        limit, holds, total = self.limit, self.by_peer[peer_id] + amount, self.total + amount
        crowded = limit.crowded is not None and self.total >= limit.crowded
        most = limit.when_crowded if crowded else limit.per_peer
        fits = holds <= most and total <= limit.in_all
        prefix = self._prefixes.get(peer_id) or self._parties.prefix(peer_id)
        of_prefix = self._by_prefix[prefix] + amount if prefix else 0
        above_share = (
            (limit.per_stranger is not None and holds > limit.per_stranger)
            or total > SHARES.strangers * limit.in_all
            or of_prefix > SHARES.prefix_peers * limit.per_peer
        )
        if not fits or (above_share and not self._parties.knows(peer_id)):
            self.refused += 1
            self._forget(peer_id)
            return False
        self.by_peer[peer_id], self.total = holds, total
        if prefix:
            self._prefixes[peer_id], self._by_prefix[prefix] = prefix, of_prefix
        return True

    def give_back(self, peer_id: str, amount: int = 1) -> None:
        """Subtract ``amount`` from what the peer holds."""
        self.by_peer[peer_id] -= amount
        self.total -= amount
        if prefix := self._prefixes.get(peer_id):
            self._by_prefix[prefix] -= amount
        self._forget(peer_id)

    def of(self, peer_id: str) -> "Share":
        """One peer's share, which raises NetworkError where there is no room."""
        return Share(self, peer_id)

    def _forget(self, peer_id: str) -> None:
        if not self.by_peer[peer_id]:
            del self.by_peer[peer_id]
            prefix = self._prefixes.pop(peer_id, "")
            if not self._by_prefix[prefix]:
                del self._by_prefix[prefix]


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
        self.held.give_back(self.peer_id, amount)


@dataclass(slots=True)
class Buckets:
    """Token buckets that allow each name ``per_s`` on average and ``burst`` at once."""

    per_s: float
    burst: float
    names_max: int = NAMES_MAX
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)

    def left(self, name: str, now_s: float) -> float:
        if self.burst == math.inf:
            return math.inf
        left, since_s = self._buckets.get(name, (self.burst, now_s))
        return min(self.burst, left + max(0.0, now_s - since_s) * self.per_s)

    def take(self, name: str, count: float, now_s: float) -> bool:
        """Take ``count`` tokens of ``name`` if there are enough; returns whether there were."""
        fits = count <= self.left(name, now_s)
        self.charge(name, count if fits else 0.0, now_s)
        return fits

    def charge(self, name: str, count: float, now_s: float) -> None:
        """Take ``count`` tokens even if fewer are left, for what has been spent already."""
        if self.burst == math.inf:
            return
        left = self.left(name, now_s) - count
        self._buckets.pop(name, None)
        self._buckets[name] = (left, now_s)
        if len(self._buckets) > self.names_max:  # forget the name unused for longest
            del self._buckets[next(iter(self._buckets))]


class Taken:
    """What peers took of one resource lately, against its rates."""

    def __init__(self, limit: RateLimit, parties: Parties | None = None) -> None:
        self.limit = limit
        self._parties = parties or Parties()
        self._peers = Buckets(limit.per_s, limit.burst)
        peers = SHARES.prefix_peers
        self._prefixes = Buckets(peers * limit.per_s, peers * limit.burst)
        self._all = Buckets(limit.all_per_s, limit.all_burst)
        self.refused = 0

    def may(self, peer_id: str, count: float, now_s: float) -> bool:
        """Whether the rates of a peer, of its prefix and of all have room for ``count``."""
        limit, left = self.limit, self._peers.left(peer_id, now_s) - count
        left_of_all = self._all.left("", now_s) - count
        if left < 0 or left_of_all < 0:
            return False
        prefix = self._parties.prefix(peer_id)
        above_share = (
            (limit.stranger_burst is not None and limit.burst - left > limit.stranger_burst)
            or left_of_all < (1.0 - SHARES.strangers) * limit.all_burst < math.inf
            or (prefix != "" and self._prefixes.left(prefix, now_s) < count)
        )
        return not above_share or self._parties.knows(peer_id)

    def take(self, peer_id: str, count: float, now_s: float) -> bool:
        """Take ``count`` for a peer if :meth:`may` allows it; returns whether it did.

        What is refused takes nothing from the others.
        """
        return self.take_between((peer_id,), count, now_s)

    def take_between(self, peer_ids: Collection[str], count: float, now_s: float) -> bool:
        """:meth:`take` what passes between peers, of each of them; it counts once for all."""
        refused = [each for each in peer_ids if not self.may(each, count, now_s)]
        for each in refused:
            self._peers.charge(each, 0.0, now_s)
        if refused:
            self.refused += 1
            return False
        self._charge(peer_ids, count, now_s)
        return True

    def charge(self, peer_id: str, count: float, now_s: float) -> None:
        """Take ``count`` even above the rate, for what has been spent already."""
        self._charge((peer_id,), count, now_s)

    def _charge(self, peer_ids: Collection[str], count: float, now_s: float) -> None:
        for peer_id in peer_ids:
            self._peers.charge(peer_id, count, now_s)
            if prefix := self._parties.prefix(peer_id):
                self._prefixes.charge(prefix, count, now_s)
        self._all.charge("", count, now_s)


class Budget:
    """All limits of one process, each with its meter."""

    def __init__(self, *changed: Limit) -> None:
        """``changed`` limits replace the defaults of the same names."""
        self.parties = parties = Parties()
        limits = {each.name: each for each in (*LIMITS, *changed)}
        self._held = {
            n: Held(each, parties) for n, each in limits.items() if isinstance(each, Amount)
        }
        self._taken = {
            n: Taken(each, parties) for n, each in limits.items() if isinstance(each, RateLimit)
        }

    def held(self, limit: Amount) -> Held:
        return self._held[limit.name]

    def rate(self, limit: RateLimit) -> Taken:
        """The meter of what is taken per second."""
        return self._taken[limit.name]

    @property
    def refused(self) -> dict[str, int]:
        """How often each limit refused something, by its name; without those that never did."""
        meters: list[Held | Taken] = [*self._held.values(), *self._taken.values()]
        return {each.limit.name: each.refused for each in meters if each.refused}
