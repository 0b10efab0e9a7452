"""How quick one answer is in a plan for an idle swarm, and what that costs when all ask.

For each cluster a coordinator's first plan, from what its peers announce, in its own time in
seconds of the processor: for an idle swarm, and for a full one. One answer's speed is that on the
plan's quickest ring, beside the quickest ring that any placement could have (each of its peers with
as many layers as help it, whatever is left for others) and the quickest peer that holds the whole
model. All figures are on paper: times that peers announce, and the estimate of what a full swarm
serves.

Rows are added to the output; those that it has already are kept.
"""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench import report
from bench.planner.clusters import HELD_OUT, TUNING
from bench.planner.live_plan import NAMED, case, solved
from coordinator.evaluation.one_answer import AnswerTimes, one_answer_s
from coordinator.planning.search.short_rings import short_rings
from coordinator.problem.service import announced_service
from coordinator.runtime import CoordinatorConfig
from dht.messages.types import RECORD_BOUNDS, Problem
from testing.paths import ROOT

RESULT = ROOT / "bench" / "results" / "idle_plan.json"
PLANS = {"idle": RECORD_BOUNDS.answer_weight_max, "full": 0.0}
"""Plans by the weight of one answer's speed."""


def row(name: str) -> dict[str, Any]:
    """One cluster, in tokens/s."""
    known = case(name).known
    times = AnswerTimes(known, announced_service(known))
    rings = short_rings(times, sys.maxsize)
    alone = [took_s for took_s, ring in rings if len(ring) == 1]
    return {
        "cluster": name,
        "peers": len(known.nodes),
        "shortest": 1 / rings[0][0],
        "stages": len(rings[0][1]),
        "single": 1 / min(alone) if alone else None,
        **{plan: _planned(known, times, weight) for plan, weight in PLANS.items()},
    }


def _planned(known: Problem, times: AnswerTimes, weight: float) -> dict[str, float]:
    """The first plan: one answer that is alone, and all together under full load."""
    answer, _ = solved(known, CoordinatorConfig().solve_s, answer_weight=weight)
    plan = answer.best
    assert plan is not None, answer.error
    return {
        "alone": 1 / one_answer_s(times, plan.assignments, plan.edges),
        "together": plan.estimate_tokens_per_s or 0.0,
    }


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The least, median and largest of some ratios."""
    figures = {"least": min(ratios), "median": median(ratios), "most": max(ratios)}
    return {what: round(value, 3) for what, value in figures.items()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ratios: one answer to the shortest ring and to the best single peer, where there is one; all
    together in an idle swarm's plan to a full one's."""
    ratios: dict[str, list[float]] = {}
    for each in rows:
        for plan in PLANS:
            alone = each[plan]["alone"]
            ratios.setdefault(f"{plan} to shortest", []).append(alone / each["shortest"])
            if each["single"]:
                ratios.setdefault(f"{plan} to single", []).append(alone / each["single"])
        together = each["idle"]["together"] / max(each["full"]["together"], 1e-9)
        ratios.setdefault("together", []).append(together)
    return {what: {"clusters": len(found), **spread(found)} for what, found in ratios.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = report.parser_of("bench.planner.idle_plan", __doc__, out=RESULT)
    parser.add_argument("--only", nargs="*", metavar="CLUSTER", help="these clusters, by name")
    parser.add_argument("--rows", type=int, metavar="N", help="at most so many new rows")
    arguments = parser.parse_args(argv)
    order = (*NAMED, *HELD_OUT, *TUNING)
    rows = {each["cluster"]: each for each in report.earlier(arguments.out).get("rows", ())}
    for each in [n for n in arguments.only or order if n not in rows][: arguments.rows]:
        rows[each] = row(each)
        print(each, rows[each], flush=True)
        ordered = [rows[name] for name in order if name in rows]
        result = {**report.provenance(0), "rows": ordered, "summary": summary(ordered)}
        report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
