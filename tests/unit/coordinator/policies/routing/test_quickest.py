"""The quickest ring: what a request alone in a swarm gets, and when it does not."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.routing.quickest import (
    QUICKEST,
    LatePeers,
    OwnSessions,
    RingTimes,
    light_ring,
    quickest_ring,
    token_s,
)
from dht.messages.types import SOURCE, NodeRecord, RouteStage
from tests.examples import examples
from tests.unit.coordinator.conftest import Make

LAYERS = 8
TIMES = ((1, 1000, 1500), (4, 1200, 1700), (16, 3600, 5000))


def record(name: str, start: int = 0, end: int = LAYERS, *, ns: int = 1000) -> NodeRecord:
    made = Make.record(name, start, end)
    return replace(made, decode_layer_ns=((1, ns, ns), (64, 64 * ns, 64 * ns)))


def stage(name: str, start: int, end: int) -> RouteStage:
    return RouteStage(peer_id=name, start=start, end=end)


@pytest.mark.parametrize(
    ("sessions", "layer_ns"),
    [(1, 1000), (2, 1000 + 200 / 3), (4, 1200), (10, 2400), (16, 3600), (32, 7200)],
)
def test_a_token_takes_what_was_announced_for_as_many_sessions(sessions, layer_ns):
    peer = replace(Make.record("a", 0, 4), decode_layer_ns=TIMES)
    assert token_s(peer, 4, sessions) == pytest.approx(4 * layer_ns * 1e-9)


def test_fewer_sessions_than_were_measured_take_as_long_as_the_fewest():
    peer = replace(Make.record("a", 0, 4), decode_layer_ns=TIMES[1:])
    assert token_s(peer, 4, 1) == token_s(peer, 4, 4) == pytest.approx(4.8e-6)


def test_without_times_the_rate_for_as_many_layers_counts():
    peer = replace(Make.record("a", 0, 4), tokens_per_s=(40.0, 20.0, 12.5, 10.0))
    assert token_s(peer, 2, 1) == pytest.approx(0.05)
    assert token_s(replace(peer, tokens_per_s=()), 2, 1) == float("inf")


def test_prompts_of_sessions_that_follow_each_other_cost_time_too():
    peer = replace(Make.record("a", 0, 4), decode_layer_ns=TIMES)
    thinks = replace(peer, prompt_layer_ns=((64, 6400, 6400), (100, 50_000, 50_000)))
    assert token_s(thinks, 4, 1) == token_s(peer, 4, 1)
    assert token_s(thinks, 4, 4) == pytest.approx(
        4 * (1200 + 3 * QUICKEST.prompt_tokens * 500) * 1e-9
    )


class TestOwnSessions:
    @pytest.fixture
    def nodes(self) -> dict[str, NodeRecord]:
        return {"a": Make.record("a", 0, 8), "b": Make.record("b", 0, 8)}

    def test_they_count_at_once_and_are_not_counted_twice(
        self, nodes: dict[str, NodeRecord]
    ) -> None:
        own = OwnSessions()
        own.take_nodes(nodes)
        own.goes_over("one", (stage("a", 0, 8),))
        own.goes_over("two", (stage("a", 0, 8),))
        assert own.beside() == {"a": 2, "b": 0}
        own.take_nodes(nodes | {"a": replace(nodes["a"], sessions=3)})
        assert own.beside() == {"a": 3, "b": 0}
        own.goes_over("three", (stage("a", 0, 8),))
        assert own.beside() == {"a": 4, "b": 0}, "two of them, and another's that was announced"
        own.take_nodes({"b": nodes["b"]})
        assert own.beside() == {"b": 0}, "its record is gone"

    def test_one_that_ended_is_not_counted_while_its_peers_still_announce_it(
        self, nodes: dict[str, NodeRecord]
    ) -> None:
        own = OwnSessions()
        own.take_nodes(nodes)
        own.goes_over("one", (stage("a", 0, 8),))
        own.ends("one")
        own.ends("one")
        announced = nodes | {"a": replace(nodes["a"], sessions=1)}
        for _ in range(3):
            own.take_nodes(announced)
            assert own.beside() == {"a": 0, "b": 0}
        own.take_nodes(nodes)
        own.take_nodes(announced)
        assert own.beside() == {"a": 1, "b": 0}, "then it is another's"

    def test_many_that_end_hide_none_of_others(self, nodes: dict[str, NodeRecord]) -> None:
        """A gateway's 30 sessions end and begin all the time, beside 40 of others."""
        own, announced = OwnSessions(), nodes | {"a": replace(nodes["a"], sessions=70)}
        for number in range(30):
            own.goes_over(str(number), (stage("a", 0, 8),))
        own.take_nodes(announced)
        for number in range(30, 120):
            own.ends(str(number - 30))
            own.goes_over(str(number), (stage("a", 0, 8),))
            assert own.beside()["a"] == 70

    def test_one_that_goes_over_other_peers_counts_there(
        self, nodes: dict[str, NodeRecord]
    ) -> None:
        own = OwnSessions()
        own.take_nodes(nodes | {"a": replace(nodes["a"], sessions=2)})
        own.goes_over("one", (stage("a", 0, 8),))
        own.goes_over("one", (stage("a", 0, 8),))
        assert own.beside() == {"a": 3, "b": 0}, "it goes on there under another attempt"
        own.goes_over("one", (stage("b", 0, 8),))
        assert own.beside() == {"a": 2, "b": 1}


def test_a_token_waits_for_every_stage_and_every_hop_of_its_ring():
    usable = {"a": record("a", 0, 4, ns=1000), "b": record("b", 4, 8, ns=3000)}
    route = (stage("a", 0, 4), stage("b", 4, 8))
    near = RingTimes(usable, {}, {frozenset("ab"): 0.1})
    assert near.token_s(route) == pytest.approx(0.1 + 4 * 1e-6 + 4 * 3e-6)
    unknown = RingTimes(usable, {"b": 1}, {})
    assert unknown.token_s(route) == pytest.approx(2 * QUICKEST.hop_s + 4 * 1e-6 + 4 * 2 * 3e-6)
    alone = RingTimes({"a": record("a")}, {}, {})
    assert alone.token_s((stage("a", 0, 8),)) == pytest.approx(8e-6), "no hop to itself"


def test_a_near_chain_of_slower_peers_is_quicker_than_one_across_an_ocean():
    usable = {
        "far": record("far", 0, 4, ns=1000),
        "away": record("away", 4, 8, ns=1000),
        "near": record("near", 0, 4, ns=5000),
        "by": record("by", 4, 8, ns=5000),
    }
    edges = {SOURCE: ["far", "near"], "far": ["away"], "near": ["by"]}
    ends = {peer_id: each.end for peer_id, each in usable.items()}
    rtt_s = {frozenset(("far", "away")): 0.2, frozenset(("near", "by")): 0.002}
    found = quickest_ring(edges, ends, RingTimes(usable, {}, rtt_s))
    assert found is not None
    assert [each.peer_id for each in found[1]] == ["near", "by"]
    busy = quickest_ring(edges, ends, RingTimes(usable, {"near": 10_000}, rtt_s))
    assert busy is not None
    assert [each.peer_id for each in busy[1]] == ["far", "away"]


def test_a_search_looks_at_a_bounded_number_of_links():
    """A dense plan of a stranger must not cost a client a look at each link per first stage."""

    class Counted(RingTimes):
        looks = 0

        def hop_s(self, one: RouteStage, other: RouteStage) -> float:
            Counted.looks += 1
            return super().hop_s(one, other)

    spans = ((0, 3), (3, 5), (5, 8))
    stages = [[f"{start}-{n}" for n in range(60)] for start, _ in spans]
    usable = {
        name: record(name, *span, ns=1_000_000 * (1 + int(name[2:]) % 7))
        for names, span in zip(stages, spans, strict=True)
        for name in names
    }
    edges = {SOURCE: stages[0]}
    for here, after in pairwise(stages):
        edges |= dict.fromkeys(here, after)
    ends = {name: each.end for name, each in usable.items()}
    found = quickest_ring(edges, ends, Counted(usable, {}, {}))
    assert found is not None
    assert [stage.peer_id for stage in found[1]] == ["0-0", "3-0", "5-0"]
    assert 60 * 60 < Counted.looks <= QUICKEST.looks_max


def test_peers_of_a_late_ring_are_late_until_another_is_on_time():
    late = LatePeers()
    late.took(("liar", "honest"), 0.01, 0.5, 0.0)
    assert late.at(1.0) == {"liar", "honest"}
    late.took(("honest", "other"), 0.1, 0.15, 2.0)
    assert late.at(3.0) == {"liar"}
    late.failed("other", 3.0)
    assert late.at(4.0) == {"liar", "other"}
    assert late.at(QUICKEST.late_kept_s + 3.0) == set()


def test_a_ring_is_light_until_its_peers_carry_what_the_plan_gives_them():
    usable = {"a": record("a", ns=1_000_000), "b": record("b", ns=4_000_000)}
    edges, ends = {SOURCE: ["a", "b"]}, {"a": 8, "b": 8}
    token_s = {"a": 0.008, "b": 0.032}

    def taken(given: dict[str, float], **sessions: int) -> str | None:
        ring = light_ring(edges, ends, given, RingTimes(usable, sessions, {}))
        return ring and ring[1][0].peer_id

    assert taken({}) == "a", "a peer without sessions takes one in any case"
    assert taken({}, a=1) == "b"
    assert taken({}, a=1, b=1) is None
    # Two sessions take turns: each has half of the peer's tokens.
    room_for_two = {"a": 2 / (2 * token_s["a"]) + 1}
    assert taken(room_for_two, a=1) == "a"
    assert taken({"a": 2 / (2 * token_s["a"]) - 1}, a=1) == "b"


@st.composite
def swarms(draw: st.DrawFn):
    """Three stages of up to three peers each, some of which do not serve what they should."""
    names = [[f"{depth}{n}" for n in range(draw(st.integers(1, 3)))] for depth in range(3)]
    ends = {name: (3, 5, 8)[depth] for depth, each in enumerate(names) for name in each}
    starts = {name: (0, 3, 5)[depth] for depth, each in enumerate(names) for name in each}
    edges: dict[str, list[str]] = {SOURCE: names[0]}
    for here, after in pairwise(names):
        for name in here:
            edges[name] = [head for head in after if draw(st.booleans())]
    usable = {
        name: record(name, starts[name], ends[name], ns=draw(st.integers(1, 9)) * 1000_000)
        for name in ends
        if draw(st.integers(0, 5))
    }
    rtt_s = {
        frozenset((a, b)): draw(st.integers(0, 30)) / 1000
        for a, b in product(ends, repeat=2)
        if a < b
    }
    return edges, ends, RingTimes(usable, {}, rtt_s)


@examples(100)
@given(swarms())
def test_no_ring_of_the_plan_is_quicker(swarm):
    edges, ends, times = swarm
    starts = {3: 0, 5: 3, 8: 5}
    rings = [
        tuple(stage(name, starts[ends[name]], ends[name]) for name in (a, b, c))
        for a in edges[SOURCE]
        for b in edges.get(a, ())
        for c in edges.get(b, ())
        if {a, b, c} <= times.usable.keys()
    ]
    found = quickest_ring(edges, ends, times)
    if found is None:
        assert not rings
        return
    assert found[1] in rings
    assert found[0] == pytest.approx(times.token_s(found[1]))
    assert found[0] == pytest.approx(min(map(times.token_s, rings)))
