"""When a full stage expects room."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.rules import (
    PROMPTS_PER_S,
    Holding,
    PromptRate,
    StageLoad,
    TurnedAway,
    first_to_give_way,
    headroom,
    prompt_turn_s,
    queue_is_long,
    retry_after_s,
    seen_by,
    takes_headroom,
)

holdings = st.lists(
    st.builds(
        Holding,
        kv_tokens=st.integers(1, 100),
        ran_tokens=st.integers(0, 100),
        age_s=st.floats(0, 1e4),
    ),
    max_size=8,
)


def test_the_session_that_ends_first_with_enough_decides() -> None:
    soon = Holding(kv_tokens=10, ran_tokens=9, age_s=9.0)  # 1 s left
    later = Holding(kv_tokens=50, ran_tokens=25, age_s=25.0)  # 25 s left
    assert retry_after_s(8, 0, [later, soon]) == pytest.approx(1.0)
    assert retry_after_s(11, 0, [later, soon]) == pytest.approx(25.0)
    assert retry_after_s(11, 1, [later, soon]) == pytest.approx(1.0)
    assert retry_after_s(5, 5, [later]) == ADMISSION.retry_least_s


def test_a_prompt_that_ran_fast_does_not_make_the_rest_look_fast() -> None:
    begun = Holding(kv_tokens=40, ran_tokens=22, prompt_tokens=20, age_s=1.0)
    assert begun.left_s == pytest.approx(9.0)
    prefilling = Holding(kv_tokens=40, ran_tokens=10, prompt_tokens=20, age_s=1.0)
    assert prefilling.left_s == pytest.approx(3.0)


def test_a_session_that_has_run_nothing_begins_or_gives_way() -> None:
    fresh = Holding(kv_tokens=500, ran_tokens=0, age_s=2.0)
    assert fresh.left_s == ADMISSION.rest_s - 2.0
    assert replace(fresh, age_s=2 * ADMISSION.rest_s).left_s == 0.0


def test_who_rests_with_most_sessions_gives_way_first() -> None:
    resting = [("a1", "a"), ("c1", "c"), ("b1", "b"), ("b2", "b"), ("b3", "b"), ("c2", "c")]
    assert first_to_give_way(resting) == ["b3", "b2", "c2", "a1", "c1", "b1"]
    assert first_to_give_way([]) == []


def test_what_will_never_fit_gets_no_promise() -> None:
    assert retry_after_s(100, 0, [Holding(kv_tokens=50, ran_tokens=0, age_s=1.0)]) == 0.0


@given(needed=st.integers(1, 500), free=st.integers(0, 500), holding=holdings)
def test_bounds_and_order(needed: int, free: int, holding: list[Holding]) -> None:
    after_s = retry_after_s(needed, free, holding)
    if free + sum(h.kv_tokens for h in holding) < needed:
        assert after_s == 0.0
    else:
        assert ADMISSION.retry_least_s <= after_s <= ADMISSION.retry_most_s
        assert retry_after_s(needed, free + 1, holding) <= after_s


def test_who_is_turned_away_does_not_come_back_with_all_the_others() -> None:
    crowd = TurnedAway()
    turns = [crowd.turn(f"client {n}", 0.01 * n) for n in range(10)]
    assert turns == [1, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert crowd.turn("client 3", 0.2) == 5, "one client is one, however often it asks"
    assert crowd.turn("client 3", 0.2 + ADMISSION.crowd_s + 0.1) == 1
    for n in range(3 * ADMISSION.crowd_max):
        crowd.turn(f"stranger {n}", 20.0)
    assert len(crowd.since_s) <= ADMISSION.crowd_max


@given(capacity=st.integers(1, 10_000), sizes=st.lists(st.integers(1, 2_000), max_size=30))
def test_ordinary_sessions_leave_the_headroom_free(capacity: int, sizes: list[int]) -> None:
    held = 0
    for size in sizes:
        if size <= capacity - held and not takes_headroom(size, capacity - held, held):
            assert held == 0 or capacity - held - size >= int(ADMISSION.headroom_share * capacity)
            held += size


def test_a_session_as_long_as_all_kv_is_served_by_a_stage_that_holds_nothing() -> None:
    assert not takes_headroom(100, 100, 0)
    assert takes_headroom(85, 90, 10)
    assert not takes_headroom(80, 90, 10)
    assert headroom(100) == 10


def test_slow_decodes_send_ordinary_sessions_elsewhere_where_many_are_served() -> None:
    few = ADMISSION.queue_sessions_least - 1
    assert not queue_is_long(StageLoad(sessions=500, seen=few), 4.0)
    assert queue_is_long(StageLoad(sessions=500, seen=few + 1), ADMISSION.queue_wait_s + 0.1)
    assert not queue_is_long(StageLoad(sessions=500, seen=500), ADMISSION.queue_wait_s - 0.1)


def test_a_crowd_is_not_let_in_before_it_shows_what_it_costs() -> None:
    most = ADMISSION.untried_sessions
    assert not queue_is_long(StageLoad(sessions=most - 1, untried=most - 1), None)
    assert queue_is_long(StageLoad(sessions=most, untried=most), None)
    assert not queue_is_long(StageLoad(sessions=200, untried=0), None)


def test_no_more_prompts_are_let_in_than_end_in_some_seconds() -> None:
    """More of them would hold KV and wait; however many decode, their tokens come no sooner."""
    per_s = 2 * ADMISSION.untried_sessions / ADMISSION.prompts_wait_s
    most = 2 * ADMISSION.untried_sessions
    for untried, is_long in ((most - 1, False), (most, True)):
        load = StageLoad(sessions=900, untried=untried, prompts_per_s=per_s)
        assert queue_is_long(load, 0.01) == is_long


def test_who_is_refused_for_prompts_comes_back_when_as_many_have_ended() -> None:
    load = StageLoad(sessions=64, untried=64, prompts_per_s=4.0)
    assert prompt_turn_s(load, 20) == 5.0
    assert prompt_turn_s(load, 1) == ADMISSION.retry_least_s
    none_ended = replace(load, prompts_per_s=0.0)
    assert prompt_turn_s(none_ended, 64) == ADMISSION.prompts_wait_s
    assert prompt_turn_s(none_ended, 1 << 20) == ADMISSION.retry_most_s
    few_came_before = replace(load, prompts_per_s=1 / ADMISSION.rate_s)
    assert prompt_turn_s(few_came_before, 64) == ADMISSION.prompts_wait_s


class TestPromptRate:
    """How fast prompts of 100 tokens end."""

    def rate_of(self, *prompts: tuple[float, float], tokens: int = 100) -> PromptRate:
        """The rate after prompts that were under way from and to such times."""
        rate = PromptRate()
        for began_s, ended_s in prompts:
            rate.add(tokens, began_s, ended_s)
        return rate

    def test_times_without_prompts_do_not_count(self) -> None:
        """A hundred prompts, each half a second after the last, take 20 ms: 50 a second."""
        rate = self.rate_of(*((at / 2, at / 2 + 0.02) for at in range(100)))
        now_s = 49.52
        assert 0.6 * 50 < rate.per_s(100, now_s) < 50

    def test_prompts_at_the_same_time_take_the_time_once(self) -> None:
        apart = self.rate_of(*((0.1 * at, 0.1 * at + 0.1) for at in range(200)))
        together = self.rate_of(*((0.1 * at - 2.0, 0.1 * at + 0.1) for at in range(200)))
        assert apart.per_s(100, 20.0) == pytest.approx(10.0, rel=0.1)
        assert together.per_s(100, 20.0) == pytest.approx(10.0, rel=0.15)

    def test_one_that_was_under_way_all_the_time_takes_all_of_it(self) -> None:
        rate = self.rate_of((1.0, 1.1), (2.0, 2.1), (0.0, 20.0))
        assert rate.per_s(100, 20.0) < 0.5

    def test_it_is_that_of_prompts_as_long_as_those_that_wait(self) -> None:
        rate = self.rate_of(*((0.1 * at, 0.1 * at + 0.1) for at in range(200)))
        assert rate.per_s(1000, 20.0) == pytest.approx(1.0, rel=0.3)
        assert rate.per_s(10, 20.0) == pytest.approx(100.0, rel=0.1)

    def test_few_decide_little_and_none_nothing(self) -> None:
        assert PromptRate().per_s(100, 0.0) == PromptRate().per_s(0, 0.0) == PROMPTS_PER_S
        assert self.rate_of((0.0, 0.001)).per_s(100, 0.1) < 2 * PROMPTS_PER_S
        assert self.rate_of((0.0, 30.0)).per_s(100, 30.0) < PROMPTS_PER_S

    def test_what_ended_long_ago_is_forgotten(self) -> None:
        rate = self.rate_of(*((0.02 * at, 0.02 * at + 0.02) for at in range(500)))
        assert rate.per_s(100, 10.0) > 40
        assert rate.per_s(100, 10.1 + ADMISSION.rate_s) == PROMPTS_PER_S

    def test_it_remembers_a_bounded_number(self) -> None:
        many = 2 * ADMISSION.rate_most
        rate = self.rate_of(*((at / many, at / many) for at in range(many)))
        assert len(rate._ended) == len(rate._under_way) == ADMISSION.rate_most
        assert rate._tokens == 100 * ADMISSION.rate_most


def test_who_has_few_sessions_sees_few_of_others() -> None:
    sessions = ["a"] * 64 + ["b", "b", "c"]
    assert seen_by("a", sessions) == len(sessions)
    assert seen_by("b", sessions) == 3 + 2 + 1
    assert seen_by("c", sessions) == 2 + 2 + 1
    assert seen_by("d", sessions) == 1 + 1 + 1
    assert seen_by("a", []) == 0
