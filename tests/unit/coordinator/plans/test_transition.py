"""When to plan anew, and which plan is worth its moves."""

from dataclasses import replace

import pytest

from coordinator.plans.transition import (
    PERIODIC,
    Change,
    TransitionConfig,
    carried_out,
    choose_plan,
    elders,
    left_out,
    reason_to_plan,
    settled,
    usable_nodes,
    with_effects,
)
from dht.messages.types import NodeState, Reach

CONFIG = TransitionConfig()
NOW_S = 1e6


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
    assert reason_to_plan(old, None, 0.0, 60.0, CONFIG) == PERIODIC
    assert reason_to_plan(old, None, 0.0, 299.0, CONFIG, thorough=True) is None
    assert reason_to_plan(old, None, 0.0, 300.0, CONFIG, thorough=True) == PERIODIC


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
    assert choose_plan(old, moved, kept, usable, CONFIG, NOW_S) is None
    better = replace(moved, flow_tokens_per_s=11.0)
    assert choose_plan(old, better, kept, usable, CONFIG, NOW_S) == (
        better,
        "1.10 times the tokens/s",
    )
    assert choose_plan(None, moved, None, usable, CONFIG, NOW_S) == (moved, "there was no plan")


def test_a_plan_that_nobody_can_carry_out_is_not_chosen_for_its_gain(make, old):
    """Two peers would have to give up their layers to each other, each before the other."""
    usable = {"a": make.record("a", 0, 4), "b": make.record("b", 4, 8)}
    swapped = (make.span("b", 0, 4), make.span("a", 4, 8))
    better = replace(old, assignments=swapped, flow_tokens_per_s=20.0)
    assert choose_plan(old, better, old, usable, CONFIG, NOW_S) is None
    assert choose_plan(old, better, old, usable, CONFIG, NOW_S, 2.0, tried=True) is None
    usable["c"] = make.record("c", 0, 8)
    third = replace(old, assignments=(*old.assignments, make.span("c", 0, 8)))
    both = replace(better, assignments=(*swapped, make.span("c", 0, 8)))
    chosen = choose_plan(third, both, third, usable, CONFIG, NOW_S)
    assert chosen == (both, "2.00 times the tokens/s")


def test_what_was_tried_counts_for_more_than_the_estimate(make, old, usable):
    swapped = (make.span("b", 0, 4), make.span("a", 4, 8))
    promising = replace(old, assignments=swapped, flow_tokens_per_s=20.0)
    assert choose_plan(old, promising, old, usable, CONFIG, NOW_S, 1.04, tried=True) is None
    modest = replace(promising, flow_tokens_per_s=10.0)
    assert choose_plan(old, modest, old, usable, CONFIG, NOW_S) is None
    chosen = choose_plan(old, modest, old, usable, CONFIG, NOW_S, 1.05, tried=True)
    assert chosen == (modest, "1.05 times the tokens/s")


def test_a_death_moves_no_survivor_whose_layers_are_held_elsewhere(make, usable):
    usable["c"] = make.record("c")
    spans = [make.span("a", 0, 4), make.span("b", 4, 8), make.span("c", 4, 8)]
    old = make.plan([*spans, make.span("d", 0, 4)], [], flow=20.0)
    kept = make.plan(spans, [], flow=10.0)
    best = make.plan([make.span("b", 0, 4), make.span("a", 4, 8)], [], flow=10.5)
    # Only one holder of the first layers is left, but the best plan has no more of them.
    assert choose_plan(old, best, kept, usable, CONFIG, NOW_S) == (kept, "1 peer left")
    assert choose_plan(old, best, None, usable, CONFIG, NOW_S) == (best, "1 peer left")


def test_a_newcomer_is_added_when_nobody_moves(make, old, usable):
    usable["c"] = make.record("c")
    more = replace(old, assignments=(*old.assignments, make.span("c", 0, 4)))
    chosen = choose_plan(old, more, more, usable, CONFIG, NOW_S)
    assert chosen == (more, "1 peer joined, nobody moves")


def test_who_leaves_is_silent_or_serves_other_weights_is_not_counted_on(make):
    nodes = {name: make.record(name) for name in "abcd"}
    nodes["a"] = replace(nodes["a"], state=NodeState.DRAINING)
    nodes["b"] = replace(nodes["b"], model=replace(make.model, root="other"))
    assert set(usable_nodes(nodes, make.model, frozenset("c"))) == {"d"}


@pytest.mark.parametrize(
    "lie", [{"layers": 9}, {"context_tokens": 1}, {"vocab": 1}, {"name": "m2"}]
)
def test_the_same_fingerprint_with_another_model_counts_for_nothing(make, lie):
    nodes = {name: make.record(name) for name in "ab"}
    nodes["a"] = replace(nodes["a"], model=replace(make.model, **lie))
    assert set(usable_nodes(nodes, make.model, frozenset())) == {"b"}


def test_who_cannot_be_reached_is_not_counted_on(make):
    nodes = {reach: replace(make.record(reach.value), reach=reach) for reach in Reach}
    assert set(usable_nodes(nodes, make.model, frozenset())) == set(Reach) - {Reach.NONE}
    assert left_out(nodes, make.model) == "; 1 more is left out: others cannot reach them"
    assert left_out(nodes, replace(make.model, root="other")) == ""


def test_elders(make):
    nodes = {"old": make.record("old"), "new": make.record("new", joined_unix_s=200.0)}
    assert elders(nodes, 310.0, CONFIG) == {"old"}


def test_who_moved_lately_stays_unless_layers_are_lost(make, old, usable):
    kept = old
    better = replace(
        old, assignments=(make.span("b", 0, 4), make.span("a", 4, 8)), flow_tokens_per_s=20.0
    )
    usable["a"] = replace(usable["a"], moved_unix_s=NOW_S - 299)
    assert choose_plan(old, better, kept, usable, CONFIG, NOW_S) is None
    assert choose_plan(old, better, None, usable, CONFIG, NOW_S) == (
        better,
        "2.00 times the tokens/s",
    )
    later_s = NOW_S + 2
    chosen = choose_plan(old, better, kept, usable, CONFIG, later_s)
    assert chosen == (better, "2.00 times the tokens/s")


def test_lost_replicas_are_worth_a_move(make, usable):
    usable |= {name: make.record(name) for name in "cd"}
    halves = [make.span("a", 0, 4), make.span("b", 4, 8), make.span("c", 0, 4)]
    old = make.plan([*halves, make.span("d", 0, 4), make.span("e", 4, 8)], [], flow=10.0)
    kept = make.plan([*halves, make.span("d", 0, 4)], [], flow=10.0)
    best = make.plan([*halves, make.span("d", 4, 8)], [], flow=10.0)
    chosen = choose_plan(old, best, kept, usable, CONFIG, NOW_S)
    assert chosen == (best, "1 peer left")
    poor = replace(best, flow_tokens_per_s=9.0)
    assert choose_plan(old, poor, kept, usable, CONFIG, NOW_S) == (kept, "1 peer left")


def test_a_repair_that_nobody_can_carry_out_is_not_chosen_where_another_can_be(make):
    """Layers 6 and 7 are lost, and both peers may give theirs up only for the other."""
    usable = {"a": make.record("a", 2, 6), "b": make.record("b", 0, 2)}
    old = make.plan([make.span("a", 2, 6), make.span("b", 0, 2), make.span("c", 6, 8)], [])
    best = make.plan([make.span("a", 0, 4), make.span("b", 4, 8)], [], flow=20.0)
    kept = make.plan([make.span("b", 0, 4), make.span("a", 4, 8)], [], flow=10.0)
    assert choose_plan(old, best, kept, usable, CONFIG, NOW_S) == (kept, "1 peer left")
    assert choose_plan(old, best, None, usable, CONFIG, NOW_S) == (best, "1 peer left")


def test_a_death_that_leaves_two_holders_of_every_layer_moves_nobody_for_a_while(make):
    usable = {name: make.record(name) for name in "abd"}
    whole = [make.span("a", 0, 8), make.span("b", 0, 8)]
    old = make.plan([*whole, make.span("c", 0, 8)], [], flow=15.0)
    kept = make.plan(whole, [], flow=10.0)
    thin = make.plan([make.span("a", 0, 4), make.span("b", 4, 8)], [], flow=20.0)
    assert choose_plan(old, thin, kept, usable, CONFIG, NOW_S) == (kept, "1 peer left")
    # Nor for a while after that, whoever leads then, and not when somebody joins; later they do.
    assert choose_plan(kept, thin, kept, usable, CONFIG, NOW_S, lost_lately=True) is None
    more = replace(kept, assignments=(*kept.assignments, make.span("d", 0, 8)))
    chosen = choose_plan(kept, thin, more, usable, CONFIG, NOW_S, lost_lately=True)
    assert chosen == (more, "1 peer joined, nobody moves")
    chosen = choose_plan(kept, thin, kept, usable, CONFIG, NOW_S)
    assert chosen == (thin, "2.00 times the tokens/s")
    # Where a layer has one holder, or none, peers move as ever.
    half = make.plan([make.span("a", 0, 8), make.span("b", 0, 4)], [], flow=10.0)
    old = make.plan([*half.assignments, make.span("c", 0, 8)], [], flow=15.0)
    assert choose_plan(old, thin, half, usable, CONFIG, NOW_S) == (thin, "1 peer left")
    assert choose_plan(old, thin, None, usable, CONFIG, NOW_S) == (thin, "1 peer left")


def test_another_s_plan_counts_as_far_as_it_is_carried_out(make):
    """``a`` waits to give up its layers to ``s``, which has just come and says that it has them."""
    plan = make.plan([make.span("s", 0, 4), make.span("a", 4, 8), make.span("c", 0, 8)], [])
    usable = {"s": make.record("s", 0, 4), "a": make.record("a", 0, 4)}
    loading = {"a": replace(make.record("a", 4, 8), state=NodeState.LOADING)}
    c = make.span("c", 0, 8)  # is gone, and its loss is seen
    assert carried_out(plan, usable, {"a"}).assignments == (make.span("a", 0, 4), c)
    assert carried_out(plan, usable).assignments == (
        make.span("s", 0, 4),
        make.span("a", 0, 4),
        c,
    )
    assert carried_out(plan, usable | loading).assignments == plan.assignments


def test_a_second_holder_of_every_layer_is_worth_moves_at_about_equal_throughput(make):
    usable = {name: make.record(name) for name in "abcd"}
    chain = [make.span(name, 2 * i, 2 * i + 2) for i, name in enumerate("abcd")]
    halves = [make.span("a", 0, 4), make.span("b", 4, 8), make.span("c", 0, 4)]
    halves.append(make.span("d", 4, 8))
    old, best = make.plan(chain, [], flow=10.0), make.plan(halves, [], flow=9.9)
    chosen = choose_plan(old, best, old, usable, CONFIG, NOW_S)
    assert chosen == (best, "2 holders of every layer, not 1")
    assert choose_plan(old, best, old, usable, CONFIG, NOW_S, 0.97) is None
    assert choose_plan(best, old, best, usable, CONFIG, NOW_S, 1.09) is None


def test_newcomers_are_no_second_holders(make):
    """``x`` and ``y`` announce all layers since a moment ago: nobody moves for them."""
    joined = {"a": 3600.0, "b": 400.0, "x": 299.0, "y": 1.0}
    usable = {
        name: replace(make.record(name), joined_unix_s=NOW_S - ago) for name, ago in joined.items()
    }
    assert settled(usable, NOW_S, CONFIG) == {"a", "b"}
    assert settled({p: usable[p] for p in "xy"}, NOW_S, CONFIG) == {"x"}
    assert settled({}, NOW_S, CONFIG) == frozenset()
    new = [make.span("x", 0, 8), make.span("y", 0, 8)]
    whole = [make.span("a", 0, 8), make.span("b", 0, 8), *new]
    thin = [make.span("a", 0, 4), make.span("b", 4, 8), *new]
    old, best = make.plan(whole, [], flow=10.0), make.plan(thin, [], flow=10.0)
    assert choose_plan(old, best, old, usable, CONFIG, NOW_S) is None
    assert choose_plan(best, old, best, usable, CONFIG, NOW_S) == (
        old,
        "2 holders of every layer, not 1",
    )


def test_a_plan_states_its_waves_and_what_it_makes_peers_read(make):
    usable = {"a": make.record("a", 0, 4), "b": make.record("b", 4, 8), "c": make.record("c")}
    plan = make.plan([make.span("a", 2, 8), make.span("b", 4, 8), make.span("c", 0, 4)], [])
    stated = with_effects(plan, usable)
    assert stated.waves == (("c",), ("a",))
    assert (stated.wave_of("c"), stated.wave_of("a"), stated.wave_of("b")) == (0, 1, 0)
    # a: four layers and the head; c: four layers and the embedding; b has what it needs.
    assert stated.fetch_bytes == 4 * 100 + 70 + 4 * 100 + 50


def test_plans_are_compared_by_what_they_would_serve(old, usable):
    """A tenth more of the estimate is worth a move, whatever the flow says."""
    kept = replace(old, estimate_tokens_per_s=5.0)
    spans = (replace(old.assignments[1], peer_id="a"), replace(old.assignments[0], peer_id="b"))
    best = replace(old, assignments=spans, flow_tokens_per_s=8.0, estimate_tokens_per_s=5.5)
    chosen = choose_plan(old, best, kept, usable, CONFIG, NOW_S)
    assert chosen == (best, "1.10 times the tokens/s")
    wide = replace(best, flow_tokens_per_s=20.0, estimate_tokens_per_s=5.4)
    assert choose_plan(old, wide, kept, usable, CONFIG, NOW_S) is None
    # A plan that would serve nothing is worth less than any other, however wide its flow.
    idle = replace(kept, flow_tokens_per_s=1e6, estimate_tokens_per_s=0.0)
    chosen = choose_plan(old, best, idle, usable, CONFIG, NOW_S)
    assert chosen == (best, "what served nothing serves")


def test_rest_protects_nobody_from_a_repair_that_moves_peers_anyway(make, old, usable):
    """Another peer must move for the lost layers; then the much better plan is as good a move."""
    usable["a"] = replace(usable["a"], moved_unix_s=NOW_S - 10)
    kept = replace(old, assignments=(make.span("a", 0, 4), make.span("b", 3, 8)))
    best = replace(
        old, assignments=(make.span("a", 4, 8), make.span("b", 0, 4)), flow_tokens_per_s=20.0
    )
    gone = replace(old, assignments=(*old.assignments, make.span("c", 0, 2)))
    chosen = choose_plan(gone, best, kept, usable, CONFIG, NOW_S)
    assert chosen == (best, "1 peer left")
