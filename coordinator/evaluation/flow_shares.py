"""Computes the part of a plan's flow that routes use, as shares, and its separate parts. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dht.messages.types import SINK, SOURCE, Assignment, FlowEdge


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSharesConfig:
    """Which edges of a flow are kept, and when a peer counts as full."""

    edge_share_min: float = 0.05
    """Minimum share of a peer's outflow for an edge to be kept, where it has ten edges or fewer."""
    even_share_min: float = 0.5
    """The same as a multiple of an even share, where it has more."""
    rounds_max: int = 8
    """Maximum times that shares are moved from full peers to others."""
    full: float = 1.01
    """Ratio of the requests that want a peer to its room above which it counts as full."""


FLOW_SHARES = FlowSharesConfig()


Shares = dict[str, dict[str, float]]
"""For the source and every peer with flow: the share of its outflow to each next peer."""


def flow_shares(edges: Sequence[FlowEdge]) -> Shares:
    """Shares of every peer's outflow, without weak edges (``FLOW_SHARES.edge_share_min``); the
    source's whole: in a large swarm each part of the flow takes little of it."""
    flows: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for edge in edges:
        flows[edge.tail][edge.head] = edge.tokens_per_s
    return {
        tail: shares
        for tail, heads in flows.items()
        if (shares := heads if tail == SOURCE else _strong(heads))
    }


def _strong(heads: Mapping[str, float]) -> dict[str, float]:
    """The shares of ``heads``, without weak ones; empty where nothing flows."""
    least = min(FLOW_SHARES.edge_share_min, FLOW_SHARES.even_share_min / len(heads)) * sum(
        heads.values()
    )
    strong = {head: flow for head, flow in heads.items() if flow >= least and flow > 0}
    left = sum(strong.values())
    return {head: flow / left for head, flow in strong.items()}


def separate_parts(kept: Shares) -> list[Shares]:
    """The flow's parts that share no peer, each with shares of its own at the source."""
    group: dict[str, str] = {}

    def find(name: str) -> str:
        while (above := group.setdefault(name, name)) != name:
            group[name] = name = group[above]
        return name

    for tail, heads in kept.items():
        for head in heads:
            if tail != SOURCE and head != SINK:
                group[find(tail)] = find(head)
    parts: defaultdict[str, Shares] = defaultdict(dict)
    for tail, heads in kept.items():
        if tail != SOURCE:
            parts[find(tail)][tail] = heads
    entries: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for head, share in kept.get(SOURCE, {}).items():
        entries[find(head)][head] = share
    return [
        {SOURCE: begin, **parts[root]}
        for root in sorted(entries)
        if (begin := _strong(entries[root]))
    ]


def topological(
    kept: Mapping[str, Mapping[str, float]], held: Mapping[str, Assignment]
) -> list[str]:
    """Peers reached from the source, each after all peers that send to it (ends only grow)."""
    reached: set[str] = set()
    frontier = [SOURCE]
    while frontier:
        for head in kept.get(frontier.pop(), {}):
            if head != SINK and head not in reached:
                reached.add(head)
                frontier.append(head)
    return sorted(reached, key=lambda name: (held[name].end, name))


def mean_visits(kept: Shares, order: Sequence[str]) -> dict[str, float]:
    """A token's mean visits to the source, each peer of ``order`` (in the flow's) and the sink."""
    found = dict.fromkeys(order, 0.0) | {SOURCE: 1.0, SINK: 0.0}
    for tail in (SOURCE, *order):
        for head, part in kept.get(tail, {}).items():
            found[head] += found[tail] * part
    return found


def within_room(
    kept: Shares, order: Sequence[str], room: Mapping[str, float], requests: float
) -> Shares:
    """The shares of routes that go round full peers, where there are others.

    ``room`` is the most requests that each peer takes of all that are in flight, ``order`` the
    peers in the flow's order. The very ``kept`` where none is full.
    """
    for _ in range(FLOW_SHARES.rounds_max):
        share = mean_visits(kept, order)
        wanted = {name: requests * share[name] for name in order}
        fits = {
            name: room[name] / each
            for name, each in wanted.items()
            if each > FLOW_SHARES.full * room[name]
        }
        if not fits:
            break
        kept = {
            tail: _scaled(heads, fits) if len(heads) > 1 else heads for tail, heads in kept.items()
        }
    return kept


def _scaled(heads: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    """The shares of ``heads`` times their factors (1 where there is none), again a whole, without
    those of nothing."""
    scaled = {head: share * factors.get(head, 1.0) for head, share in heads.items()}
    whole = sum(scaled.values())
    return {head: share / whole for head, share in scaled.items() if share > 0} or dict(heads)
