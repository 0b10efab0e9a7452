"""Bounds of the stage server, and the engine interface that it needs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from coordinator.policies.links.chunk_sizer import QUEUED_BYTES_MAX
from dht.messages.session import Sampling
from node.drafting.chain import DraftRunner
from node.drafting.drafter import Drafter
from node.drafting.suffix import SuffixDrafter
from node.engine.work_item import WorkItem, WorkResult
from node.kv.page_names import NO_NAMES, PageNames
from node.links.hops import HopConfig
from node.sampling.grammar import GrammarState
from node.sessions.activation_log import LOG_BYTES_MAX
from node.sessions.open_checks import StageView


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    chunk_tokens: int | None = None
    """Prompt tokens per prefill chunk; the next stage starts when the first chunk is done. None:
    chosen by :mod:`coordinator.policies.links.chunk_sizer` from measured steps and links."""
    sessions_max: int = 512
    sessions_per_client_max: int = 64
    urgent_per_client_max: int = 4
    """High-priority sessions per client; further ones count as normal."""
    idle_s: float = 60.0
    """A session without progress for ``idle_s`` is closed and its client told."""
    paused_s: float = 30.0
    """How long a session that lost a neighbour is kept for its owner's next attempt."""
    paused_moving_s: float = 1.0
    """Like ``paused_s``, for a session whose layers are to be given up here: a session that waits
    for a layer that nobody else serves must not hold back the move that brings the layer."""
    finished_s: float = 30.0
    """How long the answer of a finished session is kept for a client that attaches late."""
    attaches_max: int = 4
    """How often a client may attach to one attempt, which sends all its tokens and scores again:
    megabytes for a frame of some bytes. Clients attach once."""
    queued_bytes_max: int = QUEUED_BYTES_MAX
    """The first stage feeds no prefill chunk while the next link's queue is longer than this."""
    backlog_tokens_max: int = 1024
    """Stages before get no prefill credit while more rows of prefill than this wait here."""
    log_bytes_max: int = LOG_BYTES_MAX
    """Host memory for rows sent on; the oldest sessions' rows are dropped first."""
    copy_bytes_max: int = 1 << 20
    """KV sent to the new stage of a planned move and not yet taken there."""
    copy_piece_bytes: int = 128 << 10
    """KV read, sent and written at once; a step may have to wait for one piece."""
    copy_stalled_s: float = 5.0
    """A planned move is given up when its new stage takes no KV for ``copy_stalled_s``."""
    keepalive_s: float = 1.0
    int8: Literal["off", "prefill", "all"] = "off"
    """Which rows leave as int8 with a scale per row. Half the bytes of float16; answers may differ
    from those of one process: 95 to 98% of greedy answers did not (docs/measured-once.md)."""
    drafter: Callable[[], Drafter] = SuffixDrafter
    """Makes what drafts a session's tokens at its first stage."""
    draft_model: DraftRunner | None = None
    """A small model that drafts, too, where that pays more."""
    drafting_sessions_max: int = 64
    """Maximum sessions at the first stage beside which it drafts for a new one: each remembers
    up to 4 MB of tokens, and in a crowd no row is free."""
    hops: HopConfig = field(default_factory=HopConfig)


class StageEngine(Protocol):
    """The engine interface that the stage server needs; see :mod:`node.stage.local_engine`."""

    @property
    def view(self) -> StageView: ...

    @property
    def wire_dtype(self) -> str: ...

    @property
    def hidden(self) -> int: ...

    @property
    def kv_tokens(self) -> int:
        """KV tokens that each layer held has room for."""
        ...

    @property
    def page_tokens(self) -> int:
        """Tokens for which KV is given out at once."""
        ...

    @property
    def backlog_tokens(self) -> int:
        """Number of prefill rows that wait."""
        ...

    def open_kv(
        self,
        key: str,
        tokens: int,
        layers: tuple[int, int],
        likely_tokens: int,
        names: PageNames = NO_NAMES,
    ) -> int:
        """Let a session take KV for up to ``tokens`` tokens on ``layers``; it will probably take
        ``likely_tokens``. Returns the number of leading tokens whose KV is here by ``names``."""
        ...

    def keep_no_more(self, key: str) -> None:
        """Keep no further KV of a session for others."""
        ...

    def settle(self, key: str, tokens: int) -> None:
        """Nothing takes back a session's first ``tokens`` tokens, as far as they were run."""
        ...

    def extend_kv(self, key: str, tokens: int) -> bool:
        """Give a session KV for its first ``tokens`` tokens; False if too little is free."""
        ...

    def free(self, key: str) -> None: ...

    def drop(self, key: str) -> None:
        """Forget a session's queued work; a step that already runs ends normally."""
        ...

    def start(self, on_results: Callable[[Sequence[WorkResult]], None]) -> None:
        """Deliver each step's results to ``on_results`` on the event loop. Called once."""
        ...

    def submit(self, item: WorkItem) -> None: ...

    def together(self) -> AbstractContextManager[object]:
        """A block whose submitted items are ready at once: no step begins with some of them."""
        ...

    async def grammar(self, client: str, sampling: Sampling, answer: Sequence[int]) -> GrammarState:
        """The state of the grammar of ``sampling`` after the token ids ``answer``.

        Raises GrammarError where it cannot be followed here.
        """
        ...

    @property
    def state_tokens(self) -> int:
        """KV tokens that a session is charged with for what its layers keep beside keys and values;
        0 if that is nothing. Such sessions are not copied."""
        ...

    def resumable(self, key: str, position: int) -> int:
        """The last position up to ``position`` from which a session's rows can go on."""
        ...

    def kv_row_bytes(self, start: int, end: int) -> int:
        """Bytes of one token's KV in layers ``[start, end)``."""
        ...

    async def export_kv(self, key: str, position: int, tokens: int) -> bytes:
        """Copy out KV of up to ``tokens`` tokens from ``position`` on, between steps.

        Raises KeyError or ValueError if the KV is not here, or no longer.
        """
        ...

    async def import_kv(
        self, key: str, layers: tuple[int, int], position: int, tokens: int, body: bytes
    ) -> str | None:
        """Append KV that another engine exported, between steps; returns why if that fails."""
        ...
