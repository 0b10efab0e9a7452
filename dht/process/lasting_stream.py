"""Text streams of processes that run on whatever becomes of who reads what they say.

A pipe's reader may end, a terminal may be closed, the disk of a log may be full: no reason to end a
peer that others count on.
"""

import errno
import os
from contextlib import suppress
from typing import Any, TextIO

GONE = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO, errno.ESHUTDOWN, errno.ECONNRESET})
"""What writing fails with where nobody will read again: pipes, sockets, terminals."""


class LastingStream:
    """Writes to ``stream``, and leaves out what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text`` where that is possible; its length."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._left_out(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._left_out(error)

    def _left_out(self, error: OSError) -> None:
        """Let what comes after an error that stays go nowhere: what waits in the stream would be
        tried again at the end of the process."""
        if error.errno not in GONE:
            return
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
