"""Anthropic's ``/v1/messages``, translated to a chat of OpenAI's interface and back. Pure."""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from client.gateway.errors import ApiError, bad_request
from client.gateway.protocols.blocks import Kind, PartWriter, message_from, text_in, tool_from
from client.gateway.protocols.requests import (
    MESSAGES_MAX,
    STOPS_MAX,
    TOOLS_MAX,
    CalledFunction,
    ChatRequest,
    FunctionName,
    Message,
    Stop,
    StreamOptions,
    TokenCount,
    ToolCall,
    ToolChoice,
)
from dht.json_file import Json

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {
    Kind.THOUGHT: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}
"""The type of a block's growth, and the field that has it."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str


class RedactedThinkingBlock(
    msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"
):
    """Thoughts that another service sealed. Nobody here can read them, so they are left out."""

    data: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Meta(max_length=MESSAGES_MAX)]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """``/v1/messages/count_tokens``."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: AnthropicToolChoice | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """``/v1/messages``."""

    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: int | None = None


def chat_of_messages(request: MessagesRequest) -> ChatRequest:
    """The same request to ``/v1/chat/completions``; raises ApiError (400)."""
    return msgspec.structs.replace(
        prompt_of(request),
        max_tokens=request.max_tokens,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )


def prompt_of(request: CountRequest) -> ChatRequest:
    """A chat with the same prompt; raises ApiError (400)."""
    messages = []
    if request.system:
        messages.append(Message(role="system", content=text_in(request.system)))
    for message in request.messages:
        messages += _messages(message)
    choice = request.tool_choice
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=[
            tool_from(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in request.tools or ()
        ]
        or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
    )


def _choice(choice: AnthropicToolChoice) -> Literal["auto", "none", "required"] | ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise bad_request("tool_choice names no tool", "tool_choice")
            return ToolChoice(function=FunctionName(name=choice.name))
        case "auto" | "none":
            return choice.type


def _messages(message: AnthropicMessage) -> list[Message]:
    """Results of calls as messages of their own, then what else is said."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    found, said, calls, thoughts = [], [], [], []
    for block in message.content:
        match block:
            case TextBlock(text=text):
                said.append(text)
            case RedactedThinkingBlock():
                pass
            case ThinkingBlock(thinking=thought):
                thoughts.append(thought)
            case ToolUseBlock(id=call_id, name=name, input=given):
                called = CalledFunction(name=name, arguments=json.dumps(given, ensure_ascii=False))
                calls.append(ToolCall(id=call_id, function=called))
            case ToolResultBlock(tool_use_id=call_id, content=content):
                found.append(Message(role="tool", tool_call_id=call_id, content=text_in(content)))
    if said or calls or thoughts:
        found.append(message_from(message.role, said, calls, thoughts))
    return found


def message_of(answer: Json) -> Json:
    """A whole chat answer in Anthropic's form."""
    choice, usage = answer["choices"][0], answer["usage"]
    message, content = choice["message"], []
    if thoughts := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    content += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _object(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls", ())
    ]
    return {
        **_envelope(answer),
        "content": content,
        **_ended(choice),
        "usage": _usage(usage),
    }


def _ended(choice: Json) -> Json:
    """Why an answer ended: a stop sequence is told where no call ended it."""
    if choice["finish_reason"] == "stop" and choice.get("stop_reason") is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice["stop_reason"]}
    reason = STOP_REASONS.get(choice["finish_reason"], "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _object(text: str) -> Json:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _envelope(answer: Json) -> Json:
    return {
        "id": "msg_" + answer["id"].partition("-")[2],
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def error_of(error: ApiError) -> Json:
    """An error in Anthropic's form."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ERROR_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageWriter(PartWriter):
    """Writes an answer in Anthropic's form."""

    def __init__(self, request: MessagesRequest, prompt_tokens: int) -> None:
        super().__init__()
        self._prompt_tokens = prompt_tokens
        self._ended: Json = {"stop_reason": "end_turn", "stop_sequence": None}
        self._begun = False

    def whole(self, answer: Json) -> Json:
        return message_of(answer)

    def failed(self, error: ApiError) -> Json:
        return error_of(error)

    def push(self, chunk: Json) -> list[Json]:
        found: list[Json] = []
        if not self._begun:
            self._begun = True
            started = _envelope(chunk)
            started["usage"]["input_tokens"] = self._prompt_tokens
            found.append({"type": "message_start", "message": started})
        for choice in chunk["choices"]:
            found += self.take(choice["delta"])
            if choice["finish_reason"] is not None:
                self._ended = _ended(choice)
        if chunk.get("usage") is not None:
            found += self.close()
            usage = _usage(chunk["usage"])
            found.append({"type": "message_delta", "delta": self._ended, "usage": usage})
            found.append({"type": "message_stop"})
        return found

    def _begin(self, kind: Kind, call: Json) -> list[Json]:
        block: Json
        match kind:
            case Kind.THOUGHT:
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case Kind.TEXT:
                block = {"type": "text", "text": ""}
            case Kind.CALL:
                named = {"id": call["id"], "name": call["function"]["name"]}
                block = {"type": "tool_use", **named, "input": {}}
        return [{"type": "content_block_start", "index": self.index, "content_block": block}]

    def _grow(self, kind: Kind, text: str) -> list[Json]:
        name, field = DELTAS[kind]
        delta = {"type": name, field: text}
        return [{"type": "content_block_delta", "index": self.index, "delta": delta}]

    def _end(self, kind: Kind) -> list[Json]:
        return [{"type": "content_block_stop", "index": self.index}]
