"""The placement: which peer holds which layers, the best that was found in time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator import heuristics, milp
from coordinator.check import uncovered
from coordinator.flow import solve_flow, upper_bound
from dht.errors import SwarmError
from dht.types import Assignment, Plan, PlanEpoch, Problem, fits, stage_bytes

EXACT_PEERS_MAX = 12
"""The exact program is tried up to so many peers."""


class NoPlacementError(SwarmError):
    """The peers here cannot hold every layer; the message says how much is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layers for peers, and who thought of it."""

    assignments: tuple[Assignment, ...]
    flow_tokens_per_s: float
    planner: str


HEURISTICS: dict[str, Callable[[Problem], tuple[Assignment, ...] | None]] = {
    "keep": heuristics.keep,
    "chain": heuristics.chain,
    "replicas": heuristics.replicas,
    "greedy": heuristics.greedy,
}


def best_placement(problem: Problem, *, time_limit_s: float, seed: int) -> Placement:
    """The best placement of all heuristics and, for few peers, the exact program.

    Never worse than the best heuristic. Peers that the flow does not need become spare replicas of
    what is served the least. Raises NoPlacementError when the layers cannot be covered.
    """
    found: list[Placement] = []
    for name, heuristic in HEURISTICS.items():
        assignments = heuristic(problem)
        if assignments is not None and not uncovered(assignments, problem.model.layers):
            found.append(_scored(problem, assignments, name))
    best = max(found, key=_rank, default=None)
    if len(problem.nodes) <= EXACT_PEERS_MAX:
        exact = milp.solve(
            problem,
            time_limit_s=time_limit_s,
            seed=seed,
            hint=best.assignments if best is not None else (),
        )
        if exact is not None:
            placement = _scored(problem, exact, "cp-sat")
            if (
                best is None
                or placement.flow_tokens_per_s > 1.02 * best.flow_tokens_per_s
                or _shorter(placement, best)
            ):
                best = placement
    if best is None:
        raise NoPlacementError(_shortage(problem))
    return _scored(problem, heuristics.fill(problem, best.assignments), best.planner)


def _scored(problem: Problem, assignments: Sequence[Assignment], planner: str) -> Placement:
    flow = solve_flow(problem, assignments).flow_tokens_per_s
    return Placement(assignments=tuple(assignments), flow_tokens_per_s=flow, planner=planner)


def _rank(placement: Placement) -> tuple[float, int]:
    return placement.flow_tokens_per_s, -len(placement.assignments)


def _shorter(one: Placement, other: Placement) -> bool:
    """Whether ``one`` serves as much (within 2%) over fewer stages."""
    return one.flow_tokens_per_s >= 0.98 * other.flow_tokens_per_s and len(one.assignments) < len(
        other.assignments
    )


def _shortage(problem: Problem) -> str:
    model = problem.model
    whole = stage_bytes(model, 0, model.layers, 0)
    most = sum(heuristics.span_max(problem, node, 1) for node in problem.nodes)
    lent = sum(node.memory_bytes for node in problem.nodes)
    return (
        f"the {len(problem.nodes)} peers here can hold about {min(most, model.layers - 1)} of"
        f" {model.layers} layers; they lend {lent / 2**30:.3f} GiB, the weights alone need"
        f" {whole / 2**30:.3f} GiB"
    )


def make_plan(
    problem: Problem,
    placement: Placement,
    *,
    epoch: PlanEpoch,
    coordinator: str,
    solve_s: float,
    now_unix_s: float,
) -> Plan:
    """The plan of a placement, with its max flow. Spans that do not fit raise ValueError."""
    nodes = {node.peer_id: node for node in problem.nodes}
    for a in placement.assignments:
        if not fits(problem.model, nodes[a.peer_id], a.start, a.end):
            raise ValueError(f"[{a.start}, {a.end}) does not fit {a.peer_id}")
    solution = solve_flow(problem, placement.assignments)
    return Plan(
        epoch=epoch,
        coordinator=coordinator,
        model=problem.model,
        assignments=placement.assignments,
        edges=solution.edges,
        flow_tokens_per_s=solution.flow_tokens_per_s,
        bound_tokens_per_s=upper_bound(problem),
        planner=placement.planner,
        solve_s=solve_s,
        created_unix_s=now_unix_s,
    )
