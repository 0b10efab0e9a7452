"""What happens to an answer's route, in a line for whoever reads the answer. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from client.errors import no_route_text
from client.session.controller import ControllerState, RouteStatus


@dataclass(slots=True)
class RouteWords:
    """Turns each status of one answer's route into a line; the first tokens make it obsolete."""

    name_of: Callable[[str], str]
    """A peer's name by its id, fit to be shown."""
    _was_open: bool = False

    def line(self, status: RouteStatus) -> str:
        if status.state is ControllerState.RUNNING:
            self._was_open = True
            return "on the way…"
        waits = "" if status.no_route is None else f" waiting: {no_route_text(status.no_route)}"
        if status.lost and self._was_open:
            return f"{self._names(status.lost)} left; rerouting…{waits}"
        if status.lost:
            names = self._names(status.lost)
            return f"{names} did not take it; looking for another route…{waits}"
        if status.state is ControllerState.OPENING:
            stages = dict.fromkeys(stage.peer_id for stage in status.route)
            return f"asking {self._names(stages)}…"
        return f"looking for a route…{waits}"

    def _names(self, peers: Iterable[str]) -> str:
        names = [self.name_of(peer_id) for peer_id in peers]
        return ", ".join(sorted(names) if isinstance(peers, frozenset) else names)
