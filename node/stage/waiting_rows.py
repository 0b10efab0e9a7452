"""Bounds the rows that other stages sent and this one's engine has not run yet.

Credit tells a stage to wait, and a hostile one does not heed it. The KV that is promised to its
sessions bounds their rows, too; but where few layers are held, a row may take more memory than its
KV.
"""

from dataclasses import dataclass

from dht.budget import ROW_BYTES, Budget
from node.sessions.session_table import SessionTable


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingConfig:
    looks: int = 64
    """Number of counts while a peer sends as much as it may have waiting: each looks at all
    sessions."""


WAITING = WaitingConfig()


class WaitingRows:
    """What waits of each stage before this one, counted anew now and then."""

    def __init__(self, table: SessionTable, row_bytes: int, budget: Budget) -> None:
        self._table = table
        self._row_bytes = row_bytes
        self._held = budget.held(ROW_BYTES)
        self._counted: dict[str, int] = {}
        self._unseen_bytes = 0
        """Bytes that came since it was counted what waits."""
        self._over: frozenset[str] = frozenset()
        """The peers of which too much waited then."""

    def may_come(self, peer_id: str, size_bytes: int) -> bool:
        """Whether more rows of a peer, of this size in bytes, are taken."""
        self._unseen_bytes += size_bytes
        if self._unseen_bytes * WAITING.looks >= self._held.limit.per_peer:
            self._look()
        return peer_id not in self._over

    def _look(self) -> None:
        """Count what waits; of too much in all, the most is that of those who have the most."""
        self._unseen_bytes = 0
        while self._counted:
            self._held.give_back(*self._counted.popitem())
        waiting = self._table.waiting_rows()
        for rows, peer_id in sorted((rows, peer_id) for peer_id, rows in waiting.items()):
            if self._held.take(peer_id, rows * self._row_bytes):
                self._counted[peer_id] = rows * self._row_bytes
        self._over = frozenset(waiting.keys() - self._counted.keys())
