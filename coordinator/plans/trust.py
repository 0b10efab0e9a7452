"""Decides whose plans and leases count here. Pure: time is an argument.

A peer that publishes plans which this one refuses, or that leads and does nothing, is distrusted
for ``distrust_s``. Trust is each peer's own: no other peer can influence it.
"""

from dataclasses import dataclass

from dht.process.newest import Newest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustConfig:
    """For how long, and after what, a planner is distrusted."""

    distrust_s: float = 600.0
    strikes: int = 2
    """Refused plans within ``distrust_s`` that cost a peer its trust; one may be due to records
    that lag."""
    peers_max: int = 1024


class Trust:
    """This peer's trust in those that coordinate."""

    def __init__(self, config: TrustConfig | None = None) -> None:
        self.config = config = config or TrustConfig()
        self._strikes: Newest[str, tuple[int, float]] = Newest(config.peers_max)
        self._until_s: Newest[str, float] = Newest(config.peers_max)

    def strike(self, peer_id: str, now_s: float, *, times: int = 1) -> None:
        """Count a refused plan of ``peer_id``, as ``times`` strikes."""
        count, since_s = self._strikes.pop(peer_id, (0, now_s))
        if now_s - since_s > self.config.distrust_s:
            count = 0
        count += times
        if count >= self.config.strikes:
            self.distrust(peer_id, now_s)
            return
        self._strikes[peer_id] = (count, now_s)

    def distrust(self, peer_id: str, now_s: float) -> None:
        """Ignore the plans and leases of ``peer_id`` for ``distrust_s``."""
        self._until_s[peer_id] = now_s + self.config.distrust_s

    def distrusted(self, now_s: float) -> frozenset[str]:
        return frozenset(p for p, until_s in self._until_s.items() if until_s > now_s)
