"""Tools, formats, thoughts and Anthropic's messages over HTTP; the answers are spelled out."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from client.answer.generation import AnswerRequest
from client.gateway.keys import plain_keys
from client.gateway.structured.tools import ToolFormat, calls_grammar
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
        log = self.owner.log
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


def test_openai_s_client_gets_calls_and_sends_their_results() -> None:
    async def scenario() -> None:
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
            last = await client.chat.completions.create(
                model="brook", messages=messages, tools=[TOOL]
            )
            assert last.choices[0].message.content == "It snows."
            assert last.choices[0].finish_reason == "stop"

    asyncio.run(scenario())


def test_openai_s_client_reads_streamed_calls() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_thoughts_are_apart_from_content() -> None:
    async def scenario() -> None:
        async with paper_gateway(template=TEMPLATE) as gateway, openai_client(gateway) as client:
            for text, options in (
                ("<think>why</think>\n\nso", {}),
                ("why</think>\n\nso", {"chat_template_kwargs": {"think": True}}),
            ):
                scripted(gateway, text)
                asked: Any = {"model": "brook", "messages": HI, "extra_body": options}
                message = (await client.chat.completions.create(**asked)).choices[0].message
                assert (message.content, message.reasoning_content) == ("so", "why")  # type: ignore[attr-defined]
                thoughts, content = "", ""
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    delta = chunk.choices[0].delta
                    thoughts += getattr(delta, "reasoning_content", None) or ""
                    content += delta.content or ""
                assert (content.strip(), thoughts) == ("so", "why")

    asyncio.run(scenario())


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


@pytest.mark.parametrize("form", ToolFormat)
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_each_way_to_call_has_a_sound_grammar(
    form: ToolFormat, required: bool, parallel: bool
) -> None:
    functions = [{"name": "weather", "parameters": SCHEMA}, {"name": "clock"}]
    grammar = calls_grammar(form, functions, required=required, parallel=parallel, marks={})
    tokenizer = LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=2048, eos_token=EOS)
    call = {
        ToolFormat.TAGS: '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
        ToolFormat.BARE: '{"name": "clock", "parameters": {}}',
    }[form]
    for said, fits in ((call, True), ("It is late.", not required)):
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.tokenize_str(said)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


ANTHROPIC_TOOL: Any = {"name": "weather", "description": "It says.", "input_schema": SCHEMA}


def test_anthropic_s_client_gets_text_calls_and_thoughts() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_anthropic_s_client_hears_what_is_wrong_and_gives_its_key() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())
