"""Experiments of our own: volunteers that come and go, crowds, a continent cut off, growth."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.papers.arrivals import poisson
from bench.papers.churn import ChurnConfig, Cut, with_churn
from bench.papers.clusters import azure, cluster_path, ours
from bench.papers.full_load import online
from bench.papers.helix import RULES, figures, find
from bench.papers.jobs import Job, Recipe, Row
from coordinator.commands.full_load import as_plan
from coordinator.commands.planner_view import service_of
from coordinator.commands.swarm_file import read_swarm
from coordinator.planning.placement import Placement, best_placement
from coordinator.planning.solve import by_clock
from coordinator.simulator.core.profiles import Profiles
from dht.messages.types import Problem

HOUR_S = 3600.0
CROWD_S = (600.0, 780.0)
CUT_S = (1200.0, 2400.0)
CUT_REGION = "r1"
GROWTH_PER_S = 0.1
"""Requests/s for every 24 peers of the growing swarm."""
GROWTH_PLAN_S = 60.0


def churned(
    problem: Problem, profiles: Profiles, placement: Placement, per_s: float, config: ChurnConfig
) -> Row:
    """An hour (or as the config says) of Poisson arrivals while peers come and go."""
    arrivals = poisson(azure(), per_s=per_s, duration_s=config.duration_s, seed=0)
    started_s = time.process_time()
    found = with_churn(problem, profiles, as_plan(problem, placement), arrivals, config)
    return {
        "peers": len(problem.nodes),
        "requests_per_s": per_s,
        "requests": len(arrivals),
        "answered": found.served.sessions_done,
        "losses": found.losses,
        "returns": found.returns,
        "moves": found.moves,
        "uncovered_s": found.uncovered_s,
        "replays": found.served.replays,
        **figures(found.served, time.process_time() - started_s),
    }


def volunteers(stay_h: float, replan: bool, per_s: float) -> Row:
    """Four hours of a cluster of volunteers with heavy-tailed stays; 0: nobody leaves."""
    config = ChurnConfig(stay_mean_s=stay_h * HOUR_S, replan=replan, duration_s=4 * HOUR_S)
    row = churned(*ours("single24", "70b"), per_s, config)
    return {"stay_h": stay_h, "replan": replan, **row}


def cut_off(replan: bool | None, per_s: float) -> Row:
    """One of three regions loses its links to the others for 20 minutes; None: it does not."""
    cluster = json.loads(cluster_path("geo24").read_text())
    region = tuple(str(n["id"]) for n in cluster["nodes"] if n["region"] == CUT_REGION)
    cut = Cut(peers=region, start_s=CUT_S[0], end_s=CUT_S[1])
    config = ChurnConfig(
        stay_mean_s=0.0, cuts=(cut,) if replan is not None else (), replan=bool(replan)
    )
    row = churned(*ours("geo24", "70b"), per_s, config)
    return {"cut": len(region) if replan is not None else 0, "replan": replan, **row}


def crowd(placement: str, rules: str, per_s: float, crowd_per_s: float) -> Row:
    """Half an hour of calm arrivals with three minutes of a crowd in it, until all are answered."""
    trace = azure()
    start_s, end_s = CROWD_S
    calm = poisson(trace, per_s=per_s, duration_s=1800.0, seed=0)
    more = poisson(trace, per_s=crowd_per_s - per_s, duration_s=end_s - start_s, seed=1)
    shifted = [replace(request, arrival_s=start_s + request.arrival_s) for request in more]
    arrivals = sorted([*calm, *shifted], key=lambda request: request.arrival_s)
    started_s = time.process_time()
    report = online(*find("single24", "70b", placement), arrivals, RULES[rules])
    return {
        "placement": placement,
        "rules": rules,
        **RULES[rules].names(),
        "requests_per_s": per_s,
        "crowd_per_s": crowd_per_s,
        "requests": len(arrivals),
        "answered_after_s": report.simulated_s,
        **figures(report, time.process_time() - started_s),
    }


def grown(copies: int) -> Row:
    """So many times Helix's 24 peers as one swarm, planned by cells, with an hour of churn."""
    problem, profiles = many("single24", "70b", copies)
    started_s = time.monotonic()
    placement = best_placement(
        problem,
        time_limit_s=GROWTH_PLAN_S,
        seed=0,
        spent=by_clock(GROWTH_PLAN_S),
        service=service_of(problem, profiles),
    )
    planned_s = time.monotonic() - started_s
    row = churned(problem, profiles, placement, GROWTH_PER_S * copies, ChurnConfig())
    return {
        "searched_s": planned_s,
        "planner": placement.planner,
        "flow_tokens_per_s": placement.flow_tokens_per_s,
        "estimate_tokens_per_s": placement.estimate_tokens_per_s or 0.0,
        **row,
    }


def many(cluster: str, model: str, copies: int) -> tuple[Problem, Profiles]:
    """Several copies of a cluster, far from each other; names are shuffled among the copies."""
    problem, profiles = read_swarm(cluster_path(cluster), model)
    numbers = list(range(copies * len(problem.nodes)))
    random.Random(0).shuffle(numbers)
    names = {
        (copy, node.peer_id): f"p{numbers[copy * len(problem.nodes) + index]}"
        for copy in range(copies)
        for index, node in enumerate(problem.nodes)
    }

    def named(copy: int, name: str) -> str:
        return names.get((copy, name), name)

    every = range(copies)
    return (
        replace(
            problem,
            nodes=tuple(
                replace(node, peer_id=named(copy, node.peer_id))
                for copy in every
                for node in problem.nodes
            ),
            links=tuple(
                replace(link, source=named(copy, link.source), target=named(copy, link.target))
                for copy in every
                for link in problem.links
            ),
            default_rtt_s=0.1,
        ),
        Profiles(
            peers={
                named(copy, name): profile
                for copy in every
                for name, profile in profiles.peers.items()
            },
            client_links={
                (named(copy, a), named(copy, b)): link
                for copy in every
                for (a, b), link in profiles.client_links.items()
            },
        ),
    )


def _job(key: str, call: Any, cost_s: float, **arguments: Any) -> Job:
    return Job(key=key, call=call, arguments=arguments, cost_s=cost_s)


def _volunteers() -> Sequence[Job]:
    return [
        _job(
            f"stays of {stay_h:g} h, {'' if replan else 'not '}re-planned",
            volunteers,
            50.0,
            stay_h=stay_h,
            replan=replan,
            per_s=0.6,
        )
        for stay_h, replan in (
            (0.0, False),
            (8.0, True),
            (8.0, False),
            (2.0, True),
            (2.0, False),
        )
    ]


def _cut_off() -> Sequence[Job]:
    return [
        _job(f"cut, {name}", cut_off, 15.0, replan=replan, per_s=0.4)
        for name, replan in (("none", None), ("re-planned", True), ("not re-planned", False))
    ]


def _crowd() -> Sequence[Job]:
    return [
        _job(
            f"crowd, {placement}, {rules}",
            crowd,
            15.0,
            placement=placement,
            rules=rules,
            per_s=0.3,
            crowd_per_s=3.0,
        )
        for placement, rules in (("helix", "helix"), ("helix", "living"), ("ours", "living"))
    ]


def _growth() -> Sequence[Job]:
    return [
        _job(f"{24 * copies} peers", grown, 40.0 + 5.0 * copies, copies=copies)
        for copies in (1, 4, 20, 84)
    ]


RECIPES = (
    Recipe(
        name="volunteers",
        title="Ours: volunteers that come and go, re-planning on and off",
        jobs=_volunteers,
    ),
    Recipe(name="crowd", title="Ours: a flash crowd", jobs=_crowd),
    Recipe(name="cut-off", title="Ours: a continent cut off", jobs=_cut_off),
    Recipe(name="growth", title="Ours: growth to 2,000 peers with churn", jobs=_growth),
)
