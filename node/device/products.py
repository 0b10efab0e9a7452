"""Whether this CPU multiplies matrices of a dtype in hardware."""

import functools
import time

import torch

ROWS, INNER, COLUMNS = 64, 1024, 64
"""A product that stays in a CPU's cache."""
TIMINGS = 5
"""Others' work only ever adds to a timing, so the minimum of several counts."""


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether products of many rows in ``dtype`` are quicker on this CPU than in float32.

    They are timed once: where hardware has no such products they take three times as long or more.
    """
    least = dict.fromkeys((torch.float32, dtype), float("inf"))
    with torch.inference_mode():
        pairs = {
            each: (torch.ones(ROWS, INNER, dtype=each), torch.ones(INNER, COLUMNS, dtype=each))
            for each in least
        }
        for _ in range(1 + TIMINGS):  # the first ones warm up
            for each, (rows, matrix) in pairs.items():
                started_s = time.perf_counter()
                rows @ matrix
                least[each] = min(least[each], time.perf_counter() - started_s)
    return least[dtype] < least[torch.float32]
