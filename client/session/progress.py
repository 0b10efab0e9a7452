"""What happened to one answer, and what it waits for, in plain words."""

from collections.abc import Callable
from dataclasses import dataclass

from client.errors import missing_text
from coordinator.routing.routes import NoRoute
from dht.messages.types import RouteStage

StatusCallback = Callable[[str], None]


class Waiting:
    """Says once, in plain words, what an answer waits for."""

    def __init__(self, on_status: StatusCallback) -> None:
        self._on_status = on_status
        self._heard = ""
        self.text = ""

    def heard(self, reason: str) -> None:
        """Remember why the last route failed."""
        self._heard = reason

    def say(self, no_route: NoRoute) -> None:
        """Tell the caller when the reason is new."""
        text = no_route.reason
        if no_route.missing:
            text = missing_text(no_route.missing, no_route.loading, "can be reached")
        if self._heard:
            text += f" ({self._heard})"
        if text != self.text:
            self.text = text
            self._on_status(f"waiting: {text}")

    def over(self) -> None:
        """The answer goes on."""
        self.text = self._heard = ""


@dataclass(slots=True)
class Progress:
    """What happened to one answer so far."""

    route: tuple[RouteStage, ...] = ()
    failovers: int = 0
