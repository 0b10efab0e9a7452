"""A placement as a networkx graph: its minimum cuts, and which peers all routes pass. Pure.

A small placement is the network of :mod:`coordinator.evaluation.max_flow`, links included. One of
more than ``EDGES_MAX`` edges is a path of segments, an edge for each run of layers with the same
holders: without slow links these are the only minimal cuts, since a token may enter a peer's layers
in their middle. So the work grows with the layers there, not with the pairs of peers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from coordinator.evaluation.max_flow import Vertex, capacities, edge_capacity, own_rates_bytes_per_s
from dht.messages.types import SINK, SOURCE, Assignment, Problem

if TYPE_CHECKING:
    import networkx

EDGES_MAX = 2_000
"""Maximum edges of a graph with links: a cut of as many takes about 50 ms."""
UNITS = 10**12
"""Whole units of all peers' tokens/s together: sums of whole numbers are exact."""
START: Vertex = (SOURCE, "out")
END: Vertex = (SINK, "in")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutEdge:
    """An edge of a minimum cut."""

    kind: str
    """``peer``, ``uplink``, ``downlink``, ``link``, or ``layers``: all holders of a segment."""
    peers: tuple[str, ...]
    tokens_per_s: float


@dataclass(frozen=True)
class PlacementGraph:
    """The graph of a placement that covers all layers."""

    problem: Problem
    assignments: tuple[Assignment, ...]

    @cached_property
    def carries(self) -> Mapping[str, float]:
        """What each holder carries in tokens/s: its speed, or its own connection if that is less.

        The first stage takes token ids alone and the last one sends them, so the links' ends there
        do not count."""
        speeds = {node.peer_id: node.tokens_per_s for node in self.problem.nodes}
        own = own_rates_bytes_per_s(self.problem)
        row = max(1, self.problem.model.activation_bytes)
        found = {}
        for a in self.assignments:
            rates = [speeds[a.peer_id][a.end - a.start - 1]]
            up, down = own.get(a.peer_id, (float("inf"),) * 2)
            rates += [up / row] * (a.end < self.problem.model.layers)
            rates += [down / row] * (a.start > 0)
            found[a.peer_id] = min(rates)
        return found

    @cached_property
    def slowed(self) -> frozenset[str]:
        """Holders whose own connection carries less than their processors."""
        speeds = {node.peer_id: node.tokens_per_s for node in self.problem.nodes}
        return frozenset(
            a.peer_id
            for a in self.assignments
            if self.carries[a.peer_id] < speeds[a.peer_id][a.end - a.start - 1]
        )

    @cached_property
    def holders(self) -> tuple[tuple[str, ...], ...]:
        """The holders of each layer."""
        found: list[list[str]] = [[] for _ in range(self.problem.model.layers)]
        for a in self.assignments:
            for layer in range(a.start, a.end):
                found[layer].append(a.peer_id)
        return tuple(tuple(sorted(each)) for each in found)

    @cached_property
    def has_links(self) -> bool:
        """Whether the graph has the links between peers."""
        ends: dict[int, int] = {}
        for a in self.assignments:
            ends[a.end] = ends.get(a.end, 0) + 1
        pairs = sum(
            count for a in self.assignments for end, count in ends.items() if a.start <= end < a.end
        )
        return pairs <= EDGES_MAX

    @cached_property
    def graph(self) -> "networkx.DiGraph[Any]":
        """Edges with ``capacity`` in units; those of peers with ``count``, how many they are."""
        import networkx as nx  # a page or client that never asks does not wait for it

        graph: networkx.DiGraph[Any] = nx.DiGraph(total=max(1e-9, sum(self.carries.values())))
        graph.add_nodes_from((START, END))
        if self.has_links:
            self._add_network(graph)
        else:
            self._add_segments(graph)
        return graph

    def _units(self, graph: "networkx.DiGraph[Any]", tokens_per_s: float) -> int:
        total = float(graph.graph["total"])
        return int(min(tokens_per_s, total) / total * UNITS)

    def _add_network(self, graph: "networkx.DiGraph[Any]") -> None:
        kinds = {"out": "peer", "up": "uplink", "away": "uplink", "in": "downlink"}
        for tail, head, rate in capacities(self.problem, self.assignments).arcs():
            if not (units := self._units(graph, rate)):
                continue
            if tail[0] != head[0]:
                ends = tuple(name for name in (tail[0], head[0]) if name not in {SOURCE, SINK})
                graph.add_edge(tail, head, capacity=units, kind="link", peers=ends)
                continue
            kind = kinds["in" if tail[1] in {"down", "back"} else head[1]]
            graph.add_edge(tail, head, capacity=units, kind=kind, peers=(tail[0],))
            if kind == "peer":
                graph.edges[tail, head]["count"] = 1

    def _add_segments(self, graph: "networkx.DiGraph[Any]") -> None:
        client = edge_capacity(self.problem)
        before = START
        starts = [
            at for at, each in enumerate(self.holders) if not at or each != self.holders[at - 1]
        ]
        for start in starts:
            peers = self.holders[start]
            after = (str(start), "layers")
            rate = sum(self.carries[peer] for peer in peers)
            graph.add_edge(
                *(before, after),
                capacity=self._units(graph, rate),
                kind="layers",
                peers=peers,
                count=len(peers),
            )
            before = after
        entrances = min(len(self.holders[0]), len(self.holders[-1]))
        rate = entrances * client(SOURCE, SINK)
        graph.add_edge(before, END, capacity=self._units(graph, rate), kind="link", peers=())

    def tokens_per_s(self) -> float:
        """The most that the placement carries."""
        return self._cut("capacity")[0] * float(self.graph.graph["total"]) / UNITS

    def cut(self) -> tuple[CutEdge, ...]:
        """The edges of the minimum cut nearest the last layer, the widest first."""
        scale = float(self.graph.graph["total"]) / UNITS
        edges = [
            CutEdge(kind=each["kind"], peers=each["peers"], tokens_per_s=each["capacity"] * scale)
            for each in self._cut("capacity")[1]
        ]
        return tuple(sorted(edges, key=lambda e: (-e.tokens_per_s, e.peers, e.kind)))

    def fewest(self) -> tuple[str, ...]:
        """The fewest peers without which no route is left; node connectivity is their number."""
        if not self._routes:
            return ()
        return tuple(sorted({p for each in self._cut("count")[1] for p in each["peers"]}))

    @cached_property
    def _routes(self) -> bool:
        import networkx as nx

        return bool(nx.has_path(self.graph, START, END))

    def _cut(self, capacity: str) -> tuple[float, list[Mapping[str, Any]]]:
        import networkx as nx
        from networkx.algorithms.flow import shortest_augmenting_path

        graph = self.graph
        value, (near, _) = nx.minimum_cut(
            graph, START, END, capacity=capacity, flow_func=shortest_augmenting_path
        )
        edges = [graph.edges[a, b] for a in near for b in graph[a] if b not in near]
        return float(value), edges

    def on_all_routes(self) -> frozenset[str]:
        """The peers that every route passes: without one of them there is none."""
        import networkx as nx

        if not self._routes:
            return frozenset()
        if not self.has_links:
            return frozenset(each[0] for each in self.holders if len(each) == 1)
        above = nx.immediate_dominators(self.graph, START)
        found, at = set(), above[END]
        while at != START:
            found.add(at[0])
            at = above[at]
        return frozenset(found)

    def through(self) -> Mapping[str, float]:
        """An upper bound of what each peer's loss costs, in tokens/s: what a maximum flow sends
        through it, or all that it carries."""
        if not self.has_links:
            return self.carries
        import networkx as nx
        from networkx.algorithms.flow import shortest_augmenting_path

        _, flows = nx.maximum_flow(self.graph, START, END, flow_func=shortest_augmenting_path)
        scale = float(self.graph.graph["total"]) / UNITS
        return {
            name: flows.get((name, "in"), {}).get((name, "out"), 0) * scale for name in self.carries
        }

    def without(self, peer_id: str) -> "PlacementGraph":
        """The graph after a peer's loss."""
        left = tuple(a for a in self.assignments if a.peer_id != peer_id)
        return PlacementGraph(self.problem, left)


def graph_of(problem: Problem, assignments: Sequence[Assignment]) -> PlacementGraph:
    """The graph of a placement, of which peers without layers are no part."""
    return PlacementGraph(problem, tuple(a for a in assignments if a.start < a.end))
