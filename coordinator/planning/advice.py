"""Advice on a plan: what one answer alone takes, and what one more peer would gain once all is
planned again. What holds the plan itself back: :mod:`coordinator.explain`."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from coordinator.explain.weak_points import GAIN_MIN, KINDS_MAX, with_twin
from coordinator.planning.placement import Placement, best_placement, of_chains
from coordinator.problem.service import CONTEXT_TYPICAL, Service
from coordinator.routing.quickest import LOOKS_MAX
from coordinator.search.chain_judge import Judge
from coordinator.search.chain_search import as_chains, improved
from dht.messages.types import Assignment, PlannerNode, Problem

STEP_S = 0.002
"""Minimum time of a step in seconds beside its layers: receiving, queueing, sending. Peers measure
their layers alone."""


def one_answer_s(problem: Problem, assignments: Collection[Assignment], service: Service) -> float:
    """Seconds per token of one answer that has the swarm to itself, on its quickest ring.

    ``inf`` where the assignments do not cover all layers. A ring may enter and leave a peer's
    layers in their middle. In a large swarm it begins at the quickest first stages only, as those
    of clients do (:func:`coordinator.routing.quickest.quickest_ring`).
    """
    round_trips = {(k.source, k.target): k.rtt_s for k in problem.links}

    def hop_s(tail: str, head: str) -> float:
        return 0.0 if tail == head else round_trips.get((tail, head), problem.default_rtt_s) / 2

    def closing_s(last: str, first: str) -> float:
        hub = service.hub_delay_s
        return hub[last] + hub[first] if last in hub and first in hub else hop_s(last, first)

    def stage_s(name: str, layers: int) -> float:
        machine = service.machines[name]
        layer_s = machine.decode.at(1.0, CONTEXT_TYPICAL)
        run_s = layers * machine.stretch_of(layers) * layer_s
        return max(STEP_S, machine.step_overhead_s) + run_s

    best = math.inf
    spans = sorted(assignments, key=lambda a: (a.start, a.end, a.peer_id))
    entries = sorted(
        (a for a in spans if a.start == 0), key=lambda a: stage_s(a.peer_id, a.end) / a.end
    )
    looks = sum(b.start <= a.end < b.end for a in spans for b in spans)
    for first in [a.peer_id for a in entries[: max(1, LOOKS_MAX // max(1, looks))]]:
        # Seconds to come to each layer, by the peer that ran the one before.
        come: dict[int, dict[str, float]] = {0: {first: 0.0}}
        for at in range(problem.model.layers):
            for tail, before_s in come.pop(at, {}).items():
                for a in spans:
                    if a.start <= at < a.end and (at > 0 or a.peer_id == first):
                        took_s = before_s + hop_s(tail, a.peer_id) + stage_s(a.peer_id, a.end - at)
                        known = come.setdefault(a.end, {})
                        known[a.peer_id] = min(took_s, known.get(a.peer_id, math.inf))
        ends = come.get(problem.model.layers, {})
        best = min([best, *(took_s + closing_s(last, first) for last, took_s in ends.items())])
    return best


def one_more(
    problem: Problem,
    placement: Placement,
    service: Service,
    *,
    seed: int,
    spent: Callable[[], float],
) -> tuple[tuple[str, float], ...]:
    """Gains, as shares, from one more peer like the named one; largest first.

    Each gain is found by planning again from the placement with that peer added. The placement
    without it gets as much work, so that the gain is the peer's alone.
    """
    twins: dict[tuple[float, ...], PlannerNode] = {}
    for node in problem.nodes:
        twins.setdefault(node.tokens_per_s, node)
    tried = sorted(twins.values(), key=lambda n: n.peer_id)[:KINDS_MAX]
    turns = len(tried) + 1

    def clock(turn: int) -> Callable[[], float]:
        return lambda: spent() * turns - turn

    base = placed_again(problem, placement, service, seed=seed, spent=clock(0)).value
    gains = []
    for turn, twin in enumerate(tried, start=1):
        larger, served = _with_twin(problem, service, twin)
        value = placed_again(larger, placement, served, seed=seed, spent=clock(turn)).value
        gains.append((twin.peer_id, value / max(base, 1e-9) - 1))
    gains.sort(key=lambda pair: -pair[1])
    return tuple((name, gain) for name, gain in gains if gain >= GAIN_MIN)


def _with_twin(problem: Problem, service: Service, twin: PlannerNode) -> tuple[Problem, Service]:
    """The problem and service with one more peer, a copy of ``twin`` with the same links."""
    larger, name = with_twin(problem, twin)
    hub = dict(service.hub_delay_s)
    if twin.peer_id in hub:
        hub[name] = hub[twin.peer_id]
    machines = {**service.machines, name: service.machines[twin.peer_id]}
    return larger, replace(service, machines=machines, hub_delay_s=hub)


def placed_again(
    problem: Problem,
    placement: Placement,
    service: Service,
    *,
    seed: int,
    spent: Callable[[], float],
) -> Placement:
    """The placement improved by local moves, which idle peers may join.

    A placement that is not a set of chains is planned from scratch.
    """
    chains = as_chains(placement.assignments, placement.edges or (), problem.model.layers)
    if not chains:
        anew = best_placement(problem, time_limit_s=1.0, seed=seed, spent=spent, service=service)
        return anew if anew.value >= placement.value else placement
    judge = Judge(problem, service)
    better = improved(chains, judge, seed=seed, share=1.0, spent=spent).chains
    again = of_chains(judge, better, placement.planner)
    return again if again.value >= placement.value else placement
