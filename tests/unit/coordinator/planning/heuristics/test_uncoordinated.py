"""What a peer takes when nobody plans."""

from dataclasses import replace

from coordinator.planning.heuristics.uncoordinated import span_to_take
from dht.messages.types import Reach


def test_the_worst_served_layers_are_taken(make):
    mine = make.record("me", memory=450)
    serving = {
        "a": make.record("a", 0, 4),
        "b": make.record("b", 4, 8),
        "c": make.record("c", 0, 4),
    }
    assert span_to_take(mine, serving) == make.span("me", 4, 7)
    assert span_to_take(mine, {"b": serving["b"]}).start == 0, "layers that nobody holds"


def test_alone_it_takes_what_it_can_hold(make):
    assert span_to_take(make.record("me", memory=1000), {}) == make.span("me", 0, 8)


def test_records_that_cannot_be_right_do_not_count(make):
    boasting = replace(make.record("a", 0, 8), tokens_per_s=())
    assert span_to_take(make.record("me", memory=1000), {"a": boasting}) == make.span("me", 0, 8)


def test_who_can_hold_nothing_takes_nothing(make):
    assert span_to_take(make.record("me", memory=10), {}) is None


def test_who_cannot_be_reached_takes_nothing_and_serves_nobody(make):
    lost = replace(make.record("a", 0, 8), reach=Reach.NONE)
    mine = make.record("me", memory=450)
    assert span_to_take(mine, {"a": lost}) == span_to_take(mine, {})
    assert span_to_take(replace(mine, reach=Reach.NONE), {}) is None
