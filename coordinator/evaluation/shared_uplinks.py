"""Which links pass an internet connection that several peers share, and how it is divided. Pure.

Peers of one machine, or of one home, are behind one connection: links between them do not pass it,
all their other links do. A *way* is one direction of such a connection. It binds peers that may be
in several stages and several chains, so it is no capacity of an edge of the flow network, but one
linear constraint over all edges that pass it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dht.messages.types import SINK, SOURCE, FlowEdge, PlannerNode, Problem, SharedUplink

Way = tuple[str, str]
"""The name of a shared uplink, and ``up`` or ``down``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingConfig:
    """How parts of shared uplinks are given to peers."""

    more_times: float = 1.01
    """Ratio of two sums of rates from which on the larger one counts as more."""
    turns: int = 4
    """Maximum times that parts move to peers that need more of them."""
    used_share: float = 1 - 1e-6
    """Share of its part from which on a peer counts as in need of more."""


SHARING = SharingConfig()


@dataclass(frozen=True, slots=True)
class SharedUplinks:
    """The shared uplinks of a problem."""

    of_peer: Mapping[str, str]
    """The uplink of each peer that is behind one."""
    bytes_per_s: Mapping[Way, float]
    """The rate of each way whose rate is known."""

    def crossed(self, tail: str, head: str) -> tuple[Way, ...]:
        """The ways of known rate that the link between two peers passes."""
        up, down = self.of_peer.get(tail), self.of_peer.get(head)
        if up == down or tail == SOURCE or head == SINK:
            return ()
        ways = ((up, "up") if up else None, (down, "down") if down else None)
        return tuple(way for way in ways if way is not None and way in self.bytes_per_s)

    def passes(self, flows: Iterable[tuple[str, str, float]]) -> dict[Way, float]:
        """The sums of flows, given as ``(tail, head, flow)``, over each way."""
        found: dict[Way, float] = {}
        for tail, head, flow in flows:
            for way in self.crossed(tail, head):
                found[way] = found.get(way, 0.0) + flow
        return found


NONE = SharedUplinks({}, {})
_last: tuple[tuple[PlannerNode, ...], tuple[SharedUplink, ...], SharedUplinks] = ((), (), NONE)
"""A cache of the last nodes and uplinks, compared by identity."""


def shared_uplinks(problem: Problem) -> SharedUplinks:
    """The shared uplinks of a problem; those without a known rate bind nothing."""
    global _last  # noqa: PLW0603  (a cache: a search asks thousands of times)
    if not problem.uplinks:
        return NONE
    if _last[0] is not problem.nodes or _last[1] is not problem.uplinks:
        rates = {
            (uplink.name, way): rate
            for uplink in problem.uplinks
            for way, rate in (("up", uplink.up_bytes_per_s), ("down", uplink.down_bytes_per_s))
            if rate is not None
        }
        of_peer = {node.peer_id: node.uplink for node in problem.nodes if node.uplink}
        _last = problem.nodes, problem.uplinks, SharedUplinks(of_peer, rates)
    return _last[2]


def among(problem: Problem, nodes: Sequence[PlannerNode]) -> tuple[SharedUplink, ...]:
    """The uplinks of a part of a problem's peers that is planned by itself.

    Each has the share of its rate that its peers there are of all its peers: several parts together
    count it once.
    """
    if not problem.uplinks:
        return ()
    every, here = (Counter(node.uplink for node in some) for some in (problem.nodes, nodes))
    return tuple(
        SharedUplink(
            name=uplink.name,
            up_bytes_per_s=_times(uplink.up_bytes_per_s, here[uplink.name] / every[uplink.name]),
            down_bytes_per_s=_times(
                uplink.down_bytes_per_s, here[uplink.name] / every[uplink.name]
            ),
        )
        for uplink in problem.uplinks
        if uplink.name in here
    )


def _times(rate: float | None, share: float) -> float | None:
    return None if rate is None else rate * share


def kept_shares(rates: Sequence[float], uses: Sequence[Mapping[Way, float]]) -> list[float]:
    """The share of its rate that each of several flows keeps where they pass the same ways.

    ``uses[i][way]`` is the share of the way that flow i takes at ``rates[i]``. All that pass a full
    way keep as much of their rate as the others there; or, where that serves clearly more, those
    that use the ways least for each token come first.
    """
    evenly, thriftily = _evenly(uses), _thriftily(rates, uses)
    sums = [
        sum(rate * share for rate, share in zip(rates, each, strict=True))
        for each in (evenly, thriftily)
    ]
    return thriftily if sums[1] > SHARING.more_times * sums[0] else evenly


def _evenly(uses: Sequence[Mapping[Way, float]]) -> list[float]:
    """All shares rise together; those of the flows over a way end where it is full."""
    kept: list[float | None] = [None] * len(uses)
    while True:
        taken: dict[Way, float] = {}
        rising: dict[Way, float] = {}
        for share, each in zip(kept, uses, strict=True):
            sums = rising if share is None else taken
            for way, use in each.items():
                sums[way] = sums.get(way, 0.0) + use * (1.0 if share is None else share)
        level, full = min(
            ((max(0.0, 1 - taken.get(way, 0.0)) / use, way) for way, use in rising.items() if use),
            default=(1.0, ("", "")),
        )
        if level >= 1:
            return [1.0 if share is None else share for share in kept]
        for at, each in enumerate(uses):
            if kept[at] is None and each.get(full):
                kept[at] = level


def _thriftily(rates: Sequence[float], uses: Sequence[Mapping[Way, float]]) -> list[float]:
    """Those that use their fullest way least for each token come first, each with all that fits."""
    left: dict[Way, float] = {}
    kept = [1.0] * len(uses)

    def for_each_token(at: int) -> float:
        return max(uses[at].values(), default=0.0) / max(rates[at], 1e-12)

    for at in sorted(range(len(uses)), key=for_each_token):
        kept[at] = min(
            (left.get(way, 1.0) / use for way, use in uses[at].items() if use > 0), default=1.0
        )
        kept[at] = min(1.0, max(0.0, kept[at]))
        for way, use in uses[at].items():
            left[way] = left.get(way, 1.0) - kept[at] * use
    return kept


def edge_flows(edges: Iterable[FlowEdge]) -> Iterable[tuple[str, str, float]]:
    """The edges as :meth:`SharedUplinks.passes` takes them."""
    return ((edge.tail, edge.head, edge.tokens_per_s) for edge in edges)
