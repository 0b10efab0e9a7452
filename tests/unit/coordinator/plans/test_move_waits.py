"""When a peer may give up its layers for others."""

from dataclasses import replace

from coordinator.plans.move_waits import MoveWaitConfig, WaitFor, given_up, other_holders, why_wait
from dht.messages.types import NodeState

CONFIG = MoveWaitConfig()
NOW_S = 1e6


def waits(plan, mine, *others, proven="abc", answering="abcds"):
    nodes = {record.peer_id: record for record in (mine, *others)}
    found = why_wait(plan, mine, nodes, proven, answering, NOW_S, CONFIG)
    return [wait.what for wait in found]


def test_a_later_wave_waits_until_the_earlier_one_serves(make):
    plan = make.plan([make.span("a", 4, 8), make.span("b", 0, 4), make.span("c", 4, 8)], [])
    plan = replace(plan, waves=(("b",), ("a",)))
    a, c = make.record("a", 0, 4), make.record("c", 4, 8)
    loading = replace(make.record("b"), state=NodeState.LOADING)
    assert waits(plan, a, loading, c) == [WaitFor.EARLIER_WAVES, WaitFor.HOLDER]
    assert waits(plan, a, make.record("b", 0, 4), c) == []
    # A peer that serves nothing yet waits for nobody.
    assert waits(plan, loading, a, c) == []


def test_a_peer_of_an_earlier_wave_that_is_gone_is_not_waited_for(make):
    plan = make.plan([make.span(p, 0, 8) for p in "abc"], [])
    plan = replace(plan, waves=(("b",), ("a",)))
    assert waits(plan, make.record("a", 0, 4), make.record("c", 0, 8)) == []


def test_the_last_holder_waits_for_another(make):
    plan = make.plan([make.span("a", 4, 8), make.span("b", 0, 4), make.span("c", 4, 8)], [])
    mine, c = make.record("a", 0, 4), make.record("c", 4, 8)
    assert waits(plan, mine, make.record("b", 0, 3), c) == [WaitFor.HOLDER]
    assert waits(plan, mine, make.record("b", 0, 4), c) == []
    # Whom the plan leaves out may be dead though its record still lives.
    assert waits(plan, mine, make.record("dead", 0, 8), c) == [WaitFor.HOLDER]


def test_who_has_not_shown_its_layers_is_no_other_holder(make):
    plan = make.plan([make.span("a", 4, 8), make.span("b", 0, 4), make.span("c", 4, 8)], [])
    mine, b, c = make.record("a", 0, 6), make.record("b", 0, 4), make.record("c", 4, 8)
    nodes = {record.peer_id: record for record in (mine, b, c)}
    assert given_up(plan, mine) == set(range(4))
    assert [record.peer_id for record in other_holders(plan, mine, nodes)] == ["b", "c"]
    assert waits(plan, mine, b, c, proven="c") == [WaitFor.HOLDER]
    assert CONFIG.limit_s(WaitFor.HOLDER) == float("inf")
    assert waits(plan, mine, b, c, proven="bc") == []
    # It will hold layers 4 and 5 again, but serves nothing while it loads.
    assert waits(plan, mine, b, c, proven="b") == [WaitFor.HOLDER]


def test_two_that_keep_a_layer_move_one_after_the_other(make):
    plan = make.plan([make.span(p, 3, 8) for p in "ab"] + [make.span("c", 0, 3)], [])
    a, b, c = make.record("a", 0, 5), make.record("b", 0, 5), make.record("c", 0, 3)
    stranger = make.record("s", 0, 8)
    plan = replace(plan, assignments=(*plan.assignments, make.span("s", 0, 8)))
    assert waits(plan, a, b, c, stranger) == []
    assert waits(plan, b, a, c, stranger) == [WaitFor.HOLDER]
    loading = replace(make.record("a", 3, 8), state=NodeState.LOADING)
    assert waits(plan, b, loading, c, stranger) == [WaitFor.HOLDER]
    assert waits(plan, b, make.record("a", 3, 8), c, stranger) == []
    # Nobody but these two announces layer 3, and one is gone: the other must leave it for a moment.
    assert waits(plan, b, c, make.record("d", 5, 8)) == []


def test_nobody_waits_for_its_turn_while_a_layer_has_no_holder(make):
    plan = make.plan([make.span("a", 0, 8), make.span("b", 0, 4), make.span("c", 2, 6)], [])
    plan = replace(plan, waves=(("b",), ("a",)))
    mine = replace(make.record("a", 0, 4), moved_unix_s=NOW_S - 10)
    c, b = make.record("c", 4, 7), replace(make.record("b"), state=NodeState.LOADING)
    # Whoever announces the last layer does not answer.
    assert waits(plan, mine, b, c, make.record("dead", 4, 8)) == []
    both = [WaitFor.EARLIER_WAVES, WaitFor.REST]
    assert waits(plan, mine, b, c, make.record("d", 7, 8)) == both


def test_no_emergency_makes_a_peer_give_up_what_nobody_else_has_shown(make):
    """A plan that leaves out the only other holder of some layers makes none of it."""
    plan = make.plan([make.span("a", 4, 8), make.span("s", 0, 4)], [])
    mine, out = make.record("a", 0, 4), make.record("b", 4, 8)
    stranger = make.record("s", 0, 4)
    for others in [(stranger,), (stranger, out), (out,), ()]:
        for answering in ["", "s", "bs"]:
            found = waits(plan, mine, *others, proven="b", answering=answering)
            assert found == [WaitFor.HOLDER], (others, answering)
    assert waits(plan, mine, stranger, out, proven="s") == []


def test_who_serves_is_what_answers_not_what_the_plan_names(make):
    plan = make.plan([make.span("a", 0, 8), make.span("c", 4, 8)], [])
    mine = replace(make.record("a", 0, 4), moved_unix_s=NOW_S - 10)
    unplanned = make.record("b", 4, 8)
    assert waits(plan, mine, unplanned, answering="b") == [WaitFor.REST]
    assert waits(plan, mine, unplanned, answering="") == []
    other = replace(unplanned, model=replace(unplanned.model, root="another"))
    assert waits(plan, mine, other, answering="b") == []


def test_holders_that_may_be_leaving_by_another_plan_are_not_counted_on(make):
    plan = make.plan([make.span("a", 4, 8), make.span("b", 0, 4), make.span("c", 4, 8)], [])
    mine, b, c = make.record("a", 0, 4), make.record("b", 0, 4), make.record("c", 4, 8)
    later = replace(plan.version, counter=plan.version.counter + 1)
    assert waits(plan, mine, b, c) == []
    assert waits(plan, mine, replace(b, plan_version=later), c) == [WaitFor.HOLDER]
    d = make.record("d", 0, 4)
    for version, needs in [(plan.version, []), (later, [WaitFor.HOLDER])]:
        assert waits(plan, mine, replace(d, plan_version=version), c, proven="d") == needs


def test_who_moved_lately_rests_while_every_layer_has_a_holder(make):
    plan = make.plan([make.span("a", 0, 4), make.span("b", 0, 8)], [])
    mine = replace(make.record("a", 4, 8), moved_unix_s=NOW_S - 10)
    assert waits(plan, mine, make.record("b", 0, 8)) == [WaitFor.REST]
    rested = replace(mine, moved_unix_s=NOW_S - 301)
    assert waits(plan, rested, make.record("b", 0, 8)) == []
