"""What goes into an engine step and what comes out, with results coalesced by next peer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.links.scheduler import TrafficClass
from dht.messages.session import ITEMS_MAX, ActivationItem, Activations, RingToken, RingTokens
from node.links.wire_rows import Rows
from node.sessions.session import Chunk, StageSession


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """Rows of one session for the engine; exactly one of ``token_ids`` and ``rows`` is set."""

    key: str
    session: StageSession
    chunk: Chunk
    rows: Rows | None
    since_s: float = 0.0
    """When it was queued, on the event loop's clock."""

    @property
    def tokens(self) -> int:
        """Rows of this request."""
        return self.chunk.tokens

    @property
    def background(self) -> bool:
        """Whether it is a replay for a planned move, which nobody waits for."""
        return self.session.is_warming


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step made of a request: rows for the next stage, or a token, or an error."""

    request: StepRequest
    rows: Rows | None = None
    token_id: int | None = None
    score: bytes = b""
    """Of the token, packed (:mod:`dht.messages.logprobs`), where the client wants it."""
    prompt_scores: bytes = b""
    """Of the request's ``chunk.targets``, packed."""
    error: str | None = None


def rows_bytes(results: Sequence[StepResult]) -> dict[int, memoryview]:
    """The rows of each result as bytes, by its index; copied off the device in one go."""
    with_rows = [(index, r.rows) for index, r in enumerate(results) if r.rows is not None]
    if not with_rows:
        return {}
    whole = Rows.join([rows for _, rows in with_rows])
    row_bytes = len(whole) // sum(rows.tensor.shape[0] for _, rows in with_rows)
    parts, at = {}, 0
    for index, rows in with_rows:
        size = rows.tensor.shape[0] * row_bytes
        parts[index] = whole[at : at + size]
        at += size
    return parts


class Outbox:
    """Frames that follow from one step.

    Ring tokens and decode rows for one peer share a frame each; every prefill chunk has its own,
    behind them, so that a long prompt does not delay a decode.
    """

    def __init__(self) -> None:
        self._ring: dict[str, list[RingToken]] = {}
        self._decodes: dict[str, list[tuple[ActivationItem, bytes | memoryview]]] = {}
        self._prefills: list[tuple[str, ActivationItem, bytes | memoryview]] = []

    def add_token(self, peer_id: str, token: RingToken) -> None:
        """A sampled token for the first stage of its session."""
        self._ring.setdefault(peer_id, []).append(token)

    def add_rows(
        self, peer_id: str, item: ActivationItem, body: bytes | memoryview, *, prefill: bool
    ) -> None:
        """Hidden states for the next stage of their session."""
        if not prefill:
            self._decodes.setdefault(peer_id, []).append((item, body))
        else:
            self._prefills.append((peer_id, item, body))

    def frames(
        self, dtype: str, hidden: int
    ) -> Iterator[tuple[str, RingTokens | Activations, bytes | memoryview, TrafficClass]]:
        """``(peer, message, body, class)`` in the order in which they should leave."""
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
