"""Finds the regions of a problem: peers with short round trips to each other."""

from collections import defaultdict

from dht.messages.types import Problem

REGION_RTT_S = 0.015
"""Maximum round trip between neighbours of a region: one city, one provider, one building."""
REGIONS_MAX = 5
"""Maximum regions; more are planned as one region, and only max flow then counts their links."""


def regions(problem: Problem, regions_max: int = REGIONS_MAX) -> dict[str, int]:
    """The region of every peer; links of short round trips join peers. Region 0 is the largest.

    Peers without a measured link count as near to all when the default round trip is short, else
    as far from all. With more than ``regions_max`` regions all peers are in region 0.
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
