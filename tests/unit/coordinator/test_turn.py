"""When a peer may give up its layers for others."""

from dataclasses import replace

from coordinator.turn import TurnConfig, WaitFor, why_wait
from dht.types import NodeState

CONFIG = TurnConfig()
NOW_S = 1e6


def waits(plan, mine, *others):
    nodes = {record.peer_id: record for record in (mine, *others)}
    return [wait.what for wait in why_wait(plan, mine, nodes, NOW_S, CONFIG)]


def test_a_later_wave_waits_until_the_earlier_one_serves(make):
    plan = make.plan([make.span("a", 4, 8), make.span("b", 0, 4), make.span("c", 4, 8)], [])
    plan = replace(plan, waves=(("b",), ("a",)))
    a, c = make.record("a", 0, 4), make.record("c", 4, 8)
    loading = replace(make.record("b"), state=NodeState.LOADING)
    assert waits(plan, a, loading, c) == [WaitFor.EARLIER_WAVES, WaitFor.HOLDER]
    assert waits(plan, a, make.record("b", 0, 4), c) == []
    # The peer of the first wave, and one that serves nothing yet, wait for nobody.
    assert waits(plan, make.record("b", 4, 8), a, c) == []
    assert waits(plan, loading, a, c) == []


def test_a_peer_of_an_earlier_wave_that_is_gone_is_not_waited_for(make):
    plan = make.plan([make.span("a", 4, 8), make.span("b", 0, 4)], [])
    plan = replace(plan, waves=(("b",), ("a",)))
    assert waits(plan, make.record("a", 0, 4), make.record("c", 0, 8)) == []


def test_the_last_holder_waits_for_another(make):
    plan = make.plan([make.span("a", 4, 8)], [])
    assert waits(plan, make.record("a", 0, 8), make.record("b", 0, 3)) == [WaitFor.HOLDER]
    assert waits(plan, make.record("a", 0, 8), make.record("b", 0, 4)) == []


def test_who_moved_lately_rests_while_every_layer_has_a_holder(make):
    plan = make.plan([make.span("a", 0, 4)], [])
    mine = replace(make.record("a", 4, 8), moved_unix_s=NOW_S - 10)
    assert waits(plan, mine, make.record("b", 0, 8)) == [WaitFor.REST]
    assert waits(plan, mine, make.record("b", 2, 8)) == []
    rested = replace(mine, moved_unix_s=NOW_S - 301)
    assert waits(plan, rested, make.record("b", 0, 8)) == []
