"""Penalties and log probabilities of a real swarm against ``transformers`` in one process."""

import asyncio

import pytest
import torch

from client import Answer, GenerationOptions, Swarm
from node.sampling.penalties import SamplingRow
from node.sampling.sampler import draw_rows
from node.sampling.token_history import TokenHistory
from testing.local_swarm import LocalSwarm
from testing.reference import Reference
from tests.e2e.conftest import MODEL

pytestmark = pytest.mark.e2e

NEW_TOKENS = 24
TOP = 5


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[tuple[int, ...]]:
    text = "Once upon a time a small otter found a blue boat by the river. " * 40
    return [tuple(reference.encode(text)[:length]) for length in (1, 7, 300)]


def ask(
    swarm: LocalSwarm, prompts: list[tuple[int, ...]], options: GenerationOptions
) -> list[Answer]:
    async def both() -> list[Answer]:
        async with Swarm.connect(swarm.addresses, model=str(MODEL)) as client:
            return await asyncio.gather(*(client.generate(p, options) for p in prompts))

    return asyncio.run(both())


def test_log_probabilities_are_those_of_transformers(
    swarm: LocalSwarm, reference: Reference, prompts: list[tuple[int, ...]]
) -> None:
    options = GenerationOptions(
        max_new_tokens=NEW_TOKENS, logprobs=TOP, prompt_logprobs=TOP, repetition_penalty=1.2
    )
    for prompt, answer in zip(prompts, ask(swarm, prompts, options), strict=True):
        ids = torch.tensor([prompt + answer.token_ids])
        with torch.inference_mode():
            logits = reference.model(ids).logits[0].float()
        expected = torch.log_softmax(logits, dim=-1)
        assert answer.logprobs is not None
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        scores = [*answer.prompt_logprobs[1:], *answer.logprobs]
        assert len(scores) == len(prompt) + len(answer.token_ids) - 1
        for at, score in enumerate(scores):
            assert score is not None
            assert score.token_id == ids[0, at + 1]
            assert score.logprob == pytest.approx(float(expected[at, score.token_id]), abs=1e-4)
            best = torch.topk(expected[at], TOP).values.tolist()
            assert [logprob for _, logprob in score.top] == pytest.approx(best, abs=1e-4)
            for token_id, logprob in score.top:
                assert logprob == pytest.approx(float(expected[at, token_id]), abs=1e-4)


def test_a_greedy_repetition_penalty_is_that_of_generate(
    swarm: LocalSwarm, reference: Reference, prompts: list[tuple[int, ...]]
) -> None:
    options = GenerationOptions(
        max_new_tokens=NEW_TOKENS, repetition_penalty=1.3, min_new_tokens=NEW_TOKENS
    )
    for prompt, answer in zip(prompts, ask(swarm, prompts, options), strict=True):
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = reference.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                repetition_penalty=1.3,
            )
        assert answer.token_ids == tuple(out[0, len(prompt) :].tolist())


def test_sampling_with_everything_equals_the_same_sampler_in_one_process(
    swarm: LocalSwarm, reference: Reference, prompts: list[tuple[int, ...]]
) -> None:
    options = GenerationOptions(
        max_new_tokens=NEW_TOKENS,
        temperature=0.9,
        seed=4,
        min_p=0.02,
        top_p=0.95,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={100: 2.0, 7: -100.0},
        ignore_eos=True,
    )
    sampling = options.sampling(())
    for prompt, answer in zip(prompts, ask(swarm, prompts, options), strict=True):
        ids, history = list(prompt), TokenHistory(prompt)
        while len(ids) < len(prompt) + NEW_TOKENS:
            draw = SamplingRow(sampling=sampling, position=len(ids), history=history)
            ids += draw_rows(reference.logits(ids)[None], [draw])
            history.add(ids[-1])
        assert answer.token_ids == tuple(ids[len(prompt) :])
