"""Checks plans independently of the planner that made them.

Every peer and client runs :func:`check_shape` before it adopts a plan. :func:`check_plan` also
checks the plan against the problem: memory, capacities, and the objective, recomputed by another
algorithm than the planner's.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from coordinator.evaluation.max_flow import (
    Capacities,
    capacities,
    edge_capacity,
    least_served,
    solve_flow,
)
from coordinator.evaluation.shared_uplinks import edge_flows, shared_uplinks
from dht.messages.types import SINK, SOURCE, Assignment, Plan, Problem, fits, layer_ranges

TOLERANCE = 1e-6
"""Relative error allowed in sums of flows, which solvers round to whole units."""
SIMPLE_EDGES_MAX = 2000
"""Maximum edges for recomputing max flow by another algorithm than the planner's."""
FLOW_USED_MIN = 0.6
"""Minimum flow of a plan, as a share of its placement's maximum flow. It may be below 1, because
short routes serve more."""


def uncovered(assignments: Sequence[Assignment], layers: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of layers that nobody holds."""
    changes = [0] * (layers + 1)
    for a in assignments:
        if (start := max(0, a.start)) < (end := min(layers, a.end)):
            changes[start] += 1
            changes[end] -= 1
    holders = accumulate(changes[:layers])
    return layer_ranges(layer for layer, count in enumerate(holders) if not count)


def check_shape(plan: Plan) -> list[str]:
    """The errors of a plan by itself; empty when there are none."""
    layers = plan.model.layers
    wrong = [
        f"the {name} is said to be {number}"
        for name, number in (
            ("flow", plan.flow_tokens_per_s),
            ("bound", plan.bound_tokens_per_s),
        )
        if not math.isfinite(number) or number < 0
    ]
    if plan.edges and not plan.flow_tokens_per_s > 0:
        wrong.append("it has edges but no flow")
    wrong += [
        f"{a.peer_id} is given [{a.start}, {a.end}) of {layers} layers"
        for a in plan.assignments
        if not 0 <= a.start < a.end <= layers
    ]
    peers = [a.peer_id for a in plan.assignments]
    if SOURCE in peers or SINK in peers:
        wrong.append("a peer is named like an end of the flow")
    if len(set(peers)) != len(peers):
        wrong.append("a peer is given layers twice")
    if not set(peers).isdisjoint(plan.silent):
        wrong.append("a peer that is said to be silent is given layers")
    gaps = uncovered(plan.assignments, layers)
    if gaps:
        wrong.append(f"nobody holds layers {gaps}")
    return wrong + _check_edges(plan)


def _check_edges(plan: Plan) -> list[str]:
    """The errors of the edges: they must join peers in a legal order and conserve flow."""
    wrong: list[str] = []
    held = {a.peer_id: a for a in plan.assignments}
    inflow: defaultdict[str, float] = defaultdict(float)
    outflow: defaultdict[str, float] = defaultdict(float)
    pairs = [(edge.tail, edge.head) for edge in plan.edges]
    if len(set(pairs)) != len(pairs):
        wrong.append("an edge is listed twice")
    for edge in plan.edges:
        legal = math.isfinite(edge.tokens_per_s) and edge.tokens_per_s > 0
        tail, head = held.get(edge.tail), held.get(edge.head)
        if edge.tail == SOURCE:
            legal = legal and head is not None and head.start == 0
        elif edge.head == SINK:
            legal = legal and tail is not None and tail.end == plan.model.layers
        else:
            legal = legal and (
                tail is not None and head is not None and head.start <= tail.end < head.end
            )
        if not legal:
            wrong.append(f"the edge {edge.tail} to {edge.head} cannot carry flow")
        outflow[edge.tail] += edge.tokens_per_s
        inflow[edge.head] += edge.tokens_per_s
    slack = TOLERANCE * max(1.0, plan.flow_tokens_per_s)
    wrong += [
        f"{peer_id} takes {inflow[peer_id]:.3f} and gives {outflow[peer_id]:.3f} tokens/s"
        for peer_id in held
        if abs(inflow[peer_id] - outflow[peer_id]) > slack
    ]
    if abs(outflow[SOURCE] - plan.flow_tokens_per_s) > slack:
        wrong.append(
            f"the flow is said to be {plan.flow_tokens_per_s:.3f}, its edges carry"
            f" {outflow[SOURCE]:.3f} tokens/s"
        )
    return wrong


def check_plan(plan: Plan, problem: Problem) -> list[str]:
    """The errors of a plan for this problem; empty when there are none."""
    wrong = check_shape(plan)
    if plan.model != problem.model:
        wrong.append("it is for another model")
    nodes = {node.peer_id: node for node in problem.nodes}
    for a in plan.assignments:
        node = nodes.get(a.peer_id)
        if node is None:
            wrong.append(f"{a.peer_id} is not known")
        elif not fits(problem.model, node, a.start, a.end):
            wrong.append(f"[{a.start}, {a.end}) does not fit {a.peer_id}")
    if wrong:
        return wrong
    limits, capacity = capacities(problem, plan.assignments), edge_capacity(problem)
    slack = TOLERANCE * max(1.0, plan.flow_tokens_per_s)
    through: defaultdict[str, float] = defaultdict(float)
    to_peers: defaultdict[str, float] = defaultdict(float)
    from_peers: defaultdict[str, float] = defaultdict(float)
    for edge in plan.edges:
        through[edge.head] += edge.tokens_per_s
        to_peers[edge.tail] += edge.tokens_per_s if edge.head != SINK else 0.0
        from_peers[edge.head] += edge.tokens_per_s if edge.tail != SOURCE else 0.0
        limit = capacity(edge.tail, edge.head)
        if edge.tokens_per_s > limit + slack:
            wrong.append(f"{edge.tail} to {edge.head} carries more than its {limit:.1f} tokens/s")
    wrong += [
        f"{whose} {peer_id} carries {carried[peer_id]:.1f}, more than its {rate:.1f} tokens/s"
        for whose, rates, carried in (
            ("peer", limits.peers, through),
            ("the uplink of", limits.ups, to_peers),
            ("the downlink of", limits.downs, from_peers),
        )
        for peer_id, rate in rates.items()
        if carried[peer_id] > rate + slack
    ]
    shared, row = shared_uplinks(problem), max(1, problem.model.activation_bytes)
    wrong += [
        f"the {way}link shared by {name} carries {carried:.1f}, more than its {most:.1f} tokens/s"
        for (name, way), carried in shared.passes(edge_flows(plan.edges)).items()
        if carried > (most := shared.bytes_per_s[name, way] / row) + slack
    ]
    flow = plan.flow_tokens_per_s
    # The simple algorithm takes minutes for thousands of edges.
    if len(limits.edges) <= SIMPLE_EDGES_MAX:
        most = max_flow_tokens_per_s(limits)
        wasted = flow < FLOW_USED_MIN * most - slack
        if limits.away or limits.back:  # parts of shared uplinks may be found that carry more
            most = max_flow_tokens_per_s(replace(limits, away={}, back={}))
    else:
        most = least_served(problem, plan.assignments)
        wasted = flow_wasted(problem, plan.assignments, flow + slack)
    if wasted or flow > most + max(slack, 1e-3 * most):
        wrong.append(
            f"the plan's flow is {flow:.3f}, its placement could serve {most:.3f} tokens/s"
        )
    return wrong


def flow_wasted(problem: Problem, assignments: Sequence[Assignment], flow: float) -> bool:
    """Whether ``flow`` is less than ``FLOW_USED_MIN`` of what the placement can carry.

    A bound on that is looked at first: it is quick, and often enough, and the maximum flow of
    thousands of peers takes a second.
    """
    enough = flow / FLOW_USED_MIN
    return (
        enough < least_served(problem, assignments)
        and enough < solve_flow(problem, assignments).flow_tokens_per_s
    )


def max_flow_tokens_per_s(limits: Capacities) -> float:
    """Maximum flow by shortest augmenting paths (Edmonds-Karp); slow, simple, independent."""
    residual: defaultdict[tuple[str, str], defaultdict[tuple[str, str], float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for tail, head, rate in limits.arcs():
        residual[tail][head] += rate
    source, sink = (SOURCE, "out"), (SINK, "in")
    least = (
        TOLERANCE * min((rate for rate in limits.peers.values() if rate > 0), default=1.0) * 1e-3
    )
    total = 0.0
    while True:
        parent = {source: source}
        queue = deque([source])
        while queue and sink not in parent:
            vertex = queue.popleft()
            for after, room in residual[vertex].items():
                if room > least and after not in parent:
                    parent[after] = vertex
                    queue.append(after)
        if sink not in parent:
            return total
        path = [sink]
        while path[-1] != source:
            path.append(parent[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        room = min(residual[a][b] for a, b in steps)
        for a, b in steps:
            residual[a][b] -= room
            residual[b][a] += room
        total += room
