"""Llumnix's experiments (OSDI'24, §6), carried over to pipelines.

Sixteen LLaMA-7B on one GPU each become four pipelines of four A100 with LLaMA 30B, each with KV
room for as many tokens as one of its instances has. Lengths have heavy tails, arrivals are Poisson.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.papers.arrivals import heavy_tailed
from bench.papers.clusters import cluster_path
from bench.papers.freest import Freest
from bench.papers.jobs import Job, Recipe, Row
from bench.papers.moves import MoveRules, Moving
from coordinator.commands.full_load import as_plan
from coordinator.commands.swarm_file import read_swarm
from coordinator.evaluation.max_flow import solve_flow
from coordinator.planning.placement import score
from coordinator.policies.routing.balance import BalanceConfig
from coordinator.problem.service import KvCapacity
from coordinator.simulator.clients import Clients
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.core.report import latency
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.links.closed_form_wire import FramedWire
from dht.messages.types import Assignment, Plan, Problem

PIPELINES = 4
DISPATCHES = {"turns": Clients, "freest": Freest}
STAGE_LAYERS = 15
KV_TOKENS = 13_616
"""KV tokens of a pipeline: what Llumnix's instances (LLaMA-7B on an A10) hold."""
MEAN_TOKENS = 400.0
"""Mean tokens of prompts and of answers, before the longest are cut."""
DURATION_S = 1800.0
URGENT = 0.1
LEAVES_S = 600.0
WAN_RTT_S = 0.02
"""Between pipelines: sites of one region."""


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


def pipelines() -> tuple[Problem, Profiles, Plan]:
    """Four pipelines of like peers; flow stays in each."""
    problem, profiles = many("single24_sub_a100", "30b", PIPELINES)
    problem = replace(problem, default_rtt_s=WAN_RTT_S, default_bandwidth_bytes_per_s=1.25e8)
    peers = {
        name: replace(profile, kv=KvCapacity(beside=(KV_TOKENS * STAGE_LAYERS,)))
        for name, profile in profiles.peers.items()
    }
    spans: list[Assignment] = []
    edges: list[Any] = []
    count = len(problem.nodes) // PIPELINES
    for first in range(0, len(problem.nodes), count):
        chain = [
            Assignment(peer_id=node.peer_id, start=at * STAGE_LAYERS, end=(at + 1) * STAGE_LAYERS)
            for at, node in enumerate(problem.nodes[first : first + count])
        ]
        spans += chain
        edges += solve_flow(problem, chain).edges
    plan = as_plan(problem, score(problem, spans, "pipelines", edges=edges))
    return problem, replace(profiles, peers=peers), plan


MOVES = {
    "": None,
    "moves for room": BalanceConfig(),
    "moves": BalanceConfig(evens=True),
}
"""Which moves peers ask for: none, those that make room (the default of ``anabranch join``), or
those that even out, too (``--balance``)."""


def served(per_s: float, dispatch: str, moves: str, urgent: float, leaves: str) -> Row:
    """Half an hour of arrivals, until all are answered; ``leaves``: how a peer goes, if any."""
    problem, profiles, plan = pipelines()
    engine = LiveSwarm(problem, profiles, plan.assignments, FramedWire)
    clients = DISPATCHES[dispatch](problem, profiles, plan, engine.peers)
    arrivals = heavy_tailed(
        per_s=per_s, duration_s=DURATION_S, mean_tokens=MEAN_TOKENS, urgent=urgent, seed=0
    )
    rules = MoveRules(balance=MOVES[moves])
    run = Moving(engine, clients, arrivals, rules, start_s=0.0, end_s=1e9)
    gone = plan.assignments[1].peer_id
    if leaves == "drains":
        run.drain_at(gone, LEAVES_S)
    elif leaves == "vanishes":
        run.lose_at(gone, LEAVES_S)
    run.sample()
    started_s = time.process_time()
    while not run.all_done and engine.now_s < 8 * DURATION_S:
        engine.run(engine.now_s + 1.0, run)
    prompt, token = latency(run.prompt_s), latency(run.decode_s)
    first = latency(run.urgent_prompt_s) if run.urgent_prompt_s else None
    gaps = sorted(run.moved_gaps_s)
    return {
        "requests_per_s": per_s,
        "dispatch": dispatch,
        "asked_moves": moves,
        "urgent": urgent,
        "leaves": leaves,
        "requests": len(arrivals),
        "answered": run.sessions_done,
        "prompt_s": prompt.mean_s,
        "prompt_p50_s": prompt.percentiles_s[50],
        "prompt_p99_s": prompt.percentiles_s[99],
        "urgent_prompt_s": first.mean_s if first else None,
        "urgent_prompt_p99_s": first.percentiles_s[99] if first else None,
        "token_s": token.mean_s,
        "token_p99_s": token.percentiles_s[99],
        "longest_gap_s": max(run.decode_s),
        "moved_gap_p50_s": gaps[len(gaps) // 2] if gaps else None,
        "moved_gap_max_s": gaps[-1] if gaps else None,
        "moves": run.moves,
        "hit_by_loss": run.losses,
        "kv_peak": max(peer.kv_peak / peer.kv_capacity for peer in engine.peers.values()),
        "times_real": engine.now_s / max(1e-9, time.process_time() - started_s),
    }


def _job(key: str, **changed: Any) -> Job:
    arguments: dict[str, Any] = {
        "per_s": RATES[1],
        "dispatch": "turns",
        "moves": "",
        "urgent": URGENT,
        "leaves": "",
    }
    return Job(key=key, call=served, arguments=arguments | changed, cost_s=25.0)


RATES = (0.8, 1.0)
LEAVING_RATE = 0.6
"""What three pipelines serve easily."""


def _llumnix() -> Sequence[Job]:
    jobs = [
        _job(", ".join(filter(None, (f"{rate:g}/s", dispatch, moves))), **named)
        for rate in RATES
        for dispatch, moves in (("turns", ""), *(("freest", moves) for moves in MOVES))
        for named in ({"per_s": rate, "dispatch": dispatch, "moves": moves},)
    ]
    jobs += [
        _job("nobody is urgent", urgent=0.0),
        _job("a peer drains", per_s=LEAVING_RATE, leaves="drains"),
        _job("a peer vanishes", per_s=LEAVING_RATE, leaves="vanishes"),
    ]
    return jobs


RECIPES = (
    Recipe(
        name="llumnix",
        title="Llumnix carried over to pipelines: migration, priorities, draining",
        jobs=_llumnix,
    ),
)
