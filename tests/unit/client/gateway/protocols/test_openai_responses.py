"""OpenAI's Responses with the unmodified client: text, calls, thoughts, streams, refusals."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from client.gateway.protocols.openai_responses import ResponsesRequest, chat_of_response
from client.gateway.protocols.requests import parse_request
from dht.errors import SwarmError
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.test_tool_answers import (
    CALL,
    SCHEMA,
    TEMPLATE,
    openai_client,
    scripted,
)

TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
OSLO = {"city": "Oslo"}


def prompt_of(gateway: PaperGateway, ids: tuple[int, ...]) -> str:
    tokenizer = gateway.swarm.text.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(ids)


async def test_a_coding_agents_turns_go_both_ways() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, openai_client(gateway) as client:
        scripted(gateway, f"<think>hm</think>I look. {CALL}")
        turns: Any = [
            {"role": "developer", "content": "No jokes."},
            {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]},
        ]
        asked: Any = {
            "model": "brook",
            "instructions": "Be short.",
            "tools": [TOOL],
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "parallel_tool_calls": True,
        }
        first = await client.responses.create(**asked, input=turns)
        Response.model_validate_json(first.model_dump_json())
        assert first.status == "completed"
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output_text == "I look."
        assert first.store is False
        call = first.output[2]
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", OSLO)
        assert first.usage is not None
        assert first.usage.output_tokens > 10
        assert first.usage.output_tokens_details.reasoning_tokens > 0
        assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
        turns += first.output
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "snow"})
        found = scripted(gateway, "It snows.")
        last = await client.responses.create(**asked, input=turns)
        assert last.output_text == "It snows."
        prompt = prompt_of(gateway, found[0].prompt_ids)
        assert "<system>Be short.\n\nNo jokes.<user>Oslo?<assistant>I look.{" in prompt
        assert '"weather", "arguments": {"city": "Oslo"}}<tool>snow' in prompt


async def test_openai_s_client_reads_the_stream() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, openai_client(gateway) as client:
        scripted(gateway, f"<think>hm</think>I look. {CALL}{CALL}")
        asked: Any = {"model": "brook", "input": "Oslo?", "tools": [TOOL]}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events: Any = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == [*range(len(events))]
        kinds = [event.type.removeprefix("response.") for event in events]
        begun = ["output_item.added", "content_part.added"]
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        distinct = [kind for at, kind in enumerate(kinds) if kinds[at - 1] != kind]
        assert distinct == [
            "created",
            "in_progress",
            *begun,
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            *begun,
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            *call,
            *call,
            "completed",
        ]
        assert final.output_text == whole.output_text
        assert final.usage == whole.usage
        calls: Any = [item for item in final.output if item.type == "function_call"]
        assert [json.loads(each.arguments) for each in calls] == [OSLO, OSLO]
        assert len({item.id for item in final.output}) == 4
        done = [each.item for each in events if each.type == "response.output_item.done"]
        assert [each.id for each in done] == [item.id for item in final.output]


async def test_a_schema_is_followed_and_parsed() -> None:
    async with paper_gateway(template=TEMPLATE) as gateway, openai_client(gateway) as client:
        found = scripted(gateway, json.dumps(OSLO))
        form: Any = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
        answer = await client.responses.create(
            model="brook", input="Where?", text={"format": form}, temperature=0.5, top_p=0.9
        )
        assert json.loads(answer.output_text) == OSLO
        sampling = found[0].sampling
        assert b'"city"' in sampling.grammar
        assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
        await client.responses.create(
            model="brook", input="x", tools=[TOOL], tool_choice={**TOOL, "parameters": None}
        )
        assert b"weather" in found[1].sampling.grammar


async def test_what_is_cut_or_fails_says_so() -> None:
    async with paper_gateway() as gateway, openai_client(gateway) as client:
        asked: Any = {"model": "brook", "input": "Hi", "max_output_tokens": 3}
        whole = await client.responses.create(**asked)
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage is not None
        assert whole.usage.output_tokens == 3
        events: Any = [each async for each in await client.responses.create(**asked, stream=True)]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output[0].status == "incomplete"
        assert events[-1].response.output_text == whole.output_text
        gateway.swarm.fails, gateway.swarm.fails_after = SwarmError("gone"), 2
        stream = await client.responses.create(**asked, stream=True)
        events = [event async for event in stream]
        assert events[0].type == "response.created"
        assert events[-1].type == "response.failed"
        assert "gone" in events[-1].response.error.message
        gateway.swarm.fails_after = 0
        with pytest.raises(openai.InternalServerError, match="gone"):
            await client.responses.create(**asked, stream=True)


async def test_an_answer_of_no_number_has_the_length_that_the_owner_gives() -> None:
    async with paper_gateway(chat_tokens=5) as gateway, openai_client(gateway) as client:
        answer = await client.responses.create(model="brook", input="Hi")
        assert answer.usage is not None
        assert (answer.status, answer.usage.output_tokens) == ("incomplete", 5)


MANY = [{"role": "user", "content": "x"}] * 4097


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "missing required field"),
        ({"input": []}, "input", ">= 1"),
        ({"input": MANY}, "input", "4096 at most"),
        ({"input": "x", "metadata": {"a": "x" * 300_000}}, "metadata", "262144 at most"),
        ({"input": "x", "instructions": "x" * 300_000}, "input", "context"),
        ({"input": [{"type": "item_reference", "id": "rs_a"}]}, "input[0].type", "item_reference"),
        (
            {"input": [*MANY[:1], {"type": "item_reference", "id": "msg_a"}]},
            "input[1].id",
            "send the item itself",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
            "input[0].content[0].type",
            "input_image",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content", "message has to have content"),
        ({"input": [{"content": "x"}]}, "input[0].role", "has to have role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
            "function_call has to have call_id",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1"}]},
            "input[0].output",
            "has to have output",
        ),
        ({"input": "x", "tools": [{"type": "shell"}]}, "tools[0].type", "shell"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0]", "`name`"),
        ({"input": "x", "tools": [TOOL]}, "tools", "no way to call tools"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type", "file_search"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "nothing is st"),
        ({"input": "x", "conversation": {"id": "c"}}, "conversation", "nothing is stored"),
        ({"input": "x", "background": True}, "background", "while its request is open"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "no prompts are stored"),
        ({"input": "x", "prompt": ["a", [1]]}, "prompt", "mixes"),
        ({"input": "x", "truncation": "auto"}, "truncation", "refused"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format", "no json_sc"),
        ({"input": "x " * 9000}, "input", "context"),
    ],
)  # fmt: skip
async def test_a_mistake_is_named(body: dict[str, Any], param: str, said: str) -> None:
    async with paper_gateway() as gateway, openai_client(gateway) as client:
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await client.post("/responses", body=body, cast_to=object)
        assert refused.value.param == param
        assert gateway.swarm.served == 0


def test_what_asks_for_nothing_is_no_mistake() -> None:
    body = {"input": "x", "background": False, "previous_response_id": None, "store": True}
    asked = chat_of_response(parse_request(json.dumps(body).encode(), ResponsesRequest))
    assert [message.as_dict() for message in asked.messages] == [{"role": "user", "content": "x"}]


def test_turns_are_parted_where_the_model_began_anew() -> None:
    said = {"role": "assistant", "content": "one"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    body = {
        "input": [
            {"role": "user", "content": "x"},
            said,
            {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
            thought,
            {**call, "call_id": "1"},
            {**call, "call_id": "2"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
            {
                "type": "function_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": "b"}],
            },
            {"role": "system", "content": "Be brief."},
        ]
    }
    asked = chat_of_response(parse_request(json.dumps(body).encode(), ResponsesRequest))
    assert [(each.role, each.content) for each in asked.messages] == [
        ("user", "x"),
        ("assistant", "one"),
        ("assistant", "two"),
        ("assistant", None),
        ("tool", "a"),
        ("tool", "b"),
        ("system", "Be brief."),
    ]
    turn = asked.messages[3]
    assert turn.reasoning_content == "hm"
    assert turn.tool_calls is not None
    assert [each.id for each in turn.tool_calls] == ["1", "2"]
