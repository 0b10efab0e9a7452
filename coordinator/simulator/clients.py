"""What clients and stages decide when a session opens: its route, and whether there is room."""

from collections.abc import Mapping
from typing import Protocol

from coordinator.routing.routes import NoRoute, Router
from coordinator.simulator.core.parts import SimulatedSession, Stage
from coordinator.simulator.core.profiles import Profiles
from dht.messages.types import DeviceSpec, NodeRecord, NodeState, Plan, PlannerNode, Problem

CLIENTS = 64
"""Number of clients that take turns; each draws its own routes."""
KV_HIGH_WATER = 0.9
"""Maximum share of a peer's KV room that expected lengths may take."""
AVERAGE_OUTPUT_TOKENS = 240


class RequestScheduler(Protocol):
    """Chooses routes and keeps accounts of them."""

    def route(self, session: SimulatedSession) -> list[Stage] | None:
        """Stages from the first layer to the last; None: no route has room now."""

    def decode(self, session: SimulatedSession) -> None:
        """Account for a decode token of the session that starts its turn."""

    def ended(self, session: SimulatedSession) -> None:
        """Release a session that has ended or left its route."""


class Clients:
    """Draws routes as clients do (:mod:`coordinator.routing.routes`) over peers with KV room.

    A peer is skipped while the expected lengths of its sessions (prompt plus average answer) would
    take more than :data:`KV_HIGH_WATER` of its room; a request that finds no route waits.
    """

    def __init__(self, problem: Problem, profiles: Profiles, plan: Plan) -> None:
        self._problem = problem
        self._profiles = profiles
        self._used: dict[int, list[tuple[str, int]]] = {}
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Follow another plan from now on; open sessions keep their routes."""
        self._plan = plan
        self._routers: dict[int, Router] = {}
        nodes = {node.peer_id: node for node in self._problem.nodes}
        held = [a for a in plan.assignments if a.start < a.end]
        self.records = {
            a.peer_id: record_of(self._problem, nodes[a.peer_id], a.start, a.end) for a in held
        }
        self._layers = {a.peer_id: a.end - a.start for a in held}
        self._room = {
            name: KV_HIGH_WATER * self._profiles.peers[name].kv_of(layers)
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
        stages = self._draw(session.number % CLIENTS, usable)
        if stages is None:
            return None
        taken = [(name, tokens * (end - start)) for name, start, end in stages]
        for name, entries in taken:
            self._room[name] -= entries
        self._used[session.number] = taken
        return stages

    def _draw(self, client: int, usable: Mapping[str, NodeRecord]) -> list[Stage] | None:
        router = self._routers.get(client)
        if router is None:
            router = self._routers[client] = Router(self._plan)
        found = router.next_route(usable)
        if isinstance(found, NoRoute):
            return None
        return [(stage.peer_id, stage.start, stage.end) for stage in found]

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
