"""Every option of sampling against ``transformers``' own processors."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from dht.messages.session import Sampling
from node.sampling.penalties import FLOAT32_MAX, SamplingRow, adjust, finite
from node.sampling.sampler import draw_rows
from node.sampling.token_history import TokenHistory
from tests.examples import examples

VOCAB = 60
token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=40)
some_logits = st.integers(0, 10_000).map(
    lambda seed: 4 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
)


def history(prompt: list[int], answer: list[int]) -> TokenHistory:
    grown = TokenHistory(prompt)
    for token_id in answer:
        grown.add(token_id)
    return grown


def adjusted(logits: torch.Tensor, sampling: Sampling, past: TokenHistory | None) -> torch.Tensor:
    draw = SamplingRow(sampling=sampling, position=0, history=past)
    return adjust(logits.clone()[None], [draw])[0]


@given(some_logits, token_ids, token_ids, st.floats(0.1, 5.0), st.integers(0, 50))
def test_repetition_and_least_length_are_those_of_transformers(
    logits: torch.Tensor, prompt: list[int], answer: list[int], penalty: float, least: int
) -> None:
    sampling = Sampling(repetition_penalty=penalty, min_new_tokens=least, stop_token_ids=(3, 5))
    got = adjusted(logits, sampling, history(prompt, answer))
    ids = torch.tensor([prompt + answer], dtype=torch.long)
    expected = logits.clone()[None]
    if ids.numel():
        expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(ids, expected)
    expected = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), least, [3, 5])(ids, expected)
    assert torch.equal(got, expected[0].clamp(-FLOAT32_MAX))


@given(some_logits, st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), min_size=1))
def test_a_bias_is_that_of_transformers(logits: torch.Tensor, bias: dict[int, float]) -> None:
    got = adjusted(logits, Sampling(logit_bias=tuple(bias.items())), None)
    processor = theirs.SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()})
    expected = processor(torch.tensor([[0]]), logits.clone()[None])[0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@given(some_logits, token_ids, token_ids, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_are_those_of_openai(
    logits: torch.Tensor, prompt: list[int], answer: list[int], presence: float, frequency: float
) -> None:
    """As OpenAI's documentation defines them: over the answer alone."""
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    got = adjusted(logits, sampling, history(prompt, answer))
    expected = [
        value - frequency * answer.count(at) - presence * (at in answer)
        for at, value in enumerate(logits.tolist())
    ]
    assert got.tolist() == pytest.approx(expected, abs=1e-4)


class Race:
    """Which tokens can be drawn at all: the union over many positions."""

    DRAWS = 400

    @classmethod
    def of(cls, logits: torch.Tensor, sampling: Sampling) -> set[int]:
        draws = [SamplingRow(sampling=sampling, position=at) for at in range(cls.DRAWS)]
        return set(draw_rows(logits.expand(cls.DRAWS, -1), draws))


@examples(40)
@given(
    some_logits,
    st.floats(0.5, 5.0),
    st.integers(0, 80),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.5),
)
def test_what_can_be_drawn_is_what_transformers_keeps(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    ids = torch.tensor([[0]])
    scores = theirs.TemperatureLogitsWarper(temperature)(ids, logits.double()[None])
    warpers: list[Any] = []
    if top_k:
        warpers.append(theirs.TopKLogitsWarper(min(top_k, VOCAB)))
    warpers += [theirs.TopPLogitsWarper(top_p), theirs.MinPLogitsWarper(min_p)]
    for warper in warpers:
        scores = warper(ids, scores)
    kept = torch.softmax(scores[0], dim=-1)
    drawn = Race.of(
        logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    )
    assert drawn <= set(torch.nonzero(kept)[:, 0].tolist())
    likely = set(torch.nonzero(kept > 0.08)[:, 0].tolist())  # missed with probability < 1e-14
    assert likely <= drawn


@pytest.mark.parametrize("sampling", [
    Sampling(temperature=1.0, top_k=1500, seed=5),
    Sampling(temperature=5.0, top_p=0.999, seed=5),
    Sampling(temperature=5.0, top_p=0.999, top_k=2000, seed=5),
    Sampling(temperature=1.0, top_p=0.5, seed=5),
    Sampling(temperature=1.0, top_k=7, seed=5),
    Sampling(temperature=1.0, min_p=0.01, seed=5),
    Sampling(temperature=1.0, seed=5),
])  # fmt: skip
@pytest.mark.parametrize("levels", [2, 50, 100_000])
def test_candidates_are_those_of_a_full_sort(sampling: Sampling, levels: int) -> None:
    """A vocabulary larger than what is sorted first, with few or many equal logits."""
    vocab = 4000
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(0, levels, (vocab,), generator=generator).float() * (8.0 / levels)
    scores = (logits.double() - logits.double().max()) / sampling.temperature
    order = sorted(range(vocab), key=lambda at: (-scores[at], at))[: sampling.top_k or None]
    total, mass, kept = math.fsum(math.exp(scores[at]) for at in order), 0.0, []
    for at in order:
        kept.append(at)
        mass += math.exp(scores[at])
        if mass >= sampling.top_p * total * (1 - 1e-12):
            break
    kept = [at for at in kept if sampling.min_p == 0 or scores[at] >= math.log(sampling.min_p)]
    forbidden = torch.full_like(logits, -math.inf)
    forbidden[kept] = logits[kept]
    plain = Sampling(temperature=sampling.temperature, seed=sampling.seed)
    for position in range(20):
        draw = SamplingRow(sampling=sampling, position=position)
        alone = SamplingRow(sampling=plain, position=position)
        assert draw_rows(logits[None], [draw]) == draw_rows(forbidden[None], [alone])


@given(st.lists(st.tuples(token_ids, token_ids, some_logits), min_size=1, max_size=5), st.data())
def test_neighbours_change_nothing(
    rows: list[tuple[list[int], list[int], torch.Tensor]], data: st.DataObject
) -> None:
    draws = [
        SamplingRow(
            sampling=data.draw(
                st.builds(
                    Sampling,
                    temperature=st.sampled_from([0.0, 0.7]),
                    repetition_penalty=st.sampled_from([1.0, 1.3]),
                    frequency_penalty=st.sampled_from([0.0, 0.5]),
                    min_new_tokens=st.integers(0, 9),
                    stop_token_ids=st.just((1,)),
                    logit_bias=st.sampled_from([(), ((4, 2.5), (VOCAB + 9, 9.0))]),
                )
            ),
            position=len(prompt) + len(answer),
            history=history(prompt, answer) if data.draw(st.booleans()) else None,
        )
        for prompt, answer, _ in rows
    ]
    logits = torch.stack([row for _, _, row in rows])
    before = logits.clone()
    alone = [draw_rows(row[None], [draw])[0] for row, draw in zip(logits, draws, strict=True)]
    assert draw_rows(logits, draws) == alone
    assert torch.equal(logits, before), "raw logits stay as they are: they are scored"


def test_tokens_that_the_model_does_not_have_are_ignored() -> None:
    logits = torch.zeros(VOCAB)
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, min_new_tokens=9,
                        stop_token_ids=(VOCAB, 1 << 20), logit_bias=((VOCAB, 5.0),))  # fmt: skip
    got = adjusted(logits, sampling, history([VOCAB + 7], [2, VOCAB]))
    assert got.tolist() == [0.0, 0.0, -1.0] + [0.0] * (VOCAB - 3)


def test_what_is_no_number_is_least_likely() -> None:
    logits = torch.tensor([math.nan, 1.0, -math.inf, math.inf])
    assert finite(logits).tolist() == [-FLOAT32_MAX, 1.0, -FLOAT32_MAX, FLOAT32_MAX]
    sampling = Sampling(logit_bias=((1, 1.0),))
    assert draw_rows(logits[None], [SamplingRow(sampling=sampling, position=0)]) == [3]


@given(
    st.lists(st.sampled_from([math.nan, -math.inf, -3e38, 0.0, 2.5, math.inf]), min_size=1),
    st.sampled_from([5e-324, 1e-300, 1e-46, 1e-38, 100.0]),
    st.sampled_from([0.0, 5e-324, 2.0]),
    st.sampled_from([(), ((0, -2.5),)]),
)
def test_any_penalty_leaves_numbers_that_a_token_is_drawn_from(
    values: list[float], penalty: float, temperature: float, bias: tuple[tuple[int, float], ...]
) -> None:
    logits, past = torch.tensor(values), history([0], list(range(len(values))))
    sampling = Sampling(repetition_penalty=penalty, temperature=temperature, logit_bias=bias)
    assert adjusted(finite(logits), sampling, past).isfinite().all()
    draw = SamplingRow(sampling=sampling, position=5, history=past)
    assert 0 <= draw_rows(logits[None], [draw])[0] < len(values)


@given(token_ids, token_ids, st.integers(0, 40))
def test_a_replay_has_the_same_history(prompt: list[int], answer: list[int], cut: int) -> None:
    whole = history(prompt, answer)
    kept = min(cut, len(answer))
    replayed = TokenHistory(prompt + answer[:kept], answered=kept)
    for token_id in answer[kept:]:
        replayed.add(token_id)
    assert replayed.answer_tokens == whole.answer_tokens == len(answer)
    assert replayed.largest_id == whole.largest_id
    one, other = (dict(zip(h.ids.tolist(), h.counts.tolist(), strict=True))
                  for h in (whole, replayed))  # fmt: skip
    assert one == other
