"""Since when peers are here and hold their layers, as this process saw it itself. Pure.

A record's times are its author's own word. Whoever has been here for long leads before others, and
counts when plans are compared; whoever has just moved is left in peace. So that nobody gets that
for a word, :class:`Sightings` puts what was seen here in its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dht.messages.types import NodeRecord, NodeState, Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sighting:
    told: NodeRecord
    seen: NodeRecord
    offered_unix_s: float
    """When the present offer was first seen here."""
    placed_unix_s: float
    """When the present layers were first seen here."""
    changed: bool = False
    """Whether another offer was seen before the present one."""


class Sightings:
    """The node records that one process reads, over time."""

    def __init__(self) -> None:
        self._peers: dict[str, _Sighting] = {}

    def look(self, nodes: Mapping[str, NodeRecord], now_unix_s: float) -> dict[str, NodeRecord]:
        """``nodes``, each with the times that were seen here in the place of its own.

        ``joined_unix_s`` is when this process first read what the peer offers now;
        ``moved_unix_s`` is not after its present layers were first read. Peers that are not among
        ``nodes`` are forgotten.
        """
        self._peers = {
            peer_id: _seen(self._peers.get(peer_id), record, now_unix_s)
            for peer_id, record in nodes.items()
        }
        return {peer_id: sighting.seen for peer_id, sighting in self._peers.items()}

    def changed_since(self, unix_s: float) -> frozenset[str]:
        """The peers whose offer was seen to change after ``unix_s``; newcomers are none."""
        return frozenset(
            peer_id
            for peer_id, sighting in self._peers.items()
            if sighting.changed and sighting.offered_unix_s > unix_s
        )


def _offer(record: NodeRecord) -> tuple[object, ...]:
    """What a planner counts on; an honest peer changes it by leaving or joining anew alone."""
    return (
        record.model,
        record.memory_bytes,
        record.kv_tokens_min,
        record.tokens_per_s,
        record.decode_layer_ns,
        record.prompt_layer_ns,
        record.up_bytes_per_s,
        record.down_bytes_per_s,
        record.state is NodeState.DRAINING,
        record.reach is Reach.NONE,
    )


def _seen(before: _Sighting | None, record: NodeRecord, now_unix_s: float) -> _Sighting:
    if before is not None and before.told is record:
        return before
    offered_unix_s = placed_unix_s = now_unix_s
    changed = before is not None
    if before is not None:
        if _offer(before.told) == _offer(record):
            offered_unix_s, changed = before.offered_unix_s, before.changed
        if (before.told.start, before.told.end) == (record.start, record.end):
            placed_unix_s = before.placed_unix_s
    return _Sighting(
        told=record,
        seen=replace(
            record,
            joined_unix_s=offered_unix_s,
            moved_unix_s=min(record.moved_unix_s, placed_unix_s),
        ),
        offered_unix_s=offered_unix_s,
        placed_unix_s=placed_unix_s,
        changed=changed,
    )
