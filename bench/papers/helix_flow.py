"""Computes max flow as Helix's simulator does, for runs that are compared with its figures.

A placement has many maximum flows, and the choice among them changes the throughput by up to a
quarter on clusters with slow links. Helix, and this module, use networkx (preflow-push) over the
links that the plan names, with network cards as capacities. The project's own plans use
:func:`coordinator.evaluation.max_flow.solve_flow`.

networkx keeps vertices in sets, whose order follows from hashes. Vertices are numbers here, because
hashes of names, and so the flow, would differ from process to process.
"""

from collections.abc import Callable, Sequence

from coordinator.simulator.core.profiles import Profiles
from dht.messages.types import SINK, SOURCE, Assignment, FlowEdge, Plan, PlanVersion, Problem

CLIENT_CARD_BYTES_PER_S = 10e9


def helix_plan(
    problem: Problem,
    profiles: Profiles,
    assignments: Sequence[Assignment],
    links: Sequence[tuple[str, str]],
) -> Plan:
    """A plan over ``links`` only, including those of ``source`` and ``sink``, in Helix's order."""
    import networkx as nx

    token = float(max(1, problem.token_bytes))
    state = problem.model.activation_bytes + token
    bandwidth = {(link.source, link.target): link.bandwidth_bytes_per_s for link in problem.links}
    rates = {node.peer_id: node.tokens_per_s for node in problem.nodes}
    at = _numbers()
    graph = nx.DiGraph()
    graph.add_edge(at(SOURCE), at(SOURCE, "out"), capacity=CLIENT_CARD_BYTES_PER_S / token)
    graph.add_edge(at(SINK, "in"), at(SINK), capacity=CLIENT_CARD_BYTES_PER_S / token)
    for a in assignments:
        name, profile = a.peer_id, profiles.peers[a.peer_id]
        tails = [tail for tail, head in links if head == name]
        heads = [head for tail, head in links if tail == name]
        received = token if tails == [SOURCE] else state
        sent = token if heads == [SINK] else state
        start, end = at(name, "start"), at(name, "end")
        graph.add_edge(at(name, "in"), start, capacity=profile.in_bytes_per_s / received)
        graph.add_edge(start, end, capacity=rates[name][a.end - a.start - 1])
        graph.add_edge(end, at(name, "out"), capacity=profile.out_bytes_per_s / sent)
    for tail, head in links:
        if tail == SOURCE or head == SINK:
            capacity = profiles.client_links[tail, head][0] / token
        else:
            capacity = bandwidth[tail, head] / state
        graph.add_edge(at(tail, "out"), at(head, "in"), capacity=capacity)
    value, flow = nx.maximum_flow(graph, at(SOURCE), at(SINK))
    carried = [(*pair, flow[at(pair[0], "out")][at(pair[1], "in")]) for pair in links]
    return Plan(
        version=PlanVersion(term=1, counter=1),
        coordinator="helix",
        model=problem.model,
        assignments=tuple(assignments),
        edges=tuple(
            FlowEdge(tail=tail, head=head, tokens_per_s=rate)
            for tail, head, rate in carried
            if rate > 0
        ),
        flow_tokens_per_s=value,
        bound_tokens_per_s=value,
        planner="helix",
        solve_s=0.0,
        created_unix_s=0.0,
    )


def _numbers() -> Callable[..., int]:
    """A function that numbers vertices in the order of their first use."""
    known: dict[tuple[str, ...], int] = {}
    return lambda *vertex: known.setdefault(vertex, len(known))
