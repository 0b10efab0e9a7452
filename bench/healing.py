"""How long a healed swarm takes until all peers follow one leader's plan, by seed.

Real coordinators' shells over the in-memory network under a virtual clock
(``tests/sim/healing.py``): peers are killed, cut off from each other and join, records are lost and
lag; then all of that ends. Times are virtual seconds from there until there is one leader and one
plan, which both stay. With ``--no-time`` coordinators have no time to search, as on a machine that
is too busy. A seed replays identically.
"""

import argparse
import logging
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from bench import report
from tests.sim.healing import HEALED_S, run
from tests.unit.coordinator.test_runtime import solve_here, solve_without_time

GIVEN_UP_S = 600.0
PROCESSES = 2


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.healing", __doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--no-time", action="store_true", help="plan without any search")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def seconds_of(seed: int, *, no_time: bool) -> float | None:
    """What one seed took; None for one that did not settle at all."""
    logging.disable(logging.CRITICAL)
    try:
        return run(seed, limit_s=GIVEN_UP_S, solve=solve_without_time if no_time else solve_here)
    except AssertionError:
        return None


def result_of(first: int, found: list[float | None], *, no_time: bool) -> dict[str, Any]:
    """The figures of all seeds."""
    settled = sorted(took_s for took_s in found if took_s is not None)
    late = [first + i for i, took_s in enumerate(found) if took_s is None or took_s >= HEALED_S]
    return {
        **report.provenance(first),
        "first_seed": first,
        "seeds": len(found),
        "no_time_to_search": no_time,
        "never_settled": sum(took_s is None for took_s in found),
        f"not_within_{HEALED_S:.0f}_s": late,
        "p50_s": statistics.median(settled) if settled else None,
        "p95_s": settled[int(0.95 * len(settled))] if settled else None,
        "max_s": settled[-1] if settled else None,
        "seconds": found,
    }


def main() -> int:
    arguments = parse()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    work = partial(seconds_of, no_time=arguments.no_time)
    with ProcessPoolExecutor(PROCESSES) as pool:
        found: list[float | None] = []
        for took_s in track(pool.map(work, seeds), total=len(seeds), console=Console(stderr=True)):
            found.append(took_s)
            result = result_of(arguments.first, found, no_time=arguments.no_time)
            report.write(arguments.out, result)
    Console().print({key: value for key, value in result.items() if key != "seconds"})
    return 1 if result["never_settled"] else 0


if __name__ == "__main__":
    sys.exit(main())
