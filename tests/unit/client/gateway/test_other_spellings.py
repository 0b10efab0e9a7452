"""Requests in the words of other services and older clients: followed, or refused by name."""

import asyncio
import json
from typing import Any

import pytest

from client.gateway.structured.call_formats import FUNCTION_TAGS, KEYS_AND_VALUES, CallFormat
from client.gateway.structured.calls_grammar import calls_grammar
from client.gateway.structured.grammar import of_schema
from client.gateway.structured.text_patterns import patterns_of
from dht.grammars.trial import fault_of
from tests.templates import GPT_OSS, MISTRAL, QWEN3, TEMPLATES
from tests.unit.client.gateway.paper import paper_gateway
from tests.unit.client.gateway.structured.call_samples import written_call
from tests.unit.client.gateway.test_real_clients import (
    CHAT,
    HI,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    call_of,
    function,
    prompt_for,
    refusal,
    written,
)
from tests.unit.client.gateway.test_tool_answers import follows, scripted

OLLAMA = "/api/chat"


def called(**more: Any) -> list[dict[str, Any]]:
    """A conversation of chats with a call and its result."""
    call = {"role": "assistant", "tool_calls": [call_of("look", '{"city": "x-one"}')], **more}
    return [*HI, call, {"role": "tool", "tool_call_id": "c1", "content": "r-one"}]


def answered(path: str, body: dict[str, Any], *texts: str, template: str = QWEN3) -> Any:
    """The whole answer to a request whose model says ``texts``."""

    async def scenario() -> Any:
        async with paper_gateway(template=template) as gateway:
            scripted(gateway, *texts)
            status, answer = await gateway.post(path, **body)
            assert status == 200, answer
            return answer

    return asyncio.run(scenario())


# How much to think


@pytest.mark.parametrize(
    "body",
    [
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
    ],
)
def test_thoughts_are_switched_off_by_any_name(body: dict[str, Any]) -> None:
    assert asyncio.run(prompt_for(CHAT, {"messages": HI, **body})).endswith("</think>\n\n")


def test_an_effort_and_thoughts_go_by_other_names() -> None:
    messages = called(reasoning="t-one")
    body = {"messages": messages, "reasoning": {"effort": "high"}}
    prompt = asyncio.run(prompt_for(CHAT, body, GPT_OSS))
    assert "Reasoning: high" in prompt
    assert "t-one" in prompt


@pytest.mark.parametrize("body", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_thoughts_that_are_not_wanted_are_not_told(body: dict[str, Any]) -> None:
    said = answered(CHAT, {"messages": HI, **body}, "<think>hm</think>So.")
    assert said["choices"][0]["message"] == {
        "role": "assistant", "refusal": None, "content": "So.",
    }  # fmt: skip


# Conversations


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_an_answer_goes_on_with_a_message_that_says_so(name: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "It is", name: True}]
    prompt = asyncio.run(prompt_for(CHAT, {"messages": messages}))
    assert prompt.endswith("It is")


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_who_speaks_stands_in_the_prompt(role: str, family: str) -> None:
    said = [{"role": role, "name": f"n-{at}", "content": f"t-{at}"} for at in range(2)]
    prompt = asyncio.run(prompt_for(CHAT, {"messages": [*said, *HI]}, TEMPLATES[family]))
    assert all(f"{what}-{at}" in prompt for what in "nt" for at in range(2))


@pytest.mark.parametrize("family", TEMPLATES)
def test_instructions_alone_are_a_prompt(family: str) -> None:
    body = {"messages": [{"role": "system", "content": "s-one"}]}
    assert "s-one" in asyncio.run(prompt_for(CHAT, body, TEMPLATES[family]))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
        ({"audio": {"id": "a"}}, "messages[1].audio"),
        ({"images": ["a"]}, "messages[1].images"),
    ],
)
def test_what_no_prompt_would_say_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "x", **more}]
    assert asyncio.run(refusal(CHAT, {"messages": messages}))["param"] == param
    nothing = dict.fromkeys(more)
    said = [*HI, {"role": "assistant", "content": "x", **nothing}, *HI]
    assert asyncio.run(prompt_for(CHAT, {"messages": said}))


USE = {"type": "tool_use", "id": "t", "name": "look"}


@pytest.mark.parametrize(
    ("given", "told"),
    [({}, '"arguments": {}'), ({"input": None}, '"arguments": {}'), ({"input": "w-one"}, "w-one")],
)
def test_arguments_that_are_no_object_end_no_conversation(given: Any, told: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r-one"}
    messages = [
        *HI, {"role": "assistant", "content": [{**USE, **given}]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    assert told in asyncio.run(prompt_for(MESSAGES, {"messages": messages, "max_tokens": 9}))
    call = {"function": {"name": "look", "arguments": given.get("input")}}
    turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"model": "brook", "messages": turns, "stream": False}
    assert told in asyncio.run(prompt_for(OLLAMA, body))


def test_a_custom_call_without_an_input_and_one_of_a_server_of_tools_are_told() -> None:
    items = [
        *HI,
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "abc"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": None},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "r-one"},
        {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": []},
        {"type": "mcp_call", "id": "m", "server_label": "s", "name": "look", "arguments": "{}",
         "output": "r-two"},
        {"type": "file_search_call", "id": "f", "queries": ["x"], "results": None},
    ]  # fmt: skip
    prompt = asyncio.run(prompt_for(RESPONSES, {"input": items}))
    assert all(word in prompt for word in ("patch", "r-one", "look", "r-two"))
    found = {**items[-1], "results": [{"text": "x"}]}
    assert asyncio.run(refusal(RESPONSES, {"input": [found]}))["param"] == "input[0].results"


PDF = {"type": "base64", "media_type": "application/pdf", "data": ""}


def test_what_no_text_is_leaves_a_text_in_results_alone() -> None:
    document = {"type": "document", "source": PDF, "title": "d-one"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    blocks = [
        *HI, {"role": "assistant", "content": [{**USE, "input": {}}]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    prompt = asyncio.run(prompt_for(MESSAGES, {"messages": blocks, "max_tokens": 9}))
    assert "d-one\n[a document, which" in prompt
    said = [{"role": "user", "content": [document]}]
    error = asyncio.run(refusal(MESSAGES, {"messages": said, "max_tokens": 9}))
    assert "messages[0].content[0].source.type: base64" in error["message"]
    output = [{"type": "input_file", "file_id": "f"}]
    call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "t"}
    items = [*HI, call, {"type": "function_call_output", "call_id": "t", "output": output}]
    assert "[a file, which" in asyncio.run(prompt_for(RESPONSES, {"input": items}))
    messages = called()
    messages[-1]["content"] = [{"type": "input_audio", "input_audio": {"data": ""}}]
    assert "[a recording, which" in asyncio.run(prompt_for(CHAT, {"messages": messages}))


def test_documents_and_search_results_that_are_text_stand_in_the_prompt() -> None:
    found = {"type": "search_result", "source": "u-one", "title": "t-one",
             "content": [{"type": "text", "text": "f-one"}]}  # fmt: skip
    text = {"type": "text", "media_type": "text/plain", "data": "d-one"}
    parts = {"type": "content", "content": [{"type": "text", "text": "d-two"}]}
    documents = [{"type": "document", "source": source} for source in (text, parts)]
    body = {"messages": [{"role": "user", "content": [found, *documents]}], "max_tokens": 9}
    prompt = asyncio.run(prompt_for(MESSAGES, body))
    assert all(f"{each}" in prompt for each in ("u-one", "t-one", "f-one", "d-one", "d-two"))


# Ollama


@pytest.mark.parametrize("field", ["tool_name", "name"])
def test_results_find_their_calls_by_the_functions_names(field: str) -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("one", "two")]
    results = [{"role": "tool", field: name, "content": f"r-{name}"} for name in ("two", "one")]
    turns = [*HI, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    body = {"model": "brook", "messages": turns, "stream": False}
    prompt = asyncio.run(prompt_for(OLLAMA, body, TEMPLATES["Kimi K2"]))
    for at, name in enumerate(("one", "two")):
        assert f"Return of functions.{name}:{at}\nr-{name}" in prompt


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (OLLAMA, {}, "load"),
        (OLLAMA, {"messages": [], "keep_alive": 0}, "unload"),
        ("/api/generate", {"keep_alive": "15m"}, "load"),
    ],
)
def test_a_request_to_load_a_model_is_answered(
    path: str, body: dict[str, Any], reason: str
) -> None:
    said = answered(path, {"model": "brook", **body})
    assert (said["done"], said["done_reason"]) == (True, reason)


# Tools


def test_functions_without_properties_are_told_to_templates_with_some() -> None:
    template = "{% for t in tools or [] %}{{ t.function.parameters.properties.items() | list }}"
    template += "<tool_call>{% endfor %}{{ messages[0].content }}"
    for parameters in (None, {"type": "object"}, {"type": "object", "properties": None}):
        tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
        body = {"messages": HI, "tools": [tool]}
        assert "[]" in asyncio.run(prompt_for(CHAT, body, template))


TWO = [function("look"), function("find")]
RESPONSE_TOOLS = [{"type": "function", "name": n, "parameters": SCHEMA} for n in ("look", "find")]
HOSTED = [{"type": "mcp", "server_label": "s"}, {"type": "image_generation"}]
ALLOWED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "tools": TWO, "tool_choice": {"type": "allowed_tools", "allowed_tools":
            {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}}}),
    (RESPONSES, {"input": "x", "tools": RESPONSE_TOOLS + HOSTED, "tool_choice":
            {"type": "allowed_tools", "mode": "auto",
             "tools": [{"type": "function", "name": "look"}, *HOSTED]}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), ALLOWED)
def test_the_model_hears_of_allowed_functions_alone(path: str, body: dict[str, Any]) -> None:
    prompt = asyncio.run(prompt_for(path, body))
    assert "look" in prompt
    assert "find" not in prompt
    other = json.loads(json.dumps(body["tool_choice"]).replace("look", "other"))
    error = asyncio.run(refusal(path, {**body, "tool_choice": other}))
    assert error["param"] == "tool_choice"
    assert "'other'" in error["message"]


@pytest.mark.parametrize("streams", [False, True])
async def test_one_call_is_one_where_parallel_ones_are_not_wanted(streams: bool) -> None:
    async with paper_gateway(template=QWEN3) as gateway:
        calls = "\n".join(written("look", {"city": f"x-{at}"}) for at in range(2))
        scripted(gateway, f"So. {calls}")
        body = {"messages": HI, "tools": TWO, "parallel_tool_calls": False, "stream": streams}
        async with gateway.http.post(gateway.url + CHAT, json=body) as response:
            text = await response.text()
        assert text.count('"name":"look"') == 1
        assert text.count('"finish_reason":"tool_calls"') == 1


def test_any_number_of_tokens_and_no_alternatives_ask_for_nothing() -> None:
    for more in ({"max_tokens": -1}, {"max_completion_tokens": -1}, {"top_logprobs": 0}):
        assert answered(CHAT, {"messages": HI, **more}, "So.")
    assert answered("/v1/completions", {"prompt": "x", "max_tokens": -1}, "So.")
    assert answered(CHAT, {"messages": HI, "prediction": {"type": "content", "content": "x"}}, "a")


def test_long_instructions_are_bound_by_the_context_alone() -> None:
    body: dict[str, Any] = {"messages": HI, "system": "word " * 60_000, "max_tokens": 9}
    assert "prompt is too long" in asyncio.run(refusal(MESSAGES, body))["message"]
    body["system"] = [{"type": "text", "text": "x"}] * 4097
    assert "4096 at most" in asyncio.run(refusal(MESSAGES, body))["message"]


def test_mistral_shows_a_system_message_that_stands_alone() -> None:
    prompt = asyncio.run(
        prompt_for(CHAT, {"messages": [{"role": "developer", "content": "d-one"}]}, MISTRAL)
    )
    assert "[INST]d-one[/INST]" in prompt


# Thoughts

OPENS = QWEN3 + "{% if add_generation_prompt %}<think>\n{% endif %}"
"""Of models that always think."""


def test_models_think_before_a_call_that_is_strict_and_not_forced() -> None:
    strict = [function("look", strict=True)]
    call = written("look", {"city": "x"})
    for template, thought in ((QWEN3, "<think>hm</think>\n"), (OPENS, "hm\n</think>\n")):
        body = {"messages": HI, "tools": strict}
        (choice,) = answered(CHAT, body, f"{thought}So.\n{call}", template=template)["choices"]
        assert choice["message"]["reasoning_content"].strip() == "hm"
        assert choice["message"]["content"] == "So."
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [function("look")], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_what_is_demanded_of_an_answer_is_not_said_within_thoughts(body: dict[str, Any]) -> None:
    prompt = asyncio.run(prompt_for(CHAT, {"messages": HI, **body}, OPENS))
    assert prompt.endswith("<think>\n\n</think>\n\n")
    free = asyncio.run(prompt_for(CHAT, {"messages": HI}, OPENS))
    assert free.endswith("<think>\n")


# Texts that follow a schema without quotes


@pytest.mark.parametrize("form", [KEYS_AND_VALUES, FUNCTION_TAGS])
@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"format": "date-time"}, "2026-02-28T09:30:00Z", "tomorrow"),
        ({"format": "date"}, "2026-02-28", "2026-13-01"),
        ({"format": "duration"}, "P1DT2H", "P"),
        ({"format": "email"}, "a.b@c.example", "a@"),
        ({"format": "uuid"}, "12345678-1234-1234-1234-123456789abc", "12345678"),
        ({"format": "uri"}, "https://a.example/b?c=d", "a b"),
        ({"format": "password"}, "anything", None),
        ({"pattern": "^[a-z/]+$"}, "a/b", "A"),
        ({"pattern": "b+"}, "abc", "ac"),
        ({"pattern": "^(a|b)", "maxLength": 2}, "bc", "bcd"),
    ],
)
def test_values_in_tags_follow_patterns_and_formats(
    form: CallFormat, schema: dict[str, Any], fits: str, fails: str | None
) -> None:
    parameters = {"properties": {"at": {"type": "string", **schema}}, "required": ["at"]}
    functions = [{"name": "look", "parameters": parameters}]
    grammar = calls_grammar(form, functions, required=True, parallel=False, marks={})
    assert follows(grammar, written_call(form, "look", {"at": fits}))
    if fails is not None:
        assert not follows(grammar, written_call(form, "look", {"at": fails}))


def test_formats_that_only_describe_a_value_are_left_out_of_grammars() -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": "path"}}}
    assert "format" not in of_schema(schema)
    assert follows("start: " + of_schema(schema), '{"at": "/a"}')
    dated = {"type": "string", "format": "date"}
    assert of_schema(dated).count("date") == 1


RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("holds", "says"),
    [
        ({"propertyNames": {"type": "string"}}, {"propertyNames": {"enum": ["a"]}}),
        ({"uniqueItems": False}, {"uniqueItems": True}),
        ({"dependentRequired": {}}, {"dependentRequired": {"a": ["b"]}}),
        ({"unevaluatedProperties": True}, {"unevaluatedProperties": False}),
    ],
)
def test_what_holds_for_every_value_is_left_out_of_grammars(
    holds: dict[str, Any], says: dict[str, Any]
) -> None:
    def grammar(more: dict[str, Any]) -> str:
        named = {**RECORD, **more, "properties": {next(iter(more)): {"type": "integer"}}}
        items = [{"$ref": "#/$defs/r"}, named]
        schema = {"type": "array", "prefixItems": items, "$defs": {"r": {**RECORD, **more}}}
        return "start: " + of_schema(schema)

    assert follows(grammar(holds), f'[{{"a": 1}}, {{"{next(iter(holds))}": 2}}]')
    assert not follows(grammar(holds), '[{"a": "x"}]')
    assert "Unimplemented" in (fault_of(grammar(says)) or "")


@pytest.mark.parametrize(
    ("version", "is_kept"),
    [
        ("http://json-schema.org/draft-04/schema#", True),
        ("https://json-schema.org/draft/2020-12/schema", True),
        ("https://json-schema.org/draft-07/schema#", False),
        ("http://json-schema.org/schema#", False),
        ("https://spec.openapis.org/oas/3.1/dialect/base", False),
        ("x", False),
    ],
)
def test_a_version_that_json_schema_has_not_is_left_out(version: str, is_kept: bool) -> None:
    said = {"type": "object", "$schema": version}
    grammar = "start: " + of_schema({**said, "properties": {"a": said}})
    assert grammar.count("$schema") == (2 if is_kept else 0)
    assert follows(grammar, '{"a": {}}')


@pytest.mark.parametrize("pattern", ["^a$|b", "a^b", "a$b", "(^a|b)"])
def test_ends_of_a_text_at_other_places_are_not_followed(pattern: str) -> None:
    assert patterns_of({"pattern": pattern}) is None
    assert patterns_of({"pattern": f"[{pattern[0]}]" + r"\^\$[$^]"}) is not None


@pytest.mark.parametrize("piece", ["[", "[^", "[a", "(", "(a", "\\", "[\\", "^", "a|", "(["])
def test_a_long_pattern_is_read_once(piece: str) -> None:
    """Its ends decide: nobody looks from each bracket for the one that closes it."""
    patterns_of({"pattern": piece * (1 << 18)})
