"""Made-up arrivals of requests: each the same for one seed."""

import random

from coordinator.simulator.core.trace import Request

TAIL_SHAPE = 1.2
LONGEST_TOKENS = 6000


def heavy_tailed(
    *, per_s: float, duration_s: float, mean_tokens: float, urgent: float, seed: int
) -> tuple[Request, ...]:
    """Poisson arrivals with heavy-tailed lengths, as in Llumnix's traces (OSDI'24, §6.1).

    Input and output are Pareto-distributed with mean ``mean_tokens`` (before they are cut to
    :data:`LONGEST_TOKENS`); a share ``urgent`` of the requests has high priority.
    """
    draw = random.Random(seed)
    least = mean_tokens * (TAIL_SHAPE - 1) / TAIL_SHAPE
    found: list[Request] = []
    at_s = draw.expovariate(per_s)
    while at_s < duration_s:
        lengths = [
            min(LONGEST_TOKENS, max(4, round(least * draw.paretovariate(TAIL_SHAPE))))
            for _ in range(2)
        ]
        found.append(
            Request(
                arrival_s=at_s,
                input_tokens=lengths[0],
                output_tokens=lengths[1],
                urgent=draw.random() < urgent,
            )
        )
        at_s += draw.expovariate(per_s)
    return tuple(found)
