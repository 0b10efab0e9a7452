"""Ours and Petals' rule on Helix's clusters, beside its published plans.

Writes ``bench/results/placement.json``: for each cluster, model and planner the max flow, the
estimate, the seconds, and what the plan serves by Helix's rules in the event simulator. Replicas
of LLaMA-30B are judged on the sub-clusters that Helix serves them on, with the T_j of those files,
and added up; ours on the whole cluster, parts of the flow that share no peer run apart. Written
after each case; ``--resume`` goes on after the last one.
"""

import json
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any

from bench import report
from bench.papers.full_load import offline
from coordinator.commands.planner_view import read_service
from coordinator.commands.swarm_file import read_swarm
from coordinator.evaluation.max_flow import balanced_flow, flow_parts, solve_flow, upper_bound
from coordinator.planning.heuristics.heuristics import greedy
from coordinator.planning.placement import Placement, best_placement, make_plan, score
from coordinator.planning.solve import by_clock
from coordinator.problem.cluster_file import read_cluster
from coordinator.problem.service import Service
from coordinator.simulator.core.trace import as_in_papers, read_trace
from dht.messages.types import Assignment, FlowEdge, PlanVersion, Problem
from testing.local_swarm import ROOT

DATA = ROOT / "bench" / "data" / "helix"
CASES = (
    ("small10", "30b"),
    ("single24", "70b"),
    ("geo24", "70b"),
    ("het42", "70b"),
    ("single24", "30b"),
    ("geo24", "30b"),
)
RESULT = ROOT / "bench" / "results" / "placement.json"
SUB_CLUSTERS = ("a100", "l4", "t4")


def load(cluster: str, model: str) -> tuple[Problem, Service]:
    """A cluster of Helix's with its machines."""
    path = DATA / "clusters" / f"{cluster}.json"
    problem = read_cluster(path.read_bytes(), model)
    return problem, read_service(path, problem, hub=True)


def published(cluster: str, model: str) -> tuple[Assignment, ...] | None:
    """Helix's own placement of the whole cluster, where there is one."""
    shipped = json.loads((DATA / "reference.json").read_text())["max_flow_shipped"]
    names = [
        n["id"] for n in json.loads((DATA / "clusters" / f"{cluster}.json").read_text())["nodes"]
    ]
    for which in ("helix", "helix_optimal"):
        entry = shipped.get(f"{cluster}/{model}/{which}")
        if entry is not None:
            return tuple(
                Assignment(peer_id=str(name), start=start, end=end)
                for name, (start, end) in zip(names, entry["placement"], strict=True)
            )
    return None


def simulate(
    cluster: str, model: str, spans: Sequence[Assignment], edges: Sequence[FlowEdge], seconds: float
) -> float:
    """Decode tokens/s by Helix's rules; parts that share no peer are run apart and added up."""
    trace = as_in_papers(
        read_trace((DATA.parent / "azure" / "conversations_2023.csv").read_bytes())
    )
    problem, profiles = read_swarm(DATA / "clusters" / f"{cluster}.json", model)
    total = 0.0
    for part in flow_parts(edges):
        mine = tuple(a for a in spans if a.peer_id in part)
        flow = tuple(e for e in edges if e.tail in part or e.head in part)
        plan = make_plan(
            problem,
            score(problem, mine, "part", edges=flow),
            version=PlanVersion(term=1, counter=1),
            coordinator="bench",
            solve_s=0.0,
            now_unix_s=0.0,
        )
        served = offline(problem, profiles, plan, trace, measured_s=seconds)
        total += served.decode_tokens_per_s
    return total


def row(
    cluster: str,
    model: str,
    name: str,
    placement: Placement,
    seconds: float | None,
    simulate_s: float,
) -> dict[str, Any]:
    """One line of the results."""
    edges = placement.edges or ()
    return {
        "planner": name,
        "flow_tokens_per_s": round(placement.flow_tokens_per_s, 3),
        "estimate_tokens_per_s": round(placement.estimate_tokens_per_s or 0.0, 1),
        "token_time_s": round(placement.latency_s, 3),
        "simulated_tokens_per_s": simulate(cluster, model, placement.assignments, edges, simulate_s)
        if simulate_s > 0
        else None,
        "seconds": None if seconds is None else round(seconds, 2),
        "placement": {a.peer_id: [a.start, a.end] for a in placement.assignments},
    }


def case(cluster: str, model: str, limit_s: float, simulate_s: float) -> dict[str, Any]:
    """All plans of one cluster."""
    problem, service = load(cluster, model)
    rows = []
    spans = published(cluster, model)
    if spans is not None:
        for name, draw in (("published", solve_flow), ("published, flow spread", balanced_flow)):
            plan = score(problem, spans, name, service=service, edges=draw(problem, spans).edges)
            rows.append(row(cluster, model, name, plan, None, simulate_s))
    elif (DATA / "clusters" / f"{cluster}_sub_a100.json").exists():
        rows.append(replicas(cluster, model, simulate_s))
    started_s = time.perf_counter()
    ours = best_placement(
        problem, time_limit_s=limit_s, seed=0, spent=by_clock(limit_s), service=service
    )
    took_s = time.perf_counter() - started_s
    rows.append(row(cluster, model, "ours", ours, took_s, simulate_s))
    if spans := greedy(problem):
        edges = solve_flow(problem, spans).edges
        petals = score(problem, spans, "petals", service=service, edges=edges)
        rows.append(row(cluster, model, "petals", petals, None, simulate_s))
    for each in rows:
        print(cluster, model, {k: v for k, v in each.items() if k != "placement"}, flush=True)
    return {
        "cluster": cluster,
        "model": model,
        "bound_tokens_per_s": round(upper_bound(problem), 1),
        "planners": rows,
    }


def agreement(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far the estimate orders the plans of a cluster as the simulation does (Kendall's tau)."""
    alike = pairs = 0
    ratios = []
    for found in cases:
        known = [
            (r["estimate_tokens_per_s"], r["simulated_tokens_per_s"])
            for r in found["planners"]
            if r.get("simulated_tokens_per_s")
        ]
        ratios += [estimated / simulated for estimated, simulated in known]
        for (e1, s1), (e2, s2) in combinations(known, 2):
            if e1 != e2 and s1 != s2:
                pairs += 1
                alike += (e1 < e2) == (s1 < s2)
    return {
        "plans": len(ratios),
        "pairs": pairs,
        "kendall_tau": round(2 * alike / pairs - 1, 3) if pairs else None,
        "estimate_over_simulation": [round(f(ratios), 2) for f in (min, median, max)]
        if ratios
        else None,
    }


def replicas(cluster: str, model: str, simulate_s: float) -> dict[str, Any]:
    """Helix's three replicas of the small model, each on its sub-cluster."""
    flow = estimated = simulated = 0.0
    for gpu in SUB_CLUSTERS:
        part = f"{cluster}_sub_{gpu}"
        problem, service = load(part, model)
        spans = published(part, model)
        assert spans is not None
        edges = solve_flow(problem, spans).edges
        found = score(problem, spans, "published", service=service, edges=edges)
        flow += found.flow_tokens_per_s
        estimated += found.estimate_tokens_per_s or 0.0
        if simulate_s > 0:
            simulated += simulate(part, model, spans, edges, simulate_s)
    return {
        "planner": "published",
        "flow_tokens_per_s": round(flow, 1),
        "estimate_tokens_per_s": round(estimated, 1),
        "simulated_tokens_per_s": simulated or None,
        "seconds": None,
        "note": "three replicas, each with the T_j of its own sub-cluster, added up",
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = report.parser_of("bench.planner.placement", __doc__, out=RESULT)
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="S")
    parser.add_argument(
        "--simulate",
        type=float,
        default=600.0,
        metavar="S",
        help="simulated seconds of a run; 0: no simulation",
    )
    parser.add_argument("--cases", default=",".join("/".join(c) for c in CASES), metavar="C/M,…")
    parser.add_argument("--resume", action="store_true", help="keep the cases in the output")
    arguments = parser.parse_args(argv)
    result = report.provenance(seed=0)
    result["time_limit_s"] = arguments.time_limit
    known = report.earlier(arguments.out) if arguments.resume else {}
    result["cases"] = known.get("cases", [])
    done = {f"{found['cluster']}/{found['model']}" for found in result["cases"]}
    for which in arguments.cases.split(","):
        if which in done:
            continue
        found = case(*which.split("/"), arguments.time_limit, arguments.simulate)
        result["cases"].append(found)
        result["estimate_against_simulation"] = agreement(result["cases"])
        report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
