"""Returns freed memory to the system, where the allocator would keep it.

glibc keeps most free memory between blocks that are still in use, and weights are many blocks: a
CPU peer that gave up its layers would hold on to more than half of their memory.
"""

import ctypes
import functools
import sys
from collections.abc import Callable


def give_back() -> None:
    """Return freed memory to the system. Takes about 0.1 s per GiB."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``; None with other allocators."""
    if sys.platform != "linux":
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    made: Callable[[int], int] = trim
    return made
