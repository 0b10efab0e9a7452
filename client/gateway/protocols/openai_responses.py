"""OpenAI's ``/v1/responses``, translated to a chat and back. Pure; nothing is stored."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from client.answer.generation import AskedTopP
from client.gateway.errors import ApiError, bad_request, not_text
from client.gateway.protocols.blocks import Kind, PartWriter, message_from, tool_from
from client.gateway.protocols.messages import (
    MESSAGES_MAX,
    TOOLS_MAX,
    UNSEEN,
    AllowedTools,
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
from client.gateway.protocols.messages import NamedTool as ChatTool
from client.gateway.protocols.requests import (
    REQUEST,
    TOKENS_MAX,
    ChatRequest,
    Effort,
    NamedSchema,
    ResponseFormat,
    StreamOptions,
)
from dht.messages.session import Temperature
from dht.process.json_file import Json

LOGPROBS = "message.output_text.logprobs"
PARAMS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Fields of a chat by the names that they have here."""
logger = logging.getLogger(__name__)
PREFIXES = {Kind.THOUGHT: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}

HOSTED = (
    "code_interpreter",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "mcp",
    "tool_search",
    "web_search",
)
"""What the types of tools begin with that run at OpenAI's; dates may follow. Nothing runs here, so
they are left out: programs offer them to every model, beside functions of their own."""
TEXT_NAMES = ("text", "refusal", "logs", "message")
"""What parts of results call their text."""
INPUT = "input"
"""The one argument of the function that a custom tool is for models."""


ContentParts = Annotated[list[Part], Meta(max_length=MESSAGES_MAX)]


class Item(msgspec.Struct, kw_only=True):
    """A message, a model's thoughts, its call of a function, or what that returned; a call that a
    server of tools answered (``mcp_call``) is both. What hosted tools did without a word for the
    model is left out."""

    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
        "custom_tool_call_output", "mcp_call", "code_interpreter_call", "apply_patch_call",
        "apply_patch_call_output", "computer_call", "computer_call_output", "local_shell_call",
        "local_shell_call_output", "shell_call", "shell_call_output", "file_search_call",
        "image_generation_call", "item_reference", "mcp_approval_request", "mcp_approval_response",
        "mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call",
    ] = "message"  # fmt: skip
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | ContentParts | None = None
    summary: ContentParts | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    action: Any = None
    operation: Any = None
    code: str | None = None
    error: Any = None
    results: list[Any] | None = None
    input: str | None = None
    output: Any = None
    outputs: Any = None


class ToolFormat(msgspec.Struct, kw_only=True):
    """What the input of a custom tool looks like: any text, or by a grammar."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function, a tool that takes a text (``custom``), a ``namespace`` of these, or a hosted
    tool, which is left out."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: Annotated[list["ResponseTool"], Meta(max_length=TOOLS_MAX)] | None = None


class NamedTool(msgspec.Struct, kw_only=True):
    """A tool that may be called; a hosted one is left out here, too."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ChosenTool(msgspec.Struct, kw_only=True):
    """The one tool to call, or those that may be called (``allowed_tools``)."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Meta(max_length=TOOLS_MAX)] = []


class Reasoning(msgspec.Struct, kw_only=True):
    effort: Effort | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """``/v1/responses``. ``store`` is taken, and nothing is stored."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MESSAGES_MAX)]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    temperature: Temperature | None = None
    top_p: AskedTopP | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    metadata: Any = None
    reasoning: Reasoning | None = None
    # vLLM's and our own
    cache_salt: Annotated[str, Meta(max_length=REQUEST.salt_chars_max)] | None = None
    prefix_cache: Literal["own", "shared", "off"] | None = None


def chat_of_response(request: ResponsesRequest) -> ChatRequest:
    """The same request to ``/v1/chat/completions``; raises ApiError (400)."""
    if request.truncation == "auto":
        raise bad_request("truncation: what is too long is refused here", "truncation")
    if LOGPROBS in (request.include or ()):
        raise bad_request(f"include: {LOGPROBS} is not supported here", "include")
    form = request.text.format if request.text is not None else None
    return ChatRequest(
        model=request.model,
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=None if form is None else _format(form),
        tools=[tool.chat for tool in _offered(request).values()] or None,
        tool_choice=_choice(request.tool_choice),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        parallel_tool_calls=request.parallel_tool_calls,
        cache_salt=request.cache_salt,
        prefix_cache=request.prefix_cache,
    )


def _choice(
    choice: Literal["auto", "none", "required"] | ChosenTool | None,
) -> Literal["auto", "none", "required"] | ToolChoice | None:
    if not isinstance(choice, ChosenTool):
        return choice
    if choice.type == "allowed_tools":
        named = (tool for tool in choice.tools if not tool.type.startswith(HOSTED))
        names = (
            FunctionName(name=_joined(tool.namespace, tool.name or tool.type)) for tool in named
        )
        tools = [ChatTool(type="function", function=name) for name in names]
        return ToolChoice(
            type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools)
        )
    if choice.name is None:
        raise bad_request("tool_choice names no function", "tool_choice")
    return ToolChoice(function=FunctionName(name=_joined(choice.namespace, choice.name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offered:
    """A tool as a chat has it, and what it is called here."""

    chat: Tool
    name: str
    namespace: str | None
    is_custom: bool


def _joined(namespace: str | None, name: str) -> str:
    """What a chat calls a function of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def _offered(request: ResponsesRequest) -> dict[str, _Offered]:
    """The tools of a request by what a chat calls them; raises ApiError (400)."""
    found: dict[str, _Offered] = {}
    for at, tool in enumerate(request.tools or ()):
        if tool.type != "namespace":
            _offer(found, tool, f"tools[{at}]")
            continue
        for inner_at, inner in enumerate(tool.tools or ()):
            _offer(found, inner, f"tools[{at}].tools[{inner_at}]", namespace=tool.name)
    if len(found) > TOOLS_MAX:
        raise bad_request(f"tools has {len(found)} of them; {TOOLS_MAX} at most", "tools")
    return found


def _offer(
    found: dict[str, _Offered], tool: ResponseTool, at: str, *, namespace: str | None = None
) -> None:
    if tool.type.startswith(HOSTED):
        return
    if tool.type not in {"function", "custom"}:
        reason = f"{at}.type: {tool.type!r} is not supported here; functions and custom tools are"
        raise bad_request(reason, f"{at}.type")
    if tool.name is None:
        raise bad_request(f"{at}: Object missing required field `name`", at)
    name, parameters, described = _joined(namespace, tool.name), tool.parameters, tool.description
    if is_custom := tool.type == "custom":
        text = {"type": "string", "description": "The whole input, as plain text."}
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        if tool.format is not None and tool.format.definition:
            grammar = f"The input follows this {tool.format.syntax or ''} grammar:"
            described = "\n\n".join(filter(None, (described, grammar, tool.format.definition)))
    chat = tool_from(name, described, parameters, tool.strict)
    found[name] = _Offered(chat=chat, name=tool.name, namespace=namespace, is_custom=is_custom)


def _format(form: TextFormat) -> ResponseFormat:
    named = NamedSchema(name=form.name, schema=form.schema, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=named)


def _messages(request: ResponsesRequest) -> list[Message]:
    """The chat's messages, instructions in front."""
    system = [request.instructions] if request.instructions else []
    if isinstance(request.input, str):
        request_items = [Item(role="user", content=request.input)]
    else:
        request_items = request.input
    chat = _Chat(system)
    for at, item in enumerate(request_items):
        chat.add(item, f"input[{at}]")
    if not (found := chat.messages()):
        kind = request_items[0].type
        raise bad_request(f"input[0].type: {kind} says nothing here, alone", "input[0].type")
    return found


class _Chat:
    """Joins items to messages: thoughts, text and calls of one turn are one message."""

    def __init__(self, system: Sequence[str]) -> None:
        self._found = [Message(role="system", content=text) for text in system]
        self._thoughts: list[str] = []
        self._said: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, item: Item, at: str) -> None:
        """Take the next item; raises ApiError (400) with ``at``, where it stands."""
        match item.type:
            case "reasoning":
                if self._said or self._calls:
                    self._turn()
                if thought := _text(item.content or item.summary or ""):
                    self._thoughts.append(thought)
            case "function_call" | "custom_tool_call":
                is_custom = item.type == "custom_tool_call"
                name = _joined(item.namespace, _given(item, "name", at))
                given = {INPUT: item.input or ""} if is_custom else item.arguments
                self._call(_given(item, "call_id", at), name, given)
            case "apply_patch_call" | "computer_call" | "local_shell_call" | "shell_call":
                asked = item.action if item.operation is None else item.operation
                self._call(_given(item, "call_id", at), item.type.removesuffix("_call"), asked)
            case "function_call_output" | "custom_tool_call_output":
                self._result(_given(item, "call_id", at), _given(item, "output", at))
            case kind if kind.endswith("call_output"):
                self._result(item.call_id or _given(item, "id", at), item.output)
            case "code_interpreter_call":
                self._call(_given(item, "id", at), "code_interpreter", {"code": item.code or ""})
                self._result(item.id, item.outputs)
            case "mcp_call":
                self._call(_given(item, "id", at), _given(item, "name", at), item.arguments)
                self._result(item.id, item.output if item.error is None else item.error)
            case "message":
                self._message(item, at)
            case _ if (missed := _missed(item)) is not None:
                name, reason = missed
                raise bad_request(f"{at}.{name}: {reason}", f"{at}.{name}")
            case _:
                logger.debug("%s is a %s: left out, nothing runs here", at, item.type)

    def _call(self, call_id: str, name: str, arguments: Any) -> None:
        called = CalledFunction(name=name, arguments=arguments)
        self._calls.append(ToolCall(id=call_id, function=called))

    def _result(self, call_id: str | None, output: Any) -> None:
        self._turn()
        self._found.append(Message(role="tool", tool_call_id=call_id, content=_told(output)))

    def _message(self, item: Item, at: str) -> None:
        content, role = _given(item, "content", at), _given(item, "role", at)
        for part_at, part in enumerate(content if isinstance(content, list) else ()):
            if not part.is_text:
                raise not_text(f"{at}.content[{part_at}].type", part.type)
        if role == "assistant":
            if self._said or self._calls:
                self._turn()
            self._said.append(_text(content))
            return
        self._turn()
        self._found.append(Message(role=role, content=_text(content)))

    def _turn(self) -> None:
        """End the model's turn."""
        if self._thoughts or self._said or self._calls:
            turn = message_from("assistant", self._said, self._calls, self._thoughts)
            self._found.append(turn)
        self._thoughts, self._said, self._calls = [], [], []

    def messages(self) -> list[Message]:
        self._turn()
        return self._found


def _missed(item: Item) -> tuple[str, str] | None:
    """What the model would miss of an item that is left out, and what to do; None: nothing."""
    if item.type == "file_search_call" and item.results:
        return "results", "put them into a message"
    is_thought = (item.id or "").startswith(f"{PREFIXES[Kind.THOUGHT]}_")
    if item.type == "item_reference" and not is_thought:
        return "id", "nothing is stored; send the item itself, as programs do with store: false"
    return None


def _text(content: str | Sequence[Part]) -> str:
    """The text of a content; a text stands in the place of what is none."""
    return content if isinstance(content, str) else "\n".join(part.told for part in content)


def _told(output: Any) -> str:
    """What a call brought, as text: texts as they are, what no text is by a text in its place, and
    anything else as JSON."""
    if isinstance(output, str | None):
        return output or ""
    if isinstance(output, list):
        return "\n".join(map(_told, output))
    kind = output.get("type") if isinstance(output, dict) else None
    if kind in UNSEEN:
        return unseen(UNSEEN[kind])
    text = next((output[name] for name in TEXT_NAMES if name in output), None) if kind else None
    return text if isinstance(text, str) else msgspec.json.encode(output).decode()


def _given(item: Item, name: str, at: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise bad_request(f"{at}: a {item.type} has to have {name}", f"{at}.{name}")
    return value


class ResponseWriter(PartWriter):
    """Writes an answer in this form. ``request`` is what asked for it."""

    def __init__(self, request: ResponsesRequest) -> None:
        super().__init__()
        # It is as large as a body, or twenty times that, and nothing here tells of it.
        self._request = msgspec.structs.replace(request, input="")
        self._head: Json = {}
        """Fields that a response has from its beginning; empty before that."""
        self._base = ""
        self._events = 0
        self._output: list[Json] = []
        """Items that are complete."""
        self._item: Json = {}
        """The item that is open, without its text."""
        self._texts: list[str] = []
        self._finish: str | None = None
        self._offered = _offered(request)

    def whole(self, answer: Json) -> Json:
        choice = answer["choices"][0]
        only = {"delta": choice["message"], "finish_reason": choice["finish_reason"]}
        ended: Json = self.push({**answer, "choices": [only]})[-1]["response"]
        return ended

    def push(self, chunk: Json) -> list[Json]:
        found: list[Json] = []
        if not self._head:
            self._base = chunk["id"].partition("-")[2]
            self._head = self._described(chunk)
            started = self._response("in_progress")
            found.append(self._event("response.created", response=started))
            found.append(self._event("response.in_progress", response=started))
        for choice in chunk["choices"]:
            found += self.take(choice["delta"])
            self._finish = choice["finish_reason"] or self._finish
        if chunk.get("usage") is not None:
            found += self.close()
            status = self._status
            ended = self._response(status, usage=_usage(chunk["usage"]))
            if status == "incomplete":
                ended["incomplete_details"] = {"reason": "max_output_tokens"}
            found.append(self._event(f"response.{status}", response=ended))
        return found

    def failed(self, error: ApiError) -> list[Json]:
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        failure = {"code": code, "message": error.message}
        found = []
        if not self._head:  # clients take no end of what did not begin
            model = self._request.model or ""
            found += self.push({"id": "-failed", "created": 0, "model": model, "choices": []})
        ended = self._response("failed", error=failure)
        return [*found, self._event("response.failed", response=ended)]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _described(self, chunk: Json) -> Json:
        asked = self._request
        form = asked.text.format if asked.text is not None else None
        return {
            "id": f"resp_{self._base}",
            "object": "response",
            "created_at": chunk["created"],
            "model": chunk["model"],
            "background": False,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"} if form is None else form},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
        }

    def _response(
        self, status: str, *, usage: Json | None = None, error: Json | None = None
    ) -> Json:
        said = {"status": status, "error": error, "output": [*self._output], "usage": usage}
        return {**self._head, **said}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Json:
        place = {"item_id": self._item["id"], "output_index": self.index}
        return self._event(f"response.{kind}", **place, **fields)

    def _begin(self, kind: Kind, call: Json) -> list[Json]:
        self._texts = []
        self._item = {"id": f"{PREFIXES[kind]}_{self._base}_{self.index}"}
        match kind:
            case Kind.THOUGHT:
                self._item |= {"type": "reasoning", "summary": []}
            case Kind.TEXT:
                self._item |= {"type": "message", "role": "assistant"}
            case Kind.CALL:
                self._item |= self._named(call)
        empty: Json = {self._field: ""} if kind is Kind.CALL else {"content": []}
        added = {**self._item, **empty, "status": "in_progress"}
        begun = [self._event("response.output_item.added", output_index=self.index, item=added)]
        if kind is not Kind.CALL:
            part = _part(kind, "")
            begun.append(self._of_item("content_part.added", content_index=0, part=part))
        return begun

    def _named(self, call: Json) -> Json:
        """What a call says of itself, under the name that the request has for its function."""
        name = call["function"]["name"]
        offered = self._offered.get(name)
        named: Json = {"type": "function_call", "call_id": call["id"], "name": name}
        if offered is not None:
            named["name"] = offered.name
            if offered.is_custom:
                named["type"] = "custom_tool_call"
            if offered.namespace is not None:
                named["namespace"] = offered.namespace
        return named

    @property
    def _field(self) -> str:
        """Where the open item, a call, has what it is called with."""
        return INPUT if self._item["type"] == "custom_tool_call" else "arguments"

    def _grow(self, kind: Kind, text: str) -> list[Json]:
        self._texts.append(text)
        match kind:
            case Kind.THOUGHT:
                return [self._of_item("reasoning_text.delta", content_index=0, delta=text)]
            case Kind.TEXT:
                fields = {"content_index": 0, "delta": text, "logprobs": []}
                return [self._of_item("output_text.delta", **fields)]
            case Kind.CALL if self._field == INPUT:
                return []  # a text is known once its JSON is whole
            case Kind.CALL:
                return [self._of_item("function_call_arguments.delta", delta=text)]

    def _end(self, kind: Kind) -> list[Json]:
        text, part = "".join(self._texts), _part(kind, "".join(self._texts))
        done = {**self._item, "status": self._status}
        ended = []
        match kind:
            case Kind.THOUGHT:
                ended.append(self._of_item("reasoning_text.done", content_index=0, text=text))
            case Kind.TEXT:
                fields = {"content_index": 0, "text": text, "logprobs": []}
                ended.append(self._of_item("output_text.done", **fields))
            case Kind.CALL if self._field == INPUT:
                text = _input_in(text)
                ended.append(self._of_item("custom_tool_call_input.delta", delta=text))
                ended.append(self._of_item("custom_tool_call_input.done", input=text))
            case Kind.CALL:
                named = {"name": self._item["name"], "arguments": text}
                ended.append(self._of_item("function_call_arguments.done", **named))
        if kind is Kind.CALL:
            done[self._field] = text
        else:
            ended.append(self._of_item("content_part.done", content_index=0, part=part))
            done["content"] = [part]
        self._output.append(done)
        event = self._event("response.output_item.done", output_index=self.index, item=done)
        return [*ended, event]


def _input_in(arguments: str) -> str:
    """The text for a custom tool within the arguments of the function that stood for it."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    given = found.get(INPUT) if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments


def _part(kind: Kind, text: str) -> Json:
    if kind is Kind.THOUGHT:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
