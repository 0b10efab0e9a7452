from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.failure.asked import Asked, AskedConfig

CONFIG = AskedConfig(silent_misses=3, answered_s=5.0, silent_s=30.0)
PEER = "birch"


def after(answers: Sequence[bool], apart_s: float = 1.0) -> tuple[Asked, float]:
    """What is remembered of one peer's pings, and the time of the last."""
    asked, now_s = Asked(CONFIG), 0.0
    for answered in answers:
        now_s += apart_s
        asked.forget({PEER}, now_s)
        asked.note(PEER, answered=answered, now_s=now_s)
    return asked, now_s


@given(answers=st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_peer_is_silent_after_as_many_misses_in_a_row(answers: list[bool]) -> None:
    asked, _ = after(answers)
    assert asked.silent(PEER) == (len(answers) >= 3 and not any(answers[-3:]))
    assert asked.answered(PEER) == answers[-1]


def test_a_peer_that_was_not_asked_is_neither_there_nor_silent() -> None:
    asked = Asked(CONFIG)
    assert not asked.answered(PEER)
    assert not asked.silent(PEER)
    assert not asked.waits(PEER, 0.0)


def test_an_answer_counts_for_a_while() -> None:
    asked, now_s = after([True])
    asked.forget({PEER}, now_s + 4.9)
    assert asked.answered(PEER)
    asked.forget({PEER}, now_s + 5.1)
    assert not asked.answered(PEER)


def test_misses_long_ago_do_not_add_up() -> None:
    asked, _ = after([False] * 10, apart_s=31.0)
    assert not asked.silent(PEER)


def test_a_silent_peer_waits_behind_others_and_stays_silent_until_it_answers() -> None:
    asked, now_s = after([False] * 3)
    assert asked.waits(PEER, now_s + 29.0)
    assert not asked.waits(PEER, now_s + 31.0)
    asked.forget({PEER}, now_s + 1000.0)
    assert asked.silent(PEER)
    asked.note(PEER, answered=True, now_s=now_s + 1000.0)
    assert asked.answered(PEER)
    assert not asked.silent(PEER)


def test_a_peer_without_a_record_is_forgotten() -> None:
    asked, now_s = after([False] * 3)
    asked.forget((), now_s)
    assert not asked.silent(PEER)
