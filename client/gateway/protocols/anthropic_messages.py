"""Anthropic's ``/v1/messages``, translated to a chat of OpenAI's interface and back. Pure."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from client.answer.generation import AskedTopP
from client.gateway.errors import ApiError, bad_request, not_text
from client.gateway.protocols.answer_bodies import rfc3339
from client.gateway.protocols.blocks import (
    Kind,
    PartWriter,
    Took,
    begins_answer,
    message_from,
    text_in,
    tool_from,
)
from client.gateway.protocols.messages import (
    MESSAGES_MAX,
    CalledFunction,
    FunctionName,
    Message,
    Part,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
    unseen,
)
from client.gateway.protocols.requests import (
    DEFAULT_EFFORT,
    NO_EFFORT,
    REQUEST,
    ChatRequest,
    Effort,
    NamedSchema,
    ResponseFormat,
    Stop,
    StreamOptions,
    TokenCount,
)
from dht.messages.session import Temperature
from dht.process.json_file import Json

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PARAMS = {"response_format": "output_config.format", "stop": "stop_sequences"}
"""Fields of a chat by the names that they have here."""
FAILED = "Error: "
"""Before the result of a call that failed."""
HOSTED = (
    "advisor_",
    "code_execution_",
    "mcp_toolset",
    "tool_search_tool_",
    "web_fetch_",
    "web_search_",
)
"""What the types of tools begin with that run at Anthropic's. Nothing runs here, so they are left
out: programs offer them to every model, beside functions of their own."""
SEALED = frozenset({"citations", "encrypted_content", "encrypted_index", "type"})
"""What says nothing to a model in the results of hosted tools."""
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
    input: Any = None
    """Programs keep what a model wrote, also where it was no object."""


class HostedUseBlock(ToolUseBlock, tag="server_tool_use"):
    """A call of a tool that ran at Anthropic's."""


class McpUseBlock(ToolUseBlock, tag="mcp_tool_use"):
    """A call of a server of tools, made from Anthropic's."""


class SummaryBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    """What stands for the beginning of a long conversation."""

    content: str | None = None

    @property
    def text(self) -> str:
        return self.content or ""


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """Taken in the results of calls alone."""

    @property
    def text(self) -> str:
        return unseen("an image")


class DocumentSource(msgspec.Struct, kw_only=True):
    """What a document is: its text (``data`` or ``content``), or a file that no model of texts can
    read."""

    type: str
    data: str = ""
    content: str | list[TextBlock | ImageBlock] | None = None

    @property
    def text(self) -> str | None:
        """Its text; None: it has none."""
        match self.type:
            case "text":
                return self.data
            case "content":
                return text_in(self.content)
        return None


class DocumentBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    """Without a text it is taken in the results of calls alone."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        told = self.source.text
        parts = (self.title, self.context, unseen("a document") if told is None else told)
        return "\n".join(filter(None, parts))


class SearchResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="search_result"):
    """What a search found, as text."""

    source: str
    title: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, text_in(self.content)))


class ReferenceBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_reference"):
    """A tool that a search for tools found."""

    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ReferenceBlock
_RESULT_TYPES = frozenset(kind.__struct_config__.tag for kind in get_args(ResultBlock))


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: Any = None
    """A text or a list of blocks; tools bring other things, too, and that ends no conversation."""
    is_error: bool | None = None

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else [self.content]
        return "\n".join(map(_brought, parts))


def _brought(part: Any) -> str:
    if part is None:
        return ""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _RESULT_TYPES:  # what fails takes as long as twenty
        with suppress(msgspec.ValidationError):
            text: str = msgspec.convert(part, ResultBlock).text
            return text
    if kind is not None:
        return Part(type=str(kind)).told
    return msgspec.json.encode(part).decode()


class HostedResultBlock(msgspec.Struct, kw_only=True, tag_field="type"):
    """What such a call brought. It stands in the message of the assistant, behind its call."""

    tool_use_id: str
    content: Any = None

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else [self.content]
        return "\n".join(map(_told, parts))


class AdvisorResult(HostedResultBlock, tag="advisor_tool_result"): ...


class BashResult(HostedResultBlock, tag="bash_code_execution_tool_result"): ...


class CodeResult(HostedResultBlock, tag="code_execution_tool_result"): ...


class EditorResult(HostedResultBlock, tag="text_editor_code_execution_tool_result"): ...


class FetchResult(HostedResultBlock, tag="web_fetch_tool_result"): ...


class McpResult(HostedResultBlock, tag="mcp_tool_result"): ...


class SearchResult(HostedResultBlock, tag="web_search_tool_result"): ...


class ToolSearchResult(HostedResultBlock, tag="tool_search_tool_result"): ...


def _told(part: Any) -> str:
    """A part of what a hosted tool brought: its text, or all of it as JSON."""
    if isinstance(part, dict):
        told = {name: value for name, value in part.items() if name not in SEALED}
        text = told.get("text")
        return text if isinstance(text, str) else msgspec.json.encode(told).decode()
    return part if isinstance(part, str) else ""


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | SummaryBlock
    | HostedUseBlock
    | McpUseBlock
    | AdvisorResult
    | BashResult
    | CodeResult
    | EditorResult
    | FetchResult
    | McpResult
    | SearchResult
    | ToolSearchResult
)


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MESSAGES_MAX)]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A function; or a tool that Anthropic runs, which is left out."""

    name: ToolName | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether it runs where the answers are made."""
        return self.type is not None and self.type.startswith(HOSTED)


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """``/v1/messages/count_tokens``."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MESSAGES_MAX)] | None = None
    """More than OpenAI's interface takes: programs with many servers of tools bring hundreds."""
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """``/v1/messages``."""

    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=REQUEST.stops_max)] | None = None
    temperature: Temperature | None = None
    top_p: AskedTopP | None = None
    top_k: int | None = None
    output_format: OutputFormat | None = None
    """``output_config.format`` by its older name."""


def chat_of_messages(request: MessagesRequest) -> ChatRequest:
    """The same request to ``/v1/chat/completions``; raises ApiError (400)."""
    form = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        form = request.output_config.format
    return msgspec.structs.replace(
        prompt_of(request),
        response_format=None
        if form is None
        else ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=form.schema)),
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
    for at, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{at}]")
    choice, config = request.tool_choice, request.output_config
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=[
            _tool(tool, f"tools[{at}]")
            for at, tool in enumerate(request.tools or ())
            if not tool.is_hosted
        ]
        or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        continue_final_message=begins_answer(messages),
        reasoning_effort=_effort(request.thinking, config),
    )


def _effort(thinking: Thinking | None, config: OutputConfig | None) -> str | None:
    if thinking is not None and thinking.type == "disabled":
        return NO_EFFORT
    if config is not None and config.effort is not None:
        return config.effort
    return None if thinking is None else DEFAULT_EFFORT


def _tool(tool: AnthropicTool, at: str) -> Tool:
    """A function as chats have it; raises ApiError (400)."""
    if tool.name is None or tool.input_schema is None:
        missing = "name" if tool.name is None else "input_schema"
        reason = f"{at} has no {missing}" + (f"; a {tool.type} is not known here" * bool(tool.type))
        raise bad_request(reason, f"{at}.{missing}")
    return tool_from(tool.name, tool.description, tool.input_schema, tool.strict)


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


def _messages(message: AnthropicMessage, where: str) -> list[Message]:
    """Results of calls as messages of their own, then what else is said; raises ApiError (400)
    with ``where`` it stands for what cannot be read."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    found, said, calls, thoughts = [], [], [], []
    for at, block in enumerate(message.content):
        match block:
            case DocumentBlock() if block.source.text is None:
                raise not_text(f"{where}.content[{at}].source.type", block.source.type)
            case ImageBlock():
                raise not_text(f"{where}.content[{at}].type", "image")
            case DocumentBlock() | SearchResultBlock() | SummaryBlock():
                said.append(block.text)
            case TextBlock(text=text):
                said.append(text)
            case RedactedThinkingBlock():
                pass
            case ThinkingBlock(thinking=thought):
                thoughts.append(thought)
            case ToolUseBlock(id=call_id, name=name, input=given):
                called = CalledFunction(name=name, arguments=given)
                calls.append(ToolCall(id=call_id, function=called))
            case ToolResultBlock(tool_use_id=call_id, text=result, is_error=failed):
                told = f"{FAILED if failed else ''}{result}"
                found.append(Message(role="tool", tool_call_id=call_id, content=told))
            case HostedResultBlock(tool_use_id=call_id, text=result):
                found.append(message_from(message.role, said, calls, thoughts))
                found.append(Message(role="tool", tool_call_id=call_id, content=result))
                said, calls, thoughts = [], [], []
    if said or calls or thoughts or not (found or message.content):
        found.append(message_from(message.role, said, calls, thoughts))
    return found


def models_of(entries: Sequence[Json]) -> Json:
    """The list of models in Anthropic's form, all on one page; ``entries`` are OpenAI's."""
    found = [model_of(entry) for entry in entries]
    ids = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
    return {"data": found, "has_more": False, **ids}


def model_of(entry: Json) -> Json:
    """One model in Anthropic's form, with what it has in OpenAI's and not there."""
    own = {name: value for name, value in entry.items() if name not in {"created", "object"}}
    return {
        "type": "model",
        **own,
        "display_name": entry["id"],
        "created_at": rfc3339(entry["created"]),
        "lifecycle": "active",
        "max_input_tokens": entry["max_model_len"],
    }


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
    too_long = error.too_long
    message = error.message if too_long is None else too_long.for_anthropic
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageWriter(PartWriter):
    """Writes an answer in Anthropic's form."""

    def __init__(self, request: MessagesRequest) -> None:
        super().__init__()
        self._prompt_tokens = 0
        self._ended: Json = {"stop_reason": "end_turn", "stop_sequence": None}
        self._begun = False

    def whole(self, answer: Json) -> Json:
        return message_of(answer)

    def failed(self, error: ApiError) -> list[Json]:
        return [error_of(error)]

    @property
    def beat(self) -> bytes:
        return self.framed({"type": "ping"})

    def begin(self, prompt_tokens: int, created: int, took: Callable[[], Took]) -> None:
        self._prompt_tokens = prompt_tokens

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
