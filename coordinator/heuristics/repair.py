"""Repairs a placement after losses, moving as few peers as possible. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, islice

from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import uncovered
from coordinator.heuristics.heuristics import fill
from dht.messages.types import Assignment, Problem, fits

TRIES_MAX = 500
"""Maximum sets of peers to move that are tried per size; small sets come first."""
MOVED_MAX = 3


def repair(problem: Problem) -> tuple[Assignment, ...] | None:
    """The placement that covers every layer and moves the fewest peers from what they hold now.

    Peers without layers are given some. Among placements that move equally few, the one with the
    most flow is chosen. None where nobody holds layers, or more than ``MOVED_MAX`` would have to
    move.
    """
    held = {
        node.peer_id: replace(node.current, peer_id=node.peer_id)
        for node in problem.nodes
        if node.current is not None
        and fits(problem.model, node, node.current.start, node.current.end)
    }
    if not held:
        return None
    for count in range(min(MOVED_MAX, len(held)) + 1):
        found = []
        for moved in islice(combinations(sorted(held), count), TRIES_MAX):
            spans = _without(problem, held, moved)
            if not uncovered(spans, problem.model.layers):
                found.append((solve_flow(problem, spans).flow_tokens_per_s, spans))
        if found:
            return max(found, key=lambda each: each[0])[1]
    return None


def _without(
    problem: Problem, held: dict[str, Assignment], moved: Iterable[str]
) -> tuple[Assignment, ...]:
    """The spans of the peers that stay, with the ``moved`` peers at the least served layers."""
    gone = frozenset(moved)
    nodes = tuple(replace(n, current=None) if n.peer_id in gone else n for n in problem.nodes)
    staying = [a for peer_id, a in held.items() if peer_id not in gone]
    return fill(replace(problem, nodes=nodes), staying)
