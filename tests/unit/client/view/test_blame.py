"""Laws of blame where several peers may have failed a session."""

from client.view.view import SwarmView, ViewConfig
from coordinator.policies.routing.routes import NoRoute
from tests.unit.records import record_of


def test_pings_clear_a_peer_that_was_blamed_for_its_dead_neighbours() -> None:
    silent: set[str] = set()
    view = SwarmView(ViewConfig(avoid_s=60.0), is_silent=silent.__contains__)
    first = record_of("first", 0, 4)
    dead = {peer_id: record_of(peer_id, 4, 8) for peer_id in ("dead 0", "dead 1")}
    view.take_nodes({"first": first, "living": record_of("living", 4, 8)} | dead)

    assert view.at_fault(("dead 0", "first"), 1.0) == "dead 0"
    assert view.at_fault(("dead 1", "first"), 1.0) == "first", "it is in both cases"
    assert not view.is_troubled(1.0)
    view.avoid("first", None, 0.0, 1.0)
    assert view.is_troubled(2.0)
    assert isinstance(view.draw((), frozenset(), 10, 2.0), NoRoute)
    silent.add("dead 0")
    view.heard()
    assert isinstance(view.draw((), frozenset(), 10, 2.0), NoRoute), "of dead 1 nothing is known"
    silent.add("dead 1")
    view.heard()
    assert not isinstance(view.draw((), frozenset(), 10, 2.0), NoRoute)


def test_a_peer_that_fails_with_several_stays_at_fault_while_all_of_them_answer() -> None:
    view = SwarmView(ViewConfig(avoid_s=60.0))
    view.take_nodes({peer_id: record_of(peer_id, 0, 8) for peer_id in ("liar", "one", "other")})
    view.at_fault(("one", "liar"), 1.0)
    assert view.at_fault(("other", "liar"), 1.0) == "liar"
    view.avoid("liar", None, 0.0, 1.0)
    view.heard()
    assert view.avoidance.avoids(view.nodes["liar"], 2.0)
