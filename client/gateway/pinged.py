"""A swarm whose serving peers are pinged all the time, for those who ask whether it is well."""

from dataclasses import replace
from types import TracebackType
from typing import Self

from client.session.events import Route
from client.swarm.pulse import Pulse
from client.swarm.swarm import FULL, NOBODY, Swarm
from coordinator.routing.routes import NoRoute, being_loaded, route_from_records
from dht.messages.types import NodeState


class PingedSwarm(Swarm):
    """Knows by itself, and not by the next request that fails, when a holder is dead."""

    _pulse: Pulse | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._pulse = Pulse(self._transport, lambda: None)
        self._watch(self._pulse)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            await pulse.close()
        await super().__aexit__(exc_type, exc, traceback)

    async def refresh(self) -> None:
        """Read the DHT now, and ping those who serve by it."""
        await super().refresh()
        if self._pulse is not None:
            self._watch(self._pulse)

    def _watch(self, pulse: Pulse) -> None:
        serving = (r for r in self.nodes.values() if r.state is NodeState.SERVING)
        pulse.watch({record.peer_id: record.addresses for record in serving})

    def route(self) -> Route | NoRoute:
        """A route over peers that answer, as a short request might get it now. Takes no turn of
        theirs, and no second chance: requests need those."""
        spec = self.spec
        if spec is None:
            return NOBODY

        def over(*, full: bool) -> Route | NoRoute:
            usable = self._usable(spec, full=full, second_chance=True)
            answering = {p: r for p, r in usable.items() if not self._is_silent(p)}
            return route_from_records(answering, spec.layers)

        route = over(full=False)
        if not isinstance(route, NoRoute):
            return route
        if not isinstance(over(full=True), NoRoute):
            return FULL
        return replace(route, loading=being_loaded(self.nodes, spec))

    def _is_silent(self, peer_id: str) -> bool:
        return self._pulse is not None and self._pulse.beat(peer_id).silent
