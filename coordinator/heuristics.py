"""Placements found at once: the start and the yardstick of the exact search.

Each function takes a problem and returns assignments or None. They are deterministic.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations

from coordinator.check import uncovered
from dht.types import Assignment, PlannerNode, Problem, fits

ORDERS_MAX = 120
"""Orders of peers that the chain tries; all of them up to five peers."""


def span_max(problem: Problem, node: PlannerNode, start: int) -> int:
    """The most layers that ``node`` can hold from ``start`` on."""
    most = min(len(node.tokens_per_s), problem.model.layers - start)
    for count in range(most, 0, -1):
        if fits(problem.model, node, start, start + count):
            return count
    return 0


def chain(problem: Problem) -> tuple[Assignment, ...] | None:
    """One chain over some of the peers, each as far as its memory goes, then evened out."""
    for order in _orders(problem.nodes):
        spans = _greedy_chain(problem, order)
        if spans is not None:
            return even_out(problem, spans)
    return None


def _orders(nodes: Sequence[PlannerNode]) -> Iterator[Sequence[PlannerNode]]:
    by_memory = sorted(nodes, key=lambda n: (-n.memory_bytes, n.peer_id))
    yield by_memory
    yield by_memory[::-1]
    if len(nodes) <= 5:
        yield from permutations(by_memory)
        return
    for turn in range(1, min(len(nodes), ORDERS_MAX)):
        yield by_memory[turn:] + by_memory[:turn]


def _greedy_chain(problem: Problem, order: Sequence[PlannerNode]) -> tuple[Assignment, ...] | None:
    at, spans = 0, []
    for node in order:
        count = span_max(problem, node, at)
        if count == 0:
            continue
        spans.append(Assignment(peer_id=node.peer_id, start=at, end=at + count))
        at += count
        if at == problem.model.layers:
            return tuple(spans)
    return None


def even_out(problem: Problem, spans: Sequence[Assignment]) -> tuple[Assignment, ...]:
    """Move boundaries of a chain while that relieves its slowest peer."""
    nodes = {node.peer_id: node for node in problem.nodes}
    chained = list(spans)

    def slowest(candidate: Sequence[Assignment]) -> tuple[float, ...]:
        return tuple(sorted(nodes[a.peer_id].tokens_per_s[a.end - a.start - 1] for a in candidate))

    improved = True
    while improved:
        improved = False
        for index in range(len(chained) - 1):
            for shift in (-1, 1):
                left, right = chained[index], chained[index + 1]
                cut = left.end + shift
                moved = (
                    Assignment(peer_id=left.peer_id, start=left.start, end=cut),
                    Assignment(peer_id=right.peer_id, start=cut, end=right.end),
                )
                if not all(fits(problem.model, nodes[a.peer_id], a.start, a.end) for a in moved):
                    continue
                candidate = [*chained[:index], *moved, *chained[index + 2 :]]
                if slowest(candidate) > slowest(chained):
                    chained, improved = candidate, True
    return tuple(chained)


def greedy(problem: Problem) -> tuple[Assignment, ...] | None:
    """Petals' rule: each peer in turn takes the span whose layers are served the least.

    Petals (Borzunov et al., 2023), §3.3, with memory at the model's ends respected.
    """
    placed = fill(problem, ())
    return None if uncovered(placed, problem.model.layers) else placed


def fill(problem: Problem, placed: Sequence[Assignment]) -> tuple[Assignment, ...]:
    """Give every peer without layers the span that is served the least: spare replicas."""
    layers = problem.model.layers
    nodes = {node.peer_id: node for node in problem.nodes}
    served = [0.0] * layers
    for a in placed:
        rate = nodes[a.peer_id].tokens_per_s[a.end - a.start - 1]
        for layer in range(a.start, a.end):
            served[layer] += rate
    result = list(placed)
    taken = {a.peer_id for a in placed}
    order = sorted(problem.nodes, key=lambda n: (-len(n.tokens_per_s), n.peer_id))
    for node in order:
        if node.peer_id in taken:
            continue
        spans = [
            (min(served[at : at + count]), sum(served[at : at + count]) / count, -count, at)
            for at in range(layers)
            if (count := span_max(problem, node, at)) > 0
        ]
        if not spans:
            continue
        _, _, negative, at = min(spans)
        added = Assignment(peer_id=node.peer_id, start=at, end=at - negative)
        rate = node.tokens_per_s[added.end - added.start - 1]
        for layer in range(added.start, added.end):
            served[layer] += rate
        result.append(added)
    return tuple(result)


def replicas(problem: Problem) -> tuple[Assignment, ...] | None:
    """Every peer that can holds the whole model; the others as :func:`greedy` says."""
    layers = problem.model.layers
    whole = [
        Assignment(peer_id=node.peer_id, start=0, end=layers)
        for node in problem.nodes
        if fits(problem.model, node, 0, layers)
    ]
    return fill(problem, whole) if whole else None


def keep(problem: Problem) -> tuple[Assignment, ...] | None:
    """What the peers hold now, with layers for those that have none; None if layers are lost."""
    nodes = {node.peer_id: node for node in problem.nodes}
    held = [
        node.current
        for node in problem.nodes
        if node.current is not None
        and fits(problem.model, nodes[node.peer_id], node.current.start, node.current.end)
    ]
    placed = fill(problem, held)
    return None if uncovered(placed, problem.model.layers) else placed
