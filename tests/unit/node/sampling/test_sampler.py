"""Laws of picking a token."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.session import Sampling
from node.sampling import sampler
from node.sampling.penalties import SamplingRow
from node.sampling.sampler import draw_rows, noise, sample


def sample_rows(logits: torch.Tensor, drawn: list[Sampling], positions: list[int]) -> list[int]:
    draws = [SamplingRow(sampling=s, position=p) for s, p in zip(drawn, positions, strict=True)]
    return draw_rows(logits, draws)


LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 2.5, 0.0])
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.0, 100.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, (1 << 63) - 1),
)


@given(st.lists(samplings, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_token_depends_on_its_own_row_only(drawn: list[Sampling], seed: int) -> None:
    logits = torch.randn(len(drawn), 32, generator=torch.Generator().manual_seed(seed))
    positions = [seed + 7 * n for n in range(len(drawn))]
    together = sample_rows(logits, drawn, positions)
    alone = [
        sample(row, sampling, position=position)
        for row, sampling, position in zip(logits, drawn, positions, strict=True)
    ]
    assert together == alone
    assert sample_rows(logits, drawn, positions) == together


@given(samplings, st.integers(0, 10_000))
def test_a_token_is_among_the_most_likely(sampling: Sampling, position: int) -> None:
    token = sample(LOGITS, sampling, position=position)
    order = torch.argsort(LOGITS, descending=True).tolist()
    if sampling.temperature == 0.0:
        assert token == order[0]
        return
    if sampling.top_k:
        assert token in order[: sampling.top_k]
    scores = LOGITS.double()[order[: sampling.top_k or None]]
    likely = torch.softmax((scores - scores.max()) / sampling.temperature, dim=0)
    before = float(likely[: order.index(token)].sum())
    assert before < sampling.top_p + 1e-9


def test_draws_follow_the_softmax() -> None:
    draws = 20_000
    sampling = Sampling(temperature=0.7, seed=11)
    counts = torch.zeros(len(LOGITS))
    for position in range(draws):
        counts[sample(LOGITS, sampling, position=position)] += 1
    expected = torch.softmax(LOGITS.double() / 0.7, dim=0)
    chi_squared = float(((counts - draws * expected) ** 2 / (draws * expected)).sum())
    assert chi_squared < 20.5  # 5 degrees of freedom, p = 0.001


def test_other_seeds_positions_and_tokens_give_other_numbers() -> None:
    ids = np.arange(30)
    numbers = {n for seed in range(10) for at in range(10) for n in noise(seed, at, ids).tolist()}
    assert len(numbers) == 3000
    assert all(0.0 < number < 1.0 for number in numbers)
    assert noise(3, 4, np.array([5, 17])).tolist() == noise(3, 4, ids)[[5, 17]].tolist()


def test_a_tie_goes_to_the_smallest_id() -> None:
    tie = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert sample(tie, Sampling(), position=0) == 1
    assert sample_rows(tie[None], [Sampling()], [0]) == [1]
    assert sample(tie, Sampling(temperature=1.0, top_k=1), position=3) == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_little_temperature_is_nearly_greedy(temperature: float) -> None:
    for position in range(50):
        sampling = Sampling(temperature=temperature, seed=position)
        assert sample(LOGITS, sampling, position=position) == 4


@given(
    st.lists(
        st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 3.0, -3e38, 3e38]),
        min_size=1,
        max_size=8,
    ),
    samplings,
)
def test_logits_that_are_no_numbers_still_give_a_token(
    values: list[float], sampling: Sampling
) -> None:
    logits = torch.tensor(values)
    token = sample(logits, sampling, position=5)
    assert 0 <= token < len(values)
    assert 0 <= sample_rows(logits[None], [sampling], [5])[0] < len(values)
    if sampling.temperature > 0 and any(value == math.inf for value in values):
        assert values[token] == math.inf


class CountedNumpy:
    """Stands in for numpy in the sampler, and counts the numbers that its functions look at."""

    def __init__(self) -> None:
        self.numbers = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if isinstance(function, type) or not callable(function):
            return function

        def counted(*arguments: Any, **options: Any) -> Any:
            numbers = max((np.size(each) for each in arguments), default=0)
            sorts = name in {"sort", "argsort", "lexsort"}
            self.numbers += numbers * (max(1, numbers.bit_length()) if sorts else 1)
            return function(*arguments, **options)

        return counted


WIDE = 20_000
USUAL = Sampling(temperature=0.7, top_p=0.9, seed=3)


def work_of(monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, sampling: Sampling) -> float:
    """Numbers that numpy looks at for one token, on average over positions."""
    positions = range(10)
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "np", counting := CountedNumpy())
        for position in positions:
            sample(logits, sampling, position=position)
    return counting.numbers / len(positions)


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("temperature", [0.7, 100.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("top_k", [0, WIDE // 2])
def test_no_options_cost_much_more_than_the_usual_ones(
    monkeypatch: pytest.MonkeyPatch, spread: float, temperature: float, top_p: float, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(WIDE, generator=generator)
    peaked = logits.clone()
    peaked[:5] += 20.0
    usual = work_of(monkeypatch, peaked, USUAL)
    assert usual <= 8 * WIDE
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=0.01 * top_p)
    assert work_of(monkeypatch, spread * logits, sampling) <= 3 * usual
