"""The SDKs that run within this process, unmodified."""

import json
from collections.abc import Mapping, Sequence
from functools import wraps
from importlib.metadata import version
from typing import Any

import anthropic
import ollama
import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from bench.agents.said import (
    FORMAT,
    FUNCTION,
    MODEL,
    SCHEMA,
    TOOL,
    Ask,
    Refused,
    Said,
    Turn,
    chat_messages,
    chat_options,
)


def _refusals(ask: Ask) -> Ask:
    """``ask``, whose own errors for a mistake become Refused."""

    @wraps(ask)
    async def asked(*arguments: Any, **named: Any) -> Said:
        try:
            return await ask(*arguments, **named)
        except (openai.BadRequestError, anthropic.BadRequestError) as error:
            raise Refused(str(error)) from None
        except ollama.ResponseError as error:
            if error.status_code != 400:
                raise
            raise Refused(str(error)) from None

    return asked


async def chats(url: str, turns: Sequence[Turn], *, tools: bool, schema: bool) -> Said:
    """OpenAI's chats by its SDK."""
    messages: Any = chat_messages(turns)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        found, calls = Said(), dict[int, list[str]]()
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, **chat_options(tools=tools, schema=schema)
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
        more["tools"] = [{"type": "function", "name": TOOL, "parameters": SCHEMA}]
    if schema:
        more["text"] = {"format": {"type": "json_schema", **FORMAT}}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        async with client.responses.stream(model=MODEL, input=items, **more) as stream:
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
        more["tools"] = [{"name": TOOL, "input_schema": SCHEMA}]
    if schema:
        form = {"type": "json_schema", "schema": FORMAT["schema"]}
        more["extra_body"] = {"output_config": {"format": form}}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        async with client.messages.stream(
            model=MODEL, max_tokens=1024, messages=said, **more
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
    model: Any = ChatOpenAI(model=MODEL, base_url=url + "/v1", api_key="none", max_retries=0)
    if tools:
        model = model.bind_tools([FUNCTION])
    if schema:
        model = model.bind(response_format={"type": "json_schema", "json_schema": FORMAT})
    answer = await model.ainvoke(said)
    calls = [(each["id"], each["name"], json.dumps(each["args"])) for each in answer.tool_calls]
    return Said(text=str(answer.content), calls=calls)


async def ollamas(url: str, turns: Sequence[Turn], *, tools: bool, schema: bool) -> Said:
    """Ollama's chats by its client."""
    said: list[Any] = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.calls:
            message["tool_calls"] = [
                {"function": {"name": name, "arguments": json.loads(given)}}
                for _, name, given in turn.calls
            ]
        if turn.answers:
            message["tool_name"] = TOOL
        said.append(message)
    found = Said()
    async for part in await ollama.AsyncClient(host=url).chat(
        model=MODEL,
        messages=said,
        tools=[FUNCTION] if tools else None,
        format=FORMAT["schema"] if schema else None,  # type: ignore[arg-type]
        stream=True,
    ):
        found.text += part.message.content or ""
        found.thoughts += part.message.thinking or ""
        for call in part.message.tool_calls or ():
            given = json.dumps(dict(call.function.arguments))
            found.calls.append((f"c{len(found.calls)}", call.function.name, given))
    return found


_LANGCHAIN = _refusals(langchain)
CLIENTS: Mapping[str, Ask] = {
    f"openai {version('openai')}, chats": _refusals(chats),
    f"openai {version('openai')}, Responses": _refusals(responses),
    f"anthropic {version('anthropic')}": _refusals(messages),
    f"ollama {version('ollama')}": _refusals(ollamas),
    f"langchain-openai {version('langchain-openai')}": _LANGCHAIN,
}
SILENT = frozenset({_LANGCHAIN})
"""Clients that show no thoughts."""
