"""How many drafts pay: the policy on paper."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.drafting.config import DRAFTING
from node.drafting.drafter import GRADES
from node.drafting.pace import DraftOffer, DraftPace, StepCost
from node.drafting.session_drafts import SessionDrafts, Source, Wait
from node.drafting.suffix import SuffixDrafter

MOST = 15


def chosen(pace: DraftPace, most: int, grade: int, others_s: float) -> int:
    """How many drafts of a drafter that has ``most`` are taken."""
    return pace.choose([DraftOffer(grade=grade, ready=most, most=most)], others_s)[1]


def speed(
    right: float, row_s: float, *, known_row_s: float = 0.0, rounds: int = 2000, jitter: float = 0.0
) -> float:
    """Tokens/s over those of plain decoding, where a share ``right`` of drafts is right."""
    rng = random.Random(1)
    pace, tokens, took_s = DraftPace(), 0, 0.0
    for _ in range(rounds):
        count = chosen(pace, MOST, 0, known_row_s)
        good = 0
        while good < max(1, count) and rng.random() < right:
            good += 1
        round_s = 0.1 + count * row_s
        pace.took(round_s * (1 + jitter * rng.random()), count)
        pace.came(grade=0, tried=max(1, count), right=good)
        tokens += 1 + min(good, count)
        took_s += round_s
    return tokens / took_s * 0.1


@pytest.mark.parametrize("row_s", [0.0, 0.0005, 0.01, 0.1])
@pytest.mark.parametrize("right", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_it_is_never_slower_than_plain_decoding(right: float, row_s: float, jitter: float) -> None:
    assert speed(right, row_s, jitter=jitter) >= 0.97


def test_copying_is_drafted_to_the_full_where_rows_are_free() -> None:
    assert speed(0.98, 0.0) > 8
    assert speed(0.98, 0.0, jitter=0.2) > 6


def test_rows_that_cost_as_much_as_a_round_are_not_drafted() -> None:
    assert 0.97 <= speed(0.9, 0.1) <= 1.1


def test_a_full_step_is_not_made_fuller() -> None:
    pace = DraftPace(plain_s=0.1)
    assert chosen(pace, MOST, GRADES - 1, 0.0) == 3
    assert chosen(pace, MOST, GRADES - 1, 0.1) == 0
    assert chosen(pace, MOST, GRADES - 1, 0.0) == 1, "begins with little again"


def test_what_is_foretold_again_is_drafted_again() -> None:
    pace = DraftPace(plain_s=0.1)
    for _ in range(50):
        pace.came(grade=0, tried=1, right=0)
    assert chosen(pace, MOST, 0, 0.0) == 0
    for _ in range(20):
        pace.came(grade=0, tried=1, right=1)
    assert chosen(pace, MOST, 0, 0.0) > 0


def test_a_plain_round_is_timed_now_and_then() -> None:
    pace = DraftPace(plain_s=0.1)
    for _ in range(DRAFTING.plain_every):
        assert chosen(pace, MOST, GRADES - 1, 0.0) > 0
        pace.took(0.1, MOST)
    assert chosen(pace, MOST, GRADES - 1, 0.0) == 0
    pace.took(0.1, 0)
    assert chosen(pace, MOST, GRADES - 1, 0.0) > 0


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, MOST), st.integers(0, MOST)), max_size=40),
    st.integers(0, MOST),
    st.floats(0, 1e3),
)
def test_it_never_drafts_more_than_it_may(
    rounds: list[tuple[float, int, int]], most: int, row_s: float
) -> None:
    pace = DraftPace()
    for round_s, drafted, right in rounds:
        pace.took(round_s, drafted)
        pace.came(grade=1, tried=max(1, drafted), right=min(right, drafted))
    assert 0 <= chosen(pace, most, 1, row_s) <= most
    assert all(0.0 <= share <= 1.0 for share in pace.accepted)


def test_a_session_that_repeats_itself_is_drafted() -> None:
    drafts, tokens, now_s = SessionDrafts(drafter=SuffixDrafter()), [1, 2, 3, 4, 5] * 4, 0.0
    rounds = 0
    while len(tokens) < 200:
        proposed = drafts.propose(tokens, MOST, 0.0, now_s)
        assert not isinstance(proposed, Wait)
        drafts.sent(len(proposed), now_s)
        now_s += 0.1
        came = [(tokens[-1] + at) % 5 + 1 for at in range(len(proposed) + 1)]
        drafts.came(came, now_s)
        tokens += came
        rounds += 1
    assert rounds < 40


@pytest.mark.parametrize("right", [True, False])
def test_an_own_heads_drafts_are_sent_where_they_are_right(right: bool) -> None:
    drafts, tokens, now_s, sent = SessionDrafts(drafter=SuffixDrafter()), [0], 0.0, []
    for _ in range(60):
        newest = tokens[-1]
        drafts.foretell(len(tokens), tuple(newest + 1 + at + (not right) for at in range(3)))
        proposed = drafts.propose(tokens, 2, 0.0, now_s)
        assert not isinstance(proposed, Wait)
        assert len(proposed) <= 2
        assert drafts.source is Source.HEAD or not proposed
        drafts.sent(len(proposed), now_s)
        sent.append(len(proposed))
        now_s += 0.1
        came = len(proposed) + 1 if right else 1
        tokens += [newest + 1 + at for at in range(came)]
        drafts.came(tokens[-came:], now_s)
    assert sent[-1] == (2 if right else 0)


def test_what_was_foretold_behind_other_tokens_is_not_sent() -> None:
    drafts = SessionDrafts(drafter=SuffixDrafter())
    drafts.pace.plain_s = 0.1
    drafts.foretell(3, (7, 8))
    assert drafts.propose([1, 2, 3], 4, 0.0, 0.0) == (7, 8)
    drafts.foretell(3, (7, 8))
    assert drafts.propose([1, 2, 3, 4], 4, 0.0, 0.0) == ()


def test_a_long_prompt_is_followed_bit_by_bit() -> None:
    drafts, tokens = SessionDrafts(drafter=SuffixDrafter()), [1, 2, 3] * 2000
    assert drafts.propose(tokens, MOST, 0.0, 0.0) == ()
    while drafts.drafter.known < len(tokens):
        drafts.follow(tokens)
    drafts.sent(0, 0.0)
    drafts.came((1,), 0.1)
    assert drafts.propose([*tokens, 1], 3, 0.0, 0.1) == (2, 3, 1)


def test_a_drafted_row_costs_all_who_run_in_the_same_steps() -> None:
    cost = StepCost()
    assert cost.others_s(3, 0.01) == 0.0
    for _ in range(100):
        cost.ran(11, 0, 0.1, 0.1)
    assert cost.others_s(3, None) == 0.0
    assert cost.others_s(3, 0.01) == pytest.approx(10 * 3 * 0.01, rel=0.01)
    cost.ran(11, 10, 0.12, 0.1)
    assert cost.others_s(3, 0.01) == pytest.approx(10 * 3 * 0.002, rel=0.01)
