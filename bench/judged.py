"""``python -m bench.judged``: what a judgement of a placement costs, and whom it puts first.

Placements of clusters of several sizes are judged by short runs
(:func:`coordinator.simulator.judge.judge`) and by a long one of the same rules with other requests;
the planner's estimate stands beside them. Kendall's tau says how far two orders
agree: 1 is the same order.
"""

import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.local_swarm import ROOT
from bench.papers.clusters import cluster_path, published
from bench.papers.own import many
from bench.report import parser_of, provenance, write
from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import uncovered
from coordinator.experiments.planner_view import service_of
from coordinator.experiments.swarm_file import read_swarm
from coordinator.planning.placement import HEURISTICS, score
from coordinator.problem.service import Service
from coordinator.simulator.judge import judge
from dht.messages.types import Assignment, FlowEdge, Problem

CLUSTERS = ("single24/70b", "geo24/70b", "het42/70b", "single24/70b*4")
LONG_S = 240.0
SHORT_S = (30.0, 60.0)
PUBLISHED = ("helix", "petals", "swarm")
Placed = tuple[tuple[Assignment, ...], tuple[FlowEdge, ...]]


def placements(case: str, problem: Problem) -> dict[str, Placed]:
    """Placements of a cluster: Helix's published ones, and what the heuristics find."""
    found: dict[str, Placed] = {}
    for name in PUBLISHED:
        try:
            plan = published(f"{case}/{name}")[2]
        except KeyError:
            continue
        found[name] = plan.assignments, plan.edges
    for name, heuristic in HEURISTICS.items():
        spans = heuristic(problem)
        if spans is not None and not uncovered(spans, problem.model.layers):
            if any(set(spans) == set(known) for known, _ in found.values()):
                continue
            found[name] = spans, solve_flow(problem, spans).edges
    return found


def row(
    problem: Problem, service: Service, name: str, placed: Placed, long_s: float
) -> dict[str, Any]:
    """One placement: judged by short runs and by a long one, and estimated."""
    spans, edges = placed
    judged, cost = {}, {}
    for virtual_s in (*SHORT_S, long_s):
        started_s = time.process_time()
        seed = 1 if virtual_s == long_s else 0  # other requests
        judged[virtual_s] = judge(problem, service, spans, edges, virtual_s=virtual_s, seed=seed)
        cost[virtual_s] = time.process_time() - started_s
    guess = score(problem, spans, name, service=service, edges=edges).estimate_tokens_per_s
    return {"placement": name, "judged": judged, "cost_s": cost, "estimate": guess}


def tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau of two figures for each placement; None: no two differ."""
    alike = count = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        if a != c and b != d:
            count += 1
            alike += (a < c) == (b < d)
    return round(2 * alike / count - 1, 3) if count else None


def cluster(case: str, copies: int, long_s: float) -> dict[str, Any]:
    """All placements of a cluster."""
    name, model = case.split("/")
    problem, profiles = (
        many(name, model, copies) if copies > 1 else read_swarm(cluster_path(name), model)
    )
    service = service_of(problem, profiles, hub=False)
    known = placements(case if copies == 1 else "", problem)
    rows = []
    for placement, placed in known.items():
        rows.append(row(problem, service, placement, placed, long_s))
        print(case, len(problem.nodes), rows[-1], flush=True)
    return {
        "cluster": case,
        "peers": len(problem.nodes),
        "rows": rows,
        "tau": {
            **{
                f"{short:g} s": tau([(r["judged"][short], r["judged"][long_s]) for r in rows])
                for short in SHORT_S
            },
            "estimate": tau([(r["estimate"], r["judged"][long_s]) for r in rows]),
        },
        "cost_s": {
            f"{s:g} s": sum(r["cost_s"][s] for r in rows) / len(rows) for s in (*SHORT_S, long_s)
        },
    }


def main() -> int:
    """Run the benchmark."""
    parser = parser_of("bench.judged", __doc__)
    parser.add_argument("--long", type=float, default=LONG_S, metavar="S", help="(240)")
    parser.add_argument(
        "--clusters",
        nargs="*",
        default=["single24/70b", "geo24/70b", "het42/70b", "single24/70b*4"],
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "judged.json")
    arguments = parser.parse_args()
    found = []
    for each in arguments.clusters:
        case, _, copies = each.partition("*")
        found.append(cluster(case, int(copies or 1), arguments.long))
    write(arguments.out, {**provenance(0), "long_s": arguments.long, "clusters": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
