"""Whether a session goes over the route that has its history."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.routing.affinity import KnownPrefix, again, answer_s, rows_of
from coordinator.policies.routing.routes import NoRoute, route_from_records
from dht.messages.types import NodeRecord, RouteStage
from tests.unit.records import MODEL, record_of

LAYERS = MODEL.layers
HALF = LAYERS // 2


def route(*spans: tuple[str, int, int]) -> tuple[RouteStage, ...]:
    return tuple(RouteStage(peer_id=p, start=s, end=e) for p, s, e in spans)


def node(peer: str, start: int, end: int, rate: float = 10.0, sessions: int = 0) -> NodeRecord:
    rates = (rate,) * LAYERS
    return replace(record_of(peer, start, end), tokens_per_s=rates, sessions=sessions)


OLD = route(("a", 0, HALF), ("b", HALF, LAYERS))


def known(cached: int, prompt: int = 1000, answer: int = 100) -> KnownPrefix:
    return KnownPrefix(route=OLD, cached_tokens=cached, prompt_tokens=prompt, answer_tokens=answer)


def nodes(*records: NodeRecord) -> dict[str, NodeRecord]:
    return {record.peer_id: record for record in records}


def test_stages_before_one_without_history_run_the_whole_prompt() -> None:
    three = route(("a", 0, 1), ("b", 1, 2), ("c", 2, LAYERS))
    prefix = replace(known(900), route=three)
    assert rows_of(three, prefix) == [100, 100, 100]
    assert rows_of((three[0], replace(three[1], peer_id="x"), three[2]), prefix) == [
        1000,
        1000,
        100,
    ]
    assert rows_of((*three[:2], replace(three[2], end=LAYERS - 1)), prefix) == [1000] * 3


def test_the_old_route_is_taken_unless_another_is_sooner_even_with_the_prefill() -> None:
    old = (node("a", 0, HALF), node("b", HALF, LAYERS))
    for rate, taken in ((10.0, True), (20.0, True), (2000.0, False)):
        usable = nodes(*old, node("fast", 0, LAYERS, rate=rate))
        found = again(known(990), usable, LAYERS)
        assert (found == OLD) is taken, rate
        assert taken or isinstance(found, NoRoute)
    busy = nodes(
        *(replace(record, sessions=50) for record in old), node("idle", 0, LAYERS, rate=10.0)
    )
    assert isinstance(again(known(990), busy, LAYERS), NoRoute)
    assert isinstance(again(known(0, prompt=10), nodes(*old), LAYERS), tuple)


def test_a_peer_that_cannot_be_used_is_replaced_alone() -> None:
    usable = nodes(node("a", 0, HALF), node("x", HALF, LAYERS), node("y", 0, HALF))
    assert again(known(990), usable, LAYERS) == route(("a", 0, HALF), ("x", HALF, LAYERS))
    moved = nodes(node("a", HALF, LAYERS), node("b", HALF, LAYERS), node("y", 0, HALF))
    assert again(known(990), moved, LAYERS) == route(("y", 0, HALF), ("b", HALF, LAYERS))


def test_nothing_is_kept_of_a_route_that_is_gone() -> None:
    assert isinstance(again(known(990), nodes(node("x", 0, LAYERS)), LAYERS), NoRoute)
    assert isinstance(again(known(990), {}, LAYERS), NoRoute)


@given(
    st.lists(
        st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS), st.floats(0.1, 1e4)),
        max_size=6,
    ),
    st.integers(0, 999),
    st.integers(0, 500),
)
def test_what_is_taken_is_a_route_and_never_later_than_the_quickest(
    spans: list[tuple[int, int, float]], cached: int, answer: int
) -> None:
    usable = nodes(
        *(
            node(name, start, min(LAYERS, start + count), rate)
            for name, (start, count, rate) in zip("abcdef", spans, strict=False)
        )
    )
    prefix = known(cached, answer=answer)
    found = again(prefix, usable, LAYERS)
    if isinstance(found, NoRoute):
        return
    assert [stage.start for stage in found] == [0, *(stage.end for stage in found[:-1])]
    assert found[-1].end == LAYERS
    assert all(usable[stage.peer_id].holds(stage.start, stage.end) for stage in found)
    quickest = route_from_records(usable, LAYERS)
    assert isinstance(quickest, tuple)
    assert answer_s(found, prefix, usable) <= answer_s(quickest, prefix, usable)
