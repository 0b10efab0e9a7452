"""Peers count for little more than what a client knows, however fast they say they are."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from client.view.belief import believed
from client.view.reader import ReaderConfig, SwarmReader
from client.view.view import ViewConfig
from coordinator.policies.routing.quickest import token_s
from coordinator.policies.routing.routes import NoRoute
from coordinator.problem.model_pin import ModelPin
from testing.clock import run_virtual
from testing.network import MemoryNetwork
from tests.unit.client.view.test_reader import Told
from tests.unit.coordinator.conftest import Make

FRESH = 40
BELIEVED_TIMES = ViewConfig().believed_times


def fast(peer_id, times, layer_ns=3_000_000):
    """A peer with all layers, ``times`` as fast as others by T_j and by its steps."""
    ns = max(1, int(layer_ns / times))
    return replace(
        Make.record(peer_id, 0, 8, rate=800.0 * times),
        decode_layer_ns=((1, ns, ns), (16, 2 * ns, 2 * ns)),
        prompt_layer_ns=((64, 4 * ns, 4 * ns),),
    )


@pytest.mark.parametrize("times", [50.0, 1e9])
def test_nobody_counts_for_much_more_than_the_fastest_that_is_known(times):
    known, slow = fast("known", 1.0), fast("slow", 0.1)
    nodes = {r.peer_id: r for r in (known, slow, fast("liar", times))}
    held = believed(nodes, {"known"}, BELIEVED_TIMES)
    assert held["known"] is known
    assert held["slow"] == slow
    for load in (1, 16):
        ratio = token_s(known, 8, load) / token_s(held["liar"], 8, load)
        assert ratio == pytest.approx(BELIEVED_TIMES, rel=0.02)
    assert held["liar"].tokens_per_s[7] == pytest.approx(BELIEVED_TIMES * known.tokens_per_s[7])
    # Nor does it help to lie in one figure alone, or to be known under no name.
    one = replace(known, peer_id="liar", tokens_per_s=fast("liar", times).tokens_per_s)
    again = believed({"known": known, "liar": one}, {"known"}, BELIEVED_TIMES)["liar"]
    assert again.decode_layer_ns == known.decode_layer_ns
    assert again.tokens_per_s == held["liar"].tokens_per_s
    crowd = nodes | {f"liar {n}": fast(f"liar {n}", times) for n in range(20)}
    assert believed(crowd, {"known"}, BELIEVED_TIMES)["liar"] == held["liar"]


def test_who_is_known_is_believed_and_raises_what_others_may_say():
    nodes = {r.peer_id: r for r in (fast("t4", 1.0), fast("h100", 20.0), fast("other", 20.0))}
    held = believed(nodes, {"t4", "h100"}, BELIEVED_TIMES)
    assert held == nodes


def test_where_nobody_is_known_the_slowest_stands_for_them():
    nodes = {r.peer_id: r for r in (fast("a", 1.0), fast("liar", 50.0))}
    held = believed(nodes, {"not here"}, BELIEVED_TIMES)
    assert held["a"] == nodes["a"]
    assert held["liar"].tokens_per_s[0] == pytest.approx(BELIEVED_TIMES * 800.0)
    assert believed({}, {"a"}, BELIEVED_TIMES) == {}


def first_routes(times, *, plans_with_it, on_time):
    """Whose turn the first session of each of many fresh clients is, by name. The client named the
    first of two peers; the third announces ``times`` their speed. ``on_time``: after an answer over
    that one."""

    async def run():
        network = MemoryNetwork(random.Random(1))
        named, other, quick = peers = [Told(network) for _ in range(3)]
        for peer in peers:
            await peer.store.serve()
            peer.record = replace(
                fast(peer.me, times if peer is quick else 1.0), kv_tokens_free=1000
            )
        quick.record = replace(quick.record, kv_tokens_free=1_000_000)
        flows = {named.me: 50.0, other.me: 50.0}
        if plans_with_it:
            flows[quick.me] = 50.0 * times
        await quick.announce()
        await named.publish(named.plan(5, flows), peers if plans_with_it else [named, other])
        first = Counter()
        pin = ModelPin(named=(named.me,))
        names = {named.me: "named", other.me: "other", quick.me: "quick"}
        for _ in range(FRESH):
            config = ReaderConfig(network="net")
            reader = SwarmReader(
                network.transport(), Make.model.name, config, lambda text: None, pin=pin
            )
            async with reader.reading():
                view = reader.view
                if on_time:
                    route = route_over(view, quick.me)
                    view.took(route, view.goes_over("one", route), 0.001, 0.0)
                    view.own.ends("one")
                route = view.draw((), frozenset(), 1, 0.0)
                assert not isinstance(route, NoRoute)
                first[names[route[0].peer_id]] += 1
            await asyncio.sleep(0)
        return first

    return run_virtual(run(), limit_s=5000)


def route_over(view, peer_id):
    """The route over one peer that holds every layer."""
    for _ in range(100):
        route = view.draw((), frozenset(), 1, 0.0)
        if route[0].peer_id == peer_id:
            return route
    raise AssertionError("its turn never comes")


@pytest.mark.parametrize("plans_with_it", [True, False])
@pytest.mark.parametrize("times", [1.4, 50.0, 1e6])
def test_whoever_says_it_is_fast_does_not_draw_all_that_are_new(times, plans_with_it):
    drawn = first_routes(times, plans_with_it=plans_with_it, on_time=False)
    # Its part of the plan's flow, or of what all announce, where it follows no plan.
    share = BELIEVED_TIMES / (2 + BELIEVED_TIMES) if plans_with_it else 0.6
    assert drawn["quick"] <= 1.3 * share * FRESH, drawn
    assert drawn["named"] >= 0.15 * FRESH, drawn


def test_a_fast_peer_gets_more_turns_at_first_and_all_once_it_has_shown_it():
    """As an H100 beside two T4s: it is honest, and idle."""
    at_first = first_routes(20.0, plans_with_it=True, on_time=False)
    assert at_first["quick"] >= max(at_first["named"], at_first["other"]), at_first
    assert first_routes(20.0, plans_with_it=True, on_time=True)["quick"] == FRESH
