"""Computes the maximum flow of a placement: the most tokens/s that it can carry.

The network is that of Helix (ASPLOS'25) §4.2-4.3: each peer is an edge of capacity T_i(j) between
two vertices; there are edges from the source to the holders of layer 0, from the holders of the
last layer to the sink, and from i to j when j can go on where i ends: ``s_j <= e_i < e_j`` (j then
runs only ``[e_i, e_j)``, partial inference). Where the rate of a peer's own connection is known,
all its links to peers pass an edge of that capacity, one for each direction, so that an uplink with
five links counts once. Helix's node capacity, the least of compute and network, is the case of a
peer that exchanges activations only: token ids from the source and to the sink do not count here.
An internet connection that several peers share binds edges of several stages, which no flow network
expresses: each of its peers gets a part of it, and parts move to those that need more
(:mod:`coordinator.evaluation.shared_uplinks`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

from coordinator.evaluation.shared_uplinks import SHARING, Way, shared_uplinks
from dht.messages.types import SINK, SOURCE, Assignment, FlowEdge, Link, PlannerNode, Problem

Vertex = tuple[str, str]
"""A peer, ``source`` or ``sink``, and which of its vertices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """How exact flows are, and up to which size they are computed whole."""

    scale: float = 1e12
    """Sum to which capacities are scaled, since flow solvers take whole numbers."""
    pairs_max: int = 50_000
    """Number of pairs of peers of which one can go on where the other ends. Where there are more, a
    peer passes on to a few only, so that the network grows with the peers and not with their
    square."""
    next_least: int = 8
    """Minimum peers to which each peer then passes on."""
    balance_units: float = 1e6
    """Whole units of a balanced flow."""
    cost_max: int = 1000
    balanced_edges_max: int = 20_000
    """Maximum edges of a network whose flow is balanced; beyond, that takes many seconds."""
    bound_steps: int = 60
    bound_slack: float = 1e-9
    """Relative error for sums of floats, by which bounds may be too large."""


FLOW = FlowConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Every capacity of a placement's network, in tokens/s."""

    peers: dict[str, float]
    edges: dict[tuple[str, str], float]
    ups: dict[str, float] = field(default_factory=dict)
    """What a peer's own uplink carries to all peers together, where that is less than its speed."""
    downs: dict[str, float] = field(default_factory=dict)
    """The same of its downlink."""
    away: dict[str, float] = field(default_factory=dict)
    """A peer's part of the uplink that it shares, where that carries less than its peers."""
    back: dict[str, float] = field(default_factory=dict)
    """The same of the shared downlink."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """The shared connection of each peer that is behind one; links within it do not pass it."""

    def arcs(self) -> Iterator[tuple[Vertex, Vertex, float]]:
        """The network's edges, those of :attr:`edges` last and in their order."""
        for peer_id, rate in self.peers.items():
            yield (peer_id, "in"), (peer_id, "out"), rate
        for peer_id, rate in self.ups.items():
            yield (peer_id, "out"), (peer_id, "up"), rate
        for peer_id, rate in self.downs.items():
            yield (peer_id, "down"), (peer_id, "in"), rate
        for peer_id, rate in self.away.items():
            yield (peer_id, "up" if peer_id in self.ups else "out"), (peer_id, "away"), rate
        for peer_id, rate in self.back.items():
            yield (peer_id, "back"), (peer_id, "down" if peer_id in self.downs else "in"), rate
        homes = self.homes
        for (tail, head), rate in self.edges.items():
            leaves = "up" if tail in self.ups and head != SINK else "out"
            enters = "down" if head in self.downs and tail != SOURCE else "in"
            if homes and head != SINK and tail != SOURCE and homes.get(tail) != homes.get(head):
                leaves = "away" if tail in self.away else leaves
                enters = "back" if head in self.back else enters
            yield (tail, leaves), (head, enters), rate


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSolution:
    """A flow; ``edges`` are only those that carry some of it."""

    flow_tokens_per_s: float
    edges: tuple[FlowEdge, ...]


def follows(before: Assignment, after: Assignment) -> bool:
    """Whether ``after`` can go on where ``before`` ends."""
    return before.peer_id != after.peer_id and after.start <= before.end < after.end


_Measured = tuple[tuple[Link, ...], dict[tuple[str, str], float], dict[tuple[str, str], float]]
_last_measured: _Measured = ((), {}, {})
"""A cache of the last links, compared by identity: the minimum bandwidth and the last round trip of
every pair."""


def _measured(links: tuple[Link, ...]) -> _Measured:
    global _last_measured  # noqa: PLW0603  (a cache: a search asks thousands of times)
    if _last_measured[0] is not links:
        bandwidths: dict[tuple[str, str], float] = {}
        for link in links:
            pair = link.source, link.target
            known = bandwidths.get(pair, link.bandwidth_bytes_per_s)
            bandwidths[pair] = min(known, link.bandwidth_bytes_per_s)
        round_trips = {(link.source, link.target): link.rtt_s for link in links}
        _last_measured = links, bandwidths, round_trips
    return _last_measured


def bandwidth_bytes_per_s(problem: Problem) -> Callable[[str, str], float]:
    """A function from a directed pair of peers to the minimum measured bandwidth of their link."""
    measured = _measured(problem.links)[1]
    default = problem.default_bandwidth_bytes_per_s
    return lambda source, target: measured.get((source, target), default)


def round_trips_s(problem: Problem) -> Mapping[tuple[str, str], float]:
    """The measured round trips between directed pairs of peers, in seconds."""
    return _measured(problem.links)[2]


_Rates = Mapping[str, tuple[float, float]]
_last_rates: tuple[tuple[PlannerNode, ...], _Rates] = ((), {})
"""A cache of the last nodes, compared by identity."""


def own_rates_bytes_per_s(problem: Problem) -> _Rates:
    """The rates of peers' own uplinks and downlinks; infinite where one of them is not known.

    Peers of which neither is known are left out.
    """
    global _last_rates  # noqa: PLW0603  (a cache, as above)
    if _last_rates[0] is not problem.nodes:
        found = {
            node.peer_id: tuple(
                math.inf if rate is None else rate
                for rate in (node.up_bytes_per_s, node.down_bytes_per_s)
            )
            for node in problem.nodes
            if node.up_bytes_per_s is not None or node.down_bytes_per_s is not None
        }
        _last_rates = problem.nodes, cast("_Rates", found)
    return _last_rates[1]


def edge_capacity(problem: Problem) -> Callable[[str, str], float]:
    """A function from an edge to its capacity in tokens/s, whatever its ends hold."""
    bandwidth = bandwidth_bytes_per_s(problem)
    client = problem.client_bandwidth_bytes_per_s / max(1, problem.token_bytes)
    activation_bytes = max(1, problem.model.activation_bytes)

    def capacity(tail: str, head: str) -> float:
        if tail == SOURCE or head == SINK:
            return client
        return bandwidth(tail, head) / activation_bytes

    return capacity


def served_by_layer(problem: Problem, assignments: Sequence[Assignment]) -> list[float]:
    """Tokens/s of all holders of each layer."""
    nodes = {node.peer_id: node for node in problem.nodes}
    served = [0.0] * problem.model.layers
    for a in assignments:
        rate = nodes[a.peer_id].tokens_per_s[a.end - a.start - 1]
        for layer in range(a.start, a.end):
            served[layer] += rate
    return served


def least_served(problem: Problem, assignments: Sequence[Assignment]) -> float:
    """Tokens/s of all holders of the layer that is served least: no flow is larger."""
    return min(served_by_layer(problem, assignments))


def _pairs(problem: Problem, held: Sequence[Assignment]) -> Iterator[tuple[str, str]]:
    """The pairs of peers between which a token may pass: all, up to ``FLOW.pairs_max``."""
    spans: dict[tuple[int, int], list[str]] = {}
    for each in held:
        spans.setdefault((each.start, each.end), []).append(each.peer_id)
    # Thousands of peers share a few dozen spans: compare spans, not peers.
    following = {
        end: [span for span in spans if span[0] <= end < span[1]]
        for end in dict.fromkeys(end for _, end in spans)
    }
    counts = {end: sum(len(spans[span]) for span in after) for end, after in following.items()}
    if sum(counts[end] * len(before) for (_, end), before in spans.items()) <= FLOW.pairs_max:
        for (_, end), before in spans.items():
            for span in following[end]:
                yield from ((a, b) for a in before for b in spans[span])
        return
    ends: dict[int, list[str]] = {}
    for (_, end), before in spans.items():
        ends.setdefault(end, []).extend(before)
    near = _nearest(problem)
    most = max(FLOW.next_least, FLOW.pairs_max // len(held))
    for end, before in ends.items():
        after = [name for span in following[end] for name in spans[span]]
        members = frozenset(after)
        for index, a in enumerate(before):
            if len(after) <= most:
                yield from ((a, b) for b in after)
                continue
            nearest = [b for b in near.get(a, ()) if b in members][: most // 2]
            # The others are spread evenly, so that each peer is followed and follows about equally.
            step, begin = len(after) / (most - len(nearest)), index / len(before)
            rest = (after[int((k + begin) * step)] for k in range(most - len(nearest)))
            yield from ((a, b) for b in dict.fromkeys((*nearest, *rest)))


def _nearest(problem: Problem) -> Mapping[str, Sequence[str]]:
    """For every peer, those to which a link was measured, the nearest first."""
    found: dict[str, list[tuple[float, str]]] = {}
    for (source, target), rtt_s in round_trips_s(problem).items():
        found.setdefault(source, []).append((rtt_s, target))
    return {source: [target for _, target in sorted(each)] for source, each in found.items()}


def capacities(problem: Problem, assignments: Sequence[Assignment]) -> Capacities:
    """The capacities of a placement's network. Peers without layers are left out, and in a large
    network most of the edges (``FLOW.pairs_max``)."""
    nodes = {node.peer_id: node for node in problem.nodes}
    held = [a for a in assignments if a.start < a.end]
    peers = {a.peer_id: nodes[a.peer_id].tokens_per_s[a.end - a.start - 1] for a in held}
    capacity = edge_capacity(problem)
    edges: dict[tuple[str, str], float] = {}
    for a in held:
        if a.start == 0:
            edges[SOURCE, a.peer_id] = capacity(SOURCE, a.peer_id)
        if a.end == problem.model.layers:
            edges[a.peer_id, SINK] = capacity(a.peer_id, SINK)
    activation_bytes = max(1, problem.model.activation_bytes)
    rates = own_rates_bytes_per_s(problem)
    ups, downs = (
        {
            peer_id: rates[peer_id][way] / activation_bytes
            for peer_id, speed in peers.items()
            if peer_id in rates and rates[peer_id][way] / activation_bytes < speed
        }
        for way in (0, 1)
    )
    edges.update((pair, capacity(*pair)) for pair in _pairs(problem, held))
    return _shared_out(problem, Capacities(peers=peers, edges=edges, ups=ups, downs=downs))


def _shared_out(problem: Problem, limits: Capacities) -> Capacities:
    """The capacities with each peer's part of the uplinks that it shares.

    Parts begin by the peers' speeds. What some do not use of theirs goes to those that use all, so
    the flow only grows from turn to turn; of more than ``FLOW.balanced_edges_max`` edges, parts
    stay. Peers that pass no link to elsewhere have no part.
    """
    shared, row = shared_uplinks(problem), max(1, problem.model.activation_bytes)
    if not shared.bytes_per_s:
        return limits
    speeds: dict[Way, dict[str, float]] = {}
    for tail, head in limits.edges:
        for way in shared.crossed(tail, head):
            peer = tail if way[1] == "up" else head
            speeds.setdefault(way, {})[peer] = limits.peers[peer]
    rates = {way: shared.bytes_per_s[way] / row for way in speeds}
    parts = {
        way: {peer: rates[way] * speed / total for peer, speed in each.items()}
        for way, each in speeds.items()
        if (total := sum(each.values())) > rates[way]
    }
    limits = _with_parts(replace(limits, homes=shared.of_peer), parts)
    several = any(len(each) > 1 for each in parts.values())
    turns = SHARING.turns if several and len(limits.edges) <= FLOW.balanced_edges_max else 0
    for _ in range(turns):
        used = {way: dict.fromkeys(each, 0.0) for way, each in parts.items()}
        for edge in _most(limits, _arcs(limits)).edges:
            for way in shared.crossed(edge.tail, edge.head):
                if way in used:
                    used[way][edge.tail if way[1] == "up" else edge.head] += edge.tokens_per_s
        moved = {way: _moved(each, used[way]) for way, each in parts.items()}
        if moved == parts:
            break
        parts = moved
        limits = _with_parts(limits, parts)
    return limits


def _moved(parts: dict[str, float], used: Mapping[str, float]) -> dict[str, float]:
    """The parts of a way after what is not used went to those that use all of theirs."""
    short = [peer for peer, part in parts.items() if used[peer] >= SHARING.used_share * part]
    left = sum(part - used[peer] for peer, part in parts.items() if peer not in short)
    if not short or left <= (1 - SHARING.used_share) * sum(parts.values()):
        return parts
    return {
        peer: part + left / len(short) if peer in short else used[peer]
        for peer, part in parts.items()
    }


def _with_parts(limits: Capacities, parts: Mapping[Way, Mapping[str, float]]) -> Capacities:
    away, back = (
        {peer: part for way, each in parts.items() if way[1] == to for peer, part in each.items()}
        for to in ("up", "down")
    )
    return replace(limits, away=away, back=back)


@dataclass(frozen=True, slots=True)
class _Arcs:
    """A network's edges as arrays, in the order of :meth:`Capacities.arcs`, for solvers."""

    tails: Any
    """Numbers of vertices: the source is 0, the sink 1."""
    heads: Any
    rates: Any
    ends: list[tuple[str, str]]
    """The names at both ends; the same name twice within a peer."""

    def solution(self, flows: Any, entering: float, scale: float) -> FlowSolution:
        """The solution of ``flows``, in units of which ``scale`` are one token/s."""
        carried = zip(self.ends, flows.tolist(), strict=True)
        return FlowSolution(
            flow_tokens_per_s=entering / scale,
            edges=tuple(
                FlowEdge(tail=tail, head=head, tokens_per_s=flow / scale)
                for (tail, head), flow in carried
                if flow > 0 and tail != head
            ),
        )


def _arcs(limits: Capacities) -> _Arcs:
    import numpy as np  # a client that starts does not wait for it

    number: dict[Vertex, int] = {(SOURCE, "out"): 0, (SINK, "in"): 1}
    tails, heads, rates, ends = [], [], [], []
    for tail, head, rate in limits.arcs():
        tails.append(number.setdefault(tail, len(number)))
        heads.append(number.setdefault(head, len(number)))
        rates.append(rate)
        ends.append((tail[0], head[0]))
    return _Arcs(np.array(tails, np.int32), np.array(heads, np.int32), np.array(rates, float), ends)


NOTHING = FlowSolution(flow_tokens_per_s=0.0, edges=())


def solve_flow(problem: Problem, assignments: Sequence[Assignment]) -> FlowSolution:
    """A maximum flow, by OR-Tools' push-relabel solver."""
    limits = capacities(problem, assignments)
    return _most(limits, _arcs(limits))


def _most(limits: Capacities, arcs: _Arcs) -> FlowSolution:
    import numpy as np
    from ortools.graph.python import max_flow

    total = sum(limits.peers.values())
    if total <= 0:
        return NOTHING
    scale = FLOW.scale / total
    solver = max_flow.SimpleMaxFlow()
    units = (np.minimum(arcs.rates, total) * scale).astype(np.int64)
    drawn = solver.add_arcs_with_capacity(arcs.tails, arcs.heads, units)
    if solver.solve(0, 1) != solver.OPTIMAL:
        return NOTHING
    return arcs.solution(solver.flows(drawn), solver.optimal_flow(), scale)


BALANCE_PIECES = (0.1, 0.2, 0.3, 0.45, 0.65)
"""Shares of an edge's capacity at which the cost of more flow rises."""
WHOLE_MAX = 2.0**62
"""Fixed by int64: limit of costs and units, which solvers take as whole numbers."""


def balanced_flow(problem: Problem, assignments: Sequence[Assignment]) -> FlowSolution:
    """A maximum flow balanced over peers and links.

    Among all maximum flows, it has (nearly) the least sum of flow² / capacity, by a min-cost flow
    with each edge in pieces of rising cost. A link's capacity counts at most as what its ends can
    carry, so fast links are balanced too. Balanced flow keeps queues short, and few tokens wait
    behind one prompt. Of more than ``FLOW.balanced_edges_max`` edges, any maximum flow is returned.
    """
    import numpy as np
    from ortools.graph.python import min_cost_flow

    limits = capacities(problem, assignments)
    arcs = _arcs(limits)
    unbalanced = _most(limits, arcs)
    most = unbalanced.flow_tokens_per_s
    if most <= 0 or len(limits.edges) > FLOW.balanced_edges_max:
        return unbalanced
    # Costs are small whole numbers; flows need far fewer units than SimpleMaxFlow takes.
    scale = FLOW.balance_units / most
    speed = limits.peers.get
    room = [
        rate if tail == head else min(rate, speed(tail, rate), speed(head, rate))
        for (tail, head), rate in zip(arcs.ends, arcs.rates.tolist(), strict=True)
    ]
    rooms = np.array(room)
    inner = np.array([tail == head for tail, head in arcs.ends])
    units = np.ceil(np.where(inner, rooms, np.minimum(rooms, most)) * scale)
    shares = np.array(BALANCE_PIECES)
    upto = np.minimum(units[:, None], np.floor(shares * rooms[:, None] * scale))
    pieces = np.diff(np.column_stack((upto, units)), prepend=0.0)
    costs = (
        np.square((*BALANCE_PIECES, 1.0)) * FLOW.cost_max * most / np.maximum(rooms, 1e-9)[:, None]
    )
    costs = np.maximum(1, costs)
    which, _ = np.nonzero(pieces)
    solver = min_cost_flow.SimpleMinCostFlow()
    drawn = solver.add_arcs_with_capacity_and_unit_cost(
        arcs.tails[which],
        arcs.heads[which],
        np.minimum(pieces[pieces > 0], WHOLE_MAX).astype(np.int64),
        np.minimum(costs[pieces > 0], WHOLE_MAX).astype(np.int64),
    )
    solver.set_node_supply(0, int(FLOW.balance_units))
    solver.set_node_supply(1, -int(FLOW.balance_units))
    if solver.solve_max_flow_with_min_cost() != solver.OPTIMAL:
        return unbalanced
    # Whole units may overshoot a capacity by less than one unit: shrink all flow to fit.
    flows = np.bincount(which, solver.flows(drawn), len(room))
    sent = float(flows[arcs.tails == 0].sum())
    used = flows > 0
    fits = (arcs.rates[used] * scale / flows[used]).min(initial=1.0)
    shrink = min(float(fits), most * scale / max(1.0, sent))
    return arcs.solution(flows * shrink, sent * shrink, scale)


def upper_bound(problem: Problem) -> float:
    """The largest F with Σ_i max_j j × min(T_i(j), F) ≥ L × F, in tokens/s; no flow is larger.

    Every layer must carry F; a peer that holds j layers carries at most min(T_i(j), F) through
    each of them. Without the min it is Helix's bound (§4.5), Σ_i max_j(j × T_i(j)) / L, which also
    counts a fast peer's speed above F, though no layer needs more than F. The clients' links bound
    the flow, too.
    """
    import numpy as np

    layers = problem.model.layers
    sorts = Counter(node.tokens_per_s[:layers] for node in problem.nodes)  # many peers, a few sorts
    counts = np.array([*sorts.values()], float)
    rates = np.array([[*each, *[0.0] * (layers - len(each))] for each in sorts])
    held = np.arange(1, layers + 1)

    def most(flow: float) -> float:
        if not sorts:
            return 0.0
        return math.fsum(counts * (held * np.minimum(rates, flow)).max(axis=1))

    def reached(flow: float) -> bool:
        return most(flow) >= layers * flow * (1 - FLOW.bound_slack)

    entrances = (
        len(problem.nodes) * problem.client_bandwidth_bytes_per_s / max(1, problem.token_bytes)
    )
    low, high = 0.0, min(most(math.inf) / layers, entrances)
    if reached(high):
        return high
    # min(T, F) / F falls with F, so every flow below a reached one is reached too.
    for _ in range(FLOW.bound_steps):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) else (low, middle)
    return high


def ring_latency_s(
    rtts: Mapping[tuple[str, str], float], default_rtt_s: float, peers: Sequence[str]
) -> float:
    """Seconds that one token spends on links in a closed ring over ``peers``."""
    if len(peers) < 2:
        return 0.0
    hops = zip(peers, [*peers[1:], peers[0]], strict=True)
    return sum(rtts.get(hop, default_rtt_s) / 2 for hop in hops)


def paths(edges: Iterable[FlowEdge]) -> tuple[tuple[tuple[str, ...], float], ...]:
    """The routes of a flow: peers from source to sink, and the tokens/s that each route carries.

    There are at most as many routes as edges. At each peer, the edge of most flow is followed
    first.
    """
    rest: dict[str, dict[str, float]] = {}
    for edge in edges:
        rest.setdefault(edge.tail, {})[edge.head] = edge.tokens_per_s
    least = 1e-9 * sum(rest.get(SOURCE, {}).values())
    found: list[tuple[tuple[str, ...], float]] = []
    while rest.get(SOURCE):
        path = [SOURCE]
        while path[-1] != SINK and rest.get(path[-1]):
            heads = rest[path[-1]]
            path.append(max(heads, key=lambda name: (heads[name], name)))
        steps = list(pairwise(path))
        carried = min(rest[tail][head] for tail, head in steps)
        for tail, head in steps:
            rest[tail][head] -= carried
            if rest[tail][head] <= least:
                del rest[tail][head]
        if path[-1] == SINK:
            found.append((tuple(path[1:-1]), carried))
    return tuple(found)


def flow_parts(edges: Iterable[FlowEdge]) -> tuple[frozenset[str], ...]:
    """The sets of peers that flow joins, without an edge between sets, in order of their names."""
    found: list[frozenset[str]] = []
    for edge in edges:
        ends = frozenset({edge.tail, edge.head} - {SOURCE, SINK})
        joined = [part for part in found if part & ends]
        found = [part for part in found if not part & ends]
        found.append(ends.union(*joined))
    return tuple(sorted((part for part in found if part), key=sorted))


def mean_latency_s(problem: Problem, solution: FlowSolution) -> float:
    """Mean seconds that a token spends on links per ring, averaged over the flow."""
    rtts = round_trips_s(problem)
    routes = paths(solution.edges)
    total = sum(carried for _, carried in routes)
    if total <= 0:
        return 0.0
    return (
        sum(
            carried * ring_latency_s(rtts, problem.default_rtt_s, peers)
            for peers, carried in routes
        )
        / total
    )
