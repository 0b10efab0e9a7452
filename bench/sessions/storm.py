"""Thousands of storms: whole swarms in which everything goes wrong, under a virtual clock.

Real sessions, stages, hops and clients over the in-memory network (``tests/sim/storm.py``): peers
are killed, frozen, cut off, stuck, full or leave while answers fail over and move. A seed is one
run; a failure prints the seed, which replays it identically: ``--first SEED --seeds 1``. Every
hundredth seed is run twice to see that it does. ``--resume`` goes on with the result in ``--out``.
"""

import argparse
import math
import sys
import time
import traceback
from collections import Counter
from typing import Any

from rich.console import Console

from bench import report
from tests.sim.storm import ANSWERS, NEW, run_storm

TWICE_EVERY = 100
WRITE_EVERY = 50


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.sessions.storm", __doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=10_000, help="the first seed")
    parser.add_argument("--resume", action="store_true", help="go on with the result in --out")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no run after so long"
    )
    return parser.parse_args()


class Storms:
    """Runs and what became of them."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.runs = 0
        self.replayed = 0
        self.failed: list[int] = []
        self.replayed_differently: list[int] = []
        self.tokens = 0
        self.strikes: Counter[str] = Counter()
        self.did: Counter[str] = Counter()

    @classmethod
    def of(cls, result: dict[str, Any]) -> "Storms":
        """What an earlier slice had."""
        storms = cls(result["first_seed"])
        storms.runs, storms.replayed = result["seeds"], result["replayed"]
        storms.failed = list(result["failed_seeds"])
        storms.replayed_differently = list(result["replayed_differently"])
        storms.tokens = result["tokens"]
        storms.strikes.update(result["strikes"])
        storms.did.update(result["did"])
        return storms

    def run(self, console: Console) -> None:
        """The next seed."""
        seed = self.first + self.runs
        self.runs += 1
        try:
            told = run_storm(seed)
            self.tokens += ANSWERS * NEW
            self.strikes += told.strikes
            self.did += told.did
            if self.runs % TWICE_EVERY == 0:
                self.replayed += 1
                if run_storm(seed) != told:
                    self.replayed_differently.append(seed)
        except Exception:  # noqa: BLE001  whatever went wrong belongs to this seed
            console.print(f"seed {seed} failed:\n{traceback.format_exc()}")
            self.failed.append(seed)

    def result(self) -> dict[str, Any]:
        return {
            **report.provenance(self.first),
            "first_seed": self.first,
            "seeds": self.runs,
            "failed_seeds": self.failed,
            "replayed": self.replayed,
            "replayed_differently": self.replayed_differently,
            "answers": self.runs * ANSWERS,
            "tokens": self.tokens,
            "strikes": dict(sorted(self.strikes.items())),
            "did": dict(sorted(self.did.items())),
        }


def main() -> int:
    arguments = parse()
    console = Console(stderr=True)
    known = report.earlier(arguments.out) if arguments.resume else {}
    storms = Storms.of(known) if known else Storms(arguments.first)
    until_s = time.monotonic() + 60.0 * arguments.minutes
    while storms.runs < arguments.seeds and time.monotonic() < until_s:
        storms.run(console)
        if arguments.out is not None and storms.runs % WRITE_EVERY == 0:
            report.write(arguments.out, storms.result())
    report.write(arguments.out, storms.result())
    Console().print(storms.result())
    return 1 if storms.failed or storms.replayed_differently else 0


if __name__ == "__main__":
    sys.exit(main())
