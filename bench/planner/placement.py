"""Every planner on Helix's clusters, beside its published plans.

Writes ``bench/results/placement.json``: for each cluster, model and planner the max flow, the
estimate, the seconds, and what the plan serves by Helix's rules in the event simulator. Replicas
of LLaMA-30B are judged on the sub-clusters that Helix serves them on, with the T_j of those files,
and added up; ours on the whole cluster, parts of the flow that share no peer run apart. Written
after each case; ``--resume`` goes on after the last one.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from bench import report
from bench.papers.full_load import offline
from bench.planner.planners import PLANNERS, Effort
from coordinator.commands.planner_view import read_service
from coordinator.commands.swarm_file import read_swarm
from coordinator.evaluation.max_flow import balanced_flow, flow_parts, solve_flow, upper_bound
from coordinator.planning.placement import Placement, make_plan, score
from coordinator.problem.cluster_file import read_cluster
from coordinator.problem.service import Service
from coordinator.simulator.core.trace import as_in_papers, read_trace
from dht.messages.types import Assignment, FlowEdge, PlanVersion, Problem
from testing.paths import ROOT

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
EXACT = {
    "cp-sat": {"small10/30b", "single24/70b"},
    "helix-milp-highs": {"small10/30b", "single24/70b"},
    "helix-milp-scip": {"small10/30b", "single24/70b"},
}
"""Where the exact programs are run; on the larger clusters they find as little, or less."""
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


def case(
    cluster: str, model: str, names: Sequence[str], limit_s: float, simulate_s: float
) -> dict[str, Any]:
    """Every planner on one cluster."""
    problem, service = load(cluster, model)
    rows = []
    spans = published(cluster, model)
    if spans is not None:
        for name, draw in (("published", solve_flow), ("published, flow spread", balanced_flow)):
            plan = score(problem, spans, name, service=service, edges=draw(problem, spans).edges)
            rows.append(row(cluster, model, name, plan, None, simulate_s))
    elif (DATA / "clusters" / f"{cluster}_sub_a100.json").exists():
        rows.append(replicas(cluster, model, simulate_s))
    for name in names:
        if f"{cluster}/{model}" not in EXACT.get(name, {f"{cluster}/{model}"}):
            continue
        started_s = time.perf_counter()
        found = PLANNERS[name](problem, service, _effort(limit_s))
        took_s = time.perf_counter() - started_s
        if found is None:
            rows.append({"planner": name, "seconds": round(took_s, 2), "found": False})
        else:
            rows.append(row(cluster, model, name, found, took_s, simulate_s))
        print(cluster, model, {k: v for k, v in rows[-1].items() if k != "placement"}, flush=True)
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


def _effort(limit_s: float) -> Effort:
    started_s = time.perf_counter()
    spent: Callable[[], float] = lambda: (time.perf_counter() - started_s) / limit_s  # noqa: E731
    return Effort(time_limit_s=limit_s, seed=0, spent=spent)


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
    parser = argparse.ArgumentParser(prog="python -m bench.planner.placement", description=__doc__)
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="S")
    parser.add_argument(
        "--simulate",
        type=float,
        default=600.0,
        metavar="S",
        help="simulated seconds of a run; 0: no simulation",
    )
    parser.add_argument("--planners", default=",".join(PLANNERS), metavar="A,B")
    parser.add_argument("--cases", default=",".join("/".join(c) for c in CASES), metavar="C/M,…")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results" / "placement.json"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the cases that the output has already"
    )
    arguments = parser.parse_args(argv)
    result = report.provenance(seed=0)
    result["time_limit_s"] = arguments.time_limit
    known = report.earlier(arguments.output) if arguments.resume else {}
    result["cases"] = known.get("cases", [])
    done = {f"{found['cluster']}/{found['model']}" for found in result["cases"]}
    for which in arguments.cases.split(","):
        if which in done:
            continue
        result["cases"].append(
            case(
                *which.split("/"),
                arguments.planners.split(","),
                arguments.time_limit,
                arguments.simulate,
            )
        )
        result["estimate_against_simulation"] = agreement(result["cases"])
        report.write(arguments.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
