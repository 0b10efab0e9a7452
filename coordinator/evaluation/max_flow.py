"""Computes the maximum flow of a placement: the most tokens/s that it can carry.

The network is that of Helix (ASPLOS'25) §4.2-4.3: each peer is an edge of capacity T_i(j) between
two vertices; there are edges from the source to the holders of layer 0, from the holders of the
last layer to the sink, and from i to j when j can go on where i ends: ``s_j <= e_i < e_j`` (j then
runs only ``[e_i, e_j)``, partial inference).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dht.messages.types import SINK, SOURCE, Assignment, FlowEdge, Link, Problem

SCALE = 1e12
"""Sum to which capacities are scaled, since flow solvers take whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Every capacity of a placement's network, in tokens/s."""

    peers: dict[str, float]
    edges: dict[tuple[str, str], float]


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


def capacities(problem: Problem, assignments: Sequence[Assignment]) -> Capacities:
    """The capacities of a placement's network. Peers without layers are left out."""
    nodes = {node.peer_id: node for node in problem.nodes}
    bandwidth = bandwidth_bytes_per_s(problem)
    held = [a for a in assignments if a.start < a.end]
    peers = {a.peer_id: nodes[a.peer_id].tokens_per_s[a.end - a.start - 1] for a in held}
    client = problem.client_bandwidth_bytes_per_s / max(1, problem.token_bytes)
    edges: dict[tuple[str, str], float] = {}
    by_span: dict[tuple[int, int], list[Assignment]] = {}
    for a in held:
        by_span.setdefault((a.start, a.end), []).append(a)
        if a.start == 0:
            edges[SOURCE, a.peer_id] = client
        if a.end == problem.model.layers:
            edges[a.peer_id, SINK] = client
    # Thousands of peers share a few dozen spans: compare spans, not peers.
    activation_bytes = max(1, problem.model.activation_bytes)
    for before in by_span.values():
        for after in by_span.values():
            if not after[0].start <= before[0].end < after[0].end:
                continue
            for a in before:
                for b in after:
                    limit = bandwidth(a.peer_id, b.peer_id) / activation_bytes
                    edges[a.peer_id, b.peer_id] = limit
    return Capacities(peers=peers, edges=edges)


def solve_flow(problem: Problem, assignments: Sequence[Assignment]) -> FlowSolution:
    """A maximum flow, by OR-Tools' push-relabel solver."""
    from ortools.graph.python import max_flow

    limits = capacities(problem, assignments)
    total = sum(limits.peers.values())
    if total <= 0:
        return FlowSolution(flow_tokens_per_s=0.0, edges=())
    scale = SCALE / total
    number = {name: index for index, name in enumerate(_vertices(limits))}
    solver = max_flow.SimpleMaxFlow()
    for peer_id, rate in limits.peers.items():
        solver.add_arc_with_capacity(
            number[peer_id, "in"], number[peer_id, "out"], int(rate * scale)
        )
    arcs: list[tuple[str, str, int]] = []
    for (tail, head), rate in limits.edges.items():
        arc = solver.add_arc_with_capacity(
            number[tail, "out"], number[head, "in"], int(min(rate, total) * scale)
        )
        arcs.append((tail, head, arc))
    if solver.solve(number[SOURCE, "out"], number[SINK, "in"]) != solver.OPTIMAL:
        return FlowSolution(flow_tokens_per_s=0.0, edges=())
    edges = tuple(
        FlowEdge(tail=tail, head=head, tokens_per_s=solver.flow(arc) / scale)
        for tail, head, arc in arcs
        if solver.flow(arc) > 0
    )
    return FlowSolution(flow_tokens_per_s=solver.optimal_flow() / scale, edges=edges)


BALANCE_UNITS = 1e6
"""Whole units of a balanced flow."""
BALANCE_PIECES = (0.1, 0.2, 0.3, 0.45, 0.65, 1.0)
"""Shares of an edge's capacity at which the cost of more flow rises."""
COST_MAX = 1000


def balanced_flow(problem: Problem, assignments: Sequence[Assignment]) -> FlowSolution:
    """A maximum flow balanced over peers and links.

    Among all maximum flows, it has (nearly) the least sum of flow² / capacity, by a min-cost flow
    with each edge in pieces of rising cost. A link's capacity counts at most as what its ends can
    carry, so fast links are balanced too. Balanced flow keeps queues short, and few tokens wait
    behind one prompt.
    """
    from ortools.graph.python import min_cost_flow

    limits = capacities(problem, assignments)
    most = solve_flow(problem, assignments).flow_tokens_per_s
    if most <= 0:
        return FlowSolution(flow_tokens_per_s=0.0, edges=())
    # Costs are small whole numbers; flows need far fewer units than SimpleMaxFlow takes.
    scale = BALANCE_UNITS / most
    number = {name: index for index, name in enumerate(_vertices(limits))}
    solver = min_cost_flow.SimpleMinCostFlow()

    def add(tail: int, head: int, units: int, room: float) -> list[int]:
        arcs, before = [], 0
        for piece in BALANCE_PIECES:
            upto = units if piece == 1.0 else min(units, int(piece * room * scale))
            if upto > before:
                cost = max(1, int(COST_MAX * piece * piece * most / max(room, 1e-9)))
                arcs.append(
                    solver.add_arc_with_capacity_and_unit_cost(tail, head, upto - before, cost)
                )
                before = upto
        return arcs

    for peer_id, rate in limits.peers.items():
        add(number[peer_id, "in"], number[peer_id, "out"], math.ceil(rate * scale), rate)
    drawn: list[tuple[str, str, list[int]]] = []
    for (tail, head), rate in limits.edges.items():
        ends = [limits.peers[name] for name in (tail, head) if name in limits.peers]
        room = min(rate, *ends)
        units = math.ceil(min(room, most) * scale)
        arcs = add(number[tail, "out"], number[head, "in"], units, room)
        drawn.append((tail, head, arcs))
    units = int(BALANCE_UNITS)
    solver.set_node_supply(number[SOURCE, "out"], units)
    solver.set_node_supply(number[SINK, "in"], -units)
    if solver.solve_max_flow_with_min_cost() != solver.OPTIMAL:
        return solve_flow(problem, assignments)
    # Whole units may overshoot a capacity by less than one unit: shrink all flow to fit.
    sent = sum(solver.flow(a) for tail, _, arcs in drawn if tail == SOURCE for a in arcs)
    flows = {(tail, head): float(sum(solver.flow(a) for a in arcs)) for tail, head, arcs in drawn}
    through: dict[str, float] = {}
    for (_, head), flow in flows.items():
        through[head] = through.get(head, 0.0) + flow
    fit = [most * scale / max(1, sent)]
    fit += [limits.edges[pair] * scale / flow for pair, flow in flows.items() if flow > 0]
    fit += [limits.peers[p] * scale / flow for p, flow in through.items() if p != SINK and flow > 0]
    shrink = min(1.0, *fit) / scale
    return FlowSolution(
        flow_tokens_per_s=sent * shrink,
        edges=tuple(
            FlowEdge(tail=tail, head=head, tokens_per_s=flow * shrink)
            for (tail, head), flow in flows.items()
            if flow > 0
        ),
    )


def _vertices(limits: Capacities) -> Iterator[tuple[str, str]]:
    yield SOURCE, "out"
    yield SINK, "in"
    for peer_id in limits.peers:
        yield peer_id, "in"
        yield peer_id, "out"


BOUND_STEPS = 60
BOUND_SLACK = 1e-9
"""Relative error for sums of floats, by which bounds may be too large."""


def upper_bound(problem: Problem) -> float:
    """The largest F with Σ_i max_j j × min(T_i(j), F) ≥ L × F, in tokens/s; no flow is larger.

    Every layer must carry F; a peer that holds j layers carries at most min(T_i(j), F) through
    each of them. Without the min it is Helix's bound (§4.5), Σ_i max_j(j × T_i(j)) / L, which also
    counts a fast peer's speed above F, though no layer needs more than F. The clients' links bound
    the flow, too.
    """
    layers = problem.model.layers
    profiles = [node.tokens_per_s[:layers] for node in problem.nodes]
    sorts = tuple(dict.fromkeys(profiles))
    which = [sorts.index(rates) for rates in profiles]  # many peers are of a few sorts

    def most(flow: float) -> float:
        best = [
            max((j * min(rate, flow) for j, rate in enumerate(rates, start=1)), default=0.0)
            for rates in sorts
        ]
        return sum(best[index] for index in which)

    def reached(flow: float) -> bool:
        return most(flow) >= layers * flow * (1 - BOUND_SLACK)

    entrances = len(profiles) * problem.client_bandwidth_bytes_per_s / max(1, problem.token_bytes)
    low, high = 0.0, min(most(math.inf) / layers, entrances)
    if reached(high):
        return high
    # min(T, F) / F falls with F, so every flow below a reached one is reached too.
    for _ in range(BOUND_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) else (low, middle)
    return high


def ring_latency_s(problem: Problem, peers: Sequence[str]) -> float:
    """Seconds that one token spends on links in a closed ring over ``peers``."""
    return _ring_s(round_trips_s(problem), problem.default_rtt_s, peers)


def _ring_s(
    rtts: Mapping[tuple[str, str], float], default_rtt_s: float, peers: Sequence[str]
) -> float:
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
        sum(carried * _ring_s(rtts, problem.default_rtt_s, peers) for peers, carried in routes)
        / total
    )
