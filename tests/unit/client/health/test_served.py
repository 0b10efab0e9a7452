"""What the swarm served: sums since each peer joined become what came between two looks."""

from dataclasses import replace
from pathlib import Path

from client.health.app import Page
from client.health.history import KEPT_S, History
from client.health.past import WEEK, Past
from client.health.served import TOKENS_PER_S_MAX, ServedCounts, ServedTally
from client.health.state import SwarmSnapshot, build_state
from testing.paper_health import NOW_S, record

OLD = replace(record(0, 0, 32), answers=40, answer_tokens=9000, joined_unix_s=NOW_S - 7200)
NEW = replace(record(1, 0, 32), answers=1, answer_tokens=25, joined_unix_s=NOW_S + 10)


def test_only_what_came_between_two_looks_counts() -> None:
    tally = ServedTally()
    assert tally.look([OLD], NOW_S) == ServedCounts()
    more = replace(OLD, answers=42, answer_tokens=9100)
    assert tally.look([more, NEW], NOW_S + 30) == ServedCounts(answers=3, tokens=125)
    assert tally.look([more, NEW], NOW_S + 60) == ServedCounts()


def test_a_peer_that_starts_again_counts_from_nothing() -> None:
    tally = ServedTally()
    tally.look([OLD], NOW_S)
    again = replace(OLD, answers=2, answer_tokens=60, joined_unix_s=NOW_S + 20)
    assert tally.look([again], NOW_S + 30) == ServedCounts(answers=2, tokens=60)


def test_a_peer_seen_late_brings_no_past() -> None:
    tally = ServedTally()
    tally.look([], NOW_S)
    assert tally.look([OLD], NOW_S + 30) == ServedCounts()
    assert tally.look([replace(OLD, answer_tokens=9001)], NOW_S + 60) == ServedCounts(tokens=1)


def test_sums_that_fall_or_leap_are_bounded() -> None:
    tally = ServedTally()
    tally.look([OLD], NOW_S)
    assert tally.look([replace(OLD, answers=0, answer_tokens=0)], NOW_S + 30) == ServedCounts()
    leap = replace(OLD, answers=1 << 40, answer_tokens=1 << 40)
    most = int(TOKENS_PER_S_MAX * 30)
    assert tally.look([leap], NOW_S + 60) == ServedCounts(answers=most, tokens=most)


def test_what_was_forgotten_is_new() -> None:
    tally = ServedTally()
    tally.look([OLD], NOW_S)
    tally.forget([])
    assert tally.look([replace(OLD, answer_tokens=9500)], NOW_S + 30) == ServedCounts()


async def test_steps_add_up_over_a_restart_and_are_trimmed(tmp_path: Path) -> None:
    for at_s in (NOW_S - KEPT_S - 7200, NOW_S, NOW_S + 1):
        history = History(tmp_path / "health.sqlite")
        await history.add_served(ServedCounts(answers=1, tokens=50), at_s)
        history.close()
    history = History(tmp_path / "health.sqlite")
    for past in await history.past(NOW_S + 2):
        start_unix_s = NOW_S // past.span.step_s * past.span.step_s
        assert past.served == ({"start_unix_s": start_unix_s, "answers": 2, "tokens": 100},)
    assert [past.served for past in await history.past(NOW_S + KEPT_S)] == [()] * 3
    history.close()


def test_the_page_says_whose_count_it_is() -> None:
    step = {"start_unix_s": NOW_S // 3600 * 3600, "answers": 3, "tokens": 1234}
    past = (Past(span=WEEK, served=[step]),)
    state = build_state(SwarmSnapshot(model_name="m", now_unix_s=NOW_S, past=past))
    page = Page(lambda: state).render(state)
    assert "1,234 tokens in 3 answers, as the peers count them" in page
    assert state["served"]["hours"] == [step]
    nothing = build_state(SwarmSnapshot(model_name="m", now_unix_s=NOW_S))
    assert "None since this page began to look." in Page(lambda: nothing).render(nothing)
