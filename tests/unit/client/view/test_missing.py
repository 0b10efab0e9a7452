"""Why there is no route, where nobody at all can be used."""

from client.errors import no_route_text
from client.view.view import SwarmView, ViewConfig
from coordinator.policies.routing.routes import NoRoute
from dht.messages.types import NodeState
from tests.unit.records import record_of


def test_where_nobody_serves_the_missing_layers_are_named() -> None:
    view = SwarmView(ViewConfig(avoid_s=1.0))
    loads = record_of("a", 0, 4, state=NodeState.LOADING)
    view.take_nodes({"a": loads})
    found = view.draw((), frozenset(), 10, 1.0)
    assert isinstance(found, NoRoute)
    assert no_route_text(found) == (
        "layers 4-7 are held by nobody that can be reached; layers 0-3 are being loaded by 1 peer"
    )
