"""Puts the ways to choose a session's route behind one interface.

Routes are drawn whole when a request arrives, as in Helix and in this project. Swarm, random and
shortest queue choose hop by hop in Helix's simulator; here they use what is known at arrival.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from coordinator.routing.routes import NoRoute, Router
from coordinator.simulator.core.event_loop import Stage, SwarmSimulation
from coordinator.simulator.core.parts import SimulatedChunk, SimulatedLink, SimulatedSession
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.routing.helix import AVERAGE_OUTPUT_TOKENS
from dht.messages.types import (
    SINK,
    SOURCE,
    Assignment,
    DeviceSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlannerNode,
    Problem,
)

SWARM_FIRST_S = 0.05
SWARM_SMOOTHING = 0.8
"""Weight of the newest time in Swarm's moving average, as Helix's simulator sets it."""
KV_HIGH_WATER = 0.9
"""Maximum share of a peer's KV room that expected lengths may take, in our scheduler."""


class RequestScheduler(Protocol):
    """Chooses routes and keeps accounts of them."""

    def route(self, session: SimulatedSession) -> list[Stage] | None:
        """Stages from the first layer to the last; None: no route has room now."""

    def decode(self, session: SimulatedSession) -> None:
        """Account for a decode token of the session that starts its turn."""

    def ended(self, session: SimulatedSession) -> None:
        """Release a session that has ended or left its route."""


class HopByHop:
    """Chooses a route vertex by vertex among the links of a placement, without KV accounts."""

    def __init__(
        self,
        assignments: Sequence[Assignment],
        links: Iterable[tuple[str, str]],
        choose: Callable[[str, list[str]], str],
    ) -> None:
        self._ends = {a.peer_id: a.end for a in assignments}
        self._heads: dict[str, list[str]] = {}
        for tail, head in links:
            self._heads.setdefault(tail, []).append(head)
        self._choose = choose

    def route(self, session: SimulatedSession) -> list[Stage] | None:
        stages: list[Stage] = []
        at, layer = SOURCE, 0
        while True:
            at = self._choose(at, self._heads[at])
            if at == SINK:
                return stages
            stages.append((at, layer, self._ends[at]))
            layer = self._ends[at]

    def decode(self, session: SimulatedSession) -> None:
        """Do nothing: there are no accounts."""

    def ended(self, session: SimulatedSession) -> None:
        """Do nothing: there are no accounts."""


def shortest_queue(
    engine: SwarmSimulation, draw: Callable[[int], int]
) -> Callable[[str, list[str]], str]:
    """A function that chooses the next peer with the fewest waiting pieces; ties by ``draw``."""

    def waiting(name: str) -> int:
        peer = engine.peers[name]
        queued = sum(len(segment.queue) for segment in peer.segments)
        return queued + sum(
            1 for link in peer.inbound for piece in link.arrivals if piece.arrives_s <= engine.now_s
        )

    def choose(_at: str, heads: list[str]) -> str:
        if SINK in heads:
            return SINK
        lengths = [waiting(name) for name in heads]
        best = [n for n, length in zip(heads, lengths, strict=True) if length == min(lengths)]
        return best[draw(len(best))]

    return choose


class SwarmChoice:
    """Swarm's rule (SWARM Parallelism, Appendix C): the least sum of expected times goes next.

    Each next peer of a vertex has a priority value. A choice of the peer raises it by the moving
    average of the peer's time, from the start of a piece's transfer to the end of the peer's step.
    """

    def __init__(self, engine: SwarmSimulation) -> None:
        self._time: dict[tuple[str, str], float] = {}
        self._priority: dict[str, dict[str, float]] = {}
        engine.watch = self._observe

    def __call__(self, at: str, heads: list[str]) -> str:
        priority = self._priority.setdefault(at, dict.fromkeys(heads, SWARM_FIRST_S))
        best = min(heads, key=lambda name: (priority[name], name))
        priority[best] += self._time.get((at, best), SWARM_FIRST_S)
        return best

    def _observe(self, batch: list[SimulatedChunk], now_s: float) -> None:
        for piece in batch:
            link: SimulatedLink | None = piece.hop.came_by
            if link is None:
                continue
            pair = link.source, link.target.name
            before = self._time.get(pair, SWARM_FIRST_S)
            took_s = now_s - piece.sent_s
            self._time[pair] = SWARM_SMOOTHING * took_s + (1 - SWARM_SMOOTHING) * before


class OurScheduler:
    """The project's router (:class:`coordinator.routing.routes.Router`) over peers with KV room.

    A peer is skipped while the expected lengths of its sessions (prompt plus average answer) would
    take more than :data:`KV_HIGH_WATER` of its room; a request that finds no route waits.
    """

    def __init__(
        self, problem: Problem, profiles: Profiles, plan: Plan, *, high_water: float = KV_HIGH_WATER
    ) -> None:
        self._problem = problem
        self._profiles = profiles
        self._high_water = high_water
        self._used: dict[int, list[tuple[str, int]]] = {}
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Follow another plan from now on; open sessions keep their routes."""
        self._router = Router(plan)
        nodes = {node.peer_id: node for node in self._problem.nodes}
        held = [a for a in plan.assignments if a.start < a.end]
        self.records = {
            a.peer_id: record_of(self._problem, nodes[a.peer_id], a.start, a.end) for a in held
        }
        self._layers = {a.peer_id: a.end - a.start for a in held}
        self._room = {
            name: self._high_water * self._profiles.peers[name].kv_of(layers)
            for name, layers in self._layers.items()
        }
        for taken in self._used.values():
            for name, entries in taken:
                if name in self._room:
                    self._room[name] -= entries

    def lost(self, name: str) -> None:
        """Draw no more routes over a lost peer."""
        self.records.pop(name, None)

    def route(self, session: SimulatedSession) -> list[Stage] | None:
        tokens = session.input_tokens + AVERAGE_OUTPUT_TOKENS
        usable = {
            name: record
            for name, record in self.records.items()
            if self._room[name] >= tokens * self._layers[name]
        }
        found = self._router.next_route(usable)
        if isinstance(found, NoRoute):
            return None
        stages = [(stage.peer_id, stage.start, stage.end) for stage in found]
        taken = [(name, tokens * (end - start)) for name, start, end in stages]
        for name, entries in taken:
            self._room[name] -= entries
        self._used[session.number] = taken
        return stages

    def decode(self, session: SimulatedSession) -> None:
        """Do nothing: accounts are kept by whole sessions."""

    def ended(self, session: SimulatedSession) -> None:
        for name, entries in self._used.pop(session.number, ()):
            if name in self._room:
                self._room[name] += entries


def record_of(problem: Problem, node: PlannerNode, start: int, end: int) -> NodeRecord:
    """The record that a peer would announce while it serves ``[start, end)``."""
    return NodeRecord(
        peer_id=node.peer_id,
        name=node.peer_id,
        software_version="simulated",
        device=DeviceSpec(kind="simulated", name="simulated", memory_bytes=node.memory_bytes),
        model=problem.model,
        memory_bytes=node.memory_bytes,
        kv_tokens_min=node.kv_tokens_min,
        tokens_per_s=node.tokens_per_s,
        state=NodeState.SERVING,
        start=start,
        end=end,
    )


def even_cards(
    profiles: Profiles, links: Sequence[tuple[str, str]]
) -> Callable[[str, str, float], float]:
    """Bandwidth with a sender's network card shared evenly, as in Helix for Swarm and random."""
    count: Mapping[str, int] = {
        tail: sum(1 for other, _ in links if other == tail) for tail, _ in links
    }

    def rate(source: str, _target: str, bytes_per_s: float) -> float:
        if source not in profiles.peers:
            return bytes_per_s
        card = profiles.peers[source].out_bytes_per_s
        return min(bytes_per_s, card / max(1, count.get(source, 1)))

    return rate if count else lambda _source, _target, bytes_per_s: min(bytes_per_s, math.inf)
