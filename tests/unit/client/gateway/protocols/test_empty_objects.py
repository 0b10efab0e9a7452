"""``[]`` in the place of an object, as PHP writes an empty one."""

import json
from typing import Any

import msgspec
import pytest

from client.gateway.errors import ApiError
from client.gateway.protocols.anthropic_messages import MessagesRequest
from client.gateway.protocols.ollama import OllamaChat
from client.gateway.protocols.openai_responses import ResponsesRequest
from client.gateway.protocols.requests import ChatRequest, parse_request

HI = [{"role": "user", "content": "Hi"}]
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
PHP = {"type": "object", "properties": []}
CASES = [
    (ChatRequest, {"messages": HI}, {"logit_bias": []}, {"logit_bias": {}}),
    (ChatRequest, {"messages": HI}, {"metadata": [], "stop": []}, {"stop": []}),
    (ChatRequest, {"messages": HI}, {"stream_options": []}, {"stream_options": {}}),
    (ChatRequest, {"messages": HI}, {"chat_template_kwargs": []}, {"chat_template_kwargs": {}}),
    (ChatRequest, {"messages": HI}, {"guided_json": PHP}, {"guided_json": EMPTY}),
    (
        ChatRequest,
        {"messages": HI},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    ),
    (
        ChatRequest,
        {"messages": HI},
        {"tools": [{"function": {"name": "a", "parameters": []}}]},
        {"tools": [{"function": {"name": "a", "parameters": {}}}]},
    ),
    (
        MessagesRequest,
        {"messages": HI, "max_tokens": 9},
        {"tools": [{"name": "a", "input_schema": PHP}]},
        {"tools": [{"name": "a", "input_schema": EMPTY}]},
    ),
    (
        ResponsesRequest,
        {"input": "Hi"},
        {"tools": [{"type": "namespace", "tools": [{"type": "function", "parameters": PHP}]}]},
        {"tools": [{"type": "namespace", "tools": [{"type": "function", "parameters": EMPTY}]}]},
    ),
    (OllamaChat, {"model": "m", "messages": HI}, {"options": []}, {"options": {}}),
    (OllamaChat, {"model": "m", "messages": HI}, {"format": PHP}, {"format": EMPTY}),
]


@pytest.mark.parametrize(("kind", "least", "sent", "meant"), CASES)
def test_an_empty_list_stands_for_an_empty_object(
    kind: type[msgspec.Struct], least: dict[str, Any], sent: Any, meant: Any
) -> None:
    bodies = (json.dumps({**least, **more}).encode() for more in (sent, meant))
    found, expected = (parse_request(body, kind) for body in bodies)
    assert found == expected


def test_within_a_schema_only_what_has_to_be_a_schema_is_read_so() -> None:
    schema = {
        "type": "object",
        "properties": {
            "any": [],
            "inner": {"properties": [], "default": [], "enum": [[]]},
            "some": {"anyOf": [{"items": {"patternProperties": []}}], "prefixItems": []},
        },
        "required": [],
        "$defs": [],
    }
    body = json.dumps({"messages": HI, "guided_json": schema}).encode()
    assert parse_request(body, ChatRequest).guided_json == {
        "type": "object",
        "properties": {
            "any": {},
            "inner": {"properties": {}, "default": [], "enum": [[]]},
            "some": {"anyOf": [{"items": {"patternProperties": {}}}], "prefixItems": []},
        },
        "required": [],
        "$defs": {},
    }


@pytest.mark.parametrize("value", [[1], "", 5])
def test_what_is_no_empty_list_is_still_named(value: object) -> None:
    body = json.dumps({"messages": HI, "logit_bias": value, "tools": []}).encode()
    with pytest.raises(ApiError, match="logit_bias: Expected"):
        parse_request(body, ChatRequest)
