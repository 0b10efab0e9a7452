"""Groups peers that the rival of :mod:`bench.planner.stage_patterns` need not tell apart.

By speed, memory and region: its program has variables per class, not per peer."""

import math
from collections import defaultdict
from dataclasses import dataclass

from coordinator.planning.heuristics.heuristics import SpanLimits, span_limits
from dht.messages.types import PlannerNode, Problem

ALIKE = 1.08
"""Ratio of one step of speed: peers in the same steps form one class, as fast as its slowest."""
KINDS_MAX = 10
"""Maximum classes; steps are widened until there are no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerClass:
    """Peers of one region that can hold the same numbers of layers at about the same speed."""

    region: int
    peer_ids: tuple[str, ...]
    first_max: int
    """Maximum layers at the model's beginning, without the last one."""
    middle_max: int
    last_max: int
    """Maximum layers at the model's end, without the first one."""
    tokens_per_s: tuple[float, ...]
    """T_j that every peer of the class reaches, at index j - 1."""

    def rate(self, layers: int) -> float:
        """Tokens/s of one peer that holds ``layers`` layers; 0 beyond its profile."""
        return self.tokens_per_s[layers - 1] if 0 < layers <= len(self.tokens_per_s) else 0.0


def peer_classes(problem: Problem, region_of: dict[str, int]) -> tuple[PeerClass, ...]:
    """The classes of all peers that can hold a layer, in an order independent of peers' names."""
    step = 1.0
    while True:
        grouped = _grouped(problem, region_of, step)
        if len(grouped) <= KINDS_MAX or step > 16:
            return grouped
        step = ALIKE if step == 1.0 else step * ALIKE


_Key = tuple[int, int, int, int, tuple[float, ...]]


def _grouped(problem: Problem, region_of: dict[str, int], step: float) -> tuple[PeerClass, ...]:
    members: defaultdict[_Key, list[tuple[PlannerNode, SpanLimits]]] = defaultdict(list)
    for node in problem.nodes:
        room = span_limits(problem, node)
        longest = max(room.first, room.middle, room.last)
        if longest == 0 or not any(node.tokens_per_s[:longest]):
            continue
        steps = tuple(_step(rate, step) for rate in node.tokens_per_s[:longest])
        # With steps, speeds are compared only at the two ends of the profile.
        shape = steps if step == 1.0 else (steps[0], steps[-1])
        key = (region_of[node.peer_id], room.first, room.middle, room.last, shape)
        members[key].append((node, room))
    found = []
    for key in sorted(members):
        peers = sorted(members[key], key=lambda pair: pair[0].peer_id)
        room = peers[0][1]
        longest = max(room.first, room.middle, room.last)
        found.append(
            PeerClass(
                region=region_of[peers[0][0].peer_id],
                peer_ids=tuple(node.peer_id for node, _ in peers),
                first_max=room.first,
                middle_max=room.middle,
                last_max=room.last,
                tokens_per_s=tuple(
                    min(node.tokens_per_s[j] for node, _ in peers) for j in range(longest)
                ),
            )
        )
    return tuple(found)


def _step(rate: float, step: float) -> float:
    if step == 1.0 or rate <= 0:
        return rate
    return math.floor(math.log(rate) / math.log(step))
