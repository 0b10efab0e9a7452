"""Logs a simulation's events, one line each: two runs of one seed must give the same lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from zlib import crc32

Tell = Callable[[str], None]
"""A callback for one line, without its line end."""
_TOLD: ContextVar[Tell | None] = ContextVar("told", default=None)


@contextmanager
def recorded(tell: Tell) -> Iterator[None]:
    """Call ``tell`` with the events of all simulations within the context."""
    token = _TOLD.set(tell)
    try:
        yield
    finally:
        _TOLD.reset(token)


def listened() -> bool:
    """Whether events are being recorded."""
    return _TOLD.get() is not None


def log_event(what: str, *details: object) -> None:
    """Log one event. Bytes appear as their length and checksum, other details as text."""
    tell = _TOLD.get()
    if tell is not None:
        tell(" ".join([what, *map(_text, details)]))


def _text(detail: object) -> str:
    if isinstance(detail, bytes | bytearray | memoryview):
        return f"{len(detail)}:{crc32(detail):08x}"
    return str(detail)
