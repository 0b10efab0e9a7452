"""``python -m bench.papers.simulate CLUSTER.json``: ``coordinator.simulate`` with papers' rules.

Takes what ``python -m coordinator.simulate`` takes, and Helix's scheduler for living peers and
links; with ``--as-in-papers`` all is as in Helix's simulator, with one of the papers' schedulers.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from bench.papers.full_load import SCHEDULERS, PaperRules, offline, online
from coordinator import simulate
from coordinator.commands import full_load
from coordinator.simulator.core.report import SimulationReport
from dht.command_line import Parser

EXAMPLE = """example, Helix's 24 peers by all of Helix's rules, and by its scheduler alone:
  %(prog)s single24.json --model 70b --trace azure.csv \\
    --placement plan.json --scheduler helix --as-in-papers
  %(prog)s single24.json --model 70b --trace azure.csv \\
    --placement plan.json --scheduler helix
"""


def options() -> Parser:
    """The options of the command."""
    schedulers = (*full_load.SCHEDULERS, *SCHEDULERS)
    parser = simulate.options("python -m bench.papers.simulate", schedulers, EXAMPLE)
    parser.add_argument(
        "--as-in-papers",
        action="store_true",
        help="Helix's batches, whole prompts, links in order and load; with --scheduler"
        f" {', '.join(SCHEDULERS)}",
    )
    return parser


def rules_of(arguments: argparse.Namespace) -> PaperRules:
    """The rules that the arguments name; raises UserError for those that do not go together."""
    scheduler = arguments.scheduler
    if arguments.as_in_papers:
        return PaperRules(scheduler=scheduler)
    if scheduler in full_load.SCHEDULERS:
        return PaperRules(living=simulate.rules_of(arguments, scheduler))
    living = simulate.rules_of(arguments, full_load.SCHEDULERS[0])
    return PaperRules(scheduler=scheduler, living=living)


def simulated(arguments: argparse.Namespace, progress: Callable[[float], None]) -> SimulationReport:
    """Run the simulation that the arguments describe."""
    rules = rules_of(arguments)
    run = offline if arguments.mode == "offline" else online
    return run(
        *simulate.read(arguments),
        rules,
        seed=arguments.seed,
        warm_up_s=arguments.warm_up,
        measured_s=arguments.duration,
        progress=progress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return simulate.command(options(), simulated, argv)


if __name__ == "__main__":
    sys.exit(main())
