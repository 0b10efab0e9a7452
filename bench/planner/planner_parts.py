"""What each part of the planner brings, by the living rules.

A planner plans clusters of the tuning half (:mod:`bench.planner.clusters`) and Helix's, from what
live peers announce, in 0.3 to 30 seconds of the processor: whole, and without one of its parts.
Short simulated runs choose among the finalists where a coordinator has more time than for its first
answer. Every plan is replayed as :mod:`bench.planner.live_plan` does. A part pays where plans
without it serve less.

Rows are added to the output; those that it has already are kept.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bench import report
from bench.planner.clusters import TUNING
from bench.planner.live_plan import Case, case
from coordinator.planning import placement
from coordinator.planning.search import chain_search
from coordinator.planning.search.config import SEARCH
from coordinator.planning.solve import by_clock
from coordinator.problem.service import announced_service
from coordinator.runtime import CoordinatorConfig
from coordinator.simulator.plans import plan_of
from testing.local_swarm import ROOT

RESULT = ROOT / "bench" / "results" / "planner_parts.json"
LIMITS_S = (0.3, 1.0, 3.0, 10.0, 30.0)
CLUSTERS = ("single24/70b", "geo24/70b", "het42/70b", *TUNING[:6])
WHOLE, TRIALS = "whole", "trials"
Without = Callable[[], contextlib.AbstractContextManager[Any]]


def _nothing(*_args: object, **_options: object) -> Iterator[Any]:
    return iter(())


def without_heuristics(*names: str) -> Without:
    """The planner without these heuristics."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with patch.dict(placement.HEURISTICS):
            for name in names:
                del placement.HEURISTICS[name]
            yield

    return block


OPTIONAL = [name for name in placement.HEURISTICS if name not in placement.FIRST]
"""Heuristics without which a plan can be adopted; the others depend on what peers refuse."""
PARTS: dict[str, Without] = {
    WHOLE: contextlib.nullcontext,
    "dynamic program": lambda: patch.object(chain_search, "chains_by_dp", _nothing),
    "column generation": lambda: patch.object(
        chain_search, "SEARCH", replace(SEARCH, columns_share=0.0)
    ),
    "moves": lambda: patch.object(chain_search, "SEARCH", replace(SEARCH, refined=0)),
    TRIALS: contextlib.nullcontext,
    "all heuristics": without_heuristics(*OPTIONAL),
    **{name: without_heuristics(name) for name in OPTIONAL},
}
Key = tuple[str, str, float]


def key_of(row: dict[str, Any]) -> Key:
    """What a row is about: the cluster, the part that is missing, and the time limit."""
    return row["cluster"], row["without"], row["limit_s"]


def planned(each: Case, part: str, limit_s: float) -> placement.Placement:
    """The placement that is found without ``part``, in ``limit_s`` seconds of the processor."""
    with PARTS[part]():
        return placement.best_placement(
            each.known,
            time_limit_s=limit_s,
            seed=0,
            spent=by_clock(limit_s, time.process_time),
            service=announced_service(each.known),
            trials=part != TRIALS and limit_s > CoordinatorConfig().solve_s,
        )


def rows_of(name: str, parts: Sequence[str], known: set[Key]) -> Iterator[dict[str, Any]]:
    """The rows of a cluster that are not known; equal plans are replayed once."""
    wanted = [
        (part, limit_s)
        for limit_s in LIMITS_S
        for part in parts
        if (name, part, limit_s) not in known
    ]
    if not wanted:
        return
    each = case(name)
    replayed: dict[object, float] = {}
    for part, limit_s in wanted:
        found = planned(each, part, limit_s)
        plan = plan_of(each.problem, found.assignments, found.edges)
        what = frozenset(plan.assignments), frozenset(plan.edges)
        if what not in replayed:
            replayed[what] = each.replayed(plan)
        yield {
            "cluster": name,
            "without": part,
            "limit_s": limit_s,
            "served": replayed[what],
            "planner": found.planner,
        }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What plans without each part serve, of the whole planner's in the same time."""
    served = {key_of(row): row["served"] for row in rows}
    found: dict[str, Any] = {}
    for part in PARTS:
        for limit_s in LIMITS_S:
            ratios = [
                value / served[cluster, WHOLE, limit]
                for (cluster, without, limit), value in served.items()
                if without == part != WHOLE and limit == limit_s
                if (cluster, WHOLE, limit) in served
            ]
            if ratios:
                found.setdefault(part, {})[f"{limit_s:g}"] = {
                    "clusters": len(ratios),
                    "geometric mean": statistics.geometric_mean(ratios),
                    "least": min(ratios),
                    "most": max(ratios),
                }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = report.parser_of("bench.planner.planner_parts", __doc__, out=RESULT)
    parser.add_argument("--only", nargs="*", metavar="CLUSTER", help="these clusters, by name")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="without these alone")
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    if arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    parts = [WHOLE, *arguments.parts] if arguments.parts else list(PARTS)
    for name in arguments.only or CLUSTERS:
        for row in rows_of(name, parts, {key_of(known) for known in rows}):
            rows.append(row)
            print(row, flush=True)
            result = {**report.provenance(0), "rows": rows, "summary": summary(rows)}
            report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
