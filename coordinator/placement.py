"""The placement: which peer holds which layers, the best that was found in time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordinator import groups, heuristics, local_search, milp, refine
from coordinator.check import uncovered
from coordinator.estimate import estimate, serves
from coordinator.flow import (
    FlowSolution,
    balanced_flow,
    flow_parts,
    mean_latency_s,
    solve_flow,
    upper_bound,
)
from coordinator.frontier import Chains, candidates
from coordinator.service import Service
from dht.errors import SwarmError
from dht.types import (
    RATE_MAX,
    SOURCE,
    Assignment,
    FlowEdge,
    Plan,
    PlanEpoch,
    Problem,
    fits,
    stage_bytes,
)

EXACT_PEERS_MAX = 12
"""The exact program is tried up to so many peers; beyond, the heuristics' best is improved."""
EXACT_SPANS_MAX = 40_000
"""…and up to so many possible spans, which take a second or two to write down."""
MOVES_MAX = 2_000
"""Moves that the improvement tries where no clock ends it."""
VALUE_WITHIN = 0.98
"""Placements with so much of the best throughput count as equals."""
LATENCY_WITHIN = 1.1
"""Among them, those with a ring at most so much slower than the fastest count as equals."""
CANDIDATES_MAX = 300
"""Chains of stage patterns that are made where no clock ends it."""
REFINED = 3
"""How many of the best are improved move by move."""
TIMES_MIN = 3
"""Programs solved, or moves made, however late it is."""
FRONTIER_SHARE = 0.4
"""Share of the time for making chains; the rest is for improving them."""
DOUBT = 1.06
"""How much more than chains as made, refined ones must serve: the estimate errs by as much."""
CELLS_ABOVE = 64
"""More peers than that are planned in cells."""
KEPT = 12
"""How many chains are held against the heuristics, for rings and movement."""
GAIN_MIN = 1.0005
"""A move must bring so much."""


class NoPlacementError(SwarmError):
    """The peers here cannot hold every layer; the message says how much is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layers for peers, and who thought of it."""

    assignments: tuple[Assignment, ...]
    flow_tokens_per_s: float
    planner: str
    edges: tuple[FlowEdge, ...] | None = None
    """Where the flow goes; None: any maximum flow."""
    estimate_tokens_per_s: float = 0.0
    """What it would serve (:mod:`coordinator.estimate`); 0 where that was not asked."""
    latency_s: float = 0.0
    """A token's turn of the ring: estimated, or the time on links alone where it was not."""
    moved_layers: int = 0
    """Layers that peers would have to fetch."""
    lone_layers: int = 0
    """Layers with a single holder, whose loss would stop the swarm."""

    @property
    def value(self) -> float:
        """Throughput in tokens/s: estimated, or the flow where nothing was estimated."""
        return self.estimate_tokens_per_s or self.flow_tokens_per_s


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
    spent: Callable[[], float] | None = None,
    service: Service | None = None,
) -> Placement:
    """The best placement of all heuristics, chains of stage patterns and the search from there.

    Judged by the estimate under ``service``; without it, by max flow. For few peers the exact
    program is tried too. ``spent()`` says what share of the time allowed is gone, and the work
    ends at 1; without it, after a fixed amount. Never worse than the best heuristic but for the 2%
    of throughput that are worth a shorter ring. Peers that the flow does not need become spare
    replicas of what is served the least. Raises NoPlacementError when the layers cannot be covered.
    """
    shortage = why_uncoverable(problem)
    if shortage is not None:
        raise NoPlacementError(shortage)
    parts = groups.cells(problem) if len(problem.nodes) > CELLS_ABOVE else ()
    if len(parts) > 1:
        return _by_cells(problem, parts, time_limit_s, seed, spent, service)
    found = [
        score(problem, assignments, name, service=service)
        for name, heuristic in HEURISTICS.items()
        if (assignments := heuristic(problem)) is not None
        and not uncovered(assignments, problem.model.layers)
    ]
    found += _chains(problem, service, seed, spent)
    best = choose(found)
    if service is None:
        found += _by_flow(problem, found, best, time_limit_s, seed, spent)
        best = choose(found)
    return with_spares(problem, best, service)


def _by_cells(
    problem: Problem,
    parts: Sequence[Problem],
    time_limit_s: float,
    seed: int,
    spent: Callable[[], float] | None,
    service: Service | None,
) -> Placement:
    """Cells planned one after the other; flow stays inside each."""
    found = [
        best_placement(
            part,
            time_limit_s=time_limit_s / len(parts),
            seed=seed,
            spent=groups.share_of_time(spent, index, len(parts)),
            service=service,
        )
        for index, part in enumerate(parts)
    ]
    value = sum(placement.value for placement in found)
    return Placement(
        assignments=tuple(a for placement in found for a in placement.assignments),
        flow_tokens_per_s=sum(placement.flow_tokens_per_s for placement in found),
        planner=f"{len(found)} cells",
        edges=tuple(
            edge
            for part, placement in zip(parts, found, strict=True)
            for edge in placement.edges or solve_flow(part, placement.assignments).edges
        ),
        estimate_tokens_per_s=sum(placement.estimate_tokens_per_s for placement in found),
        latency_s=sum(p.value * p.latency_s for p in found) / max(value, 1e-9),
        moved_layers=sum(placement.moved_layers for placement in found),
        lone_layers=0 if len(found) > 1 else found[0].lone_layers,
    )


def placed_again(
    problem: Problem,
    placement: Placement,
    service: Service,
    *,
    seed: int,
    spent: Callable[[], float],
) -> Placement:
    """A placement improved by moves from where it is; peers beside it may join."""
    chains = _as_chains(problem, placement)

    def worth(tried: Chains, least: float = 0.0) -> float:
        return _worth(problem, tried, service, least)

    better, _ = refine.refine(
        problem, chains, judge=worth, seed=seed, go_on=_until(spent, 1.0, MOVES_MAX)
    )
    spans = tuple(a for chain in better for a in chain)
    edges = draw(problem, better, service)
    again = score(problem, spans, placement.planner, service=service, edges=edges)
    return again if again.value >= placement.value else placement


def _as_chains(problem: Problem, placement: Placement) -> Chains:
    """The placement's chains, where its spans follow each other; peers without flow left out."""
    flowing = {edge.head for edge in placement.edges or ()}
    used = [a for a in placement.assignments if a.peer_id in flowing]
    by_part: dict[int, list[Assignment]] = {}
    for number, part in enumerate(flow_parts(placement.edges or ())):
        by_part[number] = [a for a in used if a.peer_id in part]
    chains = tuple(tuple(part) for part in by_part.values())
    whole = all(_is_chain(chain, problem.model.layers) for chain in chains)
    return chains if whole and chains else ()


def _is_chain(spans: Sequence[Assignment], layers: int) -> bool:
    ranges = sorted({(a.start, a.end) for a in spans})
    joints = pairwise(ranges)
    return (
        bool(ranges)
        and ranges[0][0] == 0
        and ranges[-1][1] == layers
        and all(a[1] == b[0] for a, b in joints)
    )


def _by_flow(
    problem: Problem,
    found: Sequence[Placement],
    best: Placement,
    time_limit_s: float,
    seed: int,
    spent: Callable[[], float] | None,
) -> list[Placement]:
    """More flow: by the exact program for few peers, else by moves from what has the most."""
    if len(problem.nodes) <= EXACT_PEERS_MAX and _spans_max(problem) <= EXACT_SPANS_MAX:
        exact = milp.solve(problem, time_limit_s=time_limit_s, seed=seed, hint=best.assignments)
        return [] if exact is None else [score(problem, exact, "cp-sat")]
    most = max(found, key=lambda placement: placement.flow_tokens_per_s)
    improved = local_search.improve(
        problem,
        heuristics.fill(problem, most.assignments),
        seed=seed,
        go_on=_until(spent, 1.0, MOVES_MAX),
    )
    return [score(problem, improved, f"{most.planner}+moves")]


def _chains(
    problem: Problem,
    service: Service | None,
    seed: int,
    spent: Callable[[], float] | None,
) -> list[Placement]:
    """Placements made of stage patterns, the best of them refined; planner ``patterns``."""
    go_on = _until(spent, FRONTIER_SHARE if service else 1.0, CANDIDATES_MAX)

    def worth(chains: Chains, least: float = 0.0) -> float:
        return _worth(problem, chains, service, least)

    made = [
        (worth(chains), chains)
        for chains in candidates(
            problem,
            room_for=service.kv_tokens if service else None,
            judge=worth,
            seed=seed,
            go_on=go_on,
        )
    ]
    made.sort(key=lambda pair: -pair[0])
    if service is not None and made:
        refined = []
        for turn, (_, chains) in enumerate(made[:REFINED], start=1):
            until = FRONTIER_SHARE + (1 - FRONTIER_SHARE) * turn / REFINED
            better, value = refine.refine(
                problem,
                chains,
                judge=worth,
                seed=seed,
                go_on=_until(spent, until, MOVES_MAX),
            )
            refined.append((value, better))
        # A search finds the estimate's errors too: what it gains must be more than those.
        surely = [pair for pair in refined if pair[0] >= DOUBT * made[0][0]]
        made = sorted(surely, key=lambda pair: -pair[0]) or made
    return [
        score(
            problem,
            tuple(a for chain in chains for a in chain),
            "patterns",
            service=service,
            edges=draw(problem, chains, service),
        )
        for _, chains in made[:KEPT]
    ]


def _worth(problem: Problem, chains: Chains, service: Service | None, least: float = 0.0) -> float:
    """Tokens/s that chains serve; 0 once it is sure that they serve less than ``least``."""
    spans = tuple(a for chain in chains for a in chain)
    edges = draw(problem, chains, service)
    if service is None:
        return sum(edge.tokens_per_s for edge in edges if edge.tail == SOURCE)
    if least > 0 and not serves(problem, spans, edges, service, least * GAIN_MIN):
        return 0.0
    return estimate(problem, spans, edges, service).tokens_per_s


def _until(
    spent: Callable[[], float] | None, share: float, times_max: int
) -> Callable[[int], bool]:
    """Whether to go on after so many times: by the clock, or by count where there is none."""
    if spent is None:
        return lambda times: times < times_max
    return lambda times: times < TIMES_MIN or spent() < share


def draw(problem: Problem, chains: Chains, service: Service | None) -> tuple[FlowEdge, ...]:
    """The flow of chains that keep to themselves: spread widely where it is judged by service."""
    solve = solve_flow if service is None else balanced_flow
    return tuple(edge for chain in chains for edge in solve(problem, chain).edges)


def with_spares(problem: Problem, placement: Placement, service: Service | None) -> Placement:
    """The placement with spare replicas on all other peers that can hold something.

    They carry flow where that serves more; else they stand by.
    """
    filled = heuristics.fill(problem, placement.assignments)
    used = score(problem, filled, placement.planner, service=service)
    if service is None or placement.edges is None:
        return used
    idle = score(problem, filled, placement.planner, service=service, edges=placement.edges)
    return used if used.value >= idle.value else idle


def _spans_max(problem: Problem) -> int:
    layers = problem.model.layers
    return sum(layers * min(len(node.tokens_per_s), layers) for node in problem.nodes)


def score(
    problem: Problem,
    assignments: Sequence[Assignment],
    planner: str,
    *,
    service: Service | None = None,
    edges: Sequence[FlowEdge] | None = None,
) -> Placement:
    """A placement with what it is judged by. Without ``edges``, it has a maximum flow."""
    if edges is None:
        solution = (balanced_flow if service else solve_flow)(problem, assignments)
    else:
        entering = sum(edge.tokens_per_s for edge in edges if edge.tail == SOURCE)
        solution = FlowSolution(flow_tokens_per_s=entering, edges=tuple(edges))
    served = estimate(problem, assignments, solution.edges, service) if service else None
    held = {node.peer_id: node.current for node in problem.nodes}
    holders = [0] * problem.model.layers
    for a in assignments:
        for layer in range(a.start, a.end):
            holders[layer] += 1
    return Placement(
        assignments=tuple(assignments),
        flow_tokens_per_s=solution.flow_tokens_per_s,
        planner=planner,
        edges=solution.edges,
        estimate_tokens_per_s=served.tokens_per_s if served else 0.0,
        latency_s=served.token_time_s if served else mean_latency_s(problem, solution),
        moved_layers=sum(milp.fetched(held.get(a.peer_id), a.start, a.end) for a in assignments),
        lone_layers=sum(1 for count in holders if count == 1),
    )


def choose(found: Sequence[Placement]) -> Placement:
    """The most throughput; within 2% of it, the shortest ring; within 10% of that, the least moved.

    Among those that move as little, the one with the fewest layers that hang on a single peer.
    """
    most = max(placement.value for placement in found)
    near = [p for p in found if p.value >= VALUE_WITHIN * most]
    fastest_s = min(placement.latency_s for placement in near)
    near = [p for p in near if p.latency_s <= LATENCY_WITHIN * fastest_s]
    return min(near, key=lambda p: (p.moved_layers, p.lone_layers, p.latency_s, -p.value))


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
    if placement.edges is None:
        placement = score(problem, placement.assignments, placement.planner)
    return Plan(
        epoch=epoch,
        coordinator=coordinator,
        model=problem.model,
        assignments=placement.assignments,
        edges=placement.edges or (),
        flow_tokens_per_s=placement.flow_tokens_per_s,
        bound_tokens_per_s=upper_bound(problem),
        planner=placement.planner,
        estimate_tokens_per_s=min(placement.estimate_tokens_per_s, RATE_MAX),
        solve_s=solve_s,
        created_unix_s=now_unix_s,
    )
