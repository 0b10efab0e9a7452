"""Advice on a plan: what one more peer would gain once all is planned again.

What holds the plan itself back: :mod:`coordinator.evaluation.explain`.
"""

from collections.abc import Callable
from dataclasses import replace

from coordinator.evaluation.explain.weak_points import WEAK_POINTS, with_twin
from coordinator.planning.placement import Placement, best_placement, of_chains
from coordinator.planning.search.chain_judge import Judge
from coordinator.planning.search.chain_search import as_chains, improved
from coordinator.planning.search.objective import Objective
from coordinator.problem.service import Service
from dht.messages.types import PlannerNode, Problem


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
    tried = sorted(twins.values(), key=lambda n: n.peer_id)[: WEAK_POINTS.kinds_max]
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
    return tuple((name, gain) for name, gain in gains if gain >= WEAK_POINTS.gain_min)


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
        return anew if anew.worth >= placement.worth else placement
    judge = Judge(problem, service)
    objective = Objective(judge)
    better = improved(chains, judge, objective, seed=seed, spent=spent).chains
    again = of_chains(judge, better, placement.planner)
    return again if again.worth >= placement.worth else placement
