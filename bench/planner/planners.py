"""Puts all planners behind one signature, so that they can be compared on the same problems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.planner.helix import flow_search, helix_cpsat, helix_mathopt
from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.heuristics import heuristics
from coordinator.planning.placement import (
    HEURISTICS,
    NoPlacementError,
    Placement,
    best_placement,
    score,
)
from coordinator.problem.service import Service
from dht.messages.types import Assignment, Problem

Planner = Callable[[Problem, Service, "Effort"], Placement | None]

EXACT_PEERS_MAX = 12
"""Maximum peers for the exact program by flow; with more, the best heuristic is improved."""
EXACT_SPANS_MAX = 40_000
"""Maximum possible spans for that program; writing that many takes a second or two."""
MOVES_MAX = 2_000
"""Maximum moves by flow without a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The work that a planner may do."""

    time_limit_s: float
    seed: int = 0
    spent: Callable[[], float] | None = None
    """Returns the share of the time that is gone; None: a fixed amount of work."""


def _ours(problem: Problem, service: Service, effort: Effort) -> Placement | None:
    try:
        return best_placement(
            problem,
            time_limit_s=effort.time_limit_s,
            seed=effort.seed,
            spent=effort.spent,
            service=service,
        )
    except NoPlacementError:
        return None


def _by_flow(problem: Problem, service: Service, effort: Effort) -> Placement | None:
    """The most flow, as in Helix: by its exact program for few peers, else by moves from the best
    heuristic."""
    made = [place(problem) for place in HEURISTICS.values()]
    whole = [spans for spans in made if spans and not uncovered(spans, problem.model.layers)]
    if not whole:
        return None
    most = max(whole, key=lambda spans: solve_flow(problem, spans).flow_tokens_per_s)
    layers, spent = problem.model.layers, effort.spent
    spans_max = sum(layers * min(len(node.tokens_per_s), layers) for node in problem.nodes)
    found: Sequence[Assignment] | None
    if len(problem.nodes) <= EXACT_PEERS_MAX and spans_max <= EXACT_SPANS_MAX:
        found = helix_cpsat.solve_by_cpsat(
            problem, time_limit_s=effort.time_limit_s, seed=effort.seed, hint=most
        )
    else:
        found = flow_search.improve(
            problem,
            heuristics.fill(problem, most),
            seed=effort.seed,
            go_on=lambda moves: moves < MOVES_MAX if spent is None else spent() < 1,
        )
    return _scored(problem, found or most, "by flow", service)


def _heuristic(name: str, place: Callable[[Problem], Sequence[Assignment] | None]) -> Planner:
    def plan(problem: Problem, service: Service, effort: Effort) -> Placement | None:
        return _scored(problem, place(problem), name, service)

    return plan


def _exact(problem: Problem, service: Service, effort: Effort) -> Placement | None:
    hint = heuristics.chain(problem) or ()
    spans = helix_cpsat.solve_by_cpsat(
        problem, time_limit_s=effort.time_limit_s, seed=effort.seed, hint=hint
    )
    return _scored(problem, spans, "cp-sat", service)


def _mathopt(name: str) -> Planner:
    def plan(problem: Problem, service: Service, effort: Effort) -> Placement | None:
        spans = helix_mathopt.solve_by_mathopt(
            problem, solver=name, time_limit_s=effort.time_limit_s
        )
        return _scored(problem, spans, f"helix-milp-{name}", service)

    return plan


def _scored(
    problem: Problem, spans: Sequence[Assignment] | None, name: str, service: Service
) -> Placement | None:
    """The placement of ``spans`` with a plain maximum flow, as these planners define it."""
    if spans is None or uncovered(spans, problem.model.layers):
        return None
    edges = solve_flow(problem, spans).edges
    return score(problem, spans, name, service=service, edges=edges)


PLANNERS: dict[str, Planner] = {
    "ours": _ours,
    "by-flow": _by_flow,
    "petals": _heuristic("petals", heuristics.greedy),
    "swarm": _heuristic("swarm", heuristics.equal_stages),
    "separate": _heuristic("separate", heuristics.separate_pipelines),
    "cp-sat": _exact,
    "helix-milp-highs": _mathopt("highs"),
    "helix-milp-scip": _mathopt("scip"),
}
"""Planners by name. ``ours`` is what swarms use in a quick solve; the others are for comparison."""
