"""Divides hundreds or thousands of peers into cells that are planned separately (Helix §4.5).

A token is best served by peers near each other, so a cell takes peers region by region, nearest
first, until it can hold the model with room to spare. Each cell becomes a placement of its own,
whose flow stays inside; the cells' throughputs add up.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from coordinator.evaluation.shared_uplinks import among
from coordinator.planning.heuristics.heuristics import coverage
from coordinator.planning.heuristics.peer_regions import regions
from dht.messages.types import Link, PlannerNode, Problem, mean_layer_bytes

CELL_PEERS = 24
"""Minimum peers of a full cell: about as many as one program solves in seconds."""
CELL_SLACK = 1.5
"""Minimum layers that a cell's peers can hold, as a multiple of the model's: room for width."""


def cells(problem: Problem) -> tuple[Problem, ...]:
    """The problem divided into cells that can each hold the model; one cell if it cannot be."""
    found: list[list[PlannerNode]] = []
    current: list[PlannerNode] = []
    for node in _near_first(problem):
        current.append(node)
        if len(current) >= CELL_PEERS and _roomy(problem, current):
            found.append(current)
            current = []
    if current and _covers(problem, current) and len(current) >= CELL_PEERS // 2:
        found.append(current)
    elif current and found:
        # Too few for a cell: spread over the cells there are.
        for index, node in enumerate(current):
            found[index % len(found)].append(node)
    elif current:
        found.append(current)
    return parts(problem, found)


def _near_first(problem: Problem) -> Iterator[PlannerNode]:
    """The peers in an order: near regions in sequence; within a region, unlike peers in turn.

    So cells are alike, and a cell that a region's last peers cannot fill continues in a near
    region.
    """
    region_of = regions(problem, len(problem.nodes))
    by_region: dict[int, list[PlannerNode]] = {}
    for node in problem.nodes:
        by_region.setdefault(region_of[node.peer_id], []).append(node)
    for region in _neighbours(problem, region_of):
        ordered = sorted(
            by_region[region], key=lambda n: (-n.memory_bytes, n.tokens_per_s, n.peer_id)
        )
        count = max(1, round(len(ordered) / CELL_PEERS))
        for turn in range(count):
            yield from ordered[turn::count]


def _neighbours(problem: Problem, region_of: Mapping[str, int]) -> list[int]:
    """All regions, from the largest on, each followed by the nearest one left (by round trip)."""
    shortest: dict[int, dict[int, float]] = {}
    for link in problem.links:
        a, b = region_of.get(link.source), region_of.get(link.target)
        if a is None or b is None or a == b:
            continue
        for one, other in ((a, b), (b, a)):
            known = shortest.setdefault(one, {})
            known[other] = min(link.rtt_s, known.get(other, link.rtt_s))
    left = sorted(set(region_of.values()))
    order = left[:1]
    left = left[1:]
    while left:
        known = shortest.get(order[-1], {})
        order.append(min(left, key=lambda region: (known.get(region, math.inf), region)))
        left.remove(order[-1])
    return order


def _covers(problem: Problem, nodes: Sequence[PlannerNode]) -> bool:
    part = replace(problem, nodes=tuple(nodes), links=())
    return coverage(part).layers >= problem.model.layers


def _roomy(problem: Problem, nodes: Sequence[PlannerNode]) -> bool:
    model = problem.model
    each = max(1.0, mean_layer_bytes(model))
    held = sum(min(len(n.tokens_per_s), n.memory_bytes // each, model.layers) for n in nodes)
    return held >= CELL_SLACK * model.layers and _covers(problem, nodes)


def parts(problem: Problem, found: Sequence[Sequence[PlannerNode]]) -> tuple[Problem, ...]:
    """A problem for each set of peers, with the links inside it. Peers of no set are left out."""
    cell_of = {node.peer_id: index for index, nodes in enumerate(found) for node in nodes}
    links: list[list[Link]] = [[] for _ in found]
    for link in problem.links:
        index = cell_of.get(link.source)
        if index is not None and cell_of.get(link.target) == index:
            links[index].append(link)
    return tuple(
        replace(problem, nodes=tuple(nodes), links=tuple(inside), uplinks=among(problem, nodes))
        for nodes, inside in zip(found, links, strict=True)
    )


def with_nearest(
    problem: Problem, found: Sequence[Collection[str]]
) -> tuple[list[PlannerNode], ...]:
    """The peers of each cell, and with them all others: each joins the cell to which its shortest
    link leads, or without a link the smallest."""
    cell_of = {name: index for index, names in enumerate(found) for name in names}
    nearest: dict[str, tuple[float, int]] = {}
    for link in problem.links:
        for name, other in ((link.source, link.target), (link.target, link.source)):
            if name not in cell_of and other in cell_of:
                known = nearest.get(name, (math.inf, 0))
                nearest[name] = min(known, (link.rtt_s, cell_of[other]))
    joined: tuple[list[PlannerNode], ...] = tuple([] for _ in found)
    for node in sorted(problem.nodes, key=lambda node: node.peer_id not in cell_of):
        index = cell_of.get(node.peer_id)
        if index is None:
            smallest = min(range(len(joined)), key=lambda index: len(joined[index]))
            index = nearest[node.peer_id][1] if node.peer_id in nearest else smallest
        joined[index].append(node)
    return joined


def share_of_time(spent: Callable[[], float] | None, left: int) -> Callable[[], float] | None:
    """The clock of the next of ``left`` cells, 0 to 1 over its equal share of the time left."""
    if spent is None:
        return None
    begin = spent()
    width = max(1e-9, (1 - begin) / left)
    return lambda: (spent() - begin) / width if begin < 1 else 1.0


def ends_at(spent: Callable[[], float] | None, share: float) -> Callable[[], float] | None:
    """A clock that shows 1 when ``share`` of the time is gone."""
    return None if spent is None else lambda: spent() / share
