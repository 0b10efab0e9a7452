"""Collects the frames that one engine step produces, coalesced by next peer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.links.scheduler import TrafficClass
from dht.messages.session import (
    ITEMS_MAX,
    ActivationItem,
    Activations,
    FeaturedActivations,
    RingToken,
    RingTokens,
)
from node.engine.work_item import WorkResult
from node.links.wire_rows import feature_bytes, join_rows


def rows_bytes(results: Sequence[WorkResult]) -> dict[int, memoryview]:
    """Bytes of each result's rows by the result's index, copied off the device in one transfer."""
    hidden = {index: r.hidden for index, r in enumerate(results) if r.hidden is not None}
    if not hidden:
        return {}
    whole = join_rows(list(hidden.values()))
    row_bytes = len(whole) // sum(rows.shape[0] for rows in hidden.values())
    parts, at = {}, 0
    for index, rows in hidden.items():
        size = rows.shape[0] * row_bytes
        parts[index] = whole[at : at + size]
        at += size
    return parts


@dataclass(frozen=True, slots=True)
class _Rows:
    item: ActivationItem
    body: bytes | memoryview
    features: bytes
    """What a head at the last stage takes of the last rows, packed; empty if nothing."""


class Outbox:
    """Frames that one step produces.

    Ring tokens and decode rows for one peer share a frame each. Every prefill chunk has its own
    frame, behind them, so that a long prompt does not delay a decode.
    """

    def __init__(self) -> None:
        self._ring: dict[str, list[RingToken]] = {}
        self._decodes: dict[str, list[_Rows]] = {}
        self._prefills: list[tuple[str, _Rows]] = []

    def add_token(self, peer_id: str, token: RingToken) -> None:
        """Add a sampled token for the first stage of its session."""
        self._ring.setdefault(peer_id, []).append(token)

    def add_rows(
        self,
        peer_id: str,
        item: ActivationItem,
        body: bytes | memoryview,
        *,
        prefill: bool,
        features: bytes = b"",
    ) -> None:
        """Add hidden states for the next stage of their session; ``features``: packed, those in
        front of earlier layers."""
        rows = _Rows(item, body, features)
        if not prefill:
            self._decodes.setdefault(peer_id, []).append(rows)
        else:
            self._prefills.append((peer_id, rows))

    def frames(
        self, dtype: str, hidden: int
    ) -> Iterator[tuple[str, RingTokens | Activations, bytes | memoryview, TrafficClass]]:
        """Yield ``(peer, message, body, class)`` in sending order."""
        for peer_id, tokens in self._ring.items():
            for start in range(0, len(tokens), ITEMS_MAX):
                message = RingTokens(tokens=tuple(tokens[start : start + ITEMS_MAX]))
                yield peer_id, message, b"", TrafficClass.CONTROL
        for peer_id, group in self._decodes.items():
            for start in range(0, len(group), ITEMS_MAX):
                part = group[start : start + ITEMS_MAX]
                yield peer_id, *_frame(part, dtype, hidden), TrafficClass.DECODE
        for peer_id, rows in self._prefills:
            yield peer_id, *_frame([rows], dtype, hidden), TrafficClass.PREFILL


def _frame(
    rows: Sequence[_Rows], dtype: str, hidden: int
) -> tuple[Activations, bytes | memoryview]:
    """Message and body of rows for one peer."""
    items = tuple(each.item for each in rows)
    bodies = [each.body for each in rows]
    features = [each.features for each in rows]
    if not any(features):
        body = bodies[0] if len(bodies) == 1 else b"".join(bodies)
        return Activations(items=items, dtype=dtype, hidden=hidden), body
    counts = tuple(len(each) // feature_bytes(hidden) for each in features)
    message = FeaturedActivations(items=items, dtype=dtype, hidden=hidden, features=counts)
    return message, b"".join([*bodies, *features])
