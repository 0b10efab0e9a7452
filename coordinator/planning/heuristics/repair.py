"""Repairs a placement after losses, moving as few peers as possible. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, islice

from coordinator.evaluation.max_flow import least_served, solve_flow
from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.heuristics.heuristics import fill
from dht.messages.types import Assignment, Problem, fits

TRIES_MAX = 500
"""Maximum sets of peers to move that are tried per size; small sets come first."""
MOVED_MAX = 3
FLOW_PEERS_MAX = 64
"""Maximum peers for comparing placements by their flow; beyond, by the layer that is served least:
hundreds of flows would take minutes."""


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

    def serves(spans: Sequence[Assignment]) -> float:
        if len(problem.nodes) > FLOW_PEERS_MAX:
            return least_served(problem, spans)
        return solve_flow(problem, spans).flow_tokens_per_s

    for count in range(min(MOVED_MAX, len(held)) + 1):
        found = []
        for moved in islice(combinations(sorted(held), count), TRIES_MAX):
            spans = _without(problem, held, moved)
            if not uncovered(spans, problem.model.layers):
                found.append(spans)
        if found:
            return found[0] if len(found) == 1 else max(found, key=serves)
    return None


def _without(
    problem: Problem, held: dict[str, Assignment], moved: Iterable[str]
) -> tuple[Assignment, ...]:
    """The spans of the peers that stay, with the ``moved`` peers at the least served layers."""
    gone = frozenset(moved)
    nodes = tuple(replace(n, current=None) if n.peer_id in gone else n for n in problem.nodes)
    staying = [a for peer_id, a in held.items() if peer_id not in gone]
    return fill(replace(problem, nodes=nodes), staying)
