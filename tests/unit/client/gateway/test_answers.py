"""What the gateway answers: OpenAI's forms, whole and streamed, over HTTP."""

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace

from client.answer.defaults import defaults_in
from client.gateway.protocols.requests import (
    CompletionRequest,
    parse_request,
    request_options,
)
from client.text.tokenizer import Tokenizer
from dht.messages.session import Sampling
from tests.unit.client.gateway.paper import MODEL, SPEC, PaperGateway, PaperSwarm, paper_gateway

PROMPT = "Once upon a time"


async def stream(gateway: PaperGateway, path: str, **body: object) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    async with gateway.http.post(gateway.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def expected_ids(prompt: tuple[int, ...], count: int, sampling: Sampling) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(PaperSwarm.next_token(tuple(ids), sampling))
    return ids[len(prompt) :]


def tokenizer() -> Tokenizer:
    found = Tokenizer.load(MODEL)
    assert found is not None
    return found


async def test_a_completion_is_the_swarms_text() -> None:
    async with paper_gateway() as gateway:
        status, body = await gateway.post("/v1/completions", prompt=PROMPT, max_tokens=9)
        assert status == 200
        prompt = tokenizer().encode(PROMPT)
        text = tokenizer().decode(expected_ids(prompt, 9, Sampling()))
        assert body["object"] == "text_completion"
        assert body["model"] == "brook"
        assert body["choices"] == [
            {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
        ]
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 9,
            "total_tokens": len(prompt) + 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_usage_tells_what_peers_had_kept_and_salts_share_nothing() -> None:
    async with paper_gateway() as gateway:
        asked: dict[str, Any] = {"prompt": [*range(1, 41)], "max_tokens": 2}

        async def cached(**more: object) -> object:
            status, body = await gateway.post("/v1/completions", **asked, **more)
            assert status == 200, body
            return body["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index, call-overload]

        assert await cached() == 0
        assert await cached() == 32
        assert await cached(cache_salt="another") == 0
        assert await cached(prefix_cache="off") == 0
        assert await cached(prefix_cache="shared") == 0
        chunks = await stream(
            gateway, "/v1/completions", **asked, stream_options={"include_usage": True}
        )
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        status, body = await gateway.post("/v1/completions", **asked, cache_salt="x" * 257)
        assert status == 400, body


@pytest.mark.parametrize(("asked", "drafted"), [(None, True), (True, True), (False, False)])
def test_a_request_may_leave_drafts_out(asked: bool | None, drafted: bool) -> None:
    body = json.dumps({"prompt": "a", "speculate": asked}).encode()
    request = parse_request(body, CompletionRequest)
    assert request_options(request, defaults_in({}), 4).speculate == drafted


async def test_a_stream_has_the_same_text_and_usage() -> None:
    async with paper_gateway() as gateway:
        asked = {"prompt": PROMPT, "max_tokens": 30}
        _, whole = await gateway.post("/v1/completions", **asked)
        chunks = await stream(gateway, "/v1/completions", **asked)
        usage = {"stream_options": {"include_usage": True}}
        with_usage = await stream(gateway, "/v1/completions", **asked, **usage)
        for each in (chunks, with_usage):
            text = "".join(c["choices"][0]["text"] for c in each if c["choices"])
            assert text == whole["choices"][0]["text"]  # type: ignore[index]
            reasons = [c["choices"][0]["finish_reason"] for c in each if c["choices"]]
            assert reasons == [None] * (len(reasons) - 1) + ["length"]
            assert len({chunk["id"] for chunk in each}) == 1
        assert all("usage" not in chunk for chunk in chunks)
        assert with_usage[-1]["choices"] == []
        assert with_usage[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in with_usage[:-1])


async def test_a_chat_is_rendered_and_streamed() -> None:
    async with paper_gateway() as gateway:
        parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
        asked: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": parts},
            ],
            "max_completion_tokens": 12,
            "max_tokens": 3,
        }
        status, whole = await gateway.post("/v1/chat/completions", **asked)
        assert status == 200, whole
        text = "<system>Be kind.\n<user>Hello\nthere\n<assistant>"
        prompt = tokenizer().encode(text, special_tokens=False)
        answer = tokenizer().decode(expected_ids(prompt, 12, Sampling()))
        choice = whole["choices"][0]  # type: ignore[index]
        assert choice["message"] == {
            "role": "assistant",
            "content": answer,
            "refusal": None,
        }
        assert whole["usage"]["prompt_tokens"] == len(prompt)  # type: ignore[index]
        chunks = await stream(gateway, "/v1/chat/completions", **asked)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert "".join(delta.get("content", "") for delta in deltas) == answer
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_a_text_goes_on_with_its_space() -> None:
    """Some decoders drop a text's first space: behind a prompt it is none."""
    vocabulary = {"<unk>": 0, "</s>": 1, "▁Once": 2, "▁upon": 3, "▁a": 4}
    backend = Backend(WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer, backend.decoder = Metaspace(), MetaspaceDecoder()
    backend.add_special_tokens(["</s>"])
    said = {"role": "assistant", "content": "Once"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "Once"}, " upon a"),
        ({"prompt": [2]}, " upon a"),
        ({"prompt": "Once", "echo": True}, "Once upon a"),
        ({"messages": [{**said, "prefix": True}]}, " upon a"),
        ({"messages": [said]}, "upon a"),
    ]
    async with paper_gateway() as gateway:
        gateway.swarm.text = replace(gateway.swarm.text, tokenizer=Tokenizer(backend))
        gateway.swarm.says = "upon a"
        for asked, text in cases:
            path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
            status, body = await gateway.post(path, **asked)
            assert status == 200, body
            choice = body["choices"][0]  # type: ignore[index]
            assert choice.get("text", choice.get("message", {}).get("content")) == text, asked


async def test_several_prompts_and_choices_keep_their_places() -> None:
    async with paper_gateway() as gateway:
        prompts = [[5, 6, 7], [9], [20, 21]]
        asked = {"prompt": prompts, "n": 2, "max_tokens": 4, "temperature": 1, "seed": 7}
        status, body = await gateway.post("/v1/completions", **asked, logprobs=0)
        assert status == 200, body
        chunks = await stream(gateway, "/v1/completions", **asked)
        streamed = ["" for _ in range(6)]
        for chunk in chunks:
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        for at, choice in enumerate(body["choices"]):  # type: ignore[arg-type, var-annotated]
            assert choice["index"] == at
            sampling = Sampling(temperature=1.0, seed=7 + at % 2)
            ids = expected_ids(tuple(prompts[at // 2]), 4, sampling)
            assert choice["text"] == streamed[at] == tokenizer().decode(ids)
            assert len(choice["logprobs"]["tokens"]) == 4
        assert body["usage"] == {
            "prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
async def test_echo_has_the_prompt_and_its_log_probabilities(streams: bool) -> None:
    async with paper_gateway() as gateway:
        prompt = tokenizer().encode(PROMPT)
        asked = {"prompt": list(prompt), "max_tokens": 2, "echo": True, "logprobs": 2}
        if streams:
            chunks = await stream(gateway, "/v1/completions", **asked)
            parts = [c["choices"][0]["logprobs"] for c in chunks]
            found = {
                name: [each for part in parts if part for each in part[name]]
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            }
            text = "".join(c["choices"][0]["text"] for c in chunks)
        else:
            _, body = await gateway.post("/v1/completions", **asked)
            choice = body["choices"][0]  # type: ignore[index]
            found, text = choice["logprobs"], choice["text"]
        ids = [*prompt, *expected_ids(prompt, 2, Sampling())]
        texts = [tokenizer().token_text(token_id) for token_id in ids]
        assert found["tokens"] == texts
        scores = [PaperSwarm.score(token_id, 2) for token_id in ids]
        assert found["token_logprobs"] == [None, *(score.logprob for score in scores[1:])]
        assert found["top_logprobs"][0] is None
        for score, tops in zip(scores[1:], found["top_logprobs"][1:], strict=True):
            best = tokenizer().token_text(score.token_id)
            assert max(tops, key=tops.get) == best
            assert tops[best] == score.logprob
        offsets = [sum(map(len, texts[:at])) for at in range(len(texts))]
        assert found["text_offset"] == offsets
        assert text == PROMPT + tokenizer().decode(ids[len(prompt) :])


async def test_echo_of_the_prompt_alone() -> None:
    async with paper_gateway() as gateway:
        asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
        status, body = await gateway.post("/v1/completions", **asked)
        assert status == 200, body
        choice = body["choices"][0]  # type: ignore[index]
        prompt = tokenizer().encode(PROMPT)
        assert choice["text"] == PROMPT
        assert len(choice["logprobs"]["tokens"]) == len(prompt)
        assert choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0  # type: ignore[index]


async def test_chat_log_probabilities() -> None:
    async with paper_gateway() as gateway:
        asked = {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 5,
            "logprobs": True,
            "top_logprobs": 3,
        }
        _, body = await gateway.post("/v1/chat/completions", **asked)
        whole = body["choices"][0]["logprobs"]["content"]  # type: ignore[index]
        chunks = await stream(gateway, "/v1/chat/completions", **asked)
        parts = [c["choices"][0]["logprobs"] for c in chunks]
        assert [entry for part in parts if part for entry in part["content"]] == whole
        assert len(whole) == 5
        for entry in whole:
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert entry["top_logprobs"][0]["token"] == entry["token"]
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
            assert len(entry["top_logprobs"]) == 3


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with paper_gateway() as gateway:
        _, body = await gateway.post("/v1/completions", prompt=PROMPT, max_tokens=40)
        text = body["choices"][0]["text"]  # type: ignore[index]
        stop = text[20:24]
        _, body = await gateway.post(
            "/v1/completions", prompt=PROMPT, max_tokens=40, stop=["never there", stop]
        )
        choice = body["choices"][0]  # type: ignore[index]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert gateway.swarm.live == 0


async def test_a_stop_string_ends_an_answer_alike_however_many_tokens_come_at_once() -> None:
    found = []
    for at_once in (1, 7):
        async with paper_gateway() as gateway:
            gateway.swarm.at_once = at_once
            asked = {"prompt": PROMPT, "max_tokens": 40, "logprobs": 1}
            _, body = await gateway.post("/v1/completions", **asked)
            text = body["choices"][0]["text"]  # type: ignore[index]
            stop = [text[30:50], text[40:44]]
            _, body = await gateway.post("/v1/completions", **asked, stop=stop)
            prompt = gateway.swarm.text.prompt_ids(PROMPT)
            told = await gateway.swarm.generate(prompt, max_new_tokens=40, stop=stop, logprobs=1)
            found.append((body["choices"], body["usage"], told.token_ids, told.logprobs))
    assert found[0][0][0]["finish_reason"] == "stop"  # type: ignore[index]
    assert found[0] == found[1]


async def test_the_models_own_sampling_is_the_default() -> None:
    defaults = defaults_in({"temperature": 0.5, "top_k": 50, "top_p": "much", "eos": 3})
    assert defaults == {"temperature": 0.5, "top_k": 50}
    async with paper_gateway(defaults=defaults) as gateway:
        asked = {"prompt": [5, 6], "max_tokens": 6, "seed": 3}
        prompt, texts = (5, 6), []
        for more in ({}, {"temperature": 0}):
            _, body = await gateway.post("/v1/completions", **asked, **more)
            texts.append(body["choices"][0]["text"])  # type: ignore[index]
        sampled = expected_ids(prompt, 6, Sampling(temperature=0.5, seed=3))
        greedy = expected_ids(prompt, 6, Sampling())
        assert texts == [tokenizer().decode(sampled), tokenizer().decode(greedy)]


async def test_models_health_metrics_and_the_document() -> None:
    async with paper_gateway() as gateway:
        await gateway.post("/v1/completions", prompt=PROMPT, max_tokens=9)

        async def get(path: str) -> tuple[int, str]:
            async with gateway.http.get(gateway.url + path) as response:
                return response.status, await response.text()

        status, text = await get("/v1/models")
        listed = json.loads(text)
        assert status == 200
        assert [each["id"] for each in listed["data"]] == ["brook"]
        entry = listed["data"][0]
        assert entry["max_model_len"] == 1024
        assert entry["fingerprint"] == SPEC.fingerprint
        assert (entry["layers"], entry["covered"], entry["replicas"]) == (8, 8, 1)
        assert entry["tokens_per_s"] > 0
        assert isinstance(entry["precisions"], list)
        assert json.loads((await get("/v1/models/brook"))[1]) == listed["data"][0]
        assert (await get("/v1/models/other"))[0] == 404
        assert (await get("/health"))[0] == 200
        gateway.swarm.hold((0, 2), (4, 7))
        entry = json.loads((await get("/v1/models/brook"))[1])
        assert (entry["covered"], entry["replicas"], entry["tokens_per_s"]) == (5, 0, 0)
        status, text = await get("/health")
        assert status == 503
        assert "layers 2-3 and 7" in json.loads(text)["error"]["message"]
        status, text = await get("/metrics")
        assert status == 200
        for line in (
            'anabranch:generation_tokens_total{model_name="brook"} 9.0',
            'anabranch:request_success_total{finished_reason="length",model_name="brook"} 1.0',
            'anabranch:num_requests_running{model_name="brook"} 0.0',
            'anabranch:time_to_first_token_seconds_count{model_name="brook"} 1.0',
            'anabranch:http_responses_total{path="/v1/models/{model}",status="404"} 1.0',
        ):
            assert line in text, line
        status, text = await get("/openapi.json")
        assert set(json.loads(text)["paths"]) >= {"/v1/completions", "/v1/chat/completions"}


def test_a_request_is_logged_in_a_line_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with paper_gateway() as gateway:
            with caplog.at_level(logging.INFO, "client.gateway.web.app.requests"):
                await gateway.post("/v1/completions", prompt="secret words", max_tokens=2)
                await gateway.post("/v1/secret-path", prompt="a")

    asyncio.run(scenario())
    lines = [each.getMessage() for each in caplog.records if each.name.endswith(".requests")]
    assert [line.split()[:3] for line in lines] == [
        ["POST", "/v1/completions", "200"],
        ["POST", "other", "404"],
    ]
    assert not any("secret" in line for line in lines)
