"""Improves placements one peer at a time, for more peers than the exact program can take.

The score is the max flow. A bottleneck is a set of peers that carry all they can; the flow rises by
moving an idle peer beside one of them, or a boundary between two.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.evaluation.max_flow import FlowSolution, solve_flow
from coordinator.planning.heuristics.heuristics import span_max
from dht.messages.types import Assignment, PlannerNode, Problem, fits

BUSY = 0.999
"""Minimum share of its capacity that a bottleneck carries."""


def improve(
    problem: Problem,
    placed: Sequence[Assignment],
    *,
    seed: int,
    go_on: Callable[[int], bool],
) -> tuple[Assignment, ...]:
    """The best placement found while ``go_on(moves tried)`` was true.

    Its flow is at least that of ``placed``. The same seed and number of moves give the same
    placement.
    """
    rng = random.Random(seed)
    best = {a.peer_id: a for a in placed}
    solution = solve_flow(problem, placed)
    nodes = {node.peer_id: node for node in problem.nodes}
    names = sorted(nodes)
    tried = 0
    while names and go_on(tried):
        tried += 1
        candidate = dict(best)
        for moved in _moves(problem, nodes, candidate, solution, rng, names):
            candidate[moved.peer_id] = moved
        found = solve_flow(problem, tuple(candidate.values()))
        # Moves that keep the flow are taken too: plateaus are wide.
        if found.flow_tokens_per_s >= solution.flow_tokens_per_s:
            best, solution = candidate, found
    return tuple(best.values())


def _moves(
    problem: Problem,
    nodes: dict[str, PlannerNode],
    placed: dict[str, Assignment],
    solution: FlowSolution,
    rng: random.Random,
    names: Sequence[str],
) -> list[Assignment]:
    """New spans for the peers of one random move; empty if the drawn move is impossible."""
    node = nodes[rng.choice(names)]
    bottleneck = rng.choice(_bottlenecks(nodes, placed, solution) or names)
    beside = placed.get(bottleneck)
    dice = rng.random()
    if beside is not None and dice < 0.4:
        return _beside(problem, node, beside, rng)
    mine = placed.get(node.peer_id)
    if mine is not None and dice < 0.8:
        return _shift_boundary(problem, nodes, placed, mine, rng)
    start = rng.randrange(problem.model.layers)
    most = span_max(problem, node, start)
    if most == 0:
        return []
    return [_span(node, start, rng.randint(1, most))]


def _bottlenecks(
    nodes: dict[str, PlannerNode], placed: dict[str, Assignment], solution: FlowSolution
) -> list[str]:
    carried: dict[str, float] = {}
    for edge in solution.edges:
        carried[edge.head] = carried.get(edge.head, 0.0) + edge.tokens_per_s
    return sorted(
        peer
        for peer, a in placed.items()
        if carried.get(peer, 0.0) >= BUSY * nodes[peer].tokens_per_s[a.end - a.start - 1]
    )


def _span(node: PlannerNode, start: int, count: int) -> Assignment:
    return Assignment(peer_id=node.peer_id, start=start, end=start + count)


def _beside(
    problem: Problem, node: PlannerNode, other: Assignment, rng: random.Random
) -> list[Assignment]:
    """A span of ``node`` on the layers of a bottleneck, or on as many of them as it can hold."""
    start = other.start if rng.random() < 0.5 else rng.randrange(other.start, other.end)
    count = min(span_max(problem, node, start), other.end - start)
    return [_span(node, start, count)] if count > 0 else []


def _shift_boundary(
    problem: Problem,
    nodes: dict[str, PlannerNode],
    placed: dict[str, Assignment],
    mine: Assignment,
    rng: random.Random,
) -> list[Assignment]:
    """New spans that move a boundary by a few layers, for every peer that begins or ends there."""
    at = rng.choice((mine.start, mine.end))
    to = at + rng.choice((-2, -1, 1, 2))
    if at in {0, problem.model.layers} or not 0 < to < problem.model.layers:
        return []
    moved = []
    for a in placed.values():
        changed = replace(
            a, start=to if a.start == at else a.start, end=to if a.end == at else a.end
        )
        if changed == a:
            continue
        if not fits(problem.model, nodes[a.peer_id], changed.start, changed.end):
            return []
        moved.append(changed)
    return moved
