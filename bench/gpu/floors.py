"""Figures that cannot be: a time below what the hardware needs, or below what was timed within it.

Pure. A benchmark asks before it keeps a figure, and a document before it shows one.
"""

KERNELS_VARY = 0.05
"""How much longer kernels may take under the profiler than within a step."""


def impossible(took_s: float, floor_s: float, kernels_s: float = 0.0) -> str:
    """Why a time cannot be right; empty where it can.

    ``floor_s`` is what the bytes, operations or links need at least; ``kernels_s`` the sum of the
    kernels that ran within that time, 0 where it is unknown.
    """
    for least_s, what in (
        (floor_s, "the floor"),
        (kernels_s * (1 - KERNELS_VARY), "its kernels"),
    ):
        if took_s < least_s:
            return f"{1e6 * took_s:.0f} µs is less than {what} took, {1e6 * least_s:.0f} µs"
    return ""
