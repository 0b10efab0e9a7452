"""The laws for whatever a stranger sends: what a step may raise, and what it may take.

Time and memory are measured under ``make fuzz`` alone: they are the machine's, too. The ordinary
suite counts sizes instead.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

from hypothesis import settings

from dht.errors import AnabranchError

T = TypeVar("T")

STEP_S = 0.05
"""CPU time that one step on the event loop may take, so that nobody else is kept waiting."""
STEP_BYTES = 64 << 20
"""Memory that one input may take while it is worked on."""
TRIES = 3


def measuring() -> bool:
    """Whether time and memory are measured in this run."""
    return not settings.default.derandomize


def lawful(step: Callable[[], T], named: type[Exception] | tuple[type[Exception], ...]) -> T | None:
    """The result of ``step``, or None where it refused by a ``named`` error; others are raised.

    Under ``make fuzz`` also asserts that its CPU time and its memory are within bounds. The first
    try warms up, the least of the others counts.
    """
    assert all(issubclass(each, AnabranchError) for each in _tuple(named))
    if not measuring():
        return _tried(step, named)
    took_s = []
    gc.disable()  # the heap of a long run is not the step's
    try:
        for _ in range(TRIES):
            started_s = time.process_time()
            _tried(step, named)
            took_s.append(time.process_time() - started_s)
            if took_s[-1] < STEP_S:
                break
    finally:
        gc.enable()
    assert min(took_s) < STEP_S, f"one step took {min(took_s):.3f} s of CPU time"
    gc.collect(0)
    tracemalloc.start()
    try:
        result = _tried(step, named)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < STEP_BYTES, f"one step took {peak_bytes} bytes"
    return result


def _tuple(named: type[Exception] | tuple[type[Exception], ...]) -> tuple[type[Exception], ...]:
    return named if isinstance(named, tuple) else (named,)


def _tried(step: Callable[[], T], named: type[Exception] | tuple[type[Exception], ...]) -> T | None:
    try:
        return step()
    except named:
        return None
