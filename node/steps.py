"""What goes into an engine step and what comes out, with results coalesced by next peer."""

from collections.abc import Iterator
from dataclasses import dataclass

from dht.messages import ITEMS_MAX, ActivationItem, Activations, RingToken, RingTokens
from node.stage_session import Chunk, StageSession
from node.tensors import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """Rows of one session for the engine; exactly one of ``token_ids`` and ``rows`` is set."""

    key: str
    session: StageSession
    chunk: Chunk
    rows: Rows | None

    @property
    def tokens(self) -> int:
        """Rows of this request."""
        return self.chunk.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step made of a request: rows for the next stage, or a token, or an error."""

    request: StepRequest
    rows: Rows | None = None
    token_id: int | None = None
    error: str | None = None


class Outbox:
    """Frames that follow from one step.

    Ring tokens and decode rows for one peer share a frame each; every prefill chunk has its own,
    behind them, so that a long prompt does not delay a decode.
    """

    def __init__(self) -> None:
        self._ring: dict[str, list[RingToken]] = {}
        self._decodes: dict[str, list[StepResult]] = {}
        self._prefills: list[tuple[str, StepResult]] = []

    def add_token(self, peer_id: str, token: RingToken) -> None:
        """A sampled token for the first stage of its session."""
        self._ring.setdefault(peer_id, []).append(token)

    def add_rows(self, peer_id: str, result: StepResult) -> None:
        """Hidden states for the next stage of their session."""
        if result.request.chunk.tokens == 1:
            self._decodes.setdefault(peer_id, []).append(result)
        else:
            self._prefills.append((peer_id, result))

    def frames(
        self, dtype: str, hidden: int
    ) -> Iterator[tuple[str, RingTokens | Activations, bytes | memoryview]]:
        """``(peer, message, body)`` in the order in which they should leave."""
        for peer_id, tokens in self._ring.items():
            for start in range(0, len(tokens), ITEMS_MAX):
                yield peer_id, RingTokens(tokens=tuple(tokens[start : start + ITEMS_MAX])), b""
        for peer_id, group in self._decodes.items():
            for start in range(0, len(group), ITEMS_MAX):
                yield peer_id, *_rows_frame(group[start : start + ITEMS_MAX], dtype, hidden)
        for peer_id, result in self._prefills:
            yield peer_id, *_rows_frame([result], dtype, hidden)


def _rows_frame(
    results: list[StepResult], dtype: str, hidden: int
) -> tuple[Activations, memoryview]:
    items = tuple(
        ActivationItem(
            session=result.request.session.open.session,
            epoch=result.request.session.open.epoch,
            position=result.request.chunk.position,
            tokens=result.request.chunk.tokens,
        )
        for result in results
    )
    body = Rows.join([result.rows for result in results if result.rows is not None])
    return Activations(items=items, dtype=dtype, hidden=hidden), body
