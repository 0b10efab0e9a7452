"""How the new stage of a planned move gets the session's KV: by whichever way is over first.

- ``COPY``: the KV itself, from the stage that leaves. Many bytes, no work.
- ``REPLAY``: the rows that the stage before has logged (the token ids, at a first stage) through
  the new stage's layers. 3 to 22 times fewer bytes without grouped-query attention, but work that
  the new stage's other sessions wait for, so it is done in the share of time left to it.
- ``RERUN``: the same where the log does not reach back: stages further up run their part again.

Pure; estimates in seconds.
"""

from dataclasses import dataclass
from enum import StrEnum

UNKNOWN_BYTES_PER_S = 12.5e6
"""Of a link that nobody measured: 100 Mbit/s."""
UNKNOWN_ROW_S = 1e-3
"""What a row takes in an engine that has not run a prompt yet."""
STEP_EVERY_S = 0.05
"""A stage that serves other sessions takes some rows of a replay along this often at least
(:data:`node.engine.scheduler.BACKGROUND_QUIET_S`)."""


class Way(StrEnum):
    COPY = "copy"
    REPLAY = "replay"
    RERUN = "rerun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """What is known at the new stage when it is asked to take part in a move."""

    tokens: int
    """That the session has run so far."""
    kv_row_bytes: int
    row_bytes: int
    """Of a row on the wire; a few bytes at a first stage, which gets token ids."""
    kv_bytes_per_s: float | None
    """From the stage that leaves; None: not measured. 0: there is none that could copy."""
    rows_bytes_per_s: float | None
    """From the stage before."""
    row_s: float | None
    """Per row of prefill in this stage's layers."""
    beside_rows: int | None
    """Rows of a replay that ride along with a step; None where no other session is served."""
    logged: bool
    """Whether the stage before has logged the rows."""
    stages_above: int
    """Stages that would run their part again where it has not."""

    def seconds(self, way: Way) -> float:
        """How long ``way`` would take; infinite where it cannot be."""
        if way is Way.COPY:
            return self._link_s(self.kv_row_bytes, self.kv_bytes_per_s)
        if way is Way.REPLAY and not self.logged:
            return float("inf")
        stages = 1 if way is Way.REPLAY else 1 + self.stages_above
        row_s = UNKNOWN_ROW_S if self.row_s is None else self.row_s
        if self.beside_rows is not None:
            row_s = max(row_s, STEP_EVERY_S / self.beside_rows)
        run_s = stages * self.tokens * row_s
        return max(run_s, self._link_s(self.row_bytes, self.rows_bytes_per_s))

    def _link_s(self, row_bytes: int, bytes_per_s: float | None) -> float:
        rate = UNKNOWN_BYTES_PER_S if bytes_per_s is None else bytes_per_s
        return self.tokens * row_bytes / rate if rate > 0 else float("inf")

    def cheapest(self) -> Way:
        """The way with the least seconds; the one named first among equals."""
        return min(Way, key=self.seconds)
