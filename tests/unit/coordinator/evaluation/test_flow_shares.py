"""The shares of routes that go round full peers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.evaluation.flow_shares import FLOW_SHARES, Shares, within_room
from dht.messages.types import SINK, SOURCE

STAGES = (("a", "b"), ("c", "d", "e"))
ORDER = tuple(name for stage in STAGES for name in stage)


def shares(weights: list[float]) -> Shares:
    """Two stages; each peer of the first sends to all of the second in parts of its own."""
    left = iter(weights)

    def parts(names: tuple[str, ...]) -> dict[str, float]:
        drawn = {name: next(left) for name in names}
        return {name: each / sum(drawn.values()) for name, each in drawn.items()}

    entering = parts(STAGES[0])
    return {
        SOURCE: entering,
        **{tail: parts(STAGES[1]) for tail in STAGES[0]},
        **{tail: {SINK: 1.0} for tail in STAGES[1]},
    }


def arriving(kept: Shares) -> dict[str, float]:
    found = dict(kept[SOURCE])
    for tail in STAGES[0]:
        for head, part in kept[tail].items():
            found[head] = found.get(head, 0.0) + found[tail] * part
    return found


WEIGHTS = st.lists(st.floats(0.05, 1.0), min_size=8, max_size=8)
ROOMS = st.lists(st.floats(1.0, 100.0), min_size=5, max_size=5)


@given(WEIGHTS, ROOMS, st.floats(0.1, 0.9))
def test_no_peer_takes_more_than_its_room_while_others_have_some(
    weights: list[float], rooms: list[float], fill: float
) -> None:
    room = dict(zip(ORDER, rooms, strict=True))
    requests = fill * min(sum(room[name] for name in stage) for stage in STAGES)
    kept = within_room(shares(weights), ORDER, room, requests)
    assert all(sum(heads.values()) == pytest.approx(1.0) for heads in kept.values())
    taken = {name: requests * share for name, share in arriving(kept).items()}
    over = {name: taken[name] / room[name] for name in ORDER}
    before = {
        name: requests * share / room[name] for name, share in arriving(shares(weights)).items()
    }
    assert max(over.values()) <= max(FLOW_SHARES.full, *before.values()) * (1 + 1e-9)
    if fill <= 0.5:
        assert max(over.values()) < 1.2


def test_where_nobody_is_full_the_shares_stay_the_very_same() -> None:
    drawn = shares([1.0] * 8)
    assert within_room(drawn, ORDER, dict.fromkeys(ORDER, 10.0), 10.0) is drawn


def test_a_small_holder_keeps_what_fits_and_the_rest_goes_to_the_roomy_one() -> None:
    drawn: Shares = {SOURCE: {"a": 0.9, "b": 0.1}, "a": {SINK: 1.0}, "b": {SINK: 1.0}}
    kept = within_room(drawn, ("a", "b"), {"a": 4.0, "b": 40.0}, 20.0)
    assert kept[SOURCE]["a"] == pytest.approx(0.2, rel=0.02)
    assert kept[SOURCE]["b"] == pytest.approx(0.8, rel=0.02)


def test_a_peer_without_room_is_on_no_route() -> None:
    drawn: Shares = {SOURCE: {"a": 0.9, "b": 0.1}, "a": {SINK: 1.0}, "b": {SINK: 1.0}}
    kept = within_room(drawn, ("a", "b"), {"a": 0.0, "b": 40.0}, 20.0)
    assert kept[SOURCE] == {"b": 1.0}
    alone: Shares = {SOURCE: {"a": 1.0}, "a": {SINK: 1.0}}
    assert within_room(alone, ("a",), {"a": 0.0}, 1.0)[SOURCE] == {"a": 1.0}, "there is no other"
