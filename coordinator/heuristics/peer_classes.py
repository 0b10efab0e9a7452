"""Groups peers that a planner need not tell apart, by speed, memory and region.

A program over peer classes needs variables per class, not per peer.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from coordinator.heuristics.heuristics import SpanLimits, span_limits
from dht.messages.types import PlannerNode, Problem

REGION_RTT_S = 0.015
"""Maximum round trip between neighbours of a region: one city, one provider, one building."""
REGIONS_MAX = 5
"""Maximum regions; more are planned as one region, and only max flow then counts their links."""
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


def regions(problem: Problem, regions_max: int = REGIONS_MAX) -> dict[str, int]:
    """The region of every peer; links of short round trips join peers. Region 0 is the largest.

    Peers without a measured link count as near to all when the default round trip is short, else
    as far from all. With more than ``regions_max`` regions, by default as many as a program can
    order, all peers are in region 0.
    """
    parent = {node.peer_id: node.peer_id for node in problem.nodes}

    def find(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    near = [link for link in problem.links if link.rtt_s <= REGION_RTT_S]
    for link in near:
        if link.source in parent and link.target in parent:
            parent[find(link.source)] = find(link.target)
    members: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(parent):
        members[find(name)].append(name)
    groups = sorted(members.values(), key=lambda names: (-len(names), names))
    if not problem.links or problem.default_rtt_s <= REGION_RTT_S or len(groups) > regions_max:
        return dict.fromkeys(parent, 0)
    return {name: index for index, names in enumerate(groups) for name in names}


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
