"""Ollama's interface, translated to chats and completions and back. Pure.

Many desktop programs know this one alone. Streams are lines of JSON, and on unless a request says
otherwise.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from client.gateway.errors import ApiError, bad_request
from client.gateway.protocols.answer_bodies import rfc3339
from client.gateway.protocols.blocks import AnswerWriter, Took, begins_answer, one_line
from client.gateway.protocols.messages import (
    MESSAGES_MAX,
    TOOLS_MAX,
    CalledFunction,
    Message,
    Tool,
    ToolCall,
)
from client.gateway.protocols.requests import (
    DEFAULT_EFFORT,
    NO_EFFORT,
    REQUEST,
    ChatRequest,
    CompletionRequest,
    NamedSchema,
    Passed,
    ResponseFormat,
    Sampled,
    Stop,
    StreamOptions,
)
from dht.process.json_file import Json

VERSION = "0.12.0"
"""The version of Ollama whose interface this is."""
TAG = ":latest"
"""What programs put behind names without a tag."""


class Options(Passed, kw_only=True):
    """How to sample, by OpenAI's names. What would change an answer and is not built is refused by
    name (:mod:`client.gateway.protocols.refused`), what only tells how to run a model is let
    through."""

    max_tokens: int | None = msgspec.field(name="num_predict", default=None)
    repetition_penalty: float | None = msgspec.field(name="repeat_penalty", default=None)
    # their bounds are told in our own words
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=REQUEST.stops_max)] | None = None


PARAMS = {
    **{each.name: f"options.{each.encode_name}" for each in msgspec.structs.fields(Options)},
    "response_format": "format",
}
"""Fields of a chat by the names that they have here."""


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Any = None


class OllamaCall(msgspec.Struct, kw_only=True):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=TOOLS_MAX)] | None = None
    tool_name: str | None = None
    name: str | None = None
    """``tool_name`` as older programs say it."""
    tool_call_id: str | None = None

    @property
    def function(self) -> str | None:
        """Whose result this is."""
        return self.tool_name or self.name


Think = bool | Literal["low", "medium", "high"] | None
Format = Literal["", "json"] | dict[str, Any] | None


class OllamaAsked(msgspec.Struct, kw_only=True):
    """What both endpoints have in common."""

    model: str
    stream: bool | None = None
    """None: yes."""
    keep_alive: Any = None
    format: Format = None
    options: Options | None = None
    think: Think = None


class OllamaChat(OllamaAsked, kw_only=True):
    """``/api/chat``."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MESSAGES_MAX)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None


class OllamaGenerate(OllamaAsked, kw_only=True):
    """``/api/generate``: a chat of one message, or with ``raw`` the text as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


def name_of(model: str) -> str:
    """A model's name, without the tag that programs put behind it."""
    return model.removesuffix(TAG)


def chat_of(request: OllamaChat) -> ChatRequest:
    """The same request to ``/v1/chat/completions``; raises ApiError (400)."""
    open_calls = _OpenCalls()
    messages = []
    for at, message in enumerate(request.messages or ()):
        _no_images(message.images, f"messages[{at}].images")
        for call_at, call in enumerate(message.tool_calls or ()):
            call.id = call.id or f"call{at}x{call_at}"
            open_calls.add(call)
        own = message.tool_call_id
        if message.role == "tool":
            answered = open_calls.answered_by(message)
            own = own or (answered and answered.id) or "call"
        messages.append(
            Message(
                role=message.role,
                content=message.content,
                name=message.function,
                reasoning_content=message.thinking,
                tool_call_id=own,
                tool_calls=[
                    ToolCall(
                        id=call.id,
                        function=CalledFunction(
                            name=call.function.name, arguments=call.function.arguments
                        ),
                    )
                    for call in message.tool_calls or ()
                ]
                or None,
            )
        )
    return ChatRequest(
        messages=messages,
        tools=request.tools,
        continue_final_message=begins_answer(messages),
        **_shared(request),
    )


class _OpenCalls:
    """Calls whose results have not come; Ollama's have no ids. Each is looked at a few times,
    however many results there are."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], deque[OllamaCall]] = {}
        """By id, by function, and all: the first to come first, some of them answered already."""
        self._answered: set[int] = set()

    def add(self, call: OllamaCall) -> None:
        """Wait for the result of ``call``."""
        for key in (("id", call.id or ""), ("name", call.function.name), _ANY):
            self._waiting.setdefault(key, deque()).append(call)

    def answered_by(self, result: OllamaMessage) -> OllamaCall | None:
        """The call that a result belongs to: by its id, or else the first of its function, or else
        the first."""
        own = ("name", result.function) if result.function else _ANY
        for key in (("id", result.tool_call_id) if result.tool_call_id else own, _ANY):
            calls = self._waiting.get(key)
            while calls:
                call = calls.popleft()
                if id(call) not in self._answered:
                    self._answered.add(id(call))
                    return call
        return None


_ANY = ("", "")


def loaded(request: OllamaChat | OllamaGenerate, created: int) -> Json | None:
    """The answer to a request that only has a model loaded, or unloaded; None: it asks for more.

    Programs send it before people have typed anything. ``created`` is Unix time in whole seconds.
    """
    asks = request.messages if isinstance(request, OllamaChat) else request.prompt or request.system
    if asks:
        return None
    writer = OllamaWriter(request)
    writer.begin(0, created, _at_once)
    reason = "unload" if request.keep_alive in UNLOADS else "load"
    return {**writer.line({}, done=True), "done_reason": reason}


UNLOADS = (0, "0", "0s", "0m")
"""Times to keep a model that have it unloaded at once."""


def chat_or_text_of(request: OllamaGenerate) -> ChatRequest | CompletionRequest:
    """The same request to ``/v1/chat/completions``, or where it is ``raw`` to ``/v1/completions``;
    raises ApiError (400)."""
    _no_images(request.images, "images")
    if request.raw:
        if request.system:
            raise bad_request("system is not for raw: put it into the prompt", "system")
        shared = _shared(request)
        shared.pop("reasoning_effort", None)
        return CompletionRequest(
            prompt=request.prompt or "", **{"max_tokens": RAW_TOKENS, **shared}
        )
    said = [("system", request.system), ("user", request.prompt)]
    messages = [Message(role=role, content=text) for role, text in said if text]
    return ChatRequest(messages=messages, **_shared(request))


def bare_text_of(chat: ChatRequest) -> ChatRequest | CompletionRequest:
    """What a text is to a model without a chat template: raw, as it is with Ollama. With more than
    a prompt it stays the chat that it became, which such a model refuses."""
    match chat.messages:
        case [Message(role="user", content=str(prompt))]:
            shared = {name: getattr(chat, name) for name in Sampled.__struct_fields__}
            if shared["max_tokens"] is None:
                shared["max_tokens"] = RAW_TOKENS
            return CompletionRequest(prompt=prompt, **shared)
    return chat


RAW_TOKENS = 128
"""New tokens of a text that asks for no number."""


def _no_images(images: Sequence[str] | None, param: str) -> None:
    if images:
        raise bad_request(f"{param} is not supported here: the model reads text", param)


def _shared(request: OllamaAsked) -> dict[str, Any]:
    options = msgspec.structs.asdict(request.options or Options())
    length, streams = options["max_tokens"] or 0, request.stream is not False
    found: dict[str, Any] = {
        **options,
        "model": name_of(request.model),
        "stream": streams,
        "stream_options": StreamOptions(include_usage=True) if streams else None,
        "max_tokens": length if length > 0 else None,
    }
    found = {name: value for name, value in found.items() if value is not None}
    if request.format == "json":
        found["response_format"] = ResponseFormat(type="json_object")
    elif isinstance(request.format, dict):
        schema = NamedSchema(schema=request.format)
        found["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    if request.think is not None:
        effort = {True: DEFAULT_EFFORT, False: NO_EFFORT}
        think = request.think
        found["reasoning_effort"] = effort[think] if isinstance(think, bool) else think
    return found


def _at_once() -> Took:
    return Took(first_s=0.0, whole_s=0.0)


class OllamaWriter(AnswerWriter):
    """Writes an answer in Ollama's form."""

    media = "application/x-ndjson"

    def __init__(self, request: OllamaChat | OllamaGenerate) -> None:
        self._is_chat = isinstance(request, OllamaChat)
        self._model = request.model
        self._reason = "stop"
        self._calls: dict[int, Json] = {}
        """Calls whose arguments are still to come, by their places."""
        self._created = 0
        self._took: Callable[[], Took] = _at_once

    def begin(self, prompt_tokens: int, created: int, took: Callable[[], Took]) -> None:
        self._created, self._took = created, took

    @property
    def beat(self) -> bytes:
        """A line that brings nothing."""
        return self.framed(self.line({}, done=False))

    def framed(self, event: Json) -> bytes:
        return one_line(event) + b"\n"

    def line(self, message: Json, *, done: bool) -> Json:
        """A line of a stream, or its last."""
        said: Json = {"role": "assistant", "content": "", **message}
        if not self._is_chat:
            del said["role"]
            said["response"] = said.pop("content")
        body = {"message": said} if self._is_chat else said
        return {"model": self._model, "created_at": rfc3339(self._created), **body, "done": done}

    def _ended(self, message: Json, usage: Json) -> Json:
        counted = {
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
        }
        took = self._took()
        times = {
            "total_duration": _nanoseconds(took.whole_s),
            "load_duration": 0,
            "prompt_eval_duration": _nanoseconds(took.first_s),
            "eval_duration": _nanoseconds(took.whole_s - took.first_s),
        }
        return {**self.line(message, done=True), "done_reason": self._reason, **times, **counted}

    def whole(self, answer: Json) -> Json:
        choice = answer["choices"][0]
        self._finish(choice["finish_reason"])
        said = choice.get("message") or {"content": choice.get("text", "")}
        message = _of(said)
        if calls := said.get("tool_calls"):
            message["tool_calls"] = [_call(call["function"]) for call in calls]
        return self._ended(message, answer["usage"])

    def push(self, chunk: Json) -> list[Json]:
        found = []
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text", "")}
            for call in delta.get("tool_calls", ()):
                known = self._calls.setdefault(call["index"], {"name": "", "arguments": ""})
                for name, text in call["function"].items():
                    known[name] += text
            if any((message := _of(delta)).values()):
                found.append(self.line(message, done=False))
            self._finish(choice["finish_reason"])
        if chunk.get("usage") is not None:
            if self._calls:
                calls = [_call(call) for call in self._calls.values()]
                found.append(self.line({"tool_calls": calls}, done=False))
            found.append(self._ended({}, chunk["usage"]))
        return found

    def _finish(self, reason: str | None) -> None:
        if reason is not None:
            self._reason = "length" if reason == "length" else "stop"

    def failed(self, error: ApiError) -> list[Json]:
        return [error_of(error)]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _of(said: Json) -> Json:
    """The text and the thoughts of a message."""
    found: Json = {"content": said.get("content") or ""}
    if thoughts := said.get("reasoning_content"):
        found["thinking"] = thoughts
    return found


def _call(function: Json) -> Json:
    """A call, with its arguments as an object."""
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = {}
    return {"function": {"name": function["name"], "arguments": arguments}}


def error_of(error: ApiError) -> Json:
    """An error in Ollama's form."""
    return {"error": error.message}


def tags_of(entries: Sequence[Json]) -> Json:
    """The list of models of ``/api/tags``; ``entries`` are those of ``/v1/models``."""
    return {"models": [_tagged(entry) for entry in entries]}


def _tagged(entry: Json) -> Json:
    return {
        "name": entry["id"],
        "model": entry["id"],
        "modified_at": rfc3339(entry["created"]),
        "size": 0,
        "digest": entry.get("fingerprint") or "",
        "details": _details(entry),
    }


def _details(entry: Json) -> Json:
    precisions = entry.get("precisions") or ("",)
    return {
        "parent_model": "",
        "format": "anabranch",
        "family": "anabranch",
        "families": ["anabranch"],
        "parameter_size": "",
        "quantization_level": precisions[0],
    }


def shown(entry: Json, template: str, *, calls: bool, thinks: bool) -> Json:
    """What ``/api/show`` says of a model."""
    able: Mapping[str, bool] = {"completion": True, "tools": calls, "thinking": thinks}
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _details(entry),
        "model_info": {
            "general.architecture": "anabranch",
            "general.basename": entry["id"],  # what programs list it as
            "anabranch.context_length": entry.get("max_model_len"),
            "anabranch.block_count": entry.get("layers"),
        },
        "capabilities": [name for name, is_able in able.items() if is_able],
        "modified_at": rfc3339(entry["created"]),
    }


class ShowRequest(msgspec.Struct, kw_only=True):
    """``/api/show``."""

    model: str | None = None
    name: str | None = None
