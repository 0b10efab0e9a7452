"""Whether clients that know nothing of each other share a plan's routes as its flow says.

Simulated: each client draws its routes as it does in a swarm, by its peer id alone
(:mod:`coordinator.routing.routes`); nothing is served. Plans: this project's own for Helix's
clusters (LLaMA 70B), and a made one of many chains of unequal peers. Many clients with one request
each and a few with many are compared with the flow's shares, peer by peer.

Clients with one request each are independent draws, whatever the scheme: their loads scatter as
such draws do (noise, the same figure for chance itself). What is left of a deviation when many such
crowds are taken together is bias.
"""

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import report
from bench.local_swarm import ROOT
from bench.papers.clusters import ours
from coordinator.experiments.full_load import as_plan
from coordinator.planning.placement import Placement
from coordinator.routing.routes import NoRoute, Router
from coordinator.simulator.clients import record_of
from dht.messages.types import (
    SINK,
    SOURCE,
    Assignment,
    FlowEdge,
    NodeRecord,
    Plan,
    PlannerNode,
    Problem,
)

CLUSTERS, MODEL = ("single24", "geo24", "het42"), "70b"
CHAINS = 60
CROWDS = ((1000, 1), (10, 100), (1, 1000))
"""Clients, and requests of each."""
REPEATS = 40
"""Number of crowds, of other clients each."""


def swarm_of(cluster: str) -> tuple[Problem, Plan]:
    """The project's own plan for a cluster, or the made one of ``CHAINS`` chains."""
    if cluster != "chains":
        problem, _, placement = ours(cluster, MODEL)
        return problem, as_plan(problem, placement)
    problem, _, _ = ours(CLUSTERS[0], MODEL)
    layers = problem.model.layers
    spans, edges, nodes = [], [], []
    for chain in range(CHAINS):
        stages, rate = 2 + chain % 5, 10.0 * (1 + chain % 4)
        names = [f"chain {chain} stage {n}" for n in range(stages)]
        ends = [round(layers * n / stages) for n in range(stages + 1)]
        spans += [
            Assignment(peer_id=name, start=start, end=end)
            for name, (start, end) in zip(names, pairwise(ends), strict=True)
        ]
        edges += [
            FlowEdge(tail=tail, head=head, tokens_per_s=rate)
            for tail, head in pairwise((SOURCE, *names, SINK))
        ]
        nodes += [
            PlannerNode(peer_id=n, memory_bytes=0, kv_tokens_min=0, tokens_per_s=(rate,) * layers)
            for n in names
        ]
    placement = Placement(
        assignments=tuple(spans), flow_tokens_per_s=0.0, planner="made", edges=tuple(edges)
    )
    made = Problem(model=problem.model, nodes=tuple(nodes))
    return made, as_plan(made, placement)


def shares_of(plan: Plan) -> dict[str, float]:
    """Each peer's part of the flow."""
    into: Counter[str] = Counter()
    for edge in plan.edges:
        if edge.head != SINK:
            into[edge.head] += edge.tokens_per_s
    whole = sum(edge.tokens_per_s for edge in plan.edges if edge.tail == SOURCE)
    return {peer: flow / whole for peer, flow in into.items() if flow > 1e-9 * whole}


def drawn(
    plan: Plan, usable: dict[str, NodeRecord], identity: str, count: int
) -> Iterator[tuple[str, ...]]:
    """The first routes of one client, as peers."""
    router = Router(plan, identity)
    for _ in range(count):
        route = router.next_route(usable)
        assert not isinstance(route, NoRoute)
        yield tuple(stage.peer_id for stage in route)


def by_chance(plan: Plan, rng: random.Random) -> Callable[[], tuple[str, ...]]:
    """Routes that follow the flow, each independent of all others."""
    heads: dict[str, list[FlowEdge]] = {}
    for edge in plan.edges:
        heads.setdefault(edge.tail, []).append(edge)

    def route() -> tuple[str, ...]:
        found, at = [], SOURCE
        while at != SINK:
            found.append(at)
            ways = heads[at]
            at = rng.choices(ways, [edge.tokens_per_s for edge in ways])[0].head
        return tuple(found[1:])

    return route


def off(loads: Counter[str], shares: dict[str, float], requests: int) -> float:
    """The worst deviation of a peer's load from its share, as a part of that share."""
    return max(abs(loads[p] / (requests * share) - 1) for p, share in shares.items())


def crowd(cluster: str, clients: int, each: int, repeats: int) -> dict[str, Any]:
    """One line: ``repeats`` crowds of clients over one plan."""
    problem, plan = swarm_of(cluster)
    nodes = {node.peer_id: node for node in problem.nodes}
    usable = {
        a.peer_id: record_of(problem, nodes[a.peer_id], a.start, a.end)
        for a in plan.assignments
        if a.start < a.end
    }
    shares, requests = shares_of(plan), clients * each
    chance = by_chance(plan, random.Random(1))
    whole, worst, noise, routes = Counter[str](), [], [], []
    for repeat in range(repeats):
        loads, random_loads, ways = Counter[str](), Counter[str](), set[tuple[str, ...]]()
        for client in range(clients):
            for route in drawn(plan, usable, f"client {repeat}.{client}", each):
                loads.update(route)
                ways.add(route)
        for _ in range(requests):
            random_loads.update(chance())
        worst.append(off(loads, shares, requests))
        noise.append(off(random_loads, shares, requests))
        routes.append(len(ways))
        whole += loads
    many = requests * repeats
    apart = [
        (whole[p] - many * share) / math.sqrt(many * share * (1 - share))
        for p, share in shares.items()
        if share < 1
    ]
    return {
        "plan": cluster,
        "peers": len(shares),
        "least_share": round(min(shares.values()), 4),
        "clients": clients,
        "each": each,
        "crowds": repeats,
        "routes": statistics.median(routes),
        "worst": round(statistics.median(worst), 4),
        "within_tenth": sum(each <= 0.1 for each in worst),
        "chance": round(statistics.median(noise), 4),
        "bias": round(off(whole, shares, many), 4),
        "bias_in_deviations": round(max(map(abs, apart)), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.routes", description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "results" / "routes.json", metavar="FILE"
    )
    arguments = parser.parse_args()
    result = report.provenance(seed=1)
    result["crowds"] = []
    for cluster in (*CLUSTERS, "chains"):
        for clients, each in CROWDS:
            result["crowds"].append(crowd(cluster, clients, each, arguments.repeats))
            print(result["crowds"][-1], flush=True)
    report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
