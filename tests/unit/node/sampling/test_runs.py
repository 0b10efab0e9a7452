"""A run of drafted rows gives the tokens that one row at a time gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.session import Sampling
from node.sampling.penalties import SamplingRow
from node.sampling.sampler import draw_rows, draw_runs
from node.sampling.token_history import TokenHistory

VOCAB = 12

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    min_new_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.just((1, 2)),
)


def logits_after(tokens: list[int]) -> torch.Tensor:
    seed = sum((at + 1) * (token + 3) for at, token in enumerate(tokens))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def one_by_one(sampling: Sampling, prompt: list[int], count: int) -> list[int]:
    history, tokens = TokenHistory(prompt), list(prompt)
    for _ in range(count):
        draw = SamplingRow(sampling=sampling, position=len(tokens), history=history)
        tokens += draw_rows(logits_after(tokens)[None], [draw])
        history.add(tokens[-1])
    return tokens[len(prompt) :]


@given(
    st.lists(st.tuples(samplings, st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
)
def test_a_run_is_what_comes_one_by_one(
    asked: list[tuple[Sampling, int, int]], prompt: list[int]
) -> None:
    """Each draw has some drafts, wrong from some place on."""
    draws, rows, expected, before = [], [], [], []
    for sampling, count, right in asked:
        tokens = one_by_one(sampling, prompt, count + 1)
        drafts = [*tokens[:right], *((n + 1) % VOCAB for n in tokens[right:])][:count]
        history = TokenHistory(prompt)
        before.append((history.ids.tolist(), history.counts.tolist(), history.answer_tokens))
        draws.append(
            SamplingRow(
                sampling=sampling, position=len(prompt), history=history, drafts=tuple(drafts)
            )
        )
        rows += [logits_after([*prompt, *drafts[:at]]) for at in range(count + 1)]
        expected.append(tuple(tokens[: 1 + min(right, count)]))
    assert draw_runs(torch.stack(rows), draws) == expected
    after = [draw.history for draw in draws]
    assert [(h.ids.tolist(), h.counts.tolist(), h.answer_tokens) for h in after if h] == before


@pytest.mark.parametrize("drafts", [(), (4,), (4, 4)])
def test_without_a_history_nothing_is_kept_of_a_run(drafts: tuple[int, ...]) -> None:
    logits = torch.zeros(1 + len(drafts), VOCAB)
    logits[:, 4] = 1.0
    draw = SamplingRow(sampling=Sampling(), position=3, drafts=drafts)
    assert draw_runs(logits, [draw]) == [(4,) * (1 + len(drafts))]
