"""Every answer of a swarm equals what one process says, token for token."""

import asyncio
import json

import pytest

from client import Answer, BlockingSwarm, GenerationOptions, Swarm
from dht.messages.session import FinishReason, Sampling
from node.sampling.sampler import sample
from testing.local_swarm import LocalSwarm
from testing.reference import Reference
from tests.e2e.conftest import MODEL
from tests.unit.test_mistakes import assert_plain, run

pytestmark = pytest.mark.e2e

LENGTHS = (1, 7, 300)
NEW_TOKENS = 24


def prompt_of(length: int, reference: Reference) -> tuple[int, ...]:
    """The first ``length`` ids of a text that is long enough."""
    text = "Once upon a time a small otter found a blue boat by the river. " * 40
    return tuple(reference.encode(text)[:length])


def sampled_ids(
    reference: Reference, prompt: tuple[int, ...], sampling: Sampling, new_tokens: int
) -> tuple[int, ...]:
    """The project's sampler over ``transformers``' logits, in this process."""
    ids = list(prompt)
    while len(ids) < len(prompt) + new_tokens:
        token_id = sample(reference.logits(ids), sampling, position=len(ids))
        ids.append(token_id)
        if token_id in sampling.stop_token_ids:
            break
    return tuple(ids[len(prompt) :])


def test_greedy_answers_of_two_clients_at_once_equal_transformers(
    swarm: LocalSwarm, reference: Reference
) -> None:
    prompts = [prompt_of(length, reference) for length in LENGTHS]

    async def ask() -> list[Answer]:
        async with (
            Swarm.connect(swarm.addresses, model=str(MODEL)) as one,
            Swarm.connect(swarm.addresses[1:], model=str(MODEL)) as two,
        ):
            return await asyncio.gather(
                *(
                    client.generate(prompt, max_new_tokens=NEW_TOKENS)
                    for client in (one, two)
                    for prompt in prompts
                )
            )

    answers = asyncio.run(ask())
    expected = [tuple(reference.greedy(prompt, NEW_TOKENS)[0]) for prompt in prompts] * 2
    assert [answer.token_ids for answer in answers] == expected
    assert all(len(answer.route) > 1 for answer in answers), "no peer holds the model alone"


def test_seeded_sampling_equals_the_same_sampler_in_one_process(
    swarm: LocalSwarm, reference: Reference
) -> None:
    options = [
        GenerationOptions(max_new_tokens=NEW_TOKENS, temperature=0.8, seed=1),
        GenerationOptions(max_new_tokens=NEW_TOKENS, temperature=1.2, top_p=0.9, seed=2),
        GenerationOptions(max_new_tokens=NEW_TOKENS, temperature=1.0, top_k=5, seed=3),
    ]
    prompts = [prompt_of(length, reference) for length in LENGTHS]

    async def ask() -> list[Answer]:
        async with Swarm.connect(swarm.addresses, model=str(MODEL)) as client:
            return await asyncio.gather(
                *(client.generate(p, o) for p, o in zip(prompts, options, strict=True))
            )

    for prompt, option, answer in zip(prompts, options, asyncio.run(ask()), strict=True):
        sampling = option.sampling(reference_stops(reference))
        assert answer.token_ids == sampled_ids(reference, prompt, sampling, NEW_TOKENS)


def reference_stops(reference: Reference) -> tuple[int, ...]:
    found = reference.model.generation_config.eos_token_id
    return tuple(found) if isinstance(found, list) else (found,)


def test_text_streams_whole_and_ends_by_itself(swarm: LocalSwarm, reference: Reference) -> None:
    with BlockingSwarm.connect(swarm.addresses, model=str(MODEL)) as client:
        answer = client.generate("Once upon a time", max_new_tokens=400)
        pieces = list(client.stream("Once upon a time", max_new_tokens=400))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text
    expected, _ = reference.greedy(reference.encode("Once upon a time"), 400)
    assert answer.token_ids == tuple(expected)


def test_a_stop_string_ends_the_answer_and_frees_the_session(swarm: LocalSwarm) -> None:
    with BlockingSwarm.connect(swarm.addresses, model=str(MODEL)) as client:
        whole = client.generate("Once upon a time", max_new_tokens=60)
        assert whole.text is not None
        word = whole.text.split()[5]
        cut = client.generate("Once upon a time", max_new_tokens=60, stop=(word,))
    assert cut.text == whole.text[: whole.text.index(word)]
    assert cut.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("swarm", [3], indirect=True)  # whose size makes no difference to it
def test_a_prompt_longer_than_the_context_and_a_wrong_id(swarm: LocalSwarm) -> None:
    context = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    ask = ("--model", str(MODEL), "--initial-peers", *swarm.addresses)
    too_long = ",".join(["300"] * (context + 1))
    assert_plain(run("client.generate", *ask, "--prompt-ids", too_long), str(context))
    assert_plain(run("client.generate", *ask, "--prompt-ids", "99999999"), "99999999")
