"""Collects the frames that one engine step produces, coalesced by next peer."""

from collections.abc import Iterator, Sequence

from coordinator.links.scheduler import TrafficClass
from dht.messages.session import ITEMS_MAX, ActivationItem, Activations, RingToken, RingTokens
from node.engine.work_item import WorkResult
from node.links.wire_rows import join_rows


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


class Outbox:
    """Frames that one step produces.

    Ring tokens and decode rows for one peer share a frame each. Every prefill chunk has its own
    frame, behind them, so that a long prompt does not delay a decode.
    """

    def __init__(self) -> None:
        self._ring: dict[str, list[RingToken]] = {}
        self._decodes: dict[str, list[tuple[ActivationItem, bytes | memoryview]]] = {}
        self._prefills: list[tuple[str, ActivationItem, bytes | memoryview]] = []

    def add_token(self, peer_id: str, token: RingToken) -> None:
        """Add a sampled token for the first stage of its session."""
        self._ring.setdefault(peer_id, []).append(token)

    def add_rows(
        self, peer_id: str, item: ActivationItem, body: bytes | memoryview, *, prefill: bool
    ) -> None:
        """Add hidden states for the next stage of their session."""
        if not prefill:
            self._decodes.setdefault(peer_id, []).append((item, body))
        else:
            self._prefills.append((peer_id, item, body))

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
                items = tuple(item for item, _ in part)
                body = part[0][1] if len(part) == 1 else b"".join(body for _, body in part)
                rows = Activations(items=items, dtype=dtype, hidden=hidden)
                yield peer_id, rows, body, TrafficClass.DECODE
        for peer_id, item, body in self._prefills:
            rows = Activations(items=(item,), dtype=dtype, hidden=hidden)
            yield peer_id, rows, body, TrafficClass.PREFILL
