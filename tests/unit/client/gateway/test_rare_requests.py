"""Requests that few programs send: followed, or refused by name, once."""

import asyncio
import json
from typing import Any

import pytest

from client.gateway.keys import plain_keys
from client.gateway.protocols.refused import refused_by
from client.gateway.web import dialects
from client.gateway.web.app import GatewayConfig
from client.gateway.web.dialects import Dialect
from tests.unit.client.gateway.paper import paper_gateway
from tests.unit.client.gateway.test_real_clients import (
    CHAT,
    HI,
    MESSAGES,
    RESPONSES,
    prompt_for,
    refusal,
)
from tests.unit.client.gateway.test_tool_answers import scripted

COMPLETIONS, OLLAMA = "/v1/completions", "/api/chat"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    RESPONSES: {"input": "Hi"},
    OLLAMA: {"model": "brook", "messages": HI, "stream": False},
}
"""The least that each endpoint takes."""
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
def test_another_endpoints_fields_are_refused_by_name(path: str, more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with paper_gateway() as gateway:
            status, answer = await gateway.post(path, **LEAST[path], **more)
            assert status == 400
            assert next(iter(more)) in json.dumps(answer)

    asyncio.run(scenario())


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


@pytest.mark.parametrize(
    ("path", "more"), [(CHAT, {"seed": -1}), (OLLAMA, {"options": {"seed": -1, "stop": "x"}})]
)
def test_a_seed_of_minus_one_is_any(path: str, more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with paper_gateway() as gateway:
            asked = scripted(gateway, "yes")
            for _ in range(2):
                status, answer = await gateway.post(path, **LEAST[path], **more)
                assert status == 200, answer
            assert asked[0].sampling.seed != asked[1].sampling.seed

    asyncio.run(scenario())


# HTTP


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_it_says_is_the_clients_mistake(encoding: str) -> None:
    async def scenario() -> None:
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        async with (
            paper_gateway() as gateway,
            gateway.http.post(gateway.url + CHAT, data=b"none", headers=headers) as response,
        ):
            assert response.status == 400
            assert encoding in (await response.json())["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
def test_keys_come_in_the_headers_of_every_vendor(header: str) -> None:
    async def scenario() -> None:
        async with paper_gateway(config=GatewayConfig(keys=plain_keys(["k-one"]))) as gateway:
            for key, status in (("k-one", 200), ("k-two", 401)):
                headers = {header: key}
                async with gateway.http.get(
                    gateway.url + "/v1/models", headers=headers
                ) as response:
                    assert response.status == status

    asyncio.run(scenario())
