"""A placement as a flow network, and the most tokens/s that it can serve.

Helix (ASPLOS'25) §4.2-4.3: each peer is an edge of capacity T_i(j) between two vertices; source to
the holders of layer 0, holders of the last layer to sink, and i to j when j can go on where i
ends: ``s_j <= e_i < e_j`` (j then runs only ``[e_i, e_j)``, partial inference).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dht.types import SINK, SOURCE, Assignment, FlowEdge, Problem

SCALE = 1e12
"""Flow solvers take whole numbers: capacities are scaled so that their sum is about this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Every capacity of a placement's network, in tokens/s."""

    peers: dict[str, float]
    edges: dict[tuple[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSolution:
    """A maximum flow; only edges that carry something."""

    flow_tokens_per_s: float
    edges: tuple[FlowEdge, ...]


def follows(before: Assignment, after: Assignment) -> bool:
    """Whether ``after`` can go on where ``before`` ends."""
    return before.peer_id != after.peer_id and after.start <= before.end < after.end


def capacities(problem: Problem, assignments: Sequence[Assignment]) -> Capacities:
    """The network of a placement. Peers without layers are left out."""
    nodes = {node.peer_id: node for node in problem.nodes}
    measured = {(link.source, link.target): link for link in problem.links}
    held = [a for a in assignments if a.start < a.end]
    peers = {a.peer_id: nodes[a.peer_id].tokens_per_s[a.end - a.start - 1] for a in held}
    client = problem.client_bandwidth_bytes_per_s / problem.token_bytes
    edges: dict[tuple[str, str], float] = {}
    for a in held:
        if a.start == 0:
            edges[SOURCE, a.peer_id] = client
        if a.end == problem.model.layers:
            edges[a.peer_id, SINK] = client
        for b in held:
            if follows(a, b):
                link = measured.get((a.peer_id, b.peer_id))
                bandwidth = (
                    problem.default_bandwidth_bytes_per_s
                    if link is None
                    else link.bandwidth_bytes_per_s
                )
                edges[a.peer_id, b.peer_id] = bandwidth / max(1, problem.model.activation_bytes)
    return Capacities(peers=peers, edges=edges)


def solve_flow(problem: Problem, assignments: Sequence[Assignment]) -> FlowSolution:
    """Maximum flow by OR-Tools' push-relabel solver."""
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


def _vertices(limits: Capacities) -> Iterator[tuple[str, str]]:
    yield SOURCE, "out"
    yield SINK, "in"
    for peer_id in limits.peers:
        yield peer_id, "in"
        yield peer_id, "out"


def upper_bound(problem: Problem) -> float:
    """Σ_i max_j(j × T_i(j)) / L: no placement serves more (Helix §4.5), in tokens/s."""
    best = (
        max((j * rate for j, rate in enumerate(node.tokens_per_s, start=1)), default=0.0)
        for node in problem.nodes
    )
    return sum(best) / problem.model.layers


def ring_latency_s(problem: Problem, peers: Sequence[str]) -> float:
    """Time that one token spends on links in a closed ring over ``peers``, in seconds."""
    if len(peers) < 2:
        return 0.0
    rtts = {(link.source, link.target): link.rtt_s for link in problem.links}
    hops = zip(peers, [*peers[1:], peers[0]], strict=True)
    return sum(rtts.get(hop, problem.default_rtt_s) / 2 for hop in hops)
