"""Requests that few programs send: followed, or refused by name, once."""

import asyncio
import json
import zlib
from typing import Any

import msgspec
import pytest
from anthropic.pagination import SyncPage as Page
from anthropic.types import ModelInfo

from client.gateway.errors import ApiError
from client.gateway.keys import plain_keys
from client.gateway.protocols.ollama import Options
from client.gateway.protocols.refused import refused_by
from client.gateway.protocols.requests import ChatRequest, CompletionRequest
from client.gateway.structured.call_formats import FUNCTION_TAGS, TAGGED_JSON, CallFormat
from client.gateway.structured.calls import calls_in
from client.gateway.structured.calls_grammar import calls_grammar
from client.gateway.structured.schemas import ArgumentTypes
from client.gateway.web import dialects
from client.gateway.web.app import GatewayConfig
from client.gateway.web.dialects import Dialect
from dht.grammars.trial import fault_of
from tests.templates import TEMPLATES
from tests.unit.client.gateway.paper import paper_gateway
from tests.unit.client.gateway.structured.call_samples import written_call
from tests.unit.client.gateway.test_real_clients import (
    CHAT,
    HI,
    MESSAGES,
    RESPONSES,
    call_of,
    function,
    prompt_for,
    refusal,
)
from tests.unit.client.gateway.test_tool_answers import follows, scripted

COMPLETIONS, OLLAMA = "/v1/completions", "/api/chat"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    RESPONSES: {"input": "Hi"},
    OLLAMA: {"model": "brook", "messages": HI, "stream": False},
}
"""The least that each endpoint takes."""
TEXT = {"type": "string"}
LET_THROUGH = frozenset(
    {
        "cache_salt", "include", "keep_alive", "metadata", "model", "prefix_cache", "priority",
        "speculate", "store", "stream", "stream_options", "truncation",
    }
)  # fmt: skip
"""Fields of some endpoint that change no answer of another."""
KINDS = {
    CHAT: dialects.CHATS,
    COMPLETIONS: dialects.COMPLETIONS,
    MESSAGES: dialects.MESSAGES,
    RESPONSES: dialects.RESPONSES,
    OLLAMA: dialects.OLLAMA_CHATS,
}
DIALECTS = {
    each.kind.__name__: each for each in vars(dialects).values() if isinstance(each, Dialect)
}


# Fields


@pytest.mark.parametrize("name", DIALECTS)
def test_what_changes_an_answer_elsewhere_is_built_or_refused(name: str) -> None:
    every = {field for each in DIALECTS.values() for field in each.kind.__struct_fields__}
    every |= {*Options.__struct_encode_fields__}
    kind = DIALECTS[name].kind
    assert every - LET_THROUGH <= {*kind.__struct_fields__, *refused_by(kind)}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"format": "json"}),
        (CHAT, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        (CHAT, {"system": "x"}),
        (CHAT, {"guided_whitespace_pattern": " "}),
        (COMPLETIONS, {"messages": HI}),
        (MESSAGES, {"response_format": {"type": "json_object"}}),
        (MESSAGES, {"parallel_tool_calls": False}),
        (MESSAGES, {"stop": ["x"]}),
        (RESPONSES, {"response_format": {"type": "json_object"}}),
        (RESPONSES, {"seed": 0}),
        (RESPONSES, {"messages": HI}),
        (OLLAMA, {"temperature": 0}),
        (OLLAMA, {"tool_choice": "required"}),
    ],
)
async def test_another_endpoints_fields_are_refused_by_name(
    path: str, more: dict[str, Any]
) -> None:
    async with paper_gateway() as gateway:
        status, answer = await gateway.post(path, **LEAST[path], **more)
        assert status == 400
        assert next(iter(more)) in json.dumps(answer)


def test_a_field_that_a_request_has_is_not_refused() -> None:
    built = msgspec.defstruct("ChatRequest", [("top_a", float, 0.0)])
    assert "top_a" in refused_by(ChatRequest)
    assert "top_a" not in refused_by(built)


@pytest.mark.parametrize("path", LEAST)
def test_fields_that_are_null_or_ask_for_nothing_are_none(path: str) -> None:
    kind = KINDS[path].kind
    names = {*kind.__struct_fields__, *refused_by(kind)} - LEAST[path].keys()
    asyncio.run(prompt_for(path, {**dict.fromkeys(names), **LEAST[path]}))
    nothing = {"n": 1, "tool_choice": "auto", "tools": [], "response_format": {"type": "text"}}
    foreign = {name: nothing[name] for name in nothing.keys() - {*kind.__struct_fields__}}
    asyncio.run(prompt_for(path, {**foreign, **LEAST[path]}))


# Numbers


@pytest.mark.parametrize("count", [1 << 31, 10**15])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETIONS, "max_completion_tokens"),
        (MESSAGES, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
    ],
)
def test_any_number_of_tokens_is_refused_in_the_words_for_it(
    path: str, name: str, count: int
) -> None:
    error = asyncio.run(refusal(path, {**LEAST[path], name: count}))
    assert "context" in error["message"]
    assert str(count) in error["message"]


def test_errors_name_the_fields_that_were_sent() -> None:
    for path, body in (
        (CHAT, {"max_tokens": 0}),
        (CHAT, {"max_completion_tokens": 0}),
        (CHAT, {"min_tokens": 9, "max_tokens": 3}),
        (RESPONSES, {"max_output_tokens": 0}),
    ):
        error = asyncio.run(refusal(path, {**LEAST[path], **body}))
        name = next(iter(body))
        assert error["param"] == name
        assert name in error["message"]
        assert "new_tokens" not in error["message"]
        assert "echo" not in error["message"]
    for body in ({"top_k": -5 + (1 << 40)}, {"stop_token_ids": [-1]}):
        assert asyncio.run(refusal(CHAT, {**LEAST[CHAT], **body}))["param"] == next(iter(body))


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (OLLAMA, {"options": {"stop": ""}}, "options.stop"),
        (OLLAMA, {"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        (OLLAMA, {"options": {"presence_penalty": 5}}, "options.presence_penalty"),
        (OLLAMA, {"num_predict": 5}, "num_predict"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)
async def test_errors_begin_with_the_field_by_its_name_at_this_endpoint(
    path: str, body: dict[str, Any], name: str
) -> None:
    async with paper_gateway() as gateway:
        status, answer = await gateway.post(path, **{**LEAST[path], **body})
        error: Any = answer["error"]
        assert status == 400
        assert (error if path == OLLAMA else error["message"]).startswith(f"{name} ")


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        (CHAT, {"tool_choice": "any"}, "tool_choice: 'any' is not supported here; 'auto', 'none'"),
        (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].type: 'custom' is not supported here"),
        (MESSAGES, {"thinking": {"type": "auto"}}, "; 'adaptive', 'disabled', 'enabled' may be"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "zz"}]}]}, "'text'"),
        (OLLAMA, {"think": "max"}, "think: 'max' is not supported here; 'high', 'low', 'medium'"),
    ],
)
async def test_a_value_that_is_not_known_is_told_with_those_that_are(
    path: str, more: dict[str, Any], words: str
) -> None:
    async with paper_gateway() as gateway:
        status, answer = await gateway.post(path, **{**LEAST[path], **more})
        assert status == 400
        assert words in json.dumps(answer)


@pytest.mark.parametrize("form", ["json_schema", "json_object"])
async def test_a_schema_without_a_name_is_one(form: str) -> None:
    async with paper_gateway() as gateway:
        asked = scripted(gateway, "{}")
        wanted = {"type": form, "schema": {"type": "object", "properties": {"k-one": TEXT}}}
        status, answer = await gateway.post(CHAT, messages=HI, response_format=wanted)
        assert status == 200, answer
        assert b"k-one" in asked[0].sampling.grammar


# Parts of messages

SEEN = {"type": "image", "data": "", "mimeType": "image/png"}  # as MCP has it


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:"}}),
        (CHAT, SEEN),
        (CHAT, {"type": "input_image"}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "data": ""}}),
        (RESPONSES, {"type": "image_url"}),
        (RESPONSES, {"type": "input_image"}),
    ],
)
def test_an_image_is_refused_in_the_same_words_however_it_is_spelled(
    path: str, part: dict[str, Any]
) -> None:
    said = [{"role": "user", "content": [part]}]
    field = "input" if path == RESPONSES else "messages"
    error = asyncio.run(refusal(path, {**LEAST[path], field: said}))
    where = f"{field}[0].content[0].type"
    kind = part["type"]
    reason = f"{where}: {kind} is not supported here: the model reads text"
    assert error["message"] == reason


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (SEEN, "[an image, which"),
        ({"type": "audio", "data": ""}, "[a recording, which"),
        ({"type": "resource", "resource": {}}, "[a part of type 'resource', which"),
        ({"type": "text", "text": "r-one"}, "r-one"),
    ],
)
def test_no_part_of_a_result_ends_a_conversation(part: dict[str, Any], told: str) -> None:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [part]}
    blocks = [
        *HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]},
    ]  # fmt: skip
    assert told in asyncio.run(prompt_for(MESSAGES, {"messages": blocks, "max_tokens": 9}))
    chat = [
        *HI, {"role": "assistant", "tool_calls": [call_of("look", "{}")]},
        {"role": "tool", "tool_call_id": "c1", "content": [part]},
    ]  # fmt: skip
    assert told in asyncio.run(prompt_for(CHAT, {"messages": chat}))


def test_a_text_is_one_by_the_type_of_either_interface() -> None:
    said = [{"role": "user", "content": [{"type": "input_text", "text": "t-one"}]}]
    assert "t-one" in asyncio.run(prompt_for(CHAT, {"messages": said}))


@pytest.mark.parametrize(
    ("path", "more"), [(CHAT, {"seed": -1}), (OLLAMA, {"options": {"seed": -1, "stop": "x"}})]
)
async def test_a_seed_of_minus_one_is_any(path: str, more: dict[str, Any]) -> None:
    async with paper_gateway() as gateway:
        asked = scripted(gateway, "yes")
        for _ in range(2):
            status, answer = await gateway.post(path, **LEAST[path], **more)
            assert status == 200, answer
        assert asked[0].sampling.seed != asked[1].sampling.seed


@pytest.mark.parametrize("number", [3, 3.0, "3"])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_tokens"),
        (COMPLETIONS, "max_completion_tokens"),
        (MESSAGES, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
        (OLLAMA, "options"),
    ],
)
async def test_a_whole_number_is_one_however_it_is_written(
    path: str, name: str, number: Any
) -> None:
    async with paper_gateway() as gateway:
        asked = scripted(gateway, "one two three four")
        value = {"num_predict": number, "top_k": number} if name == "options" else number
        status, answer = await gateway.post(path, **{**LEAST[path], name: value})
        assert status == 200, answer
        assert asked[0].max_new_tokens == 3


# HTTP


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\ufeff{}", "Hi"),
        ("{}", "cut \\ud83d"),
        ("{}", "\\ude00 cut"),
        ("{}", "both \\ud83d\\ude00"),
        ("{}", "a half \\ud83d, \\\\ud83d written out, and a whole one \\ud83d\\ude00"),
    ],
)
async def test_bodies_with_a_mark_in_front_or_half_a_character_are_taken(
    text: str, told: str
) -> None:
    body = text.replace("{}", f'{{"prompt": "{told}", "max_tokens": 1}}')
    whole = told.encode().decode("unicode_escape").encode("utf-16", "surrogatepass")
    async with paper_gateway() as gateway:
        asked = scripted(gateway, "x")
        headers = {"Content-Type": "application/json"}
        url = gateway.url + COMPLETIONS
        async with gateway.http.post(url, data=body.encode(), headers=headers) as response:
            assert response.status == 200, await response.text()
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        expected = whole.decode("utf-16", "replace")
        assert asked[0].prompt_ids == tokenizer.encode(expected)


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip"])
async def test_a_body_in_an_encoding_that_is_not_read_is_a_415(encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with (
        paper_gateway() as gateway,
        gateway.http.post(gateway.url + MESSAGES, data=b"x", headers=headers) as response,
    ):
        assert response.status == 415
        body = await response.json()
        assert body["type"] == "error"
        assert encoding in body["error"]["message"]


async def test_a_packed_body_is_read() -> None:
    body = zlib.compress(json.dumps({**LEAST[CHAT], "max_tokens": 1}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    async with (
        paper_gateway() as gateway,
        gateway.http.post(gateway.url + CHAT, data=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "said"),
    [
        ("POST", "/v1/messages/batches", {}, 404, "nothing at this path"),
        ("GET", "/v1/messages", {}, 405, "send POST"),
        ("GET", "/v1/models/other", {"anthropic-version": "2023-06-01"}, 404, "'other'"),
        ("POST", "/api/embed", {}, 400, "embeddings are not served"),
        ("POST", "/v1/embeddings", {}, 400, "embeddings are not served"),
        ("DELETE", "/v1/models", {}, 405, "send GET or HEAD"),
        ("POST", "/v1/messages", {"Expect": "nothing"}, 417, "send 100-continue or none"),
        ("POST", "/api/chat", {"Expect": "nothing"}, 417, "'Expect: nothing'"),
        ("POST", "/v1/completions", {"Expect": "nothing"}, 417, "is not known here"),
    ],
)
async def test_errors_around_requests_are_in_the_form_of_who_asks(
    method: str, path: str, headers: dict[str, str], status: int, said: str
) -> None:
    async with (
        paper_gateway() as gateway,
        gateway.http.request(method, gateway.url + path, headers=headers) as response,
    ):
        assert response.status == status
        body = await response.json()
        assert said in json.dumps(body)
        if "/messages" in path or "anthropic-version" in headers:
            assert body["type"] == "error"
            assert set(body["error"]) == {"type", "message"}
        elif path.startswith("/api"):
            assert isinstance(body["error"], str)
        else:
            assert set(body["error"]) == {"message", "type", "param", "code"}


async def test_models_are_listed_in_anthropics_form_for_its_clients() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    async with paper_gateway() as gateway:
        async with gateway.http.get(gateway.url + "/v1/models", headers=headers) as response:
            page = Page[ModelInfo].model_validate(await response.json(), strict=False)
        async with gateway.http.get(gateway.url + "/v1/models/brook", headers=headers) as response:
            one = ModelInfo.model_validate(await response.json(), strict=False)
    assert (page.first_id, page.last_id, page.has_more) == ("brook", "brook", False)
    assert page.data == [one]
    assert (one.type, one.display_name) == ("model", "brook")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_an_empty_name_is_no_choice_of_a_model(path: str) -> None:
    asyncio.run(prompt_for(path, {**LEAST[path], "model": ""}))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
    ],
)
def test_who_speaks_no_http_gets_json_and_leaves_no_line_in_the_log(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with paper_gateway() as gateway:
            host, port = gateway.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert b" 400 " in head.splitlines()[0]
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"].startswith("this is no HTTP request that can be read: ")
            assert "\n" not in error["message"]
            writer.close()

    asyncio.run(scenario())
    assert not [each.getMessage() for each in caplog.records if each.exc_info]


@pytest.mark.parametrize("beside", ["", "none"])
@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key"])
async def test_keys_come_in_the_headers_of_every_vendor(header: str, beside: str) -> None:
    begins = {"Authorization": "Bearer ", "x-api-key": "", "api-key": ""}
    others = {name: begin + beside for name, begin in begins.items()}
    async with paper_gateway(config=GatewayConfig(keys=plain_keys(["k-one"]))) as gateway:
        for key, status in (("k-one", 200), ("k-two", 401), ("", 401)):
            headers = {**others, header: begins[header] + key}
            async with gateway.http.get(gateway.url + "/v1/models", headers=headers) as response:
                assert response.status == status


# Schemas of functions

ONE = {"type": "object", "properties": {"at": TEXT}, "required": ["at"]}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"at": TEXT}, "required": ["at"]},
        {**ONE, "type": ["object", "null"]},
        {"anyOf": [ONE, {"type": "null"}]},
        {"$ref": "#/$defs/A", "$defs": {"A": ONE}},
        {"properties": [], "required": None},
        {"required": ["at"]},
    ],
)
def test_forced_arguments_are_an_object_whatever_the_schema_leaves_open(
    parameters: dict[str, Any],
) -> None:
    functions = [{"name": "look", "parameters": parameters}]
    grammar = calls_grammar(TAGGED_JSON, functions, required=True, parallel=False, marks={})
    assert fault_of(grammar) == ""
    assert follows(grammar, written_call(TAGGED_JSON, "look", {"at": "x"}))
    for wrong in ("5", "null", "[]"):
        call = written_call(TAGGED_JSON, "look", {}).replace("{}", wrong)
        assert not follows(grammar, call)


@pytest.mark.parametrize(
    ("form", "parameters", "word"),
    [
        (TAGGED_JSON, {"type": "string"}, "object"),
        (FUNCTION_TAGS, {"type": "string"}, "object"),
        (FUNCTION_TAGS, {**ONE, "minProperties": 2}, "minProperties"),
        (FUNCTION_TAGS, {**ONE, "dependentRequired": {"at": ["b"]}}, "dependentRequired"),
        (FUNCTION_TAGS, {"properties": {"at": {"$dynamicRef": "#a"}}}, "$dynamicRef"),
    ],
)
def test_what_a_schema_asks_and_no_call_can_follow_is_refused(
    form: CallFormat, parameters: dict[str, Any], word: str
) -> None:
    functions = [{"name": "look", "parameters": parameters}]
    with pytest.raises(ApiError) as raised:
        calls_grammar(form, functions, required=True, parallel=False, marks={})
    assert raised.value.status == 400
    assert word in raised.value.message


@pytest.mark.parametrize(
    "parameters",
    [
        ONE,
        {"$ref": "#/$defs/A", "$defs": {"A": ONE}},
        {"type": "object", "$ref": "#/$defs/A", "$defs": {"A": ONE}},
        {"allOf": [{"properties": {"b": TEXT}}, ONE]},
        {"anyOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": TEXT}}], "$defs": {"A": ONE}},
    ],
)
def test_a_text_in_tags_stays_text_wherever_the_schema_says_so(parameters: dict[str, Any]) -> None:
    types = ArgumentTypes({"look": parameters})
    assert types.of("look", "at") == {"string"}
    assert types.of("look", "other") is None
    call = written_call(FUNCTION_TAGS, "look", {"at": "5"})
    (found,) = calls_in(call, FUNCTION_TAGS, types, is_whole=True)
    assert json.loads(found.arguments) == {"at": "5"}


# Ways to call

FENCED = "<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```</tool_call>"
ARGUMENTS_FIRST = (
    '<tool_call>\n{"arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}\n</tool_call>'
)


@pytest.mark.parametrize(("shape", "status"), [(FENCED, 400), (ARGUMENTS_FIRST, 200)])
async def test_a_form_is_the_models_if_it_reads_what_the_template_writes(
    shape: str, status: int
) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% set f = call.function %}" + shape + "{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    async with paper_gateway(template=template) as gateway:
        got, answer = await gateway.post(CHAT, messages=HI, tools=[function("look")])
        assert got == status
        assert status == 200 or "no way to call tools" in json.dumps(answer)


# Conversations


@pytest.mark.parametrize("family", TEMPLATES)
def test_results_stand_in_the_order_of_their_calls(family: str) -> None:
    calls = [{**call_of(f"f-{at}", "{}"), "id": f"c{at}"} for at in range(3)]
    results = [{"role": "tool", "tool_call_id": f"c{at}", "content": f"r-{at}"} for at in (2, 0, 1)]
    stray = {"role": "tool", "tool_call_id": "none", "content": "r-x"}
    messages = [*HI, {"role": "assistant", "tool_calls": calls}, *results, stray]
    prompt = asyncio.run(prompt_for(CHAT, {"messages": messages}, TEMPLATES[family]))
    places = [prompt.index(f"r-{at}") for at in (0, 1, 2, "x")]
    assert places == sorted(places)


@pytest.mark.parametrize("arguments", [[], [1], 5, True])
def test_arguments_of_any_kind_end_no_conversation(arguments: object) -> None:
    told = "{}" if arguments == [] else json.dumps(arguments)
    call = {**call_of("look", ""), "function": {"name": "look", "arguments": arguments}}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": arguments}
    item = {"type": "function_call", "call_id": "t", "name": "look", "arguments": arguments}
    chat = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for path, body in (
        (CHAT, {"messages": chat}),
        (OLLAMA, {**LEAST[OLLAMA], "messages": chat}),
        (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [use]}], "max_tokens": 9}),
        (RESPONSES, {"input": [*HI, item]}),
    ):
        prompt = asyncio.run(prompt_for(path, body))
        assert f'"arguments": {told}' in prompt or f'"arguments": "{told}"' in prompt


def test_templates_that_read_lists_of_parts_get_them() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    said = [{"role": role, "content": f"t-{role}"} for role in ("system", "user", "assistant")]
    prompt = asyncio.run(prompt_for(CHAT, {"messages": said}, template))
    assert prompt == "<system>t-system<user>t-user<assistant>t-assistant"
    body = {"messages": said, "continue_final_message": True}
    assert asyncio.run(prompt_for(CHAT, body, template)).endswith("t-assistant")


def test_what_hosted_tools_did_stands_in_the_prompt() -> None:
    exec_call = {"type": "local_shell_call", "call_id": "a", "action": {"command": ["ls", "c-1"]}}
    items = [
        *HI,
        exec_call,
        {"type": "local_shell_call_output", "id": "a", "output": "c-2"},
        {"type": "shell_call", "call_id": "b", "action": {"commands": ["c-3"]}},
        {"type": "shell_call_output", "call_id": "b", "output": [{"stdout": "c-4", "stderr": ""}]},
        {"type": "apply_patch_call", "call_id": "d", "operation": {"diff": "c-5"}},
        {"type": "apply_patch_call_output", "call_id": "d", "status": "failed", "output": "c-6"},
        {"type": "code_interpreter_call", "id": "e", "code": "c-7", "outputs": None},
        {"type": "computer_call", "call_id": "g", "action": {"type": "c-8"}},
        {
            "type": "computer_call_output", "call_id": "g",
            "output": {"type": "computer_screenshot", "image_url": "x"},
        },
        {"type": "mcp_call", "id": "h", "name": "c-9", "arguments": "{}",
         "error": {"type": "x", "message": "c-10"}},
    ]  # fmt: skip
    prompt = asyncio.run(prompt_for(RESPONSES, {"input": items}))
    assert [at for at in range(1, 11) if f"c-{at}" not in prompt] == []
    assert "[an image, which" in prompt

    def use(kind: str, own: str) -> dict[str, Any]:
        return {"type": kind, "id": own, "name": f"n-{own}", "input": {"q": f"q-{own}"}}

    def result(kind: str, own: str, content: object) -> dict[str, Any]:
        return {"type": f"{kind}_tool_result", "tool_use_id": own, "content": content}

    found = {"type": "web_search_result", "title": "r-a", "encrypted_content": "sealed"}
    blocks = [
        {"type": "compaction", "content": "r-s"},
        use("server_tool_use", "a"), result("web_search", "a", [found]),
        use("mcp_tool_use", "b"), result("mcp", "b", [{"type": "text", "text": "r-b"}]),
        use("server_tool_use", "c"), result("code_execution", "c", {"stdout": "r-c"}),
        {"type": "text", "text": "t-one"},
    ]  # fmt: skip
    messages = [*HI, {"role": "assistant", "content": blocks}, *HI]
    prompt = asyncio.run(prompt_for(MESSAGES, {"messages": messages, "max_tokens": 9}))
    words = ["r-s", "n-a", "q-a", "r-a", "n-b", "r-b", "n-c", "r-c", "t-one"]
    assert [prompt.index(word) for word in words] == sorted(prompt.index(word) for word in words)
    assert "sealed" not in prompt


def test_a_message_without_parts_is_an_empty_one() -> None:
    for path in (CHAT, MESSAGES):
        body = {**LEAST[path], "messages": [{"role": "user", "content": []}]}
        assert asyncio.run(prompt_for(path, body))


def test_a_web_search_of_any_date_is_left_out_of_the_functions() -> None:
    tools = [{"type": "web_search_2031_01_01"}, {"type": "function", "name": "look"}]
    assert "web_search" not in asyncio.run(prompt_for(RESPONSES, {"input": "x", "tools": tools}))


async def test_options_are_checked_once_for_all_prompts_of_a_request() -> None:
    """A body of 17 KB has 256 prompts and 1,024 biases: each bias was checked 768 times, for three
    seconds on the event loop."""
    biases = {str(token_id): 1.0 for token_id in range(9)}
    request = CompletionRequest(
        prompt=[[5], [6, 7], [8]], n=2, seed=1, logit_bias=biases, max_tokens=-1
    )
    async with paper_gateway() as gateway, gateway.gateway._served.use(None) as model:
        job = await model.service.understand(request, "")
    assert [task.options.max_new_tokens for task in job.tasks][::2] == [1023, 1022, 1023]
    assert [task.options.seed for task in job.tasks[:2]] == [1, 2]
    first, *others = (task.options.logit_bias for task in job.tasks)
    assert first == dict.fromkeys(range(9), 1.0)
    assert all(other is first for other in others)


async def test_scores_of_prompts_are_bounded_for_all_answers_of_a_request() -> None:
    """One prompt may have a million of them, each some hundred bytes here, and a request asked for
    256 times as many."""
    async with paper_gateway() as gateway:
        body: dict[str, object] = {"prompt": [[5] * 1000] * 4, "echo": True, "max_tokens": 0}
        status, said = await gateway.post(COMPLETIONS, **body, n=16, logprobs=20)
        assert status == 400
        assert "log probabilities of prompts" in str(said)
        assert gateway.swarm.served == 0
        assert (await gateway.post(COMPLETIONS, **body, n=1, logprobs=1))[0] == 200
