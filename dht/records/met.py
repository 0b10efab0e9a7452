"""Remembers the full peers met lately, to greet again those of whom nothing is heard now. Pure.

Records live for a minute. After a longer cut each side of a network knows only itself, and the
peers that the owner named may have left or moved: whoever was met is greeted again.

A record says where its author is, at its author's word alone: anybody can name others' addresses,
or ones that nobody has. So peers whose own streams have come here count where these came from. They
go before all others, of which those that name the same address share its places.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from dht.budget import prefix_of
from dht.identity.multiaddr import host_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MetConfig:
    """Bounds: strangers' records name any number of peers, at any addresses."""

    peers_max: int = 64
    per_host_max: int = 8
    """Peers remembered at one address; several GPUs of one machine are as many peers."""
    per_prefix_max: int = 16
    """Peers remembered of one address prefix (:func:`dht.budget.prefix_of`): a quarter, which finds
    a laboratory's network again as well as all would."""
    kept_s: float = 6 * 3600.0
    """Time for which a peer is greeted again after it was last heard of: a night's outage."""
    greeted_at_once: int = 8
    answered_s: float = 120.0
    """Pause after a peer that answered: it is there, and serves something else."""


@dataclass(frozen=True, slots=True)
class Announced:
    """Where a node record says that its author is."""

    addresses: tuple[str, ...] = ()
    """Empty for who is no full peer."""
    leaves: bool = False
    """Whether it says that it leaves; then it is not missed."""
    places: frozenset[str] = field(init=False)
    """The hosts of the addresses, and their prefixes; found once for each record."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", _places(self.addresses))


@dataclass(slots=True)
class _Peer:
    announced: Announced
    heard_s: float
    came_from: str = ""
    """The address prefix that its streams came from; "" while none has."""
    greeted_s: float = -1e9
    until_s: float = -1e9
    """Until when it is not greeted."""


@dataclass(slots=True)
class Met:
    """The peers met, in the order in which they were; who was met first is remembered longest."""

    config: MetConfig = field(default_factory=MetConfig)
    _peers: dict[str, _Peer] = field(default_factory=dict)

    def hear(
        self,
        named: Mapping[str, Announced],
        now_s: float,
        came_from: Callable[[str], str] = lambda peer_id: "",
    ) -> None:
        """Note the peers that records name now, by peer id. ``came_from`` tells the address prefix
        that a peer's own streams come from, "" where none has come."""
        seen = self._kept(named, now_s, came_from)
        others = [peer_id for peer_id, each in self._peers.items() if not each.came_from]
        claimed = Counter(at for name in others for at in self._peers[name].announced.places)
        for peer_id in named.keys() - self._peers.keys():
            here, prefix = named[peer_id], came_from(peer_id)
            has_share = (
                seen[prefix] < self.config.per_prefix_max
                if prefix
                else all(claimed[place] < self._most(place) for place in here.places)
            )
            is_full = len(self._peers) >= self.config.peers_max
            displaces = prefix and others
            if here.leaves or not here.addresses or not has_share or (is_full and not displaces):
                continue
            if is_full:
                claimed.subtract(self._peers.pop(others.pop()).announced.places)
            self._peers[peer_id] = _Peer(here, now_s, prefix)
            if prefix:
                seen[prefix] += 1
            else:
                others.append(peer_id)
                claimed.update(here.places)

    def _kept(
        self, named: Mapping[str, Announced], now_s: float, came_from: Callable[[str], str]
    ) -> Counter[str]:
        """Note what is new of the peers that are known, and forget those that leave, were not heard
        of for long, or are one too many where they came from; returns how many came from each
        prefix."""
        seen = Counter[str]()
        for peer_id, known in list(self._peers.items()):
            here = named.get(peer_id)
            if here is not None and here.addresses:
                known.announced, known.heard_s, known.until_s = here, now_s, -1e9
            prefix = known.came_from = came_from(peer_id) or known.came_from
            leaves = here is not None and here.leaves
            is_over = now_s - known.heard_s > self.config.kept_s
            if leaves or is_over or (prefix and seen[prefix] >= self.config.per_prefix_max):
                del self._peers[peer_id]
            else:
                seen[prefix] += 1
        return seen

    def _most(self, place: str) -> int:
        return self.config.per_prefix_max if "/" in place else self.config.per_host_max

    def absent(self, living: Collection[str], now_s: float) -> dict[str, tuple[str, ...]]:
        """Up to ``greeted_at_once`` peers to greet now, with their addresses: those that were met
        and are not ``living``, the ones greeted longest ago first."""
        due = [
            (each.greeted_s, peer_id)
            for peer_id, each in self._peers.items()
            if peer_id not in living
            and now_s >= each.until_s
            and now_s - each.heard_s <= self.config.kept_s
        ]
        chosen = [peer_id for _, peer_id in sorted(due)[: self.config.greeted_at_once]]
        for peer_id in chosen:
            self._peers[peer_id].greeted_s = now_s
        return {peer_id: self._peers[peer_id].announced.addresses for peer_id in chosen}

    def answered(self, peer_id: str, now_s: float) -> None:
        """Note that a peer of whom nothing was heard has answered a greeting."""
        if (known := self._peers.get(peer_id)) is not None:
            known.until_s = now_s + self.config.answered_s

    @property
    def peers(self) -> frozenset[str]:
        """Who was met lately and did not say that it leaves."""
        return frozenset(self._peers)

    def __len__(self) -> int:
        return len(self._peers)


def _places(addresses: tuple[str, ...]) -> frozenset[str]:
    hosts = {host for each in addresses if (host := host_of(each))}
    return frozenset(hosts | {prefix for host in hosts if (prefix := prefix_of(host))})
