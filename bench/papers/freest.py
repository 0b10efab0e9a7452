"""Llumnix's dispatch (OSDI'24, §4.4), carried over to routes: the freest takes the next request.

Real clients draw by turns (:mod:`coordinator.policies.routing.routes`); this is what they are
compared with.
"""

from collections.abc import Mapping

from coordinator.evaluation.max_flow import paths
from coordinator.policies.routing.balance import freeness
from coordinator.simulator.clients import Clients
from coordinator.simulator.core.parts import SimulatedSession, Stage
from dht.messages.types import NodeRecord, Plan


class Freest(Clients):
    """Chooses among the plan's routes the one whose least free stage is the freest."""

    def adopt(self, plan: Plan) -> None:
        super().adopt(plan)
        held = {a.peer_id: a for a in plan.assignments}
        self._routes = [
            [(name, held[name].start, held[name].end) for name in peers]
            for peers, _ in paths(plan.edges)
        ]

    def draw(
        self, session: SimulatedSession, usable: Mapping[str, NodeRecord]
    ) -> list[Stage] | None:
        able = [route for route in self._routes if all(name in usable for name, _, _ in route)]
        return max(able, key=self._freeness, default=None)

    def _freeness(self, route: list[Stage]) -> float:
        return min(
            freeness(self.rooms[name].free_tokens, self._peers[name].sessions)
            for name, _, _ in route
        )
