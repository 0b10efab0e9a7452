"""Replacing lost stages of a route: what survives stays, and the whole covers every layer once."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.routing.routes import NoRoute, replacement
from dht.messages.types import NodeRecord, RouteStage
from tests.unit.records import MODEL, record_of

LAYERS = MODEL.layers


def nodes(*spans: tuple[str, int, int]) -> dict[str, NodeRecord]:
    return {peer: record_of(peer, start, end) for peer, start, end in spans}


def route(*spans: tuple[str, int, int]) -> tuple[RouteStage, ...]:
    return tuple(RouteStage(peer_id=p, start=s, end=e) for p, s, e in spans)


THREE = route(("a", 0, 3), ("b", 3, 6), ("c", 6, 8))


@pytest.mark.parametrize(
    ("lost", "spare", "expected"),
    [
        ("b", (("x", 3, 6),), (("a", 0, 3), ("x", 3, 6), ("c", 6, 8))),
        ("a", (("x", 0, 3),), (("x", 0, 3), ("b", 3, 6), ("c", 6, 8))),
        ("c", (("x", 6, 8),), (("a", 0, 3), ("b", 3, 6), ("x", 6, 8))),
        # Only the gap is run by a peer that holds more.
        ("b", (("x", 0, 8),), (("a", 0, 3), ("x", 3, 6), ("c", 6, 8))),
        # Several together.
        ("b", (("x", 2, 5), ("y", 4, 8)), (("a", 0, 3), ("x", 3, 5), ("y", 5, 6), ("c", 6, 8))),
        # Neighbours, and the two ends at once.
        ("bc", (("x", 3, 8),), (("a", 0, 3), ("x", 3, 8))),
        ("ac", (("x", 0, 3), ("y", 6, 8)), (("x", 0, 3), ("b", 3, 6), ("y", 6, 8))),
        ("abc", (("x", 0, 8),), (("x", 0, 8),)),
    ],
)
def test_survivors_keep_their_layers(
    lost: str, spare: tuple[tuple[str, int, int], ...], expected: tuple[tuple[str, int, int], ...]
) -> None:
    survivors = [(s.peer_id, s.start, s.end) for s in THREE if s.peer_id not in lost]
    usable = nodes(*survivors, *spare)
    assert replacement(THREE, set(lost), usable, LAYERS) == route(*expected)


def test_a_neighbour_that_holds_more_takes_over_where_nobody_else_can() -> None:
    usable = nodes(("a", 0, 6), ("c", 6, 8))
    assert replacement(THREE, {"b"}, usable, LAYERS) == route(("a", 0, 6), ("c", 6, 8))


def test_survivors_need_no_record() -> None:
    """One that leaves, or whose record has just expired, still serves what it has begun."""
    usable = nodes(("x", 3, 6))
    mended = replacement(THREE, {"b"}, usable, LAYERS)
    assert mended == route(("a", 0, 3), ("x", 3, 6), ("c", 6, 8))


def test_layers_that_nobody_else_holds_are_named() -> None:
    found = replacement(THREE, {"b"}, nodes(("a", 0, 3), ("c", 6, 8)), LAYERS)
    assert isinstance(found, NoRoute)
    assert found.missing == ((3, 6),)


def test_a_lost_peer_that_is_trusted_again_is_used_again() -> None:
    usable = nodes(("a", 0, 3), ("b", 3, 6), ("c", 6, 8))
    assert replacement(THREE, {"b"}, usable, LAYERS) == THREE


def check(found: tuple[RouteStage, ...], usable: Mapping[str, NodeRecord]) -> None:
    assert [s.start for s in found] == [0, *(s.end for s in found[:-1])]
    assert found[-1].end == LAYERS
    assert len({s.peer_id for s in found}) == len(found)


@given(
    cuts=st.sets(st.integers(1, LAYERS - 1), max_size=4),
    lost=st.sets(st.integers(0, 4)),
    spare=st.lists(
        st.tuples(st.integers(0, LAYERS), st.integers(0, LAYERS), st.sampled_from([1.0, 50.0])),
        max_size=6,
    ),
)
def test_laws(cuts: set[int], lost: set[int], spare: list[tuple[int, int, float]]) -> None:
    spans = list(itertools.pairwise([0, *sorted(cuts), LAYERS]))
    old = route(*((f"s{i}", *span) for i, span in enumerate(spans)))
    gone = {f"s{i}" for i in lost}
    records = {
        s.peer_id: record_of(s.peer_id, s.start, s.end) for s in old if s.peer_id not in gone
    }
    records |= {
        f"x{i}": record_of(f"x{i}", a, b, tokens_per_s=(v,) * LAYERS)
        for i, (a, b, v) in enumerate(spare)
        if a < b
    }
    found = replacement(old, gone, records, LAYERS)
    if isinstance(found, NoRoute):
        held = {n for r in records.values() for n in range(r.start, r.end)}
        named = {n for start, end in found.missing for n in range(start, end)}
        assert named == set(range(LAYERS)) - held
        return
    check(found, records)
    assert not gone & {s.peer_id for s in found}
    for stage in found:
        assert records[stage.peer_id].holds(stage.start, stage.end)
    if not gone & {s.peer_id for s in old}:
        assert found == old
