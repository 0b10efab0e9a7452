"""Tools, formats, thoughts and Anthropic's messages over HTTP; the answers are spelled out."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from client.answer.answer import AnswerRequest
from client.gateway.errors import ApiError
from client.gateway.keys import plain_keys
from client.gateway.structured.answer_reader import AnswerReader
from client.gateway.structured.call_formats import (
    CALL_FORMATS,
    FUNCTION_TAGS,
    KEYS_AND_VALUES,
    TAGGED_JSON,
    CallFormat,
)
from client.gateway.structured.calls import Call
from client.gateway.structured.calls_grammar import calls_grammar
from client.gateway.structured.channels import MESSAGES
from client.gateway.web.app import GatewayConfig
from client.session.driver import SessionDriver
from tests.unit.client.gateway.paper import (
    EOS,
    MODEL,
    PaperGateway,
    PaperSession,
    PaperSwarm,
    paper_gateway,
)
from tests.unit.client.gateway.structured.call_samples import written_call

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% if think %}<think>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HI: Any = [{"role": "user", "content": "Hi"}]


class Scripted(PaperSession):
    """Answers with a text, token by token."""

    text = ""
    requests: list[AnswerRequest]

    async def tokens(self) -> AsyncGenerator[tuple[int, ...], None]:
        log = self.controller.log
        tokenizer = self._swarm.text.tokenizer
        assert tokenizer is not None
        for token_id in (*tokenizer.encode(self.text, special_tokens=False), EOS):
            if log.finish_reason is None:
                yield log.accept(
                    attempt=0, position=log.next_position, token_ids=(token_id,), scores=()
                )


def scripted(gateway: PaperGateway, *texts: str) -> list[AnswerRequest]:
    """Answer one request after the other with these, from then on with the last; returns the
    requests."""
    asked: list[AnswerRequest] = []
    swarm: PaperSwarm = gateway.swarm

    def session(request: AnswerRequest) -> SessionDriver:
        asked.append(request)
        found = Scripted(swarm, request)
        found.text = texts[min(len(asked), len(texts)) - 1]
        return found

    swarm.session = session  # type: ignore[method-assign]
    return asked


def openai_client(gateway: PaperGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0)


def anthropic_client(gateway: PaperGateway, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0)


async def test_openai_s_client_gets_calls_and_sends_their_results() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, openai_client(gateway) as client:
        asked = scripted(gateway, f"I look. {CALL}")
        answer = await client.chat.completions.create(model="brook", messages=HI, tools=[TOOL])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        assert not asked[0].sampling.grammar
        messages: Any = [
            *HI,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "snow"},
        ]
        scripted(gateway, "It snows.")
        last = await client.chat.completions.create(model="brook", messages=messages, tools=[TOOL])
        assert last.choices[0].message.content == "It snows."
        assert last.choices[0].finish_reason == "stop"


async def test_openai_s_client_reads_streamed_calls() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, openai_client(gateway) as client:
        scripted(gateway, CALL + CALL)
        async with client.chat.completions.stream(
            model="brook", messages=HI, tools=[TOOL]
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert [call.function.name for call in calls] == ["weather", "weather"]
        assert calls[0].function.arguments == '{"city": "Oslo"}'
        assert len({call.id for call in calls}) == 2
        assert final.choices[0].finish_reason == "tool_calls"


def test_calls_are_streamed_as_they_come_in_all_three_interfaces() -> None:
    text = f"I look. {CALL}{CALL}".replace("Oslo", "Oslo by the sea")

    async def pieces(gateway: PaperGateway, path: str, **body: Any) -> list[str]:
        found = []
        asked = {"model": "brook", "stream": True, **body}
        async with gateway.http.post(gateway.url + path, json=asked) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event.get("choices", ()):
                    calls = choice["delta"].get("tool_calls", ())
                    found += [call["function"]["arguments"] for call in calls]
                if event.get("type") == "content_block_delta":
                    found.append(event["delta"].get("partial_json", ""))
                if event.get("type") == "response.function_call_arguments.delta":
                    found.append(event["delta"])
        return [piece for piece in found if piece]

    async def scenario() -> None:
        async with (
            paper_gateway(template=TEMPLATE) as gateway,
            openai_client(gateway) as client,
            anthropic_client(gateway) as other,
        ):
            scripted(gateway, text)
            named = {"name": "weather"}
            anthropic_tool: Any = {**named, "input_schema": SCHEMA}
            response_tool: Any = {"type": "function", **named, "parameters": SCHEMA}
            chat: Any = {"messages": HI, "tools": [TOOL]}
            message: Any = {"messages": HI, "max_tokens": 500, "tools": [anthropic_tool]}
            response: Any = {"input": "Hi", "tools": [response_tool]}
            for found in (
                await pieces(gateway, "/v1/chat/completions", **chat),
                await pieces(gateway, "/v1/messages", **message),
                await pieces(gateway, "/v1/responses", **response),
            ):
                assert len(found) > 8
                assert "".join(found) == 2 * '{"city": "Oslo by the sea"}'
            async with other.messages.stream(model="brook", **message) as stream:
                last = await stream.get_final_message()
            assert [each.input for each in last.content[1:] if each.type == "tool_use"] == [
                {"city": "Oslo by the sea"}
            ] * 2
            async with client.responses.stream(model="brook", **response) as events:
                done: Any = await events.get_final_response()
            calls = [each for each in done.output if each.type == "function_call"]
            assert [json.loads(call.arguments) for call in calls] == [
                {"city": "Oslo by the sea"}
            ] * 2

    asyncio.run(scenario())


async def test_thoughts_are_apart_from_content() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, openai_client(gateway) as client:
        for text, options in (
            ("<think>why</think>\n\nso", {}),
            ("why</think>\n\nso", {"chat_template_kwargs": {"think": True}}),
            ("<think></think>\n\nso", {}),
            ("</think>\n\nso", {"chat_template_kwargs": {"think": True}}),
        ):
            scripted(gateway, text)
            thought = "why" if "why" in text else ""
            asked: Any = {"model": "brook", "messages": HI, "extra_body": options}
            message = (await client.chat.completions.create(**asked)).choices[0].message
            told = getattr(message, "reasoning_content", "")
            assert (message.content, told) == ("so", thought)
            thoughts, content = "", ""
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                delta = chunk.choices[0].delta
                thoughts += getattr(delta, "reasoning_content", None) or ""
                content += delta.content or ""
            assert (content, thoughts) == ("so", thought)


@pytest.mark.parametrize(
    ("body", "text", "other"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            '{"city": "Oslo"}',
            '{"town": "Oslo"}',
        ),
        ({"guided_json": json.dumps(SCHEMA)}, '{"city":"Oslo"}', '{"city": 1}'),
        ({"guided_regex": "a/b\\d+"}, "a/b17", "ab17"),
        ({"guided_choice": ["yes", 'n"o']}, 'n"o', "no"),
        ({"guided_grammar": 'start: "x" start | "y"'}, "xxy", "xx"),
        ({"tools": [TOOL], "tool_choice": "required"}, CALL, "I look."),
        ({"tools": [TOOL], "tool_choice": "required"}, CALL, CALL.replace("city", "town")),
        (
            {"tools": [TOOL], "tool_choice": {"function": {"name": "weather"}}},
            CALL,
            CALL + "\n" + CALL,
        ),
        (
            {"tools": [{"function": {**TOOL["function"], "strict": True}}]},
            f"I look.\n{CALL}",
            CALL.replace("city", "town"),
        ),
        (
            {"tools": [{"function": {**TOOL["function"], "strict": True}}]},
            "No call <too.",
            CALL[:-3],
        ),
    ],
)
def test_what_a_request_asks_for_is_a_grammar(body: Any, text: str, other: str) -> None:
    async def asked() -> str:
        async with paper_gateway(template=TEMPLATE) as gateway:
            found = scripted(gateway, text)
            path = "/v1/chat/completions"
            status, answer = await gateway.post(path, messages=HI, **body)
            assert status == 200, answer
            return found[0].sampling.grammar.decode()

    grammar = asyncio.run(asked())
    tokenizer = LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=2048, eos_token=EOS)
    for said, fits in ((text, True), (other, False)):
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.tokenize_str(said)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


def follows(grammar: str, text: str) -> bool:
    """Whether all of ``text`` follows the grammar, and may end there."""
    tokenizer = LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=2048, eos_token=EOS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_each_way_to_call_has_a_sound_grammar(
    form: CallFormat, required: bool, parallel: bool
) -> None:
    functions: list[dict[str, Any]] = [
        {"name": "weather", "parameters": SCHEMA},
        {"name": "clock"},
    ]
    channels = MESSAGES if form.in_channel else None
    grammar = calls_grammar(
        form, functions, required=required, parallel=parallel, marks={}, channels=channels
    )
    assert follows(grammar, written_call(form, "clock", {}))
    said = f"{MESSAGES.says_at_once if form.in_channel else ''}It is late."
    assert follows(grammar, said) is not required


TYPED: dict[str, Any] = {
    "type": "object",
    "$defs": {"Unit": {"type": "string", "enum": ["°C", "°F"]}},
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "days": {"type": "integer"},
        "unit": {"$ref": "#/$defs/Unit"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "at": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["city", "days"],
}
VALUES = [
    ({"city": "Oslo", "days": 3}, True),
    ({"city": "a < b\n</arg", "days": 3, "unit": "°F", "note": "x\ny", "at": [1.5, 2]}, True),
    ({"city": "Oslo", "days": 3, "note": None}, True),
    ({"city": "Oslo"}, False),
    ({"city": "O", "days": 3}, False),
    ({"city": "O" * 13, "days": 3}, False),
    ({"city": "Oslo", "days": "3 or 4"}, False),
    ({"city": "Oslo", "days": 3, "unit": "K"}, False),
    ({"city": "Oslo", "days": 3, "at": ["here"]}, False),
    ({"city": "Oslo", "days": 3, "sky": "blue"}, False),
]


@pytest.mark.parametrize("form", [KEYS_AND_VALUES, FUNCTION_TAGS])
@pytest.mark.parametrize(("values", "fits"), VALUES)
def test_values_in_tags_follow_their_schemas(
    form: CallFormat, values: dict[str, Any], fits: bool
) -> None:
    between = {
        KEYS_AND_VALUES: "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
        FUNCTION_TAGS: "<parameter={}>\n{}\n</parameter>\n",
    }[form]
    written = "".join(
        between.format(key, value if isinstance(value, str) else json.dumps(value))
        for key, value in values.items()
    )
    called = {
        KEYS_AND_VALUES: f"<tool_call>weather\n{written}</tool_call>",
        FUNCTION_TAGS: f"<tool_call>\n<function=weather>\n{written}</function>\n</tool_call>",
    }[form]
    functions = [{"name": "weather", "parameters": TYPED}]
    for required, said in ((True, called), (False, f"I look.\n{called}")):
        grammar = calls_grammar(form, functions, required=required, parallel=True, marks={})
        assert follows(grammar, said) is fits
    reader = AnswerReader(form, None, parameters={"weather": TYPED})
    assert reader.push(called) == [
        Call(name="weather", arguments=json.dumps(values, ensure_ascii=False))
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "^x$|y"}}},
        {"properties": {"a": {"anyOf": [{"type": "string", "format": "ipv6"}]}}},
        {"properties": {"a": {"type": "string", "minLength": "many"}}},
        {"anyOf": [{"properties": {"a": {"type": "string"}}}]},
    ],
)
def test_a_schema_that_text_without_quotes_cannot_follow_is_refused(schema: Any) -> None:
    functions = [{"name": "weather", "parameters": schema}]
    with pytest.raises(ApiError, match="leave it out"):
        calls_grammar(KEYS_AND_VALUES, functions, required=True, parallel=True, marks={})
    calls_grammar(TAGGED_JSON, functions, required=True, parallel=True, marks={})


KEYED_TEMPLATE = TEMPLATE.replace("<tool_call>", "<tool_call><arg_key><arg_value>")
KEYED_CALL = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>17</arg_value>\n</tool_call>"


async def test_calls_in_tags_come_whole_streamed_and_forced() -> None:
    async with (
        paper_gateway(template=KEYED_TEMPLATE) as gateway,
        openai_client(gateway) as client,
    ):
        found = scripted(gateway, f"<think>hm</think>I look.\n{KEYED_CALL}")
        asked: Any = {"model": "brook", "messages": HI, "tools": [TOOL]}
        message = (await client.chat.completions.create(**asked)).choices[0].message
        assert message.content == "I look."
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "17"}')
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        streamed = final.choices[0].message.tool_calls
        assert streamed is not None
        assert streamed[0].function.arguments == '{"city": "17"}'
        assert final.choices[0].finish_reason == "tool_calls"
        await client.chat.completions.create(**asked, tool_choice="required")
        grammar = found[-1].sampling.grammar.decode()
        assert follows(grammar, KEYED_CALL)
        assert not follows(grammar, CALL)


CHANNELS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{{ 'functions.' }}{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "<|end|>{% endfor %}<|start|>assistant{{ '<|channel|>'[:0] }}"
)
CHANNELS_ANSWER = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
)


async def test_messages_with_heads_are_thoughts_content_and_calls() -> None:
    async with (
        paper_gateway(template=CHANNELS_TEMPLATE) as gateway,
        openai_client(gateway) as client,
    ):
        scripted(gateway, CHANNELS_ANSWER)
        asked: Any = {"model": "brook", "messages": HI, "tools": [TOOL]}
        choice = (await client.chat.completions.create(**asked)).choices[0]
        message: Any = choice.message
        assert (message.content, message.reasoning_content) == ("I look.", "hm")
        assert message.tool_calls[0].function.name == "weather"
        assert message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
        assert choice.finish_reason == "tool_calls"
        thoughts, content, arguments = "", "", ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            delta: Any = chunk.choices[0].delta
            thoughts += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                arguments += call.function.arguments
        assert (thoughts, content, arguments) == ("hm", "I look.", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("template", "answer", "thoughts"),
    [
        (CHANNELS_TEMPLATE, CHANNELS_ANSWER, "hm"),
        (TEMPLATE, "<think>alfa bravo charlie</think>I look.", "alfa bravo charlie"),
        (TEMPLATE, "I look.", ""),
    ],
)
async def test_the_usage_has_the_tokens_of_thoughts(
    template: str, answer: str, thoughts: str
) -> None:
    async with paper_gateway(template=template) as gateway, openai_client(gateway) as client:
        scripted(gateway, answer)
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        wanted = len(tokenizer.encode(thoughts, special_tokens=False))
        asked: Any = {"model": "brook", "messages": HI}
        for hides in ({}, {"include_reasoning": False}):
            whole = await client.chat.completions.create(**asked, extra_body=hides)
            streamed = [
                chunk
                async for chunk in await client.chat.completions.create(
                    **asked,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body=hides,
                )
            ]
            for usage in (whole.usage, streamed[-1].usage):
                assert usage is not None
                assert usage.completion_tokens_details is not None
                assert usage.completion_tokens_details.reasoning_tokens == wanted
                assert usage.completion_tokens > wanted


async def test_a_format_is_that_of_the_final_message() -> None:
    async with paper_gateway(template=CHANNELS_TEMPLATE) as gateway:
        found = scripted(gateway, '{"city": "Oslo"}', CHANNELS_ANSWER)
        path, tokenizer = "/v1/chat/completions", gateway.swarm.text.tokenizer
        assert tokenizer is not None
        status, answer = await gateway.post(path, messages=HI, guided_json=SCHEMA)
        assert status == 200, answer
        body: Any = answer
        assert body["choices"][0]["message"]["content"] == '{"city": "Oslo"}'
        prompt = tokenizer.decode(found[0].prompt_ids)
        assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>")
        status, answer = await gateway.post(path, messages=HI, tools=[TOOL], tool_choice="required")
        body = answer
        assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert tokenizer.decode(found[1].prompt_ids).endswith("<|start|>assistant")
        grammar = found[1].sampling.grammar.decode()
        assert follows(grammar, CHANNELS_ANSWER[CHANNELS_ANSWER.rindex("<|channel|>") :])


async def test_with_functions_a_format_is_that_of_answers_that_call_none() -> None:
    formats: list[tuple[str, Any, str]] = [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "{}"),
        ("response_format", {"type": "json_object"}, "[]"),
        ("guided_regex", "..city.*", "city"),
        ("guided_grammar", 'start: "{" REST\nREST: /.*/', "[]"),
    ]
    final, text = MESSAGES.says_at_once, '{"city": "Oslo"}'
    for template, says, call in (
        (TEMPLATE, "", CALL),
        (CHANNELS_TEMPLATE, final, CHANNELS_ANSWER[CHANNELS_ANSWER.rindex("<|channel|>") :]),
    ):
        async with paper_gateway(template=template) as gateway:
            path = "/v1/chat/completions"
            for name, form, other in formats:
                found = scripted(gateway, call, f"{says}{text}")
                asked: Any = {"messages": HI, "tools": [TOOL], name: form}
                messages: list[Any] = []
                for _ in range(2):
                    status, answer = await gateway.post(path, **asked)
                    assert status == 200, answer
                    body: Any = answer
                    messages.append(body["choices"][0]["message"])
                assert messages[0]["tool_calls"][0]["function"]["name"] == "weather"
                assert messages[1]["content"] == text
                grammar = found[0].sampling.grammar.decode()
                assert follows(grammar, call)
                assert follows(grammar, f"{says}{text}")
                assert not follows(grammar, f"{says}{other}")
                await gateway.post(path, **asked, tool_choice="required")
                assert not follows(found[-1].sampling.grammar.decode(), f"{says}{text}")


async def test_arguments_are_an_object_or_a_text_as_a_template_takes_them() -> None:
    joined = (
        "{% if tools %}<tool_call>{% endif %}{% for message in messages %}"
        "{% for call in message.tool_calls %}{{ 'json ' + call['function']['arguments'] + ';' }}"
        "{{ call.function.arguments.city }} {{ call.function.arguments | tojson }}"
        " {{ call.function.arguments is string }}{% endfor %}{% endfor %}"
    )
    async with paper_gateway(template=joined) as gateway:
        found = scripted(gateway, "yes")
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        calls = [{"id": "1", "type": "function", "function": function}]
        status, answer = await gateway.post(
            "/v1/chat/completions", messages=[{"role": "assistant", "tool_calls": calls}]
        )
        assert status == 200, answer
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.decode(found[0].prompt_ids)
        assert prompt.strip() == 'json {"city": "Oslo"};Oslo {"city": "Oslo"} False'


ANTHROPIC_TOOL: Any = {"name": "weather", "description": "It says.", "input_schema": SCHEMA}


@pytest.mark.parametrize("behind", ["", "\n</think>\n"])
async def test_an_answer_that_ends_with_a_call_within_its_thoughts_calls(behind: str) -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, anthropic_client(gateway) as client:
        scripted(gateway, f"<think>hm {CALL}{behind}")
        asked: Any = {"model": "brook", "max_tokens": 300, "messages": HI}
        asked["tools"] = [ANTHROPIC_TOOL]
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for said in (whole, streamed):
            thought, call = said.content
            assert (thought.type, call.type) == ("thinking", "tool_use")
            assert (thought.thinking, call.input) == ("hm ", {"city": "Oslo"})  # type: ignore[union-attr]
            assert said.stop_reason == "tool_use"


async def test_anthropic_s_client_gets_text_calls_and_thoughts() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, anthropic_client(gateway) as client:
        scripted(gateway, f"<think>hm</think>I look. {CALL}")
        asked: Any = {
            "model": "brook",
            "max_tokens": 300,
            "system": "Be short.",
            "messages": HI,
            "tools": [ANTHROPIC_TOOL],
        }
        whole = await client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        assert whole.stop_reason == "tool_use"
        assert whole.usage.output_tokens > 10
        async with client.messages.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
        call = streamed.content[2]
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Oslo"})
        assert streamed.stop_reason == "tool_use"
        assert streamed.usage.input_tokens == whole.usage.input_tokens
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        found = scripted(gateway, "It snows.")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "snow"}
        again = await client.messages.create(
            **{
                **asked,
                "messages": [
                    *HI,
                    {"role": "assistant", "content": streamed.content},
                    {"role": "user", "content": [result]},
                ],
            }
        )
        assert again.content[0].type == "text"
        assert again.content[0].text == "It snows."
        assert again.stop_reason == "end_turn"
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.decode(found[0].prompt_ids)
        assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in prompt
        assert "<tool>snow" in prompt


async def test_anthropic_s_client_hears_which_stop_sequence_ended_an_answer() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, anthropic_client(gateway) as client:
        asked: Any = {"model": "brook", "max_tokens": 300, "messages": HI, "tools": []}
        for text, stops, ended in (
            ("one two three", ["three", "two"], ("stop_sequence", "two")),
            ("one two three", ["four"], ("end_turn", None)),
        ):
            scripted(gateway, text)
            whole = await client.messages.create(**asked, stop_sequences=stops)
            assert (whole.stop_reason, whole.stop_sequence) == ended
            async with client.messages.stream(**asked, stop_sequences=stops) as stream:
                streamed: Any = await stream.get_final_message()
            assert (streamed.stop_reason, streamed.stop_sequence) == ended
            assert streamed.content[0].text == whole.content[0].text
        scripted(gateway, f"{CALL} three")
        asked |= {"tools": [ANTHROPIC_TOOL], "stop_sequences": ["three"]}
        called = await client.messages.create(**asked)
        assert (called.stop_reason, called.stop_sequence) == ("tool_use", None)


async def test_anthropic_s_client_counts_the_tokens_of_a_prompt() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, anthropic_client(gateway) as client:
        scripted(gateway, "yes")
        sealed = {"type": "redacted_thinking", "data": "x" * 400}
        asked: Any = {
            "model": "brook",
            "system": "Be short.",
            "messages": [
                *HI,
                {"role": "assistant", "content": [sealed, {"type": "text", "text": "Ho"}]},
                {"role": "assistant", "content": [sealed]},
                *HI,
            ],
            "tools": [ANTHROPIC_TOOL],
        }
        counted = await client.messages.count_tokens(**asked)
        whole = await client.messages.create(**asked, max_tokens=9)
        assert counted.input_tokens == whole.usage.input_tokens > 20
        asked["messages"] = [*HI, {"role": "assistant", "content": "Ho"}, *HI]
        assert (await client.messages.count_tokens(**asked)) == counted
        with pytest.raises(anthropic.BadRequestError, match="context"):
            await client.messages.count_tokens(
                model="brook", messages=[{"role": "user", "content": "x " * 2_000_000}]
            )
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            await client.messages.count_tokens(**{**asked, "model": "other"})


async def test_anthropic_s_client_hears_what_is_wrong_and_gives_its_key() -> None:
    config = GatewayConfig(keys=plain_keys(("secret",)))
    async with paper_gateway(template=TEMPLATE, config=config) as gateway:
        scripted(gateway, "yes")
        asked: Any = {"model": "brook", "max_tokens": 5, "messages": HI}
        async with anthropic_client(gateway) as client:
            with pytest.raises(anthropic.AuthenticationError, match="valid key"):
                await client.messages.create(**asked)
        async with anthropic_client(gateway, "secret") as client:
            assert (await client.messages.create(**asked)).content[0].type == "text"
            with pytest.raises(anthropic.NotFoundError, match="not served here"):
                await client.messages.create(**{**asked, "model": "other"})
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                await client.messages.create(**asked, tool_choice={"type": "any"})
