"""What ours takes for 10 to 2,000 peers, and its gap.

Writes ``bench/results/placement_sizes.json``. Up to 42 peers they are Helix's clusters; larger ones
are made of the same devices at many sites: short round trips within a site, longer ones between,
and links measured between neighbours and to a few others, as link records have. The planner knows
what live peers announce. Stated beside each: the first answer (a search whose time is over before
it begins); a coordinator's whole answer, the checks of its plan included, in the time that it has,
for peers that hold nothing, after a hundredth of them is lost, and after that with a tenth of the
others new; the answer within 10 s and within a long limit, the latter's gap to the upper bound of
the flow, and what the best heuristic would serve.
"""

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench import report
from bench.planner.placement import load
from coordinator.evaluation.max_flow import upper_bound
from coordinator.evaluation.plan_check import check_plan
from coordinator.planning.placement import HEURISTICS, Placement, best_placement, make_plan, score
from coordinator.planning.solve import SolveAnswer, SolveRequest, by_clock, solve_request
from coordinator.problem.service import Service, announced_service
from coordinator.runtime import CoordinatorConfig
from dht.messages.types import FlowEdge, Link, Plan, PlanVersion, Problem
from testing.paths import ROOT

SIZES = (
    (10, "small10", "30b", 1.0),
    (24, "geo24", "70b", 10.0),
    (42, "het42", "70b", 30.0),
    (200, None, "70b", 60.0),
    (2000, None, "70b", 300.0),
)
"""Peers, a cluster of Helix's or made ones, the model, and seconds."""
RESULT = ROOT / "bench" / "results" / "placement_sizes.json"
LOST_SHARE = 0.01
NEW_SHARE = 0.1
SOON_S = 10.0
SITE_PEERS = 30
NEAR_LINKS, FAR_LINKS = 40, 4
HEURISTIC_PEERS_MAX = 200
"""Beyond, a heuristic's max flow alone takes longer than the search."""


def made(count: int, model: str, seed: int) -> Problem:
    """So many peers like those of het42, at sites that lie on a map; a few links each."""
    rng = random.Random(seed)
    template, _ = load("het42", model)
    sites = [(rng.random(), rng.random()) for _ in range(max(1, count // SITE_PEERS))]
    nodes, at = [], []
    for index in range(count):
        nodes.append(replace(rng.choice(template.nodes), peer_id=f"n{index}", current=None))
        at.append(rng.randrange(len(sites)))
    members: dict[int, list[int]] = {}
    for index, site in enumerate(at):
        members.setdefault(site, []).append(index)
    links = []
    for index, site in enumerate(at):
        near = rng.sample(members[site], min(NEAR_LINKS, len(members[site])))
        for other in (*near, *rng.sample(range(count), min(FAR_LINKS, count))):
            if other == index:
                continue
            far_s = 0.15 * math.dist(sites[site], sites[at[other]])
            links.append(
                Link(
                    source=f"n{other}",
                    target=f"n{index}",
                    bandwidth_bytes_per_s=1.25e9 if at[other] == site else 12.5e6,
                    rtt_s=0.002 if at[other] == site else 0.02 + far_s,
                    measured_unix_s=0.0,
                )
            )
    return replace(
        template,
        nodes=tuple(nodes),
        links=tuple(links),
        default_rtt_s=0.1,
        default_bandwidth_bytes_per_s=12.5e6,
    )


def _live(
    problem: Problem, flow: tuple[FlowEdge, ...] = (), settled: frozenset[str] | None = None
) -> tuple[SolveAnswer, float]:
    """A coordinator's answer, and the seconds that it took."""
    request = SolveRequest(
        problem=problem,
        version=PlanVersion(),
        coordinator="bench",
        time_limit_s=CoordinatorConfig().solve_s,
        seed=0,
        now_unix_s=0.0,
        flow=flow,
        settled=settled,
    )
    started_s = time.perf_counter()
    return solve_request(request), time.perf_counter() - started_s


def _after_a_loss(problem: Problem, plan: Plan) -> Problem:
    """The problem of those who are left and hold what ``plan`` gave them."""
    lost = frozenset(
        random.Random(0).sample(
            [node.peer_id for node in problem.nodes], max(1, round(LOST_SHARE * len(problem.nodes)))
        )
    )
    held = {a.peer_id: a for a in plan.assignments}
    return replace(
        problem,
        nodes=tuple(
            replace(node, current=held.get(node.peer_id))
            for node in problem.nodes
            if node.peer_id not in lost
        ),
    )


def _with_newcomers(problem: Problem) -> tuple[Problem, frozenset[str]]:
    """The problem with ``NEW_SHARE`` of its peers new and without layers; those that are not."""
    names = [node.peer_id for node in problem.nodes]
    new = frozenset(random.Random(1).sample(names, max(1, round(NEW_SHARE * len(names)))))
    nodes = tuple(
        replace(node, current=None) if node.peer_id in new else node for node in problem.nodes
    )
    return replace(problem, nodes=nodes), frozenset(names) - new


def _answered(name: str, answer: SolveAnswer, took_s: float) -> dict[str, Any]:
    """What a solve after a change took, and what its plans would serve."""
    plans = {"kept": answer.kept, "best": answer.best}
    return {f"{name}_s": round(took_s, 2)} | {
        f"{name}_{which}_tokens_per_s": plan and round(plan.value_tokens_per_s, 1)
        for which, plan in plans.items()
    }


def _solved(
    problem: Problem, service: Service, spent: Callable[[], float], limit_s: float
) -> tuple[Placement, float]:
    started_s = time.perf_counter()
    found = best_placement(problem, time_limit_s=limit_s, seed=0, spent=spent, service=service)
    return found, time.perf_counter() - started_s


def _within(problem: Problem, service: Service, limit_s: float) -> tuple[Placement, float]:
    return _solved(problem, service, by_clock(limit_s), limit_s)


def size(count: int, cluster: str | None, model: str, limit_s: float) -> dict[str, Any]:
    """One size."""
    problem = load(cluster, model)[0] if cluster else made(count, model, count)
    service = announced_service(problem)
    worked_s = time.process_time()
    first, first_s = _solved(problem, service, lambda: 1.0, limit_s)
    worked_s = time.process_time() - worked_s
    live, live_s = _live(problem)
    assert live.best is not None, live.error
    left = _after_a_loss(problem, live.best)
    after_a_loss = _answered("after_a_loss", *_live(left, live.best.edges))
    changed, settled = _with_newcomers(left)
    newcomers = _answered("newcomers", *_live(changed, live.best.edges, settled))
    soon, _ = _within(problem, service, min(SOON_S, limit_s))
    found, took_s = _within(problem, service, limit_s)
    plan = make_plan(
        problem, found, version=PlanVersion(), coordinator="bench", solve_s=took_s, now_unix_s=0.0
    )
    wrong = check_plan(plan, problem)
    assert not wrong, wrong
    bound = upper_bound(problem)
    heuristics = {}
    for name, heuristic in HEURISTICS.items() if count <= HEURISTIC_PEERS_MAX else ():
        spans = heuristic(problem)
        if spans is not None:
            heuristics[name] = score(problem, spans, name, service=service).value
    return {
        "peers": count,
        "cluster": cluster or f"made, sites of about {SITE_PEERS}",
        "model": model,
        "limit_s": limit_s,
        "first_answer_s": round(first_s, 2),
        "first_answer_processor_s": round(worked_s, 2),
        "first_estimate_tokens_per_s": round(first.value, 1),
        "live_s": round(live_s, 2),
        "live_estimate_tokens_per_s": round(live.best.value_tokens_per_s, 1),
        **after_a_loss,
        **newcomers,
        "soon_estimate_tokens_per_s": round(soon.value, 1),
        "seconds": round(took_s, 2),
        "within_limit": took_s <= limit_s,
        "planner": found.planner,
        "estimate_tokens_per_s": round(found.value, 1),
        "flow_tokens_per_s": round(found.flow_tokens_per_s, 1),
        "bound_tokens_per_s": round(bound, 1),
        "gap": round(1 - found.flow_tokens_per_s / bound, 3),
        "best_heuristic_estimate_tokens_per_s": round(max(heuristics.values()), 1)
        if heuristics
        else None,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = report.parser_of("bench.planner.placement_sizes", __doc__, out=RESULT)
    parser.add_argument("--peers-max", type=int, default=2000, metavar="N")
    parser.add_argument("--resume", action="store_true", help="keep the sizes in the output")
    arguments = parser.parse_args(argv)
    result = report.provenance(seed=0)
    result["sizes"] = report.earlier(arguments.out).get("sizes", []) if arguments.resume else []
    known = {each["peers"] for each in result["sizes"]}
    for each in SIZES:
        if each[0] <= arguments.peers_max and each[0] not in known:
            result["sizes"].append(size(*each))
            print(result["sizes"][-1], flush=True)
            report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
