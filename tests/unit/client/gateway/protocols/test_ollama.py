"""Ollama's interface, as desktop programs use it: lines of JSON, calls as objects, tagged names."""

import asyncio
import json
from typing import Any

import pytest

from client.gateway.protocols.ollama import (
    OllamaCall,
    OllamaChat,
    OllamaFunction,
    OllamaMessage,
    chat_of,
)
from client.gateway.web.app import GatewayConfig
from tests.templates import QWEN3
from tests.unit.client.gateway.looked import Looked
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.test_tool_answers import scripted

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


async def lines(gateway: PaperGateway, path: str, **body: Any) -> list[dict[str, Any]]:
    async with gateway.http.post(gateway.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def test_a_chat_calls_and_reads_the_result() -> None:
    async with paper_gateway(template=QWEN3) as gateway:
        asked = scripted(gateway, f"<think>hm</think>I look. {CALL}", "It snows.")
        body: dict[str, Any] = {"model": "brook:latest", "tools": [TOOL]}
        streamed = await lines(gateway, "/api/chat", messages=HI, **body)
        said = [each["message"] for each in streamed]
        assert "".join(each["content"] for each in said).strip() == "I look."
        assert "".join(each.get("thinking", "") for each in said) == "hm"
        (call,) = [call for each in said for call in each.get("tool_calls", ())]
        assert call["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
        assert [each["done"] for each in streamed] == [False] * (len(said) - 1) + [True]
        last = streamed[-1]
        assert last["done_reason"] == "stop"
        assert last["prompt_eval_count"] == len(asked[0].prompt_ids)
        assert last["eval_count"] > 5
        messages = [
            *HI,
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "content": "snow", "tool_name": "weather"},
        ]
        status, whole = await gateway.post("/api/chat", messages=messages, stream=False, **body)
        assert status == 200
        assert whole["message"] == {"role": "assistant", "content": "It snows."}
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.decode(asked[1].prompt_ids)
        assert all(word in prompt for word in ("Oslo", "snow"))


async def test_a_text_is_a_chat_or_raw_and_follows_a_format() -> None:
    async with paper_gateway(template=QWEN3) as gateway:
        asked = scripted(gateway, '{"a": 1}')
        options = {"num_predict": 50, "temperature": 0.5, "stop": ["x"], "num_ctx": 4096}
        streamed = await lines(
            gateway, "/api/generate", model="brook", prompt="alfa", system="bravo",
            format={"type": "object"}, options=options, think=False,
        )  # fmt: skip
        assert "".join(each["response"] for each in streamed) == '{"a": 1}'
        raw = {"model": "brook", "prompt": "alfa", "raw": True, "stream": False}
        status, whole = await gateway.post("/api/generate", format="json", **raw)
        assert (status, whole["response"]) == (200, '{"a": 1}')
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        prompts = [tokenizer.decode(each.prompt_ids) for each in asked]
        assert all(word in prompts[0] for word in ("alfa", "bravo", "<|im_start|>"))
        assert prompts[1].removeprefix("<|bos|>").strip() == "alfa"
        assert asked[0].max_new_tokens == 50
        assert all(each.sampling.grammar for each in asked)


async def test_a_prompt_is_raw_to_a_model_without_a_chat_template() -> None:
    async with paper_gateway(template=None) as gateway:
        asked = scripted(gateway, "bravo")
        text = {"model": "brook", "prompt": "alfa", "stream": False, "think": False}
        for options, most in (({}, 128), ({"num_predict": 7}, 7)):
            status, whole = await gateway.post("/api/generate", options=options, **text)
            assert (status, whole["response"]) == (200, "bravo"), whole
            assert asked[-1].max_new_tokens == most
        streamed = await lines(gateway, "/api/generate", model="brook", prompt="alfa")
        assert "".join(each["response"] for each in streamed) == "bravo"
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        for each in asked:
            assert tokenizer.decode(each.prompt_ids).removeprefix("<|bos|>").strip() == "alfa"
        status, whole = await gateway.post("/api/generate", **text, system="x")
        assert status == 400
        assert "no chat template" in whole["error"]
        status, whole = await gateway.post("/api/chat", model="brook", messages=HI)
        assert status == 400
        assert "no chat template" in whole["error"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"mirostat": 2, "mirostat_tau": 5.0}, "mirostat"),
        ({"typical_p": 0.7}, "typical_p"),
        ({"tfs_z": 0.5}, "tfs_z"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_options_that_would_change_an_answer_are_refused_by_name(
    path: str, options: dict[str, Any], param: str
) -> None:
    async with paper_gateway(template=QWEN3) as gateway:
        body = {"model": "brook", "messages": HI, "prompt": "Hi", "options": options}
        status, answer = await gateway.post(path, **body)
        assert status == 400
        assert f"options.{param}" in str(answer["error"])
        assert gateway.swarm.served == 0


async def test_options_as_programs_send_them_by_default_are_taken() -> None:
    options = {
        "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "num_ctx": 4096, "num_keep": 24,
        "repeat_last_n": 64, "repeat_penalty": 1.1, "tfs_z": 1.0, "typical_p": 1, "use_mmap": True,
    }  # fmt: skip
    async with paper_gateway(template=QWEN3) as gateway:
        body = {"model": "brook", "messages": HI, "options": options, "stream": False}
        status, answer = await gateway.post("/api/chat", **body)
        assert status == 200, answer


async def test_signs_of_life_bear_the_time_of_the_answer() -> None:
    config = GatewayConfig(silent_s=0.01, beat_s=0.02)
    async with paper_gateway(template=QWEN3, config=config) as gateway:
        gate = gateway.swarm.gate = asyncio.Event()
        body = {"model": "brook", "messages": HI, "options": {"num_predict": 3}}
        async with gateway.http.post(gateway.url + "/api/chat", json=body) as response:
            first = json.loads(await response.content.readline())
            gate.set()
            rest = [json.loads(line) for line in (await response.read()).splitlines()]
        assert not first["message"]["content"]
        assert {first["created_at"]} == {each["created_at"] for each in rest}


async def test_models_are_listed_and_shown() -> None:
    async with paper_gateway(template=QWEN3) as gateway:
        for path, said in (("/api/tags", "models"), ("/api/version", "version")):
            async with gateway.http.get(gateway.url + path) as response:
                assert (await response.json())[said]
        status, shown = await gateway.post("/api/show", model="brook:latest")
        assert status == 200
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["anabranch.context_length"] == 1024  # type: ignore[index]
        assert shown["model_info"]["general.basename"] == "brook"  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/api/chat", {"model": "other", "messages": HI}, 404, "not served here"),
        (
            "/api/chat",
            {"model": "brook", "messages": [{"role": "user", "content": "x", "images": ["a"]}]},
            400,
            "messages[0].images",
        ),
        ("/api/generate", {"model": "brook", "prompt": "x", "suffix": "y"}, 400, "suffix"),
        (
            "/api/generate",
            {"model": "brook", "prompt": "x", "system": "y", "raw": True},
            400,
            "system is not for raw",
        ),
    ],
)
async def test_a_mistake_is_named(path: str, body: Any, status: int, said: str) -> None:
    async with paper_gateway(template=QWEN3) as gateway:
        found, answer = await gateway.post(path, **body)
        assert found == status
        assert set(answer) == {"error"}
        assert said in str(answer["error"])


def test_results_find_their_calls_without_looking_at_all_of_them() -> None:
    """400 results of 294,000 calls took 15 s."""
    calls = [OllamaCall(function=OllamaFunction(name="a")) for _ in range(100)]
    other = OllamaCall(function=OllamaFunction(name="b"), id="own")
    asks = OllamaMessage(role="assistant", tool_calls=[*calls, other])
    of_name = OllamaMessage(role="tool", tool_name=Looked("b"))
    of_id = OllamaMessage(role="tool", tool_call_id=Looked("none"))
    before = Looked.looks
    chat = chat_of(OllamaChat(model="m", messages=[asks, of_name, *[of_id] * 99]))
    assert chat.messages[1].tool_call_id == "own"
    assert Looked.looks - before < 100


def test_results_belong_to_calls_by_id_then_function_then_order() -> None:
    calls = [OllamaCall(function=OllamaFunction(name=name)) for name in "abab"]
    asks = OllamaMessage(role="assistant", tool_calls=calls)
    names = ("b", "a", "none", "", "a")
    results = [OllamaMessage(role="tool", tool_name=name) for name in names]
    chat = chat_of(OllamaChat(model="m", messages=[asks, *results]))
    found = [message.tool_call_id for message in chat.messages[1:]]
    assert found == ["call0x1", "call0x0", "call0x2", "call0x3", "call"]


@pytest.mark.parametrize("streams", [True, False])
async def test_durations_are_those_of_the_answer(streams: bool) -> None:
    """Programs show ``eval_count / eval_duration`` as the speed."""
    async with paper_gateway(step_s=0.01) as gateway:
        body: Any = {"model": "brook", "prompt": "Hi", "raw": True}
        body["options"] = {"num_predict": 6}
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if streams:
            last = (await lines(gateway, "/api/generate", **body))[-1]
        else:
            _, last = await gateway.post("/api/generate", stream=False, **body)
        passed_ns = (loop.time() - began_s) * 1e9
        assert min(last["eval_duration"], last["prompt_eval_duration"]) > 0
        parts = last["prompt_eval_duration"] + last["eval_duration"]
        assert abs(parts - last["total_duration"]) <= 1
        assert last["total_duration"] <= passed_ns


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/show"])
@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
async def test_requests_as_its_manual_has_them_are_read(path: str, kind: str | None) -> None:
    """``curl http://…/api/generate -d '{…}'`` says the type of a form; a browser has to say JSON,
    as it sends all else for any page, without asking first."""
    async with paper_gateway() as gateway:
        scripted(gateway, "Hello.")
        body = {"model": "brook", "prompt": "Hi", "messages": HI, "stream": False}
        data = json.dumps({name: body[name] for name in FIELDS[path]})
        said = {} if kind is None else {"Content-Type": kind}
        for header, status in (({}, 200), ({"Sec-Fetch-Site": "cross-site"}, 415)):
            async with gateway.http.post(
                gateway.url + path,
                data=data.encode(),
                headers=said | header,
                skip_auto_headers=["Content-Type"],
            ) as response:
                assert response.status == status, await response.text()


FIELDS = {
    "/api/generate": ("model", "prompt", "stream"),
    "/api/chat": ("model", "messages", "stream"),
    "/api/show": ("model",),
}
