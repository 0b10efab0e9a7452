"""A real swarm behind ``generate()`` of ``transformers`` people, and behind the terminal chat."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, TextIteratorStreamer

from client import Answer, GenerationOptions, Swarm
from client.model import SwarmModel
from client.swarm.long_answer import LongAnswer
from dht.errors import UserError
from testing.local_swarm import LocalSwarm
from testing.paths import ROOT
from testing.reference import Reference
from tests.e2e.conftest import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("swarm", [3], indirect=True)]

PROMPTS = ("One morning", "The otter found a small blue boat and", "Rain")


@pytest.fixture(scope="module")
def model(swarm: LocalSwarm) -> Iterator[SwarmModel]:
    with SwarmModel.from_swarm(swarm.addresses, model=str(MODEL)) as connected:
        yield connected


@pytest.mark.parametrize(
    "named",
    [
        {"max_new_tokens": 24},
        {"max_length": 40},
        {"max_new_tokens": 24, "repetition_penalty": 1.3},
        {"max_new_tokens": 40, "eos_token_id": 13, "pad_token_id": 0},
        {"generation_config": GenerationConfig(max_new_tokens=12, do_sample=False)},
    ],
    ids=str,
)
def test_greedy_ids_are_those_of_transformers(
    model: SwarmModel, reference: Reference, named: dict[str, object]
) -> None:
    ids = torch.tensor([reference.encode(PROMPTS[1])])
    # The bundled model's own configuration samples; both sides take it where nothing is said.
    named = {"do_sample": False, **named}
    if "generation_config" in named:
        del named["do_sample"]
    expected = reference.model.generate(ids, attention_mask=torch.ones_like(ids), **named)
    made = model.generate(ids, **named)
    assert made.dtype == expected.dtype
    assert made.tolist() == expected.tolist()


def test_a_left_padded_batch_is_that_of_transformers(
    model: SwarmModel, reference: Reference
) -> None:
    rows = [reference.encode(prompt) for prompt in PROMPTS]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    named = {"attention_mask": mask, "max_new_tokens": 16, "pad_token_id": 0, "do_sample": False}
    expected = reference.model.generate(ids, **named)
    assert model.generate(input_ids=ids, **named).tolist() == expected.tolist()


def test_transformers_streamer_gets_the_answer_as_it_comes(model: SwarmModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    made = model.generate(**inputs, max_new_tokens=12, streamer=streamer)
    new = made[0, inputs["input_ids"].shape[1] :]
    assert "".join(streamer) == tokenizer.decode(new)
    assert len(new) == 12


def test_a_seed_repeats_a_sample_and_what_cannot_be_done_is_named(model: SwarmModel) -> None:
    ids = [[1, 5, 9]]
    named = {"do_sample": True, "temperature": 1.2, "max_new_tokens": 16}
    one, again, other = (model.generate(ids, seed=seed, **named) for seed in (1, 1, 2))
    assert one == again != other
    with pytest.raises(UserError, match="num_beams"):
        model.generate(ids, num_beams=2)


def test_an_answer_in_parts_is_that_of_one_request(swarm: LocalSwarm, reference: Reference) -> None:
    prompt = tuple(reference.encode(PROMPTS[0]))
    expected, _ = reference.greedy(list(prompt), 60)

    async def asked() -> tuple[str, Answer, str]:
        async with Swarm.connect(swarm.addresses, model=str(MODEL)) as connected:
            assert connected.text.tokenizer is not None
            running = LongAnswer(
                connected,
                connected.text.tokenizer,
                prompt,
                GenerationOptions(ignore_eos=True),
                context_tokens=len(prompt) + 60,
                first_tokens=25,
                part_tokens=20,
            )
            text = "".join([piece.text async for piece in running])
            return text, running.answer(), running.cut

    text, answer, cut = asyncio.run(asked())
    assert answer.token_ids == tuple(expected)
    assert text == answer.text == reference.decode(expected)
    assert cut == f"the model's context of {len(prompt) + 60} tokens is full"


def test_a_chat_answers_and_ctrl_c_stops_the_answer_alone(swarm: LocalSwarm) -> None:
    command = [sys.executable, "-m", "client.chat", "--model", str(MODEL), "--ignore-eos"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "180", "--initial-peers", *swarm.addresses],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("One morning\n")
        process.stdin.flush()
        assert process.stdout.read(1), "text comes as it is made"
        process.send_signal(signal.SIGINT)
        process.stdin.write("/nonsense\n/system Be brief\n/system\n/reset\nRain\n")
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, err
    assert err.count("(stopped)") == 1, err
    for said in ("no command /nonsense", "takes no instructions", "there are no instructions"):
        assert err.count(said) == 1, err
    assert "(forgot 1 message of yours)" in err
    assert err.count("180 tokens after a prompt of") == 1, "the second answer came whole"
    assert len(out) > 180
