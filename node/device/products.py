"""Whether this CPU multiplies matrices of a dtype in hardware."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

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
    ways = {}
    with torch.inference_mode():
        for each in (torch.float32, dtype):
            rows, matrix = (
                torch.ones(ROWS, INNER, dtype=each),
                torch.ones(INNER, COLUMNS, dtype=each),
            )
            ways[each] = partial(torch.matmul, rows, matrix)
        least_s = dict(zip(ways, least_seconds(list(ways.values()), TIMINGS), strict=True))
    return least_s[dtype] < least_s[torch.float32]


def least_seconds(ways: Sequence[Callable[[], object]], timings: int) -> list[float]:
    """Minimum seconds of each of ``ways``, which take turns ``timings`` times and once to warm
    up."""
    least_s = [math.inf] * len(ways)
    for _ in range(1 + timings):
        for way, run in enumerate(ways):
            started_s = time.perf_counter()
            run()
            least_s[way] = min(least_s[way], time.perf_counter() - started_s)
    return least_s
