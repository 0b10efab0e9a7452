"""Decides how the new stage of a planned move gets the session's KV, and what is sent next. Pure.

- ``COPY``: the KV itself, from the stage that leaves. Many bytes, no work. The session goes on
  meanwhile, so the KV to copy grows. KV is append-only and sent KV stays valid. Pieces go in order,
  a bounded number of bytes ahead of what the new stage has taken, until only the newest rows are
  missing (Llumnix, OSDI'24, §4.2). The session's upstream sends those as rows when the route
  changes, at a token boundary.
- ``REPLAY``: the rows that the stage before has logged (at a first stage, the token ids) run
  through the new stage's layers. 3 to 22 times fewer bytes without grouped-query attention, but the
  new stage's other sessions wait for the work, so it runs in the share of time left to it.
- ``RERUN``: the same if the log does not reach back: stages before run their part again.

The fastest way is taken; estimates are in seconds.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingConfig:
    """How a session's past is copied or run again elsewhere."""

    unknown_bytes_per_s: float = 12.5e6
    """Assumed bandwidth of an unmeasured link: 100 Mbit/s."""
    unknown_row_s: float = 1e-3
    """Assumed time of a row in an engine that has not run a prompt yet."""
    step_every_s: float = 0.05
    """Maximum interval at which a stage that serves other sessions runs some rows of a replay
    (``BATCHING.background_quiet_s``)."""
    rest_rows: int = 4
    """Missing rows that are left to the hand-over: few enough for one small step."""
    piece_tokens_max: int = 512


MOVING = MovingConfig()


class Way(StrEnum):
    COPY = "copy"
    REPLAY = "replay"
    RERUN = "rerun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """What the new stage knows when it is asked to take part in a move."""

    tokens: int
    """Number of tokens that the session has run."""
    kv_row_bytes: int
    row_bytes: int
    """Bytes of a row on the wire; a few bytes at a first stage, which gets token ids."""
    kv_bytes_per_s: float | None
    """Bandwidth from the stage that leaves. None: not measured. 0: no stage could copy."""
    rows_bytes_per_s: float | None
    """Bandwidth from the stage before. None: not measured."""
    row_s: float | None
    """Time per row of prefill in this stage's layers. None: no prompt has run yet."""
    beside_rows: int | None
    """Rows of a replay that a step takes along; None if no other session is served."""
    logged: bool
    """Whether the stage before has logged the rows."""
    stages_above: int
    """Number of stages before that would run their part again if the rows are not logged."""

    def seconds(self, way: Way) -> float:
        """Duration of ``way``; infinite if it is impossible."""
        if way is Way.COPY:
            return self._link_s(self.kv_row_bytes, self.kv_bytes_per_s)
        if way is Way.REPLAY and not self.logged:
            return float("inf")
        stages = 1 if way is Way.REPLAY else 1 + self.stages_above
        row_s = MOVING.unknown_row_s if self.row_s is None else self.row_s
        if self.beside_rows is not None:
            row_s = max(row_s, MOVING.step_every_s / self.beside_rows)
        run_s = stages * self.tokens * row_s
        return max(run_s, self._link_s(self.row_bytes, self.rows_bytes_per_s))

    def _link_s(self, row_bytes: int, bytes_per_s: float | None) -> float:
        rate = MOVING.unknown_bytes_per_s if bytes_per_s is None else bytes_per_s
        return self.tokens * row_bytes / rate if rate > 0 else float("inf")

    def cheapest(self) -> Way:
        """The fastest way; the first in order of definition among equals."""
        return min(Way, key=self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """Range of tokens whose KV is to be sent."""

    position: int
    tokens: int


@dataclass(slots=True, kw_only=True)
class KvCopyOut:
    """State of one copy, at the stage that serves on."""

    row_bytes: int
    """Bytes of one token's KV in the session's layers."""
    piece_bytes: int
    ahead_bytes: int
    """Maximum bytes sent and not yet taken; one piece is always allowed."""
    sent: int = 0
    """Number of leading tokens whose KV was sent."""
    taken: int = 0
    """Number of leading tokens whose KV the new stage has written."""

    def next(self, written: int) -> KvSpan | None:
        """The next piece to send when the session stands at ``written``; None: wait, or done."""
        rest = written - self.sent
        if rest < 1 or (rest <= MOVING.rest_rows and self.sent > 0):
            return None
        tokens = max(1, min(rest, self.piece_bytes // self.row_bytes, MOVING.piece_tokens_max))
        ahead = self.sent - self.taken
        if ahead and (ahead + tokens) * self.row_bytes > self.ahead_bytes:
            return None
        piece = KvSpan(position=self.sent, tokens=tokens)
        self.sent += tokens
        return piece

    def took(self, position: int) -> bool:
        """Record that the new stage has all KV before ``position``; False if that is impossible."""
        if not 0 <= position <= self.sent:
            return False
        self.taken = max(self.taken, position)
        return True

    def is_warm(self, written: int) -> bool:
        """Whether the new stage may take over: only the newest rows are missing there."""
        return self.taken > 0 and written - self.taken <= MOVING.rest_rows
