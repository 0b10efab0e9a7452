"""Remembers the full peers met lately, to greet again those of whom nothing is heard now. Pure.

Records live for a minute. After a longer cut each side of a network knows only itself, and the
peers that the owner named may have left or moved: whoever was met is greeted again.
"""

from collections import Counter
from collections.abc import Collection, Mapping
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


@dataclass(slots=True)
class _Peer:
    addresses: tuple[str, ...]
    heard_s: float
    greeted_s: float = -1e9
    until_s: float = -1e9
    """Until when it is not greeted."""


@dataclass(slots=True)
class Met:
    """The peers met, in the order in which they were; who was met first is remembered longest."""

    config: MetConfig = field(default_factory=MetConfig)
    _peers: dict[str, _Peer] = field(default_factory=dict)

    def hear(
        self, living: Mapping[str, tuple[str, ...]], leaving: Collection[str], now_s: float
    ) -> None:
        """Note the addresses of the full peers that are heard of now, and those that say that they
        leave, who are not missed."""
        for peer_id, addresses in living.items():
            known = self._peers.get(peer_id)
            if known is not None:
                known.addresses, known.heard_s, known.until_s = addresses, now_s, -1e9
        for peer_id in leaving:
            self._peers.pop(peer_id, None)
        if any(now_s - each.heard_s > self.config.kept_s for each in self._peers.values()):
            self._peers = {
                peer_id: each
                for peer_id, each in self._peers.items()
                if now_s - each.heard_s <= self.config.kept_s
            }
        held = Counter(place for each in self._peers.values() for place in _places(each.addresses))
        for peer_id in living.keys() - self._peers.keys() - set(leaving):
            if len(self._peers) >= self.config.peers_max:
                return
            here = _places(living[peer_id])
            if any(held[place] >= self._most(place) for place in here):
                continue
            held.update(here)
            self._peers[peer_id] = _Peer(living[peer_id], now_s)

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
        return {peer_id: self._peers[peer_id].addresses for peer_id in chosen}

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


def _places(addresses: tuple[str, ...]) -> set[str]:
    """The hosts of addresses, and their prefixes."""
    hosts = {host for each in addresses if (host := host_of(each))}
    return hosts | {prefix for host in hosts if (prefix := prefix_of(host))}
