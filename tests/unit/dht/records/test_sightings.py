"""What a process saw of peers' records itself, whatever times they say."""

from dataclasses import replace

from dht.messages.types import NodeState
from dht.records.sightings import Sightings
from tests.unit.records import record_of

FIRST_S = 1000.0


def test_nobody_is_here_for_longer_than_it_was_seen():
    sightings = Sightings()
    old, new = (record_of(p, joined_unix_s=0.0) for p in "ab")
    assert sightings.look({"a": old}, FIRST_S)["a"].joined_unix_s == FIRST_S
    later = sightings.look({"a": replace(old, sessions=3), "b": new}, FIRST_S + 50)
    assert (later["a"].joined_unix_s, later["b"].joined_unix_s) == (FIRST_S, FIRST_S + 50)
    assert later["a"].sessions == 3
    sightings.look({"b": new}, FIRST_S + 60)
    again = sightings.look({"a": old}, FIRST_S + 70)
    assert again["a"].joined_unix_s == FIRST_S + 70, "who was away comes anew"


def test_who_offers_something_else_is_here_since_then():
    sightings = Sightings()
    record = record_of("a", 0, 2)
    offers = [
        replace(record, tokens_per_s=(1e15,)),
        replace(record, memory_bytes=1),
        replace(record, state=NodeState.DRAINING),
        record,
    ]
    sightings.look({"a": record}, FIRST_S)
    assert not sightings.changed_since(0.0)
    for turn, offer in enumerate(offers, 1):
        at_s = FIRST_S + 10 * turn
        assert sightings.look({"a": offer}, at_s)["a"].joined_unix_s == at_s
        assert sightings.changed_since(at_s - 1) == {"a"}
    assert not sightings.changed_since(at_s)


def test_a_peer_that_knows_its_times_better_is_no_newcomer():
    """Beyond a quarter in all it is one, in however many steps it went there."""
    sightings = Sightings()
    first = record_of(
        "a", 0, 2, decode_layer_ns=((1, 1000, 1000), (16, 2000, 4000)), up_bytes_per_s=1e6
    )

    def joined_s(at_s: float, **told: object) -> float:
        record = replace(first, **told)  # type: ignore[arg-type]
        return sightings.look({"a": record}, at_s)["a"].joined_unix_s

    for step, slower in enumerate((1.0, 1.08, 1.16, 1.24)):
        times = ((1, 1000, 1000), (16, 2000, int(4000 * slower)))
        assert joined_s(FIRST_S + step, decode_layer_ns=times) == FIRST_S
    assert not sightings.changed_since(0.0)
    assert joined_s(FIRST_S + 5, up_bytes_per_s=1.2e6) == FIRST_S
    changes = [
        {"decode_layer_ns": ((1, 1000, 1000), (16, 2000, 5100))},
        {"decode_layer_ns": ((1, 1000, 1000), (17, 2000, 5100))},
        {"decode_layer_ns": ()},
        {"decode_layer_ns": (), "up_bytes_per_s": 2e6},
        {"decode_layer_ns": (), "up_bytes_per_s": None},
        {"decode_layer_ns": (), "up_bytes_per_s": 0.0},
    ]
    for step, change in enumerate(changes, 10):
        assert joined_s(FIRST_S + step, **change) == FIRST_S + step
        assert sightings.changed_since(FIRST_S + step - 1) == {"a"}


def test_a_peer_is_not_at_rest_for_saying_so():
    """It says in each record that it has just moved, and serves the same layers all the time."""
    sightings = Sightings()
    record = record_of("a", 0, 2)
    for seconds in range(0, 600, 10):
        told = replace(record, moved_unix_s=FIRST_S + seconds)
        seen = sightings.look({"a": told}, FIRST_S + seconds)
        assert seen["a"].moved_unix_s == FIRST_S
    moved = replace(record, start=1, moved_unix_s=FIRST_S + 600)
    assert sightings.look({"a": moved}, FIRST_S + 601)["a"].moved_unix_s == FIRST_S + 600
