"""What cannot be followed is said by the gateway at once, as the caller's mistake."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from client.answer.answer import AnswerRequest
from client.errors import RequestRefusedError
from client.gateway.web.app import GatewayConfig
from client.gateway.web.callers import proxies_of
from client.text.tokenizer import Tokenizer
from dht.grammars.trials import GrammarTrials, TrialsBusyError
from tests.unit.client.gateway import paper
from tests.unit.client.gateway.paper import APART, MODEL, PaperGateway, paper_gateway

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
)
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HI: Any = [{"role": "user", "content": "Hi"}]
HARD = {
    "unique items": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "names of properties": {"type": "object", "propertyNames": {"pattern": "^x"}},
    "not": {"not": {"type": "string"}},
    "look-ahead": {"type": "string", "pattern": "^(?!\\.)[a-z]+$"},
    "a reference to nothing": {"$ref": "#/$defs/none"},
    "nothing": {"type": "array", "minItems": 2, "maxItems": 1},
}


async def posted(gateway: PaperGateway, path: str, body: Any) -> tuple[int, Any, Any]:
    async with gateway.http.post(gateway.url + path, json=body) as response:
        return response.status, await response.json(), response.headers


@pytest.mark.parametrize("name", HARD)
async def test_a_schema_that_cannot_be_followed_is_a_400_before_a_session_is_opened(
    name: str,
) -> None:
    schema = {"type": "object", "properties": {"x": HARD[name]}, "required": ["x"]}
    function = {"name": "f", "parameters": schema}
    tool = {"name": "f", "input_schema": schema}
    response_tool = {"type": "function", "name": "f", "parameters": schema}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    asked: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": "Hi", "guided_json": schema}),
        (
            "/v1/completions",
            {"prompt": "Hi", "response_format": {"type": "json_schema", "json_schema": form}},
        ),
        (
            "/v1/chat/completions",
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": form}},
        ),
        (
            "/v1/chat/completions",
            {"messages": HI, "tools": [{"function": function}], "tool_choice": "required"},
        ),
        (
            "/v1/chat/completions",
            {"messages": HI, "tools": [{"function": {**function, "strict": True}}], "stream": True},
        ),
        ("/v1/responses", {"input": "Hi", "text": {"format": form}}),
        ("/v1/responses", {"input": "Hi", "tools": [response_tool], "tool_choice": "required"}),
        (
            "/v1/messages",
            {"messages": HI, "max_tokens": 5, "tools": [tool], "tool_choice": {"type": "any"}},
        ),
    ]
    async with paper_gateway(template=TEMPLATE, trials=GrammarTrials(APART)) as gateway:
        for path, body in asked:
            status, answer, headers = await posted(gateway, path, body)
            assert status == 400, (path, answer)
            assert answer["error"]["type"] == "invalid_request_error"
            assert len(answer["error"]["message"]) < 600
            assert "Retry-After" not in headers
        assert gateway.swarm.served == 0


@pytest.mark.parametrize("grammar", ["{]", "start: none", "start: A\nA: /(?=x)y/", "start: \ud800"])
async def test_a_grammar_that_is_none_is_the_callers_mistake(grammar: str) -> None:
    async with paper_gateway() as gateway:
        status, answer = await gateway.post("/v1/completions", prompt="Hi", guided_grammar=grammar)
        assert status == 400, answer
        assert gateway.swarm.served == 0


async def test_what_all_stages_call_unsound_is_a_400_that_says_why() -> None:
    async with paper_gateway() as gateway:
        gateway.swarm.fails = RequestRefusedError("the grammar: token 9999 is none")
        for path, said in (
            (CHAT, {"messages": HI}),
            (MESSAGES, {"messages": HI, "max_tokens": 9}),
        ):
            for streams in (False, True):
                async with gateway.http.post(
                    gateway.url + path, json={**said, "stream": streams}
                ) as response:
                    assert response.status == 400
                    assert "Retry-After" not in response.headers
                    error = (await response.json())["error"]
                    assert error["type"] == "invalid_request_error"
                    assert "token 9999" in error["message"]


def test_callers_without_keys_take_turns_at_trials_by_their_addresses() -> None:
    tried: list[str] = []

    async def fault(client: str, grammar: bytes, standing: int = 0) -> str:
        tried.append(client)
        return ""

    async def scenario() -> None:
        config = GatewayConfig(proxies=proxies_of(["127.0.0.1"]), silent_s=60.0)
        async with paper_gateway(config=config) as gateway:
            gateway.trials.fault = fault  # type: ignore[method-assign]
            for address in ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"):
                async with gateway.http.post(
                    gateway.url + CHAT,
                    json={"messages": HI, "guided_regex": "a+"},
                    headers={"X-Forwarded-For": address},
                ) as response:
                    assert response.status == 200

    asyncio.run(scenario())
    assert tried == ["192.0.2.1", "192.0.2.2", "2001:db8::/64", "2001:db8::/64"]


async def test_only_what_may_pass_by_itself_is_to_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def busy(*_: object) -> str:
        raise TrialsBusyError("too many grammars wait to be read here")

    monkeypatch.setattr(GrammarTrials, "fault", busy)
    async with paper_gateway() as gateway:
        body = {"prompt": "Hi", "guided_choice": ["a"]}
        status, _, headers = await posted(gateway, "/v1/completions", body)
        assert status == 429
        assert int(headers["Retry-After"]) > 0


TAGS_TEMPLATE = TEMPLATE.replace("tojson", "length").replace(
    "<tool_call>", "<tool_call><function=a><parameter=b>"
)


async def test_a_schema_that_refers_to_itself_in_ever_more_ways_is_one_like_others() -> None:
    defs: dict[str, Any] = {
        f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 8} for at in range(40)
    }
    schema = {"type": "object", "$defs": {**defs, "a40": {"type": "integer"}}}
    schema["properties"] = {"x": {"$ref": "#/$defs/a0"}}
    tool = {"name": "f", "input_schema": schema, "strict": True}
    async with paper_gateway(template=TAGS_TEMPLATE, trials=GrammarTrials(APART)) as gateway:
        asked: Any = {"messages": HI, "tools": [tool]}
        gateway.swarm.says = (
            "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
        )
        status, answer, _ = await posted(gateway, "/v1/messages/count_tokens", asked)
        assert status == 200, answer
        status, answer, _ = await posted(gateway, "/v1/messages", {**asked, "max_tokens": 200})
        assert status == 200, answer
        assert answer["content"][0]["input"] == {"x": 1}


@pytest.mark.parametrize("special", [False, True])
async def test_marks_that_are_added_tokens_are_named_by_their_ids(
    special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend.from_file(str(MODEL / "tokenizer.json"))
    marks = [f"<{each}>" for each in ("tool_call", "/tool_call", "think")]
    backend.add_tokens([AddedToken(each, special=special, normalized=False) for each in marks])
    monkeypatch.setattr(Tokenizer, "load", lambda _: Tokenizer(backend))
    monkeypatch.setattr(paper, "SPEC", replace(paper.SPEC, vocab=backend.get_vocab_size()))
    function = {"name": "f", "parameters": {"type": "object"}}
    async with paper_gateway(template=TEMPLATE) as gateway:
        gateway.swarm.says = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        asked: list[bytes] = []
        session = gateway.swarm.session

        def seen(request: AnswerRequest) -> Any:
            asked.append(request.sampling.grammar)
            return session(request)

        monkeypatch.setattr(gateway.swarm, "session", seen)
        for choice in ("required", "auto"):
            tools = [{"function": {**function, "strict": choice == "auto"}}]
            status, answer = await gateway.post(
                "/v1/chat/completions", messages=HI, tools=tools, tool_choice=choice
            )
            assert status == 200, answer
            said: Any = answer
            assert said["choices"][0]["finish_reason"] == "tool_calls"
        for grammar in asked:
            for mark in marks[:2]:
                assert f"<[{backend.token_to_id(mark)}]>".encode() in grammar


CIRCLE = (1 << 61) - 1
"""Whole numbers that differ by this have the same hash."""


@pytest.mark.parametrize(
    "bias",
    [
        {str(17 + at * CIRCLE): 1 for at in range(1000)},
        {str(at): 1 for at in range(2000)},
        {"-1": 1},
        {" 1": 1},
        {"1_0": 1},
        {"9" * 5000: 1},
    ],
)
async def test_the_keys_of_logit_bias_are_counted_and_measured_before_they_are_numbers(
    bias: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paper_gateway() as gateway:
        status, answer = await gateway.post("/v1/completions", prompt="Hi", logit_bias=bias)
        said: Any = answer
        assert (status, said["error"]["param"]) == (400, "logit_bias"), json.dumps(answer)[:500]
