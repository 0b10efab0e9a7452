"""The gateway before a swarm of real peers, used by OpenAI's and others' clients unmodified."""

import asyncio
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from testing.forked import forked, run
from testing.local_swarm import GatewayProcess, LocalSwarm
from testing.reference import Reference
from tests.compat import python_with
from tests.e2e.conftest import MODEL, start_swarm

pytestmark = pytest.mark.e2e

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ '\n' }}{% endfor %}"
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's text files with a chat template, under the swarm's name."""
    directory = tmp_path_factory.mktemp("models") / MODEL.name
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(MODEL / name, directory)
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def peers() -> Iterator[LocalSwarm]:
    started = start_swarm((0.62, 0.45, 0.36))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def gateway(peers: LocalSwarm, chat_model: Path) -> Iterator[GatewayProcess]:
    started = GatewayProcess(peers.addresses, chat_model, start=forked)
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0)


def greedy(reference: Reference, text: str, tokens: int) -> str:
    ids, _ = reference.greedy(reference.encode(text), tokens)
    return str(reference._tokenizer.decode(ids, skip_special_tokens=True))


def test_openai_completions_are_those_of_transformers(
    client: openai.OpenAI, reference: Reference
) -> None:
    (listed,) = client.models.list()  # before anything was asked
    assert (listed.id, listed.model_extra["max_model_len"]) == ("brook", 1024)
    expected = greedy(reference, PROMPT, 40)
    asked: dict[str, Any] = {
        "model": "brook",
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0,
    }
    answer = client.completions.create(**asked)
    assert answer.choices[0].text == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(reference.encode(PROMPT))
    ids = reference.encode(PROMPT)
    assert client.completions.create(**{**asked, "prompt": ids}).choices[0].text == expected
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == answer.usage


def test_openai_chats_stream_and_keep_their_seed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "brook",
        "messages": [
            {"role": "system", "content": "A story."},
            {"role": "user", "content": [{"type": "text", "text": "Once upon a time"}]},
        ],
        "max_completion_tokens": 30,
        "seed": 5,
        "temperature": 0.9,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "frequency_penalty": 0.3,
        "logit_bias": {"50": -100},
    }
    answer = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 2, "another seed, another choice"
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert joined.decode(errors="replace").startswith(choice.message.content or "")
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_openai_responses_are_those_of_its_chats(client: openai.OpenAI) -> None:
    system: Any = {"role": "system", "content": "A story."}
    user: Any = {"role": "user", "content": "Once upon a time"}
    chat = client.chat.completions.create(
        model="brook", messages=[system, user], max_completion_tokens=20, temperature=0
    )
    asked: Any = {"model": "brook", "instructions": "A story.", "input": [user]}
    asked |= {"max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    with client.responses.stream(**asked) as stream:
        said = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    assert said == whole.output_text


def test_many_at_once(gateway: GatewayProcess, reference: Reference) -> None:
    starts = ["The fox", "A boat", "One morning", "Her friend", "In the wood", "A cold wind"]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as many:
            answers = await asyncio.gather(
                *(
                    many.completions.create(model="brook", prompt=text, temperature=0)
                    for text in starts
                )
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [greedy(reference, text, 16) for text in starts]


def test_echoed_log_probabilities_are_those_of_one_process(
    client: openai.OpenAI, reference: Reference
) -> None:
    prompts = [reference.encode(text) for text in ("The otter swam home.", PROMPT)]
    answer = client.completions.create(
        model="brook", prompt=prompts, max_tokens=1, echo=True, logprobs=5, temperature=0
    )
    for ids, choice in zip(prompts, answer.choices, strict=True):
        with torch.inference_mode():
            logits = reference.model(torch.tensor([ids])).logits[0].float()
        expected = torch.log_softmax(logits, dim=-1)
        assert choice.logprobs is not None
        found = choice.logprobs.token_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == len(ids) + 1
        for at in range(1, len(ids)):
            assert found[at] == pytest.approx(float(expected[at - 1, ids[at]]), abs=1e-4)


def test_openai_errors_are_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="brook"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.completions.create(model="brook", prompt="a", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="brook", prompt="a", temperature=9)
    assert caught.value.param == "temperature"
    assert [model.id for model in client.models.list()] == ["brook"]
    assert client.models.retrieve("brook").id == "brook"


def test_a_client_that_hangs_up_frees_its_session(
    client: openai.OpenAI, gateway: GatewayProcess
) -> None:
    stream = client.completions.create(
        model="brook",
        prompt="Once",
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    until_s = time.monotonic() + 60
    line = 'anabranch:num_requests_running{model_name="brook"} 0.0'
    while line not in get(gateway.url.removesuffix("/v1") + "/metrics")[1]:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:  # noqa: S310  our own
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_langchain_chats_and_completes(gateway: GatewayProcess, reference: Reference) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage  # seconds of imports
    from langchain_openai import ChatOpenAI
    from langchain_openai import OpenAI as LangchainOpenAI

    chat = ChatOpenAI(model="brook", base_url=gateway.url, api_key="none", temperature=0)
    messages = [SystemMessage("A story."), HumanMessage("Once upon a time")]
    whole = chat.invoke(messages, max_tokens=20)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 20
    streamed = "".join(str(chunk.content) for chunk in chat.stream(messages, max_tokens=20))
    assert streamed == whole.content
    both = chat.batch([messages, messages], max_tokens=20)
    assert [each.content for each in both] == [whole.content] * 2
    text = LangchainOpenAI(
        model="brook", base_url=gateway.url, api_key="none", temperature=0, max_tokens=16
    )
    assert text.invoke(PROMPT) == greedy(reference, PROMPT, 16)


def test_mistakes_at_the_start_are_one_line(peers: LocalSwarm, gateway: GatewayProcess) -> None:
    port = gateway.url.rsplit(":", 1)[1].removesuffix("/v1")
    command = ("client.gateway", "--model", str(MODEL))
    for extra, said in (
        (["--initial-peers", *peers.addresses, "--port", port], f"port {port}"),
        (["--initial-peers", *peers.addresses, "--port", "70000"], "--port is 70000"),
        (["--initial-peers", "nonsense"], "nonsense"),
    ):
        ended = run(*command, *extra, limit_s=120)
        assert ended.returncode == 2, ended.stderr
        lines = ended.stderr.strip().splitlines()
        assert lines[-1].startswith("error: ")
        assert said in lines[-1]
        assert "Traceback" not in ended.stderr


def test_guidellm_measures_without_an_error(gateway: GatewayProcess, tmp_path: Path) -> None:
    python = python_with("guidellm")
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    rows = [{"prompt": f"There was a {n}", "output_tokens_count": 12} for n in range(12)]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    command = [python, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={gateway.url.removesuffix('/v1')}"]
    command[-1] += ",model=brook,request_format=/v1/completions"
    command += ["--tokenizer", f"kind=huggingface_auto,model={MODEL}"]
    command += ["--profile", "kind=concurrent,streams=3"]
    command += ["--constraint", "kind=max_requests,count=9"]
    command += ["--data", f"kind=json_file,path={prompts}"]
    command += ["--output", f"kind=json,path={report}"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (9, 0)


def test_lm_eval_loglikelihoods_are_those_of_one_process(
    gateway: GatewayProcess, reference: Reference, tmp_path: Path
) -> None:
    """lm-eval's own local-completions client; in a process of its own, as it patches much."""
    python = python_with("lm_eval")
    pairs = [
        ("Once upon a time", " a small otter found a blue boat."),
        ("The fox was", " happy. Then it rained"),
        ("", "One morning the wind was cold."),
    ]
    (tmp_path / "ask.py").write_text(
        "import json, sys\n"
        "from lm_eval.api.instance import Instance\n"
        "from lm_eval.models.openai_completions import LocalCompletionsAPI\n"
        f"model = LocalCompletionsAPI(model='brook', base_url={gateway.url!r} + '/completions',\n"
        f"    tokenizer={str(MODEL)!r}, tokenizer_backend='huggingface', num_concurrent=2,\n"
        "    tokenized_requests=True, batch_size=2, max_length=1024)\n"
        f"pairs = {pairs!r}\n"
        "asked = [Instance(request_type='loglikelihood', doc={}, arguments=pair, idx=at)\n"
        "    for at, pair in enumerate(pairs)]\n"
        "found = model.loglikelihood(asked)\n"
        "until = [Instance(request_type='generate_until', doc={}, idx=0,\n"
        "    arguments=('Once upon a time', {'until': ['.'], 'max_gen_toks': 40}))]\n"
        "text = model.generate_until(until)\n"
        "tokens = [model._encode_pair(*pair) if pair[0] else\n"
        "    ([model.prefix_token_id], model.tok_encode(pair[1])) for pair in pairs]\n"
        "json.dump([found, text, tokens], open(sys.argv[1], 'w'))\n"
    )
    done = subprocess.run(
        [python, str(tmp_path / "ask.py"), str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, (text,), tokens = json.loads((tmp_path / "found.json").read_text())
    for (loglikelihood, is_greedy), (context, continuation) in zip(found, tokens, strict=True):
        ids = torch.tensor([context + continuation])
        with torch.inference_mode():
            logits = reference.model(ids).logits[0].float()
        rows = torch.log_softmax(logits, dim=-1)[len(context) - 1 : -1]
        own = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert loglikelihood == pytest.approx(float(own.sum()), abs=1e-4)
        assert is_greedy == (rows.argmax(dim=-1).tolist() == continuation)
    assert text == greedy(reference, "Once upon a time", 40).split(".")[0]


def test_answers_follow_a_format(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "brook", "prompt": PROMPT, "max_tokens": 40}
    choice = {"guided_choice": ["a fox", "a bear"]}
    found = client.completions.create(**asked, extra_body=choice).choices[0]
    assert found.text in choice["guided_choice"]
    assert found.finish_reason == "stop"
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [3, 4]}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    answers = [
        client.chat.completions.create(
            model="brook",
            messages=[{"role": "user", "content": PROMPT}],
            temperature=temperature,
            seed=3,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "fox", "schema": schema, "strict": True},
            },
        )
        for temperature in (0, 1, 1)
    ]
    read = [json.loads(answer.choices[0].message.content or "") for answer in answers]
    assert all(set(each) == {"name", "age"} and each["age"] in {3, 4} for each in read)
    assert read[1] == read[2], "the same seed gives the same answer"
    with pytest.raises(openai.APIStatusError, match="the format of the answer cannot be followed"):
        client.completions.create(**asked, extra_body={"guided_regex": "((a{100}){100}){9999"})


def test_missing_layers_are_named_with_a_503(peers: LocalSwarm, chat_model: Path) -> None:
    """Last in this file: it takes peers away."""
    short = GatewayProcess(peers.addresses[:1], chat_model, "--wait", "3", start=forked)
    try:
        asking = openai.OpenAI(base_url=short.url, api_key="none", max_retries=0)
        assert asking.completions.create(model="brook", prompt="a", max_tokens=2).choices
        for peer in peers.peers[1:]:
            peer.kill()
        with pytest.raises(openai.InternalServerError, match="layer") as caught:
            asking.completions.create(model="brook", prompt="a", max_tokens=200)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["Retry-After"]) > 0
        status, text = get(short.url.removesuffix("/v1") + "/health")
        assert status == 503
        assert "layer" in text
    finally:
        assert short.stop() == 0
