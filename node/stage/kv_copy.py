"""Which KV of a moving session is to be sent next, and when the new stage has caught up.

The session goes on while its KV is copied, so what there is to copy grows. KV is append-only and
what was sent stays true: pieces go in order, a bounded number of bytes ahead of what the new stage
has taken, until little but the newest rows is missing (Llumnix, OSDI'24, §4.2). Those the session's
upstream sends as rows when the route changes, at a token boundary. Pure.
"""

from dataclasses import dataclass

REST_ROWS = 4
"""So few missing rows are left to the hand-over: one small step there."""
PIECE_TOKENS_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """Tokens whose KV is to be sent."""

    position: int
    tokens: int


@dataclass(slots=True, kw_only=True)
class KvCopyOut:
    """One copy, at the stage that serves on."""

    row_bytes: int
    """Of one token's KV in the session's layers."""
    piece_bytes: int
    ahead_bytes: int
    """Sent and not yet taken, at most (one piece always may be)."""
    sent: int = 0
    """Tokens before it were sent."""
    taken: int = 0
    """Tokens before it have been written by the new stage."""

    def next(self, written: int) -> KvSpan | None:
        """What to send now that the session stands at ``written``; None: wait or be done."""
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
        """The new stage has everything before ``position``; False for what cannot be."""
        if not 0 <= position <= self.sent:
            return False
        self.taken = max(self.taken, position)
        return True

    def is_warm(self, written: int) -> bool:
        """Whether the new stage may take over: it has all but the newest few rows."""
        return self.taken > 0 and written - self.taken <= REST_ROWS
