"""Clients by template families: each cell runs what agents do, with a model that is scripted.

    python -m bench.agents --out bench/results/agents.json

Rows are the unmodified SDKs' streaming helpers, columns small templates of the shapes that families
have (tests/templates.py). The model's answers are spelled out, calls in the family's own form; the
swarm is made up, all else is the gateway's.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import anthropic
import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from bench.report import parser_of, provenance, write
from tests.templates import TEMPLATES
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.test_tool_answers import scripted

CONTEXT_TOKENS = 16_384
LIMIT_S = 60.0
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FORMAT = {"name": "place", "schema": {**SCHEMA, "additionalProperties": False}}


def _tagged(at: str) -> str:
    return (
        "<tool_call>\n" + json.dumps({"name": "look", "arguments": {"at": at}}) + "\n</tool_call>"
    )


CALLS: Mapping[str, Callable[[str], str]] = {
    "Hermes": _tagged,
    "Qwen3": _tagged,
    "Qwen3.5": lambda at: (
        f"<tool_call>\n<function=look>\n<parameter=at>\n{at}\n</parameter>\n</function>\n</tool_call>"
    ),
    "Llama 3": lambda at: json.dumps({"name": "look", "parameters": {"at": at}}),
    "Mistral": lambda at: "[TOOL_CALLS]" + json.dumps([{"name": "look", "arguments": {"at": at}}]),
    "gpt-oss": lambda at: (
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        + json.dumps({"at": at})
    ),
    "GLM": lambda at: (
        f"<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{at}</arg_value>\n</tool_call>"
    ),
    "DeepSeek": lambda at: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
        + json.dumps({"at": at})
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}
"""How models of a family write a call; the others have no way to."""
FINAL = {"gpt-oss": "<|channel|>final<|message|>"}
THINKS = {"gpt-oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
          "<|message|>so"}  # fmt: skip
MARKED = {"Qwen3", "DeepSeek", "GLM"}
"""Families whose templates have marks of thoughts."""


@dataclass(slots=True)
class Said:
    """What a client read of an answer."""

    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Id, name and arguments of each."""


@dataclass(slots=True)
class Turn:
    """A message, whatever a client's form of it is."""

    role: str
    text: str = ""
    calls: Sequence[tuple[str, str, str]] = ()
    answers: str = ""
    """Id of the call that this is the result of."""


Ask = Callable[..., Awaitable[Said]]


async def chats(url: str, turns: Sequence[Turn], *, tools: bool, schema: bool) -> Said:
    """OpenAI's chats by its SDK."""
    messages: list[Any] = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.calls:
            message["tool_calls"] = [
                {"id": each, "type": "function", "function": {"name": name, "arguments": given}}
                for each, name, given in turn.calls
            ]
        if turn.answers:
            message["tool_call_id"] = turn.answers
        messages.append(message)
    more: dict[str, Any] = {}
    if tools:
        more["tools"] = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    if schema:
        more["response_format"] = {"type": "json_schema", "json_schema": FORMAT}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        found, calls = Said(), dict[int, list[str]]()
        async for chunk in await client.chat.completions.create(
            model="brook", messages=messages, stream=True, **more
        ):
            for choice in chunk.choices:
                found.text += choice.delta.content or ""
                found.thoughts += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or ():
                    parts = calls.setdefault(call.index, ["", "", ""])
                    parts[0] += call.id or ""
                    if call.function is not None:
                        parts[1] += call.function.name or ""
                        parts[2] += call.function.arguments or ""
        found.calls = [(one, two, three) for one, two, three in calls.values()]
        return found


async def responses(url: str, turns: Sequence[Turn], *, tools: bool, schema: bool) -> Said:
    """OpenAI's Responses by its SDK."""
    items: list[Any] = []
    for turn in turns:
        if turn.answers:
            said = {"type": "function_call_output", "call_id": turn.answers, "output": turn.text}
            items.append(said)
            continue
        if turn.text:
            items.append({"role": turn.role, "content": turn.text})
        for each, name, given in turn.calls:
            call = {"type": "function_call", "call_id": each, "name": name, "arguments": given}
            items.append(call)
    more: dict[str, Any] = {}
    if tools:
        more["tools"] = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    if schema:
        more["text"] = {"format": {"type": "json_schema", **FORMAT}}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        async with client.responses.stream(model="brook", input=items, **more) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        found = Said(text=final.output_text)
        for item in final.output:
            if item.type == "function_call":
                found.calls.append((item.call_id, item.name, item.arguments))
            if item.type == "reasoning":
                found.thoughts += "".join(part.text for part in item.content or ())
        return found


async def messages(url: str, turns: Sequence[Turn], *, tools: bool, schema: bool) -> Said:
    """Anthropic's messages by its SDK."""
    said: list[Any] = []
    for turn in turns:
        blocks: list[dict[str, Any]] = []
        if turn.answers:
            result = {"type": "tool_result", "tool_use_id": turn.answers, "content": turn.text}
            blocks.append(result)
        elif turn.text:
            blocks.append({"type": "text", "text": turn.text})
        for each, name, given in turn.calls:
            use = {"type": "tool_use", "id": each, "name": name, "input": json.loads(given)}
            blocks.append(use)
        role = {"tool": "user", "developer": "system"}.get(turn.role, turn.role)
        said.append({"role": role, "content": blocks})
    more: dict[str, Any] = {}
    if tools:
        more["tools"] = [{"name": "look", "input_schema": SCHEMA}]
    if schema:
        form = {"type": "json_schema", "schema": FORMAT["schema"]}
        more["extra_body"] = {"output_config": {"format": form}}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        async with client.messages.stream(
            model="brook", max_tokens=1024, messages=said, **more
        ) as stream:
            final = await stream.get_final_message()
        found = Said()
        for block in final.content:
            match block.type:
                case "text":
                    found.text += block.text
                case "thinking":
                    found.thoughts += block.thinking
                case "tool_use":
                    found.calls.append((block.id, block.name, json.dumps(block.input)))
        return found


async def langchain(url: str, turns: Sequence[Turn], *, tools: bool, schema: bool) -> Said:
    """langchain-openai."""
    said: list[Any] = []
    for turn in turns:
        match turn.role:
            case "tool":
                said.append(ToolMessage(turn.text, tool_call_id=turn.answers))
            case "assistant":
                calls = [
                    {"id": each, "name": name, "args": json.loads(given)}
                    for each, name, given in turn.calls
                ]
                said.append(AIMessage(turn.text, tool_calls=calls))
            case "user":
                said.append(HumanMessage(turn.text))
            case role:
                said.append(SystemMessage(turn.text, additional_kwargs={"__openai_role__": role}))
    model: Any = ChatOpenAI(model="brook", base_url=url + "/v1", api_key="none", max_retries=0)
    if tools:
        model = model.bind_tools(
            [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
        )
    if schema:
        model = model.bind(response_format={"type": "json_schema", "json_schema": FORMAT})
    answer = await model.ainvoke(said)
    calls = [(each["id"], each["name"], json.dumps(each["args"])) for each in answer.tool_calls]
    return Said(text=str(answer.content), calls=calls)


CLIENTS: Mapping[str, Ask] = {
    f"openai {version('openai')}, chats": chats,
    f"openai {version('openai')}, Responses": responses,
    f"anthropic {version('anthropic')}": messages,
    f"langchain-openai {version('langchain-openai')}": langchain,
}
USER = Turn("user", "q-one")


async def cell(ask: Ask, family: str) -> dict[str, str]:
    """What became of each thing that was tried: ``ok``, ``refused`` by name, or what went wrong."""
    found = {}
    async with paper_gateway(template=TEMPLATES[family], context_tokens=CONTEXT_TOKENS) as gateway:
        for name, scenario in SCENARIOS.items():
            try:
                async with asyncio.timeout(LIMIT_S):
                    found[name] = await scenario(ask, gateway, family)
            except (openai.BadRequestError, anthropic.BadRequestError) as error:
                named = "no way to call" in str(error) and family not in CALLS
                found[name] = "refused" if named else str(error)[:300]
            except Exception as error:  # noqa: BLE001  it is this cell's result
                found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def _prompt(gateway: PaperGateway, request: Any) -> str:
    tokenizer = gateway.swarm.text.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(request.prompt_ids)


def _judged(ok: bool, said: object) -> str:
    return "ok" if ok else f"got {said}"[:300]


async def _chat(ask: Ask, gateway: PaperGateway, family: str) -> str:
    scripted(gateway, FINAL.get(family, "") + "so")
    said = await ask(gateway.url, [USER], tools=False, schema=False)
    return _judged(said.text.strip() == "so", said)


async def _instructions(ask: Ask, gateway: PaperGateway, family: str) -> str:
    asked = scripted(gateway, FINAL.get(family, "") + "so")
    turns = [
        Turn("system", "s-one"), Turn("developer", "d-one"), USER, Turn("assistant", "a-one"),
        Turn("system", "s-two"), Turn("user", "q-two"),
    ]  # fmt: skip
    await ask(gateway.url, turns, tools=False, schema=False)
    prompt = _prompt(gateway, asked[0])
    return _judged(all(turn.text in prompt for turn in turns), prompt)


async def _loop(ask: Ask, gateway: PaperGateway, family: str) -> str:
    call = CALLS.get(family, _tagged)
    asked = scripted(gateway, *(call(f"x-{at}") for at in range(3)), FINAL.get(family, "") + "done")
    turns = [USER]
    for at in range(3):
        said = await ask(gateway.url, turns, tools=True, schema=False)
        if [json.loads(given) for _, _, given in said.calls] != [{"at": f"x-{at}"}]:
            return f"got {said}"[:300]
        turns += [Turn("assistant", said.text.strip(), said.calls)]
        turns += [Turn("tool", f"r-{at}", answers=said.calls[0][0])]
    said = await ask(gateway.url, turns, tools=True, schema=False)
    prompt = _prompt(gateway, asked[-1])
    told = all(f"{name}-{at}" in prompt for name in "xr" for at in range(3))
    return _judged(told and said.text.strip() == "done", said)


async def _parallel(ask: Ask, gateway: PaperGateway, family: str) -> str:
    call = CALLS.get(family, _tagged)
    asked = scripted(gateway, FINAL.get(family, "") + "done")
    calls = [(f"call_{at}", "look", json.dumps({"at": f"x-{at}"})) for at in range(2)]
    turns = [USER, Turn("assistant", "i-look", calls)]
    turns += [Turn("tool", f"r-{at}", answers=f"call_{at}") for at in range(2)]
    await ask(gateway.url, turns, tools=True, schema=False)
    prompt = _prompt(gateway, asked[0])
    told = all(word in prompt for word in ("i-look", "x-0", "x-1", "r-0", "r-1"))
    if family in {"gpt-oss"}:  # its messages end with their call
        return _judged(told, prompt)
    between = "; " if family == "Llama 3" else ""
    scripted(gateway, between.join(call(f"x-{at}") for at in range(2)))
    said = await ask(gateway.url, [USER], tools=True, schema=False)
    return _judged(told and len(said.calls) == 2, said)


async def _structured(ask: Ask, gateway: PaperGateway, family: str) -> str:
    asked = scripted(gateway, '{"at": "x"}')
    said = await ask(gateway.url, [USER], tools=False, schema=True)
    followed = b'"at"' in asked[0].sampling.grammar
    return _judged(followed and json.loads(said.text) == {"at": "x"}, said)


async def _thinking(ask: Ask, gateway: PaperGateway, family: str) -> str:
    if family not in THINKS and family not in MARKED:
        return "none"
    scripted(gateway, THINKS.get(family, "<think>hm</think>\n\nso"))
    said = await ask(gateway.url, [USER], tools=False, schema=False)
    thoughts = said.thoughts or "hm" if ask is langchain else said.thoughts  # it reads none
    return _judged((said.text.strip(), thoughts) == ("so", "hm"), said)


async def _long(ask: Ask, gateway: PaperGateway, family: str) -> str:
    asked = scripted(gateway, FINAL.get(family, "") + "so")
    await ask(gateway.url, [Turn("user", "a long way " * 3000)], tools=False, schema=False)
    return _judged(len(asked[0].prompt_ids) > CONTEXT_TOKENS // 2, len(asked[0].prompt_ids))


async def _overflow(ask: Ask, gateway: PaperGateway, family: str) -> str:
    try:
        turns = [Turn("user", "a long way " * 30_000)]
        said = await ask(gateway.url, turns, tools=False, schema=False)
    except (openai.BadRequestError, anthropic.BadRequestError) as error:
        known = ("maximum context length is", "prompt is too long: ")
        return _judged(any(words in str(error) for words in known), error)
    return f"got {said}"[:300]


SCENARIOS: Mapping[str, Callable[[Ask, PaperGateway, str], Awaitable[str]]] = {
    "chat": _chat,
    "system and developer messages": _instructions,
    "a loop of three calls": _loop,
    "parallel calls": _parallel,
    "structured output": _structured,
    "thinking": _thinking,
    "a long prompt": _long,
    "overflow": _overflow,
}


async def run() -> dict[str, Any]:
    """All cells."""
    cells = {
        client: {family: await cell(ask, family) for family in TEMPLATES}
        for client, ask in CLIENTS.items()
    }
    return {
        **provenance(0),
        "emulated": "the swarm is made up and its answers are scripted",
        "cells": cells,
    }


GOOD = frozenset({"ok", "none", "refused"})


def main() -> None:
    parser = parser_of("bench.agents", __doc__)
    arguments = parser.parse_args()
    result = asyncio.run(run())
    write(arguments.out, result)
    for client, row in result["cells"].items():
        for family, tried in row.items():
            for name, each in tried.items():
                if each not in GOOD:
                    print(f"{client}, {family}, {name}: {each}")


if __name__ == "__main__":
    main()
