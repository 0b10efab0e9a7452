"""Helix's scheduler: IWRR over the max flow, masked by an estimate of each peer's KV use.

Helix §5: each vertex draws the next peer with the least load, where a load grows by tokens divided
by flow; decode tokens follow their prompt's route and count as load on it. Edges with less than 5%
of their vertex's flow are never drawn. A peer is masked when the estimate of its KV use (prompt
plus average output, on every layer it holds) would exceed the high-water mark.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.simulator.clients import GROWN, Growth
from coordinator.simulator.core.parts import SimulatedSession, Stage
from coordinator.simulator.core.profiles import Profiles
from dht.messages.types import SINK, SOURCE, Assignment, FlowEdge, Problem

AVERAGE_OUTPUT_TOKENS = 240
FLOW_SHARE_MIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HelixRules:
    """Bounds on the KV use at which sessions are admitted and an offline run feeds requests."""

    kv_high_water: float = 0.85
    output_ratio: float = 1.0
    """Expected output, as a share of ``AVERAGE_OUTPUT_TOKENS``."""
    feed_below: float = 0.8
    """Offline: maximum use of the fullest layer at which an end feeds the next request."""


OFFLINE = HelixRules()
ONLINE = HelixRules(kv_high_water=0.9, output_ratio=0.6)


class _Vertex:
    """One vertex's out-edges with flow and their loads."""

    __slots__ = ("flows", "heads", "loads", "open")

    def __init__(self, edges: Sequence[FlowEdge]) -> None:
        self.heads = [edge.head for edge in edges]
        self.flows = [edge.tokens_per_s for edge in edges]
        self.loads = [0.0] * len(edges)
        least = FLOW_SHARE_MIN * sum(self.flows)
        self.open = [flow >= least for flow in self.flows]


class _Room:
    """The estimate of one peer's KV use, in tokens x layers."""

    __slots__ = ("capacity", "end", "free", "start")

    def __init__(self, start: int, end: int, capacity: int) -> None:
        self.start = start
        self.end = end
        self.capacity = capacity
        self.free = capacity


class HelixScheduler:
    """Draws whole routes at a prompt's arrival."""

    def __init__(
        self,
        problem: Problem,
        profiles: Profiles,
        assignments: Sequence[Assignment],
        edges: Sequence[FlowEdge],
        rules: HelixRules,
    ) -> None:
        self.rules = rules
        self.layers = problem.model.layers
        tails: dict[str, list[FlowEdge]] = {}
        for edge in edges:
            if edge.tokens_per_s > 0:
                tails.setdefault(edge.tail, []).append(edge)
        self._vertices = {tail: _Vertex(out) for tail, out in tails.items()}
        self._rooms = {
            a.peer_id: _Room(
                a.start,
                a.end,
                int(profiles.peers[a.peer_id].kv.of(a.start, a.end, problem.model.layers)),
            )
            for a in assignments
            if a.start < a.end
        }
        self._paths: dict[int, list[tuple[list[float], int, float]]] = {}
        self._total = [0.0] * self.layers
        for room in self._rooms.values():
            for layer in range(room.start, room.end):
                self._total[layer] += room.capacity / (room.end - room.start)

    def _expected(self, input_tokens: int) -> int:
        return int(input_tokens + AVERAGE_OUTPUT_TOKENS * self.rules.output_ratio)

    def route(self, session: SimulatedSession, _now_s: float) -> list[Stage] | None:
        """The session's stages, booked as load and KV use; None: every way on is masked."""
        tokens, expected = session.input_tokens, self._expected(session.input_tokens)
        path: list[tuple[list[float], int, float]] = []
        stages: list[Stage] = []
        at, layer = SOURCE, 0
        while True:
            vertex = self._vertices.get(at)
            best = self._choose(vertex, tokens, expected) if vertex is not None else -1
            if vertex is None or best < 0:
                for loads, index, per_token in path:
                    loads[index] -= tokens * per_token
                return None
            per_token = 1.0 / vertex.flows[best]
            vertex.loads[best] += tokens * per_token
            path.append((vertex.loads, best, per_token))
            at = vertex.heads[best]
            if at == SINK:
                break
            end = self._rooms[at].end
            stages.append((at, layer, end))
            layer = end
        for name, start, end in stages:
            self._rooms[name].free -= expected * (end - start)
        self._paths[session.number] = path
        return stages

    def _choose(self, vertex: _Vertex, tokens: int, expected: int) -> int:
        best, least = -1, math.inf
        for index, head in enumerate(vertex.heads):
            if not vertex.open[index]:
                continue
            after = vertex.loads[index] + tokens / vertex.flows[index]
            if after < least and (head == SINK or self._has_room(head, expected)):
                best, least = index, after
        return best

    def _has_room(self, name: str, expected: int) -> bool:
        room = self._rooms[name]
        left = room.free - expected * (room.end - room.start)
        return left >= (1 - self.rules.kv_high_water) * room.capacity

    def decode(self, session: SimulatedSession, _now_s: float) -> Growth:
        """Count one decode token as load on the session's route."""
        for loads, index, per_token in self._paths[session.number]:
            loads[index] += per_token
        return GROWN

    def ended(self, session: SimulatedSession) -> None:
        """Release the session's estimated KV use."""
        expected = self._expected(session.input_tokens)
        for name, start, end in session.stages:
            self._rooms[name].free += expected * (end - start)
        del self._paths[session.number]

    def fullest_layer(self) -> float:
        """The estimated KV use of the layer with the least room left, as a share."""
        free = [0.0] * self.layers
        for room in self._rooms.values():
            each = room.free / (room.end - room.start)
            for layer in range(room.start, room.end):
                free[layer] += each
        return max(
            1 - left / total if total else 1.0
            for left, total in zip(free, self._total, strict=True)
        )


def link_shares(
    profiles: Profiles, edges: Sequence[FlowEdge]
) -> Callable[[str, str, float], float]:
    """A function to the bandwidth that Helix gives an edge: the least of link and card shares.

    A network card is shared between a peer's edges in proportion to their flow in tokens; the edges
    of one peer carry tokens of one size, except those from and to the clients.
    """
    sent: dict[str, float] = {}
    received: dict[str, float] = {}
    flows: Mapping[tuple[str, str], float] = {
        (edge.tail, edge.head): edge.tokens_per_s for edge in edges
    }
    for edge in edges:
        sent[edge.tail] = sent.get(edge.tail, 0.0) + edge.tokens_per_s
        received[edge.head] = received.get(edge.head, 0.0) + edge.tokens_per_s

    def rate(source: str, target: str, bytes_per_s: float) -> float:
        flow = flows.get((source, target), 0.0)
        if flow <= 0:
            return bytes_per_s
        limits = [bytes_per_s]
        if source in profiles.peers:
            limits.append(profiles.peers[source].out_bytes_per_s * flow / sent[source])
        if target in profiles.peers:
            limits.append(profiles.peers[target].in_bytes_per_s * flow / received[target])
        return max(1.0, min(limits))

    return rate
