"""What a person reads while an answer looks for its way."""

from client.session.controller import ControllerState, RouteStatus
from client.terminal.route_words import RouteWords
from coordinator.policies.routing.routes import NoRoute
from dht.messages.types import RouteStage

ROUTE = tuple(
    RouteStage(peer_id=peer, start=at, end=at + 2) for at, peer in ((0, "zoe"), (2, "amy"))
)


def status(state: ControllerState, *lost: str, no_route: NoRoute | None = None) -> RouteStatus:
    return RouteStatus(
        state=state, route=ROUTE, lost=frozenset(lost), failovers=0, no_route=no_route
    )


def test_peers_are_named_in_the_order_of_the_route_and_those_that_left_by_name() -> None:
    words = RouteWords(str.capitalize)
    assert words.line(status(ControllerState.DRAWING)) == "looking for a route…"
    assert words.line(status(ControllerState.OPENING)) == "asking Zoe, Amy…"
    assert words.line(status(ControllerState.OPENING, "amy")) == (
        "Amy did not take it; looking for another route…"
    )
    words.line(status(ControllerState.RUNNING))
    missing = NoRoute(missing=((2, 4),), reason="")
    assert words.line(status(ControllerState.DRAWING, "zoe", "amy", no_route=missing)) == (
        "Amy, Zoe left; rerouting… waiting: layers 2-3 are held by nobody that can be reached"
    )
