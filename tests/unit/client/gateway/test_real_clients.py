"""What agents, SDKs and chat programs send, as they send it: taken, or refused by name, once."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from client.answer.answer import AnswerRequest
from client.gateway.errors import unavailable
from client.gateway.keys import named_keys
from client.gateway.protocols.openai_responses import ResponsesRequest, ResponseWriter
from client.gateway.web.app import GatewayConfig
from client.session.driver import SessionDriver
from dht.errors import SwarmError
from tests.templates import GPT_OSS, QWEN3, TEMPLATES
from tests.unit.client.gateway.paper import PaperGateway, PaperSession, paper_gateway
from tests.unit.client.gateway.test_tool_answers import (
    anthropic_client,
    openai_client,
    scripted,
)
from tests.unit.client.gateway.waiting import until

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def call_of(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def written(name: str, arguments: Any) -> str:
    """A call as models with Qwen3's template write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompt_of(gateway: PaperGateway, request: AnswerRequest) -> str:
    tokenizer = gateway.swarm.text.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(request.prompt_ids)


async def prompt_for(path: str, body: dict[str, Any], template: str = QWEN3) -> str:
    """The prompt that a request makes, which has to be taken."""
    async with paper_gateway(template=template, context_tokens=1 << 14) as gateway:
        asked = scripted(gateway, "yes")
        status, answer = await gateway.post(path, **body)
        assert status == 200, answer
        return prompt_of(gateway, asked[0])


# What a request says stands in the prompt


@pytest.mark.parametrize("family", TEMPLATES)
def test_instructions_of_every_kind_stand_in_the_prompt(family: str) -> None:
    template = TEMPLATES[family]
    chat = [
        {"role": "system", "content": "alfa"},
        {"role": "developer", "content": "bravo"},
        {"role": "user", "content": "charlie"},
        {"role": "user", "content": [{"type": "text", "text": "delta"}]},
        {"role": "system", "content": "echo"},
        {"role": "assistant", "content": "foxtrot"},
        {"role": "user", "content": "golf"},
    ]
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "bravo"}]},
        {"role": "system", "content": "charlie"},
        {"role": "assistant", "content": "delta"},
        {"role": "user", "content": "echo"},
    ]
    items = [
        {"type": "message", "role": "developer", "content": "bravo"},
        {"role": "user", "content": [{"type": "input_text", "text": "charlie"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "delta"}]},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "item_reference", "id": "rs_1"},
        {"role": "user", "content": "echo"},
    ]
    for path, body, count in (
        (CHAT, {"messages": chat}, 7),
        (MESSAGES, {"messages": blocks, "system": "alfa", "max_tokens": 9}, 5),
        (RESPONSES, {"input": items, "instructions": "alfa"}, 5),
    ):
        prompt = asyncio.run(prompt_for(path, body, template))
        words = ("alfa", "bravo", "charlie", "delta", "echo", "foxtrot", "golf")[:count]
        assert [word for word in words if word not in prompt] == [], path


@pytest.mark.parametrize("arguments", ["", "null", "{", '{"city": "Os', "[1]", '"Oslo"', "{}"])
def test_malformed_arguments_of_an_earlier_call_end_no_conversation(arguments: str) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call_of("weather", arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": "no city"},
    ]
    for family in ("Qwen3", "Qwen3.5", "GLM", "DeepSeek", "Mistral"):
        prompt = asyncio.run(prompt_for(CHAT, {"messages": messages}, TEMPLATES[family]))
        assert "weather" in prompt
        assert "no city" in prompt


def test_a_call_whose_arguments_are_null_is_one_without() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": None}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    assert '"arguments": {}' in asyncio.run(prompt_for(CHAT, {"messages": messages}))


def test_images_in_results_of_calls_leave_a_text_and_others_are_refused() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    use = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image], "is_error": True}
    blocks = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = {"messages": blocks, "max_tokens": 9}
    assert "Error: [an image" in asyncio.run(prompt_for(MESSAGES, body))
    call = {"type": "function_call", "name": "see", "arguments": "{}", "call_id": "t"}
    seen = [{"type": "input_image", "image_url": "data:"}]
    items = [*HI, call, {"type": "function_call_output", "call_id": "t", "output": seen}]
    assert "[an image" in asyncio.run(prompt_for(RESPONSES, {"input": items}))
    seen = [{"type": "image_url", "image_url": {"url": "data:"}}]
    chat = [
        *HI,
        {"role": "assistant", "tool_calls": [call_of("see", "{}")]},
        {"role": "tool", "tool_call_id": "c1", "content": seen},
    ]
    assert "[an image" in asyncio.run(prompt_for(CHAT, {"messages": chat}))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"reasoning_effort": "high"}, "Reasoning: high"),
        (CHAT, {"reasoning_effort": "minimal"}, "Reasoning: low"),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, "Reasoning: low"),
        (MESSAGES, {"output_config": {"effort": "max"}, "max_tokens": 9}, "Reasoning: high"),
        (CHAT, {"chat_template_kwargs": {"reasoning_effort": "high"}}, "Reasoning: high"),
        (CHAT, {}, "Reasoning: medium"),
    ],
)
def test_how_much_to_think_reaches_the_template(path: str, body: Any, words: str) -> None:
    said = {"input" if path == RESPONSES else "messages": HI, **body}
    assert words in asyncio.run(prompt_for(path, said, GPT_OSS))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (MESSAGES, {"thinking": {"type": "disabled"}, "max_tokens": 9}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
    ],
)
def test_thoughts_are_left_out_where_a_request_says_so(path: str, body: Any) -> None:
    said = {"input" if path == RESPONSES else "messages": HI}
    assert asyncio.run(prompt_for(path, {**said, **body})).endswith("</think>\n\n")
    assert not asyncio.run(prompt_for(CHAT, {"messages": HI})).endswith("</think>\n\n")


def test_thoughts_between_calls_reach_a_template() -> None:
    thinks = {"type": "thinking", "thinking": "hotel", "signature": ""}
    use = {"type": "tool_use", "id": "t", "name": "see", "input": {"city": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "snow"}
    blocks = [
        *HI,
        {"role": "assistant", "content": [thinks, use]},
        {"role": "user", "content": [result]},
    ]
    body = {"messages": blocks, "max_tokens": 9}
    assert "hotel" in asyncio.run(prompt_for(MESSAGES, body, GPT_OSS))


@pytest.mark.parametrize(
    ("path", "more"),
    [(MESSAGES, {"max_tokens": 9}), ("/api/chat", {"model": "brook", "stream": False})],
)
def test_a_last_assistant_message_is_continued(path: str, more: dict[str, Any]) -> None:
    begun = [*HI, {"role": "assistant", "content": "The answer is {"}]
    for family, template in TEMPLATES.items():
        prompt = asyncio.run(prompt_for(path, {"messages": begun, **more}, template))
        assert prompt.endswith("The answer is {"), family


# Tools


async def test_namespaces_custom_tools_and_hosted_ones_are_offered_and_answered_as_asked() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: patch"}
    inner = {"type": "function", "name": "find", "parameters": SCHEMA}
    tools: Any = [
        {"type": "namespace", "name": "mcp__maps__", "description": "Maps.", "tools": [inner]},
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar},
        {"type": "web_search"},
    ]
    async with paper_gateway(template=QWEN3) as gateway, openai_client(gateway) as client:
        asked = scripted(
            gateway,
            written("mcp__maps__find", {"city": "Oslo"})
            + written("apply_patch", {"input": "*** Begin\n"}),
            "done",
        )
        first = await client.responses.create(model="brook", input="Go", tools=tools)
        found, patch = first.output
        assert (found.type, found.name, found.namespace) == (  # type: ignore[union-attr]
            "function_call", "find", "mcp__maps__",
        )  # fmt: skip
        assert (patch.type, patch.name, patch.input) == (  # type: ignore[union-attr]
            "custom_tool_call", "apply_patch", "*** Begin\n",
        )  # fmt: skip
        prompt = prompt_of(gateway, asked[0])
        assert all(word in prompt for word in ("mcp__maps__find", "apply_patch", "start: patch"))
        assert "web_search" not in prompt
        said: Any = [
            *HI,
            *(each.model_dump(exclude_none=True) for each in first.output),
            {"type": "function_call_output", "call_id": found.call_id, "output": "here"},  # type: ignore[union-attr]
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "fits"},  # type: ignore[union-attr]
        ]
        last = await client.responses.create(model="brook", input=said, tools=tools)
        assert last.output_text == "done"
        prompt = prompt_of(gateway, asked[1])
        assert all(word in prompt for word in ("*** Begin", "here", "fits"))
        assert prompt.count("mcp__maps__find") == 2

        events = [
            event.type
            async for event in await client.responses.create(
                model="brook", input="Go", tools=tools, stream=True
            )
        ]
        assert events[-1] == "response.completed"


async def test_a_custom_tool_is_streamed_in_its_own_events() -> None:
    async with paper_gateway(template=QWEN3) as gateway, openai_client(gateway) as client:
        scripted(gateway, written("shell", {"input": "ls -l"}))
        tools: Any = [{"type": "custom", "name": "shell"}]
        async with client.responses.stream(model="brook", input="Go", tools=tools) as stream:
            events = [event async for event in stream]
        done = [each for each in events if each.type == "response.custom_tool_call_input.done"]
        assert [each.input for each in done] == ["ls -l"]


async def test_long_names_of_functions_are_shortened_and_mapped_back() -> None:
    long = "mcp__" + "a_very_long_server_name__" * 4 + "find it"
    async with paper_gateway(template=QWEN3, context_tokens=4096) as gateway:
        asked = scripted(gateway, "no")
        body: dict[str, Any] = {"messages": HI, "tools": [function(long), function("short")]}
        status, _ = await gateway.post(CHAT, **body)
        assert status == 200
        shown = prompt_of(gateway, asked[0]).split('"name": "')[1].partition('"')[0]
        assert len(shown) <= 64
        scripted(gateway, written(shown, {"city": "Oslo"}))
        _, answer = await gateway.post(CHAT, **body)
        (call,) = answer["choices"][0]["message"]["tool_calls"]  # type: ignore[index]
        assert call["function"]["name"] == long
        messages = [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "here"},
        ]
        asked = scripted(gateway, "yes")
        choice = {"type": "function", "function": {"name": long}}
        status, _ = await gateway.post(
            CHAT, **{**body, "messages": messages, "tool_choice": choice}
        )
        assert status == 200
        assert prompt_of(gateway, asked[0]).count(shown) == 2
        assert shown in asked[0].sampling.grammar.decode()


def test_tools_that_run_at_anthropic_s_are_left_out_and_unknown_ones_named() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"name": "look", "input_schema": SCHEMA},
    ]
    body = {"messages": HI, "max_tokens": 9, "tools": tools}
    prompt = asyncio.run(prompt_for(MESSAGES, body))
    assert "look" in prompt
    assert "web_search" not in prompt
    tools.append({"type": "computer_20250124", "name": "computer"})
    error = asyncio.run(refusal(MESSAGES, body))
    assert "computer_20250124" in error["message"]


async def test_servers_of_tools_bring_hundreds_of_functions() -> None:
    tools = [{"name": f"mcp__s__f{at}", "input_schema": SCHEMA} for at in range(200)]
    body = {"messages": HI, "max_tokens": 500, "tools": tools}
    async with paper_gateway(template=QWEN3, context_tokens=1 << 16) as gateway:
        gateway.swarm.says = written("mcp__s__f199", {"city": "Oslo"})
        status, answer = await gateway.post(MESSAGES, **body)
        assert status == 200, answer
        assert answer["content"][0]["name"] == "mcp__s__f199"  # type: ignore[index]
        status, _ = await gateway.post(f"{MESSAGES}/count_tokens", **body)
        assert status == 200


# Formats


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}),
        (CHAT, {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
        ("/v1/completions", {"structured_outputs": {"json": SCHEMA}, "prompt": "x"}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    ],
)
def test_a_format_is_followed_by_whatever_name_it_comes(path: str, body: Any) -> None:
    async def scenario() -> str:
        async with paper_gateway(template=QWEN3) as gateway:
            asked = scripted(gateway, '{"city": "Oslo"}')
            said = {"max_tokens": 50, **({} if "prompt" in body else {"messages": HI}), **body}
            status, answer = await gateway.post(path, **said)
            assert status == 200, answer
            return asked[0].sampling.grammar.decode()

    grammar = asyncio.run(scenario())
    assert '"city"' in grammar


@pytest.mark.parametrize(
    ("outputs", "term"),
    [
        ({"regex": "a+"}, "/a+/"),
        ({"choice": ["yes", "no"]}, '"yes"'),
        ({"grammar": 'start: "x"'}, '"x"'),
        ({"json_object": True}, '"object"'),
        ({"json_object": False}, ""),
    ],
)
def test_structured_outputs_are_vllm_s(outputs: Any, term: str) -> None:
    async def scenario() -> str:
        async with paper_gateway(template=QWEN3) as gateway:
            asked = scripted(gateway, "yes")
            status, answer = await gateway.post(CHAT, messages=HI, structured_outputs=outputs)
            assert status == 200, answer
            return asked[0].sampling.grammar.decode()

    grammar = asyncio.run(scenario())
    assert term in grammar
    assert bool(grammar) is bool(term)


async def test_anthropic_s_client_parses() -> None:
    async with paper_gateway(template=QWEN3) as gateway, anthropic_client(gateway) as client:
        scripted(gateway, '{"city": "Oslo"}')
        form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = await client.messages.create(
            model="brook",
            max_tokens=50,
            messages=HI,
            output_config=form,  # type: ignore[arg-type]
        )
        assert json.loads(answer.content[0].text) == {"city": "Oslo"}  # type: ignore[union-attr]


# Mistakes: a 4xx that names them, once


async def refusal(path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with (
        paper_gateway(template=QWEN3) as gateway,
        gateway.http.post(gateway.url + path, json=body) as response,
    ):
        assert response.status == 400, await response.text()
        assert "Retry-After" not in response.headers
        error: dict[str, Any] = (await response.json())["error"]
        assert error["type"] == "invalid_request_error"
        assert gateway.swarm.served == 0
        return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"function_call": "auto"}, "function_call"),
        (CHAT, {"audio": {"voice": "a"}}, "audio"),
        (CHAT, {"chat_template": "x"}, "chat_template"),
        (CHAT, {"mirostat": 2}, "mirostat"),
        (CHAT, {"top_n_sigma": 1.5}, "top_n_sigma"),
        (CHAT, {"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        (CHAT, {"num_beams": 4}, "num_beams"),
        (CHAT, {"random_seed": 0}, "random_seed"),
        (CHAT, {"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
        (CHAT, {"reasoning_format": "hidden"}, "reasoning_format"),
        (RESPONSES, {"input": "x", "mirostat": 2}, "mirostat"),
        ("/v1/completions", {"prompt": "x", "regex": "[a-z]+"}, "regex"),
        (CHAT, {"allowed_token_ids": [5]}, "allowed_token_ids"),
        (CHAT, {"web_search_options": {"a": 1}}, "web_search_options"),
        (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        (RESPONSES, {"input": "x", "max_tool_calls": 3}, "max_tool_calls"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_fields_that_would_change_an_answer_are_refused_by_name(
    path: str, body: dict[str, Any], param: str, streams: bool
) -> None:
    said = body if path != CHAT else {"messages": HI, **body}
    error = asyncio.run(refusal(path, {**said, "stream": streams}))
    assert error["param"] == param
    assert param in error["message"]


def test_fields_that_change_nothing_are_let_through() -> None:
    body = {"user": "u", "store": False, "metadata": {"a": "b"}, "functions": [], "audio": None}
    # What programs of many samplers send for none of them.
    body |= {"top_n_sigma": -1, "typical": 1.0, "guidance_scale": 1, "no_repeat_ngram_size": 0,
             "mirostat_mode": 0, "num_beams": 1, "skip_special_tokens": True,
             "include_stop_str_in_output": False, "reasoning_format": "auto"}  # fmt: skip
    assert asyncio.run(prompt_for(CHAT, {"messages": HI, "anything": 1, **body}))


@pytest.mark.parametrize("streams", [False, True])
async def test_what_is_too_long_is_said_in_the_words_that_clients_look_for(streams: bool) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    many = [{"role": "user", "content": "x" * 900_000}]

    async def said(path: str, **body: Any) -> dict[str, Any]:
        return await refusal(path, {"stream": streams, **body})

    for messages in (long, many):
        for path, field in ((CHAT, "messages"), (RESPONSES, "input")):
            error = await said(path, **{field: messages})
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == field
            assert "This model's maximum context length is 1024 tokens." in error["message"]
        error = await said(MESSAGES, messages=messages, max_tokens=9)
        assert error["message"].startswith("prompt is too long: ")
        assert " tokens > 1024 maximum" in error["message"]
    error = await said(CHAT, messages=HI, max_tokens=32_000)
    assert "(35 in the messages, 32000 in the completion)" in error["message"]
    assert error["code"] == "context_length_exceeded"
    error = await said(MESSAGES, messages=HI, max_tokens=32_000)
    words = "input length and `max_tokens` exceed context limit: 35 + 32000 > 1024, "
    assert error["message"].startswith(words)


# Lengths


async def test_an_answer_of_no_number_has_what_context_key_and_peers_have() -> None:
    keys = named_keys('[keys.a]\nkey = "a"\ntokens_per_day = 500\n[keys.b]\nkey = "b"\n')
    config = GatewayConfig(keys=keys)
    async with paper_gateway(template=QWEN3, context_tokens=8192, config=config) as gateway:
        asked = scripted(gateway, "yes")

        async def new_tokens(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with gateway.http.post(
                gateway.url + CHAT, json={"messages": HI}, headers=headers
            ) as response:
                assert response.status == 200, await response.text()
            prompt = len(asked[-1].prompt_ids)
            assert asked[-1].max_new_tokens is not None
            return prompt + asked[-1].max_new_tokens

        assert await new_tokens("b") == 35 + 1024, "peers say that they have no room"
        gateway.swarm.free(1 << 20)
        assert await new_tokens("b") == 8192
        gateway.swarm.free(16_384)
        assert await new_tokens("b") == 35 + 4096
        assert await new_tokens("a") == 500
        assert await new_tokens("a") == 500 - len(asked[-1].prompt_ids) - 3


# Signs of life


STREAMS: list[tuple[str, dict[str, Any], bytes]] = [
    (CHAT, {"messages": HI}, b": "),
    ("/v1/completions", {"prompt": "x"}, b": "),
    (MESSAGES, {"messages": HI, "max_tokens": 9}, b"event: ping"),
    (RESPONSES, {"input": "x"}, b": "),
    ("/api/chat", {"model": "brook", "messages": HI}, b'{"model":"brook"'),
    ("/api/generate", {"model": "brook", "prompt": "x"}, b'{"model":"brook"'),
]
QUICK = GatewayConfig(silent_s=0.01, beat_s=0.02)


@pytest.mark.parametrize(("path", "body", "beat"), STREAMS)
async def test_a_stream_shows_life_before_anything_comes(
    path: str, body: dict[str, Any], beat: bytes
) -> None:
    async with paper_gateway(template=QWEN3, config=QUICK) as gateway:
        gate = gateway.swarm.gate = asyncio.Event()
        async with gateway.http.post(gateway.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            for _ in range(3):
                while not (line := await response.content.readline()).strip():
                    pass
                assert line.startswith((beat, b"data: " + b'{"type":"ping"}'))
            gate.set()
            rest = (await response.read()).decode()
        assert "error" not in rest.replace('"error":null', "")
        ends = ("[DONE]", "message_stop", "response.completed", "response.incomplete")
        for end in (*ends, '"done":true'):
            if end in rest:
                break
        else:
            pytest.fail(rest[-300:])


@pytest.mark.parametrize(("path", "body", "beat"), STREAMS)
async def test_what_fails_after_the_headers_is_told_in_the_stream_s_form(
    path: str, body: dict[str, Any], beat: bytes
) -> None:
    async with paper_gateway(template=QWEN3, config=QUICK) as gateway:
        gate = gateway.swarm.gate = asyncio.Event()
        gateway.swarm.fails, gateway.swarm.fails_after = SwarmError("gone"), 1
        async with gateway.http.post(gateway.url + path, json={**body, "stream": True}) as response:
            assert (await response.content.readline()).startswith(beat)
            gate.set()
            last = (await response.read()).decode().strip().split("\n\n")[-1].splitlines()
        data = json.loads(last[-1].removeprefix("data: "))
        match path:
            case "/v1/messages":
                assert last[0] == "event: error"
                assert data["error"]["type"] == "overloaded_error"
            case "/v1/responses":
                assert last[0] == "event: response.failed"
                assert data["response"]["error"]["code"] == "server_error"
            case "/api/chat" | "/api/generate":
                assert "gone" in data["error"]
            case _:
                assert data["error"]["code"] == "unavailable"


def test_a_response_that_fails_at_once_has_begun() -> None:
    writer = ResponseWriter(ResponsesRequest(input="x"))
    events = [each["type"] for each in writer.failed(unavailable("gone", 5))]
    assert events == ["response.created", "response.in_progress", "response.failed"]


@pytest.mark.parametrize(("path", "body", "beat"), STREAMS)
async def test_a_whole_answer_shows_life_once_the_stages_have_taken_it(
    path: str, body: dict[str, Any], beat: bytes
) -> None:
    async with paper_gateway(config=QUICK) as gateway:
        gate = gateway.swarm.gate = asyncio.Event()
        async with gateway.http.post(
            gateway.url + path, json={**body, "stream": False}
        ) as response:
            assert response.status == 200
            assert await response.content.readexactly(2) == b"  "
            gate.set()
            answer = json.loads(await response.read())
            assert any(answer.get(each) for each in ("choices", "content", "output", "done"))


async def test_a_whole_answer_that_fails_later_is_cut() -> None:
    async with paper_gateway(config=QUICK) as gateway:
        gate = gateway.swarm.gate = asyncio.Event()
        gateway.swarm.fails, gateway.swarm.fails_after = SwarmError("gone"), 1
        async with gateway.http.post(gateway.url + CHAT, json={"messages": HI}) as response:
            assert response.status == 200
            gate.set()
            with pytest.raises(Exception, match=r"payload|reset|TransferEncoding"):
                await response.read()


async def test_sdks_read_streams_that_begin_with_signs_of_life() -> None:
    async with (
        paper_gateway(template=QWEN3, config=QUICK) as gateway,
        openai_client(gateway) as client,
        anthropic_client(gateway) as claude,
    ):
        gateway.swarm.says = "yes"

        async def hold() -> None:
            gate = gateway.swarm.gate = asyncio.Event()
            await until(lambda: gateway.swarm.live == 1)
            await asyncio.sleep(0.1)
            gate.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(hold())
            async with client.chat.completions.stream(
                model="brook",
                messages=HI,
                max_tokens=50,  # type: ignore[arg-type]
            ) as chat:
                assert (await chat.get_final_completion()).choices[0].message.content
        async with asyncio.TaskGroup() as group:
            group.create_task(hold())
            async with client.responses.stream(
                model="brook", input="Hi", max_output_tokens=50
            ) as response:
                events = [event.type async for event in response]
            assert events[-1] == "response.completed"
        async with asyncio.TaskGroup() as group:
            group.create_task(hold())
            async with claude.messages.stream(
                model="brook",
                messages=HI,
                max_tokens=50,  # type: ignore[arg-type]
            ) as messages:
                assert await messages.get_final_text()


@pytest.mark.parametrize(("path", "body", "beat"), STREAMS)
async def test_no_answer_breaks_a_line_of_a_stream(
    path: str, body: dict[str, Any], beat: bytes
) -> None:
    """To httpx, as to Python, a line ends at more than line breaks."""
    ends = "\u2028\x85"
    async with paper_gateway(template=QWEN3) as gateway, httpx.AsyncClient() as client:
        gateway.swarm.says = f"a{ends}b"
        async with client.stream(
            "POST", gateway.url + path, json={**body, "stream": True}, timeout=None
        ) as response:
            lines = [line async for line in response.aiter_lines()]
    told = [line.removeprefix("data: ") for line in lines if not line.startswith("event: ")]
    events = [json.loads(line) for line in told if line not in ("", "[DONE]")]
    assert all(end in json.dumps(events, ensure_ascii=False) for end in ends)


# Turns


class Endless(PaperSession):
    """A session that ends only when it is left."""

    async def tokens(self) -> Any:
        self._swarm.live += 1
        try:
            await asyncio.Event().wait()
            yield ()
        finally:
            self._swarm.live -= 1


async def test_another_who_asks_need_not_wait_for_a_crowd_of_one() -> None:
    keys = named_keys('[keys.many]\nkey = "many"\n[keys.one]\nkey = "one"\n')
    config = GatewayConfig(keys=keys, answers_at_once_max=4, requests_max=12)
    async with paper_gateway(config=config) as gateway:
        first = gateway.swarm.session

        def session(request: AnswerRequest) -> SessionDriver:
            crowd = "many" in request.cache_salt or len(request.prompt_ids) == 3
            return Endless(gateway.swarm, request) if crowd else first(request)

        gateway.swarm.session = session  # type: ignore[method-assign]

        async def ask(key: str, prompt: list[int]) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": prompt, "max_tokens": 4}
            async with gateway.http.post(
                gateway.url + "/v1/completions", json=body, headers=headers
            ) as response:
                await response.read()
                return response.status

        crowd = [asyncio.create_task(ask("many", [5, 6, 7])) for _ in range(12)]
        await until(lambda: gateway.swarm.live == 3 and gateway.answers.requests == 12)
        assert await ask("one", [5, 6, 7, 8]) == 200
        assert await ask("many", [5, 6, 7]) == 429, "there is no room for more of them"
        for each in crowd:
            each.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


async def test_who_gets_no_turn_in_time_hears_when_to_come_back() -> None:
    config = GatewayConfig(answers_at_once_max=1)
    async with paper_gateway(config=config, wait_s=0.05) as gateway:
        gateway.swarm.gate = asyncio.Event()
        first = asyncio.create_task(gateway.post("/v1/completions", prompt="a"))
        await until(lambda: gateway.swarm.live == 1)
        async with gateway.http.post(
            gateway.url + "/v1/completions", json={"prompt": "a"}
        ) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
        gateway.swarm.gate.set()
        assert (await first)[0] == 200
        # Choices of one request that has begun wait for each other, however long.
        status, answer = await gateway.post("/v1/completions", prompt=["a"] * 9, n=2)
        assert status == 200
        assert len(answer["choices"]) == 18  # type: ignore[arg-type]


# Around requests


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/chat/completions", {"messages": HI}, "choices"),
        ("/v1/chat/completions/", {"messages": HI}, "choices"),
        ("/v1/v1/messages", {"messages": HI, "max_tokens": 9}, "content"),
        ("/messages/", {"messages": HI, "max_tokens": 9}, "content"),
        ("/responses", {"input": "x"}, "output"),
        ("/completions", {"prompt": "x"}, "choices"),
        ("//v1/chat/completions", {"messages": HI}, "choices"),
        ("/v1//chat/completions", {"messages": HI}, "choices"),
        ("/v1/api/chat", {"model": "brook", "messages": HI, "stream": False}, "message"),
    ],
)
async def test_paths_of_people_s_settings_are_answered(path: str, body: Any, said: str) -> None:
    async with paper_gateway() as gateway:
        status, answer = await gateway.post(path, **body)
        assert status == 200
        assert said in answer
        listed_at = ("/models", "/v1/models/", "/v1/models/brook/", "/models/brook")
        for listed in (*listed_at, "//v1/models", "/api/tags/"):
            async with gateway.http.get(gateway.url + listed) as response:
                assert response.status == 200, listed
        async with gateway.http.get(gateway.url + "/metrics") as response:
            assert f'path="{path}"' not in await response.text()
        status, answer = await gateway.post("/messages", messages=[])
        assert (status, answer["type"]) == (400, "error"), "Anthropic's form"


async def test_a_preflight_lets_a_page_send_what_it_asks_for() -> None:
    asks = "authorization, anthropic-version, content-type, x-stainless-os, x-api-key"
    config = GatewayConfig(origins=("https://page.example",))
    async with paper_gateway(config=config) as gateway:
        for origin, allowed in (
            ("https://page.example", asks),
            ("https://other.example", None),
        ):
            headers = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": asks,
            }
            async with gateway.http.options(gateway.url + CHAT, headers=headers) as response:
                assert response.headers.get("Access-Control-Allow-Headers") == allowed
                assert (response.status == 204) is (allowed is not None)
