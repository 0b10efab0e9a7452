"""Logs the rows that a stage sent on, in bounded host memory, to rebuild a lost next stage.

The KV of a lost stage is a function of the rows it was sent. The stage that sent them sends them
again to the replacement, and no stage before computes anything again (architecture.md, "The
session's owner can rebuild anything"). A dropped log costs time, never a token: the stage then runs
its own rows again from what *its* upstream logged, and in the end from the token log.
"""

from dataclasses import dataclass, field

LOG_BYTES_MAX = 256 << 20
"""Default bound on all logs of one stage: 16,000 tokens of a model of width 4096 in 16 bits."""


@dataclass(slots=True)
class _Entry:
    start: int = 0
    """Position of the first logged row."""
    data: bytearray = field(default_factory=bytearray)
    dropped: bool = False


class ActivationLog:
    """Logged rows by session, ``row_bytes`` each; a session's rows have consecutive positions.

    Above ``bytes_max`` the oldest sessions' rows are dropped first: short answers end soon and need
    no replay, and a long answer has the most upstreams that logged it. From then on, only the
    newest rows of that session are kept; a next stage that resumes where it stood asks for those.
    """

    def __init__(self, row_bytes: int, bytes_max: int) -> None:
        self._row_bytes = row_bytes
        self._bytes_max = bytes_max
        self._entries: dict[str, _Entry] = {}  # oldest session first
        self.bytes_held = 0
        self.dropped = 0
        """Number of sessions whose rows were dropped to stay within the bound."""

    def append(self, session: str, position: int, rows: bytes | memoryview) -> None:
        """Log rows at ``position`` onwards; they replace rows logged at or behind it."""
        if len(rows) % self._row_bytes:
            raise ValueError(f"{len(rows)} bytes are no rows of {self._row_bytes} bytes")
        entry = self._entries.setdefault(session, _Entry(start=position))
        if entry.dropped or not entry.start <= position <= self.end(session):
            self._clear(entry, position)
        self.truncate(session, position)
        entry.data += rows
        self.bytes_held += len(rows)
        self._keep_bound(entry)

    def _keep_bound(self, newest: _Entry) -> None:
        for entry in list(self._entries.values()):
            if self.bytes_held <= self._bytes_max:
                return
            if entry.data and entry is not newest:
                self._drop(entry)
        if self.bytes_held > self._bytes_max:
            self._drop(newest)

    def _drop(self, entry: _Entry) -> None:
        self._clear(entry, entry.start + len(entry.data) // self._row_bytes)
        self.dropped += not entry.dropped
        entry.dropped = True

    def _clear(self, entry: _Entry, start: int) -> None:
        self.bytes_held -= len(entry.data)
        entry.data = bytearray()
        entry.start = start

    def end(self, session: str) -> int:
        """Position behind the last logged row; 0 for an unknown session."""
        entry = self._entries.get(session)
        return 0 if entry is None else entry.start + len(entry.data) // self._row_bytes

    def covers(self, session: str, start: int, end: int) -> bool:
        """Whether the rows of positions ``[start, end)`` are all logged."""
        entry = self._entries.get(session)
        return start >= end or (
            entry is not None and entry.start <= start <= end <= self.end(session)
        )

    def rows(self, session: str, start: int, end: int) -> bytes:
        """The rows of positions ``[start, end)``; KeyError unless :meth:`covers` them."""
        if start >= end:
            return b""
        if not self.covers(session, start, end):
            raise KeyError(f"positions [{start}, {end}) of session {session} are not kept")
        entry = self._entries[session]
        first = (start - entry.start) * self._row_bytes
        return bytes(entry.data[first : first + (end - start) * self._row_bytes])

    def truncate(self, session: str, end: int) -> None:
        """Forget rows at ``end`` and behind, which will be computed again."""
        entry = self._entries.get(session)
        if entry is None:
            return
        keep = max(0, (end - entry.start) * self._row_bytes)
        if keep < len(entry.data):
            self.bytes_held -= len(entry.data) - keep
            del entry.data[keep:]

    def forget(self, session: str) -> None:
        """Forget a session that ended here; an unknown one is ignored."""
        entry = self._entries.pop(session, None)
        if entry is not None:
            self.bytes_held -= len(entry.data)
