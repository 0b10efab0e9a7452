"""Whose plans and leases count for something. Pure: time is an argument.

A peer that publishes plans which this one refuses, or that leads and does nothing, is distrusted
for a while. Trust is each peer's own; nobody can talk it out of trusting somebody else.
"""

from dataclasses import dataclass, field
from typing import Any

DISTRUST_S = 600.0
STRIKES = 2
"""So many refused plans within ``DISTRUST_S``: what one peer sees may lag once."""
PEERS_MAX = 1024


@dataclass(slots=True)
class Trust:
    """What this peer remembers of those who coordinate."""

    _strikes: dict[str, tuple[int, float]] = field(default_factory=dict)
    _until_s: dict[str, float] = field(default_factory=dict)

    def strike(self, peer_id: str, now_s: float, *, times: int = 1) -> None:
        """A plan of ``peer_id`` was refused."""
        count, since_s = self._strikes.pop(peer_id, (0, now_s))
        if now_s - since_s > DISTRUST_S:
            count = 0
        count += times
        if count >= STRIKES:
            self.distrust(peer_id, now_s)
            return
        self._strikes[peer_id] = (count, now_s)
        _bound(self._strikes)

    def distrust(self, peer_id: str, now_s: float) -> None:
        """Let nothing that ``peer_id`` claims count for a while."""
        self._until_s.pop(peer_id, None)
        self._until_s[peer_id] = now_s + DISTRUST_S
        _bound(self._until_s)

    def distrusted(self, now_s: float) -> frozenset[str]:
        """Who counts for nothing now."""
        self._until_s = {p: until_s for p, until_s in self._until_s.items() if until_s > now_s}
        return frozenset(self._until_s)


def _bound(entries: dict[str, Any]) -> None:
    while len(entries) > PEERS_MAX:
        del entries[next(iter(entries))]
