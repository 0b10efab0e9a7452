"""Decides which KV of a moving session to send next, and when the new stage has caught up. Pure.

The session goes on while its KV is copied, so the KV to copy grows. KV is append-only and sent KV
stays valid. Pieces go in order, a bounded number of bytes ahead of what the new stage has taken,
until only the newest rows are missing (Llumnix, OSDI'24, §4.2). The session's upstream sends those
as rows when the route changes, at a token boundary.
"""

from dataclasses import dataclass

REST_ROWS = 4
"""Missing rows that are left to the hand-over: few enough for one small step."""
PIECE_TOKENS_MAX = 512


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
        if rest < 1 or (rest <= REST_ROWS and self.sent > 0):
            return None
        tokens = max(1, min(rest, self.piece_bytes // self.row_bytes, PIECE_TOKENS_MAX))
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
        return self.taken > 0 and written - self.taken <= REST_ROWS
