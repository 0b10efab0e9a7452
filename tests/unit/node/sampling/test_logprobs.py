"""Log probabilities: those of float32 log-softmax, whole or in parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.logprobs import LOGPROB_MIN, row_bytes, unpack_scores
from node.sampling import logprobs
from node.sampling.logprobs import score_prompt, score_rows


@given(st.integers(1, 6), st.integers(1, 50), st.integers(0, 20), st.integers(0, 1000))
def test_scores_are_those_of_log_softmax(rows: int, vocab: int, top: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(rows, vocab, generator=generator)
    ids = torch.randint(0, vocab, (rows,), generator=generator).tolist()
    expected = torch.log_softmax(logits, dim=-1)
    scores = unpack_scores(b"".join(score_rows(logits, ids, top)), ids, top, vocab)
    for row, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(expected[row, ids[row]]), abs=1e-5)
        best = sorted(range(vocab), key=lambda at: -float(logits[row, at]))[:top]
        assert [at for at, _ in score.top[:vocab]] == best
        for at, logprob in score.top[:vocab]:
            assert logprob == pytest.approx(float(expected[row, at]), abs=1e-5)
        assert all(logprob == LOGPROB_MIN for _, logprob in score.top[vocab:])


def test_scores_can_always_be_sent() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 100.0], [float("nan"), 0.0, 0.0]])
    data = b"".join(score_rows(logits, [1, 900], 2))
    assert [score.logprob for score in unpack_scores(data, [1, 900], 2, 3)] == [LOGPROB_MIN] * 2


def test_a_prompt_is_scored_in_parts_that_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, width, tokens = 30, 8, 23
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(width, vocab, generator=generator)
    hidden = torch.randn(tokens, width, generator=generator)
    ids = torch.randint(0, vocab, (tokens,), generator=generator).tolist()
    sizes: list[int] = []

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ head

    whole = score_prompt(logits_of, hidden, ids, 3, vocab)
    monkeypatch.setattr(logprobs, "LOGITS_MAX", 5 * vocab)
    parts = score_prompt(logits_of, hidden, ids, 3, vocab)
    assert sizes == [23, 5, 5, 5, 5, 3]
    assert len(whole) == tokens * row_bytes(3)
    for one, other in zip(
        unpack_scores(whole, ids, 3, vocab), unpack_scores(parts, ids, 3, vocab), strict=True
    ):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
