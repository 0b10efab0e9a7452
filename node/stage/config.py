"""The bounds of a stage server, and what it needs of an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from node.engine.work_item import WorkItem, WorkResult
from node.links.hops import HopConfig
from node.sessions.activation_log import LOG_BYTES_MAX
from node.stage.open_checks import StageView


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Bounds of the stage server."""

    chunk_tokens: int | None = None
    """Prompt tokens per prefill chunk: the next stage starts when the first chunk is done. None:
    as many as fit the steps and links as measured (:mod:`coordinator.links.chunk_sizer`)."""
    sessions_max: int = 512
    sessions_per_client_max: int = 64
    urgent_per_client_max: int = 4
    """Sessions of high priority that one client may have here; further ones count as normal."""
    idle_s: float = 60.0
    """A session without progress for so long is closed and its client told."""
    paused_s: float = 30.0
    """How long a session that lost a neighbour is kept for its owner's next attempt."""
    paused_moving_s: float = 1.0
    """The same while its layers here are to be given up: who waits for a layer that nobody else
    serves must not hold back the move that brings it."""
    finished_s: float = 30.0
    """How long the answer of a finished session is kept for a client that attaches late."""
    queued_bytes_max: int = 4 << 20
    """The first stage feeds no further prefill chunk while more waits for the next link."""
    backlog_tokens_max: int = 1024
    """While more rows of prefill wait here, the stages before get no credit for further ones."""
    log_bytes_max: int = LOG_BYTES_MAX
    """Host memory for rows that were sent on; the oldest sessions' go first."""
    copy_bytes_max: int = 1 << 20
    """KV on its way to the new stage of a planned move that has not been taken there yet."""
    copy_piece_bytes: int = 128 << 10
    """KV that is read, sent and written at once: what a step may have to wait for."""
    copy_stalled_s: float = 5.0
    """A new stage that takes no KV for so long is not moved to."""
    keepalive_s: float = 1.0
    int8: Literal["off", "prefill", "all"] = "off"
    """Which rows leave as int8 with a scale per row: half the bytes of float16, and answers that
    may differ from those of one process (``bench/int8.py`` measures by how much)."""
    hops: HopConfig = field(default_factory=HopConfig)


class StageEngine(Protocol):
    """What the stage server needs of an engine; see :mod:`node.stage.local_engine`."""

    @property
    def view(self) -> StageView: ...

    @property
    def wire_dtype(self) -> str: ...

    @property
    def hidden(self) -> int: ...

    @property
    def kv_tokens_free(self) -> int: ...

    @property
    def backlog_tokens(self) -> int:
        """Rows of prefill that wait."""
        ...

    def reserve(self, key: str, tokens: int) -> str | None: ...

    def free(self, key: str) -> None: ...

    def drop(self, key: str) -> None:
        """Forget what is queued of a session; a step that runs ends as it will."""
        ...

    def start(self, on_results: Callable[[Sequence[WorkResult]], None]) -> None:
        """Begin: each step's results go to ``on_results`` on the event loop. Called once."""
        ...

    def submit(self, item: WorkItem) -> None: ...

    def kv_row_bytes(self, start: int, end: int) -> int:
        """Bytes of one token's KV in layers ``[start, end)``."""
        ...

    async def export_kv(self, key: str, position: int, tokens: int) -> bytes:
        """Up to ``tokens`` tokens' KV from ``position`` on, between steps; it stays as it is.

        Raises KeyError and ValueError where it is not there (any more).
        """
        ...

    async def import_kv(
        self, key: str, layers: tuple[int, int], position: int, tokens: int, body: bytes
    ) -> str | None:
        """Append KV that another engine exported, between steps; the reason where it cannot be."""
        ...
