"""The token log accepts every token exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.answer.answer import AnswerLog, AnswerRequest
from dht.messages.logprobs import TokenScore
from dht.messages.session import FinishReason, Sampling
from tests.unit.records import MODEL

STOP = 7


def make_log(new: int = 10, prompt: int = 3) -> AnswerLog:
    sampling = Sampling(stop_token_ids=(STOP,))
    return AnswerLog(
        request=AnswerRequest(
            model=MODEL,
            prompt_ids=tuple(range(100, 100 + prompt)),
            max_new_tokens=new,
            sampling=sampling,
        )
    )


@given(
    answer=st.lists(st.integers(8, 50), min_size=1, max_size=20),
    frames=st.lists(st.tuples(st.integers(0, 19), st.integers(1, 6), st.integers(0, 1))),
)
def test_repeated_late_and_stale_frames_change_nothing(
    answer: list[int], frames: list[tuple[int, int, int]]
) -> None:
    log = make_log(new=len(answer))
    log.attempt = 1
    delivered: list[int] = []
    in_order = [(start, 1, 1) for start in range(len(answer))]
    for start, size, attempt in [*frames, *in_order]:
        part = tuple(answer[start : start + size])
        before = log.next_position
        got = log.accept(attempt=attempt, position=3 + start, token_ids=part)
        if attempt == 0 or 3 + start > before:
            assert got == ()
        delivered.extend(got)
        assert delivered == answer[: len(delivered)] == log.token_ids
    assert log.token_ids == answer
    assert log.finish_reason is FinishReason.LENGTH


def test_nothing_follows_a_stop_token() -> None:
    log = make_log()
    assert log.accept(attempt=0, position=3, token_ids=(1, STOP, 2)) == (1, STOP)
    assert log.finish_reason is FinishReason.STOP
    assert log.accept(attempt=0, position=5, token_ids=(2,)) == ()


def test_nothing_exceeds_the_length() -> None:
    log = make_log(new=2)
    assert log.accept(attempt=0, position=3, token_ids=(1, 2, 3, 4)) == (1, 2)
    assert log.finish_reason is FinishReason.LENGTH


def test_a_replay_asks_for_the_rest() -> None:
    log = make_log(new=5)
    log.accept(attempt=0, position=3, token_ids=(1, 2))
    assert log.replay_ids == (100, 101, 102, 1, 2)
    assert log.remaining_tokens == 3
    assert log.next_position == 5


def score(token_id: int) -> TokenScore:
    return TokenScore(token_id=token_id, logprob=-1.0)


def test_each_score_counts_once_and_belongs_to_its_token() -> None:
    log = make_log()
    scores = tuple(score(n) for n in range(4))
    log.accept(attempt=0, position=3, token_ids=(0, 1), scores=scores[:2])
    log.accept(attempt=0, position=3, token_ids=(0, 1, 2, 3), scores=scores)
    assert log.token_ids == [0, 1, 2, 3]
    assert log.scores == list(scores)


def test_scores_of_the_prompt_come_once_in_order_and_under_their_attempt() -> None:
    sampling = Sampling(prompt_logprobs=0)
    request = AnswerRequest(
        model=MODEL, prompt_ids=(10, 11, 12, 13), max_new_tokens=2, sampling=sampling
    )
    log = AnswerLog(request=request)
    log.attempt = 1
    first, second, third = score(11), score(12), score(13)
    log.accept_prompt_scores(attempt=0, position=1, scores=(third,))
    log.accept_prompt_scores(attempt=1, position=2, scores=(second,))
    assert log.prompt_scores == []
    log.accept_prompt_scores(attempt=1, position=1, scores=(first, second))
    assert not log.prompt_is_scored
    log.accept_prompt_scores(attempt=1, position=1, scores=(third, third, third))
    assert log.prompt_scores == [first, second, third]
    assert log.prompt_is_scored


@pytest.mark.parametrize(
    ("sampling", "history"),
    [
        (Sampling(), ()),
        (Sampling(presence_penalty=1.0), (1, 2)),
        (Sampling(frequency_penalty=1.0), (1, 2)),
        (Sampling(repetition_penalty=1.1), (100, 101, 102, 1, 2)),
        (Sampling(prompt_logprobs=1), (100, 101, 102, 1, 2)),
        (Sampling(logprobs=1, min_new_tokens=5), ()),
    ],
)
def test_a_replay_brings_what_the_last_stage_has_to_know(
    sampling: Sampling, history: tuple[int, ...]
) -> None:
    request = AnswerRequest(
        model=MODEL, prompt_ids=(100, 101, 102), max_new_tokens=9, sampling=sampling
    )
    log = AnswerLog(request=request, token_ids=[1, 2])
    assert log.history == history
