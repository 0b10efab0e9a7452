"""What happens in a simulation, one line per event: two runs of a seed must give the same lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from zlib import crc32

Tell = Callable[[str], None]
"""Takes one line, without its end."""
_TOLD: ContextVar[Tell | None] = ContextVar("told", default=None)


@contextmanager
def recorded(tell: Tell) -> Iterator[None]:
    """Hand ``tell`` the events of all simulations that run meanwhile."""
    token = _TOLD.set(tell)
    try:
        yield
    finally:
        _TOLD.reset(token)


def listened() -> bool:
    """Whether anybody is told of events now."""
    return _TOLD.get() is not None


def log_event(what: str, *details: object) -> None:
    """Tell of one event. Bytes appear as their number and checksum, all else as its text."""
    tell = _TOLD.get()
    if tell is not None:
        tell(" ".join([what, *map(_text, details)]))


def _text(detail: object) -> str:
    if isinstance(detail, bytes | bytearray | memoryview):
        return f"{len(detail)}:{crc32(detail):08x}"
    return str(detail)
