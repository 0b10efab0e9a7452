"""The placement: which peer holds which layers, the best that was found in time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator import heuristics, local_search, milp
from coordinator.check import uncovered
from coordinator.flow import mean_latency_s, solve_flow, upper_bound
from dht.errors import SwarmError
from dht.types import Assignment, Plan, PlanEpoch, Problem, fits, stage_bytes

EXACT_PEERS_MAX = 12
"""The exact program is tried up to so many peers; beyond, the heuristics' best is improved."""
EXACT_SPANS_MAX = 40_000
"""…and up to so many possible spans, which take a second or two to write down."""
MOVES_MAX = 2_000
"""Moves that the improvement tries where no clock ends it."""
FLOW_WITHIN = 0.98
"""Placements with so much of the best flow count as equals."""
LATENCY_WITHIN = 1.1
"""Among them, those with a ring at most so much slower than the fastest count as equals."""


class NoPlacementError(SwarmError):
    """The peers here cannot hold every layer; the message says how much is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layers for peers, and who thought of it."""

    assignments: tuple[Assignment, ...]
    flow_tokens_per_s: float
    planner: str
    latency_s: float = 0.0
    """A token's time on links in one turn of the ring, averaged over the flow."""
    moved_layers: int = 0
    """Layers that peers would have to fetch."""


HEURISTICS: dict[str, Callable[[Problem], tuple[Assignment, ...] | None]] = {
    "keep": heuristics.keep,
    "chain": heuristics.chain,
    "chains": heuristics.chains,
    "equal-stages": heuristics.equal_stages,
    "replicas": heuristics.replicas,
    "greedy": heuristics.greedy,
}


def best_placement(
    problem: Problem,
    *,
    time_limit_s: float,
    seed: int,
    out_of_time: Callable[[], bool] | None = None,
) -> Placement:
    """The best placement of all heuristics and, for few peers, the exact program.

    For more peers than that, the heuristics' best is improved move by move until ``out_of_time()``
    (a fixed number of moves without it). Never worse than the best heuristic but for the 2% of
    flow that are worth a shorter ring. Peers that the flow does not need become spare replicas of
    what is served the least. Raises NoPlacementError when the layers cannot be covered.
    """
    shortage = why_uncoverable(problem)
    if shortage is not None:
        raise NoPlacementError(shortage)
    found = [
        score(problem, assignments, name)
        for name, heuristic in HEURISTICS.items()
        if (assignments := heuristic(problem)) is not None
        and not uncovered(assignments, problem.model.layers)
    ]
    best = choose(found)
    if len(problem.nodes) <= EXACT_PEERS_MAX and _spans_max(problem) <= EXACT_SPANS_MAX:
        exact = milp.solve(problem, time_limit_s=time_limit_s, seed=seed, hint=best.assignments)
        if exact is not None:
            found.append(score(problem, exact, "cp-sat"))
    else:
        most = max(found, key=lambda placement: placement.flow_tokens_per_s)
        improved = local_search.improve(
            problem,
            heuristics.fill(problem, most.assignments),
            seed=seed,
            go_on=lambda moves: not out_of_time() if out_of_time else moves < MOVES_MAX,
        )
        found.append(score(problem, improved, f"{most.planner}+moves"))
    best = choose(found)
    return score(problem, heuristics.fill(problem, best.assignments), best.planner)


def _spans_max(problem: Problem) -> int:
    layers = problem.model.layers
    return sum(layers * min(len(node.tokens_per_s), layers) for node in problem.nodes)


def score(problem: Problem, assignments: Sequence[Assignment], planner: str) -> Placement:
    """A placement with what it is judged by."""
    solution = solve_flow(problem, assignments)
    held = {node.peer_id: node.current for node in problem.nodes}
    return Placement(
        assignments=tuple(assignments),
        flow_tokens_per_s=solution.flow_tokens_per_s,
        planner=planner,
        latency_s=mean_latency_s(problem, solution),
        moved_layers=sum(milp.fetched(held.get(a.peer_id), a.start, a.end) for a in assignments),
    )


def choose(found: Sequence[Placement]) -> Placement:
    """The most flow; within 2% of it, the shortest ring; within 10% of that, the least moved."""
    most = max(placement.flow_tokens_per_s for placement in found)
    near = [p for p in found if p.flow_tokens_per_s >= FLOW_WITHIN * most]
    fastest_s = min(placement.latency_s for placement in near)
    near = [p for p in near if p.latency_s <= LATENCY_WITHIN * fastest_s]
    return min(near, key=lambda p: (p.moved_layers, p.latency_s, -p.flow_tokens_per_s))


def why_uncoverable(problem: Problem) -> str | None:
    """Why no placement can cover all layers, in plain words; None when one can. Exact, quick."""
    model = problem.model
    covered = heuristics.coverage(problem)
    if covered.layers >= model.layers:
        return None
    kv_tokens = max((node.kv_tokens_min for node in problem.nodes), default=0)
    each = stage_bytes(model, 0, 1, kv_tokens) - model.embed_bytes
    if model.layers == 1:
        each -= model.head_bytes
    more = (model.layers - covered.layers) * each
    more += model.embed_bytes if covered.first is None else 0
    more += model.head_bytes if covered.last is None else 0
    count = len(problem.nodes)
    return (
        f"the {count} peer{'s' if count != 1 else ''} here can hold at most {covered.layers} of"
        f" {model.layers} layers; about {more / 2**30:.3g} GiB more are needed"
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
