"""When to plan anew, and which plan is worth its moves."""

from dataclasses import replace

import pytest

from coordinator.transition import (
    Change,
    TransitionConfig,
    choose_plan,
    elders,
    reason_to_plan,
    usable_nodes,
)
from dht.types import NodeState

CONFIG = TransitionConfig()


def change(joined: str = "", lost: str = "", since_s: float = 0.0, last_s: float = 0.0) -> Change:
    return Change(joined=frozenset(joined), lost=frozenset(lost), since_s=since_s, last_s=last_s)


@pytest.fixture
def old(make):
    return make.plan([make.span("a", 0, 4), make.span("b", 4, 8)], [], flow=10.0)


@pytest.fixture
def usable(make):
    return {name: make.record(name) for name in "ab"}


def test_joins_settle_and_losses_do_not_wait(old):
    assert reason_to_plan(None, change("a"), 0.0, 0.5, CONFIG) is None
    assert reason_to_plan(None, change("a"), 0.0, 1.0, CONFIG) == "the first plan"
    assert reason_to_plan(old, change("c", last_s=4.5), 0.0, 5.0, CONFIG) == "a peer joined"
    assert reason_to_plan(old, change(lost="a"), 0.0, 0.0, CONFIG) == "a peer left"
    assert reason_to_plan(old, None, 0.0, 59.0, CONFIG) is None
    assert reason_to_plan(old, None, 0.0, 60.0, CONFIG) == "periodic"


def test_moves_need_a_gain(old, usable):
    kept = old
    moved = replace(old, assignments=old.assignments[::-1], flow_tokens_per_s=10.9)
    moved = replace(
        moved,
        assignments=(
            replace(moved.assignments[0], peer_id="a"),
            replace(moved.assignments[1], peer_id="b"),
        ),
    )
    assert choose_plan(old, moved, kept, usable, CONFIG) is None
    better = replace(moved, flow_tokens_per_s=11.0)
    assert choose_plan(old, better, kept, usable, CONFIG) == (better, "1.10 times the flow")
    assert choose_plan(None, moved, None, usable, CONFIG) == (moved, "there was no plan")


def test_a_death_moves_no_survivor_whose_layers_are_held_elsewhere(make, usable):
    usable["c"] = make.record("c")
    spans = [make.span("a", 0, 4), make.span("b", 4, 8), make.span("c", 4, 8)]
    old = make.plan([*spans, make.span("d", 0, 4)], [], flow=20.0)
    kept = make.plan(spans, [], flow=10.0)
    best = make.plan([make.span("b", 0, 4), make.span("a", 4, 8)], [], flow=10.5)
    assert choose_plan(old, best, kept, usable, CONFIG) == (kept, "1 peer left")
    assert choose_plan(old, best, None, usable, CONFIG) == (best, "1 peer left")


def test_a_newcomer_is_added_when_nobody_moves(make, old, usable):
    usable["c"] = make.record("c")
    more = replace(old, assignments=(*old.assignments, make.span("c", 0, 4)))
    chosen = choose_plan(old, more, more, usable, CONFIG)
    assert chosen == (more, "1 peer joined, nobody moves")


def test_who_leaves_is_silent_or_serves_other_weights_is_not_counted_on(make):
    nodes = {name: make.record(name) for name in "abcd"}
    nodes["a"] = replace(nodes["a"], state=NodeState.DRAINING)
    nodes["b"] = replace(nodes["b"], model=replace(make.model, fingerprint="other"))
    assert set(usable_nodes(nodes, "f", frozenset("c"))) == {"d"}


def test_elders(make):
    nodes = {"old": make.record("old"), "new": make.record("new", joined_unix_s=200.0)}
    assert elders(nodes, 310.0, CONFIG) == {"old"}
