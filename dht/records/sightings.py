"""Since when peers are here and hold their layers, as this process saw it itself. Pure.

A record's times are its author's own word. A peer that has been here for long leads before others,
and counts when plans are compared; one that has just moved is left in peace. A peer's word alone
must not earn it that, so :class:`Sightings` puts what was seen here in its place.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dht.messages.types import LayerTimes, NodeRecord, NodeState, Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sighting:
    told: NodeRecord
    seen: NodeRecord
    offer: NodeRecord
    """The first record of the present offer: what is told now may differ by ``ALIKE``."""
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

    def since_unix_s(self, peer_id: str) -> float:
        """When the peer's present offer was first seen here; infinite for who was not seen."""
        sighting = self._peers.get(peer_id)
        return math.inf if sighting is None else sighting.offered_unix_s

    def changed_since(self, unix_s: float) -> frozenset[str]:
        """The peers whose offer was seen to change after ``unix_s``; newcomers do not count."""
        return frozenset(
            peer_id
            for peer_id, sighting in self._peers.items()
            if sighting.changed and sighting.offered_unix_s > unix_s
        )


ALIKE = 1.25
"""Ratio within which a figure is the same offer: peers refine their times while they serve."""


def _offer(record: NodeRecord) -> tuple[object, ...]:
    """The part of a record on which a planner counts; an honest peer changes it only by leaving or
    joining anew."""
    return (
        record.model,
        record.memory_bytes,
        record.kv_tokens_min,
        record.tokens_per_s,
        record.up_bytes_per_s is None,
        record.down_bytes_per_s is None,
        "" if record.uplink is None else record.uplink.uplink,
        record.shared_up_bytes_per_s is None,
        *(tuple(rows for rows, _, _ in times) for times in _times(record)),
        record.state is NodeState.DRAINING,
        record.reach is Reach.NONE,
    )


def _times(record: NodeRecord) -> tuple[LayerTimes, LayerTimes]:
    return record.decode_layer_ns, record.prompt_layer_ns


def _figures(record: NodeRecord) -> list[float]:
    """The figures on which a planner counts and which an honest peer may come to know better."""
    rates = record.up_bytes_per_s, record.down_bytes_per_s, record.shared_up_bytes_per_s
    found: list[float] = [rate or 0.0 for rate in rates]
    for times in _times(record):
        found += (ns for _, near_ns, far_ns in times for ns in (near_ns, far_ns))
    return found


def _is_same(offer: NodeRecord, record: NodeRecord) -> bool:
    """Whether ``record`` offers what ``offer`` did, but for refinements."""
    return _offer(offer) == _offer(record) and all(
        max(a, b) <= ALIKE * min(a, b)
        for a, b in zip(_figures(offer), _figures(record), strict=True)
    )


def _seen(before: _Sighting | None, record: NodeRecord, now_unix_s: float) -> _Sighting:
    if before is not None:
        before = _not_after(before, now_unix_s)
        if before.told is record:
            return before
    offered_unix_s = placed_unix_s = now_unix_s
    offer, changed = record, before is not None
    if before is not None:
        if _is_same(before.offer, record):
            offer, changed = before.offer, before.changed
            offered_unix_s = before.offered_unix_s
        if (before.told.start, before.told.end) == (record.start, record.end):
            placed_unix_s = before.placed_unix_s
    return _Sighting(
        told=record,
        seen=replace(
            record,
            joined_unix_s=offered_unix_s,
            moved_unix_s=min(record.moved_unix_s, placed_unix_s),
        ),
        offer=offer,
        offered_unix_s=offered_unix_s,
        placed_unix_s=placed_unix_s,
        changed=changed,
    )


def _not_after(sighting: _Sighting, now_unix_s: float) -> _Sighting:
    """``sighting``, with times that are past: this clock may have been set back since."""
    seen = sighting.seen
    if max(sighting.offered_unix_s, sighting.placed_unix_s, seen.moved_unix_s) <= now_unix_s:
        return sighting
    return replace(
        sighting,
        seen=replace(
            seen,
            joined_unix_s=min(seen.joined_unix_s, now_unix_s),
            moved_unix_s=min(seen.moved_unix_s, now_unix_s),
        ),
        offered_unix_s=min(sighting.offered_unix_s, now_unix_s),
        placed_unix_s=min(sighting.placed_unix_s, now_unix_s),
    )
