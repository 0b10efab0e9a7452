"""What a stage sent on, kept in bounded host memory so that a lost next stage can be rebuilt.

The KV of a lost stage is a function of the rows it was sent. Whoever sent them sends them again to
its replacement, and nobody upstream computes anything anew (architecture.md, "The session's owner
can rebuild anything"). A log that was dropped costs time, never a token: the stage then runs its
own rows again, from what *its* upstream logged, and in the end from the token log.
"""

from dataclasses import dataclass, field

LOG_BYTES_MAX = 256 << 20
"""Default bound on all logs of one stage: 16,000 tokens of a model of width 4096 in 16 bits."""


@dataclass(slots=True)
class _Entry:
    start: int = 0
    """Position of the first row that is kept."""
    data: bytearray = field(default_factory=bytearray)
    dropped: bool = False


class ActivationLog:
    """Rows by session, ``row_bytes`` each. Rows of a session are consecutive positions.

    Above ``bytes_max`` the oldest sessions' rows are dropped first: short answers end soon and
    need no replay, and a long one has the most upstreams that logged it. Of a session that was
    dropped only the newest rows are kept from then on, which a next stage asks for when it
    resumes where it was.
    """

    def __init__(self, row_bytes: int, bytes_max: int) -> None:
        self._row_bytes = row_bytes
        self._bytes_max = bytes_max
        self._entries: dict[str, _Entry] = {}  # oldest session first
        self.bytes_held = 0
        self.dropped = 0
        """Sessions whose rows were dropped to stay within the bound."""

    def append(self, session: str, position: int, rows: bytes | memoryview) -> None:
        """Keep rows at ``position`` onwards; what was kept at or behind it is replaced."""
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
        """The position behind the last row that is kept; 0 for an unknown session."""
        entry = self._entries.get(session)
        return 0 if entry is None else entry.start + len(entry.data) // self._row_bytes

    def covers(self, session: str, start: int, end: int) -> bool:
        """Whether the rows of positions ``[start, end)`` are all kept."""
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
        """Forget rows at ``end`` and behind: they will be made again."""
        entry = self._entries.get(session)
        if entry is None:
            return
        keep = max(0, (end - entry.start) * self._row_bytes)
        if keep < len(entry.data):
            self.bytes_held -= len(entry.data) - keep
            del entry.data[keep:]

    def forget(self, session: str) -> None:
        """The session ended here; unknown ones are ignored."""
        entry = self._entries.pop(session, None)
        if entry is not None:
            self.bytes_held -= len(entry.data)
