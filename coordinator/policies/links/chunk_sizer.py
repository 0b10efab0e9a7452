"""Prefill chunk size: how many rows of a prompt the first stage runs in one step.

Small chunks let the next stage start early and decodes run in between; large ones pay a step's
fixed cost less often. With S stages whose step takes t(c) = b + a·c seconds for c rows, and links
that take l(c), a prompt of n rows takes about (S − 1)·(t + l) + ⌈n/c⌉·max(t, l): the fill of the
pipeline, then its slowest part per chunk (Sarathi-Serve, OSDI'24, §4.3, over links as in MoLink
§3.2). The candidate with the least time is chosen. b and a are learned from measured steps, so
chunks shrink as attention over a growing context makes rows slower.

Pure: durations in seconds are arguments.
"""

from dataclasses import dataclass, field

CANDIDATES = (16, 32, 64, 128, 256, 512)
QUEUED_BYTES_MAX = 4 << 20
"""The first stage feeds no chunk while the next link's queue is longer than this."""
RESENT_TOKENS = 128
"""Maximum number of logged rows per frame to a stage that takes over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig:
    """Bounds on rows of a prompt in a step."""

    chunk_tokens_unmeasured: int = 64
    beside_share: float = 0.05
    """Share of a decode step's time by which rows that nobody waits for may lengthen it."""
    beside_tokens_least: int = 4
    """Minimum rows beside decodes, however slow they are: a stage that leaves must not wait
    forever."""
    beside_tokens_most: int = 64
    newest_weight: float = 0.25
    decode_waits_s_max: float = 0.1
    """Maximum expected time of a chunk's step while other sessions decode, in seconds."""
    step_s_max: float = 2.5
    """Maximum expected time of any chunk's step, in seconds: half of that after which a peer is
    given up that is still at it (:mod:`coordinator.policies.failure.detector`)."""


@dataclass(slots=True, kw_only=True)
class ChunkSizer:
    """Learns step times and chooses chunk sizes. One per stage."""

    config: ChunkConfig = field(default_factory=ChunkConfig)
    fixed_s: float | None = None
    """Time of the smallest step (b); None: not measured yet."""
    row_s: float | None = None
    """Time that a row of prefill adds (a); None: not measured yet."""

    def ran(self, rows: int, took_s: float, *, decodes_only: bool) -> None:
        """Learn from a step of ``rows`` rows; one without prefill gives the fixed time."""
        if rows < 1 or not 0 <= took_s < 3600:
            return
        if decodes_only:
            self.fixed_s = self._moved(self.fixed_s, took_s)
            return
        fixed_s = min(self.fixed_s or 0.0, took_s)
        self.row_s = self._moved(self.row_s, (took_s - fixed_s) / rows)

    def step_s(self, rows: int) -> float | None:
        """Expected time of a step of ``rows`` rows; None: nothing is measured yet."""
        if self.row_s is None:
            return None
        return (self.fixed_s or 0.0) + self.row_s * rows

    def beside(self) -> int:
        """Rows to add to a decode step without lengthening it by more than ``beside_share``."""
        if self.row_s is None or self.fixed_s is None:
            return self.config.beside_tokens_least
        room_s = self.config.beside_share * self.fixed_s
        if self.row_s * self.config.beside_tokens_most <= room_s:
            return self.config.beside_tokens_most
        return max(self.config.beside_tokens_least, int(room_s / self.row_s))

    def choose(
        self, left_tokens: int, stages: int, *, link_row_s: float | None, others_decode: bool
    ) -> int:
        """Rows of the next chunk of a prompt with ``left_tokens`` left to run.

        ``link_row_s`` is the time of one row on the link to the next stage; while it is unknown
        (None), no chunk is larger than ``chunk_tokens_unmeasured``.
        """
        if left_tokens <= CANDIDATES[0]:
            return CANDIDATES[0]
        if self.row_s is None:
            return self.config.chunk_tokens_unmeasured
        if stages == 1:
            link_row_s = 0.0
        best, best_s = CANDIDATES[0], float("inf")
        for rows in CANDIDATES:
            chunk = min(rows, left_tokens)
            step_s, link_s = self._takes_s(chunk, link_row_s)
            most_s = self.config.decode_waits_s_max if others_decode else self.config.step_s_max
            if step_s > most_s and rows > CANDIDATES[0]:
                break
            whole, rest = divmod(left_tokens, chunk)
            slowest_s = whole * max(step_s, link_s)
            slowest_s += max(self._takes_s(rest, link_row_s)) if rest else 0.0
            total_s = (stages - 1) * (step_s + link_s) + slowest_s
            if link_row_s is None and rows > self.config.chunk_tokens_unmeasured:
                break
            if total_s < best_s:
                best, best_s = rows, total_s
        return best

    def _takes_s(self, rows: int, link_row_s: float | None) -> tuple[float, float]:
        """Time of a chunk in a stage and on a link, in seconds."""
        return self.step_s(rows) or 0.0, (link_row_s or 0.0) * rows

    def _moved(self, before: float | None, newest: float) -> float:
        weight = self.config.newest_weight
        return newest if before is None else before + weight * (newest - before)
