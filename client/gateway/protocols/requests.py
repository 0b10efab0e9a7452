"""Requests of OpenAI's interface: their schema, their bounds, and what they ask of the swarm.

Pure. The structures are the schema of the OpenAPI document, too. Fields that would change an answer
and are not built are refused by name (:mod:`client.gateway.protocols.refused`); other unknown
fields are ignored. Fields below "vLLM's" are what vLLM adds to OpenAI's interface, under its names.
"""

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from client.answer.answer import PrefixCache
from client.answer.defaults import SamplingDefaults
from client.answer.generation import PASSED_ON, AskedTopP, GenerationOptions
from client.gateway.errors import ApiError, bad_request, not_text
from client.gateway.protocols.empty_objects import mended_fields
from client.gateway.protocols.messages import (
    MESSAGES_MAX,
    TOOLS_MAX,
    Message,
    Tool,
    ToolChoice,
)
from client.gateway.protocols.mistakes import mistake
from client.gateway.protocols.refused import check_fields, refused_by
from client.gateway.structured.schemas import Schema
from dht.errors import UserError
from dht.messages.session import (
    SESSION_BOUNDS,
    Alternatives,
    Bias,
    Priority,
    Sampling,
)

PROMPT_FIELDS = frozenset({"prompt", "messages", "input", "system", "instructions"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestConfig:
    """Bounds of requests, and what those get that do not say."""

    field_bytes_max: int = 256 << 10
    """Maximum size of any other field: 16 stop strings of 1,024 escaped characters have 192 KiB."""
    message_characters: int = 64
    """Characters that take as long as a message alone."""
    parts_max: int = 1 << 16
    """Maximum parts of the messages of a chat, all together."""
    template_s: float = 5.0
    """Processor time that a chat template has for a conversation: some look at all later messages
    for each call."""
    prompts_max: int = 256
    choices_max: int = 16
    answers_max: int = 256
    """Maximum answers of one request: its choices of all its prompts."""
    stops_max: int = 16
    stop_chars_max: int = 1024
    salt_chars_max: int = 256
    prompt_tokens_max: int = 1 << 20
    chat_tokens_least: int = 1024
    """What such an answer gets room for even where peers announce less."""
    free_share: int = 4
    """Divisor of the KV room that peers have free: such an answer gets that part. KV is reserved
    for all of it at every stage, and others come, too."""


REQUEST = RequestConfig()


NO_EFFORT, DEFAULT_EFFORT = "none", "medium"
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that no template knows, by the nearest that those know which read one."""
_HALF_ALONE = re.compile(
    rb"\\u(?<!\\\\u)"
    rb"(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""An escape of one half of a character beyond U+FFFF whose other half is not next to it."""
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
COMPLETION_TOKENS_DEFAULT = 16
"""Fixed by OpenAI's interface: default for completions."""
CHAT_TOKENS_DEFAULT: int | None = None
"""The most that a chat's answer is given room for where neither the request nor the gateway's owner
says; None: the rest of the context, as far as key and swarm have it (:func:`open_tokens`)."""

TokenIds = Annotated[list[int], Meta(max_length=REQUEST.prompt_tokens_max)]
Effort = Annotated[str, Meta(pattern="^[a-z]{1,32}$")]
Choices = Annotated[int, Meta(ge=1, le=REQUEST.choices_max)]
Stop = Annotated[str, Meta(max_length=REQUEST.stop_chars_max)]
TOKENS_MAX = (1 << 63) - 1
"""Fixed by int64: the most tokens that a request may name. The model's context bounds them, in the
words that clients look for."""
TokenCount = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
MostTokens = Annotated[int, Meta(ge=-1, le=TOKENS_MAX)]
"""-1: as many as there is room for."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream brings besides text."""

    include_usage: bool | None = None
    include_route: bool | None = None
    """Chunks that tell which peers answer, and when one of them is replaced."""


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema that an answer has to follow, always exactly."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None
    """The schema without a name, as some servers take it."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's newer name of its ``guided_…`` fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


OTHERWISE = frozenset({"top_k", "min_new_tokens", "logprobs", "prompt_logprobs"})
"""Options for peers that requests say by another name, or with other numbers."""
ALIKE = tuple(name for name in PASSED_ON if name not in OTHERWISE)
"""Options for peers that requests say as peers get them."""

if TYPE_CHECKING:

    class Passed(msgspec.Struct, kw_only=True):
        """Those of the fields that translations of other interfaces name."""

        temperature: float | None = None
        top_p: float | None = None
        top_k: int | None = None

else:
    _HINTS = get_type_hints(Sampling, include_extras=True) | {"top_p": AskedTopP, "top_k": int}
    Passed = msgspec.defstruct(
        "Passed", [(name, _HINTS[name] | None, None) for name in (*ALIKE, "top_k")], kw_only=True
    )


class Sampled(Passed, kw_only=True):
    """What both kinds of requests have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=REQUEST.stops_max)] | None = None
    logit_bias: dict[str, Bias] | None = None
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    # vLLM's
    min_tokens: TokenCount | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=32)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=REQUEST.salt_chars_max)] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    # our own
    prefix_cache: Literal["own", "shared", "off"] | None = None
    speculate: bool | None = None


class CompletionRequest(Sampled, kw_only=True):
    """``/v1/completions``. ``prompt`` is text, token ids, or a list of either."""

    prompt: str | Annotated[list[str | int | TokenIds], Meta(max_length=REQUEST.prompt_tokens_max)]
    echo: bool | None = None
    logprobs: Alternatives | None = None
    best_of: int | None = None
    suffix: str | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    """How much to think, as OpenRouter's clients say it."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """Whether to think, as the clients of DeepSeek, GLM and Kimi say it."""

    type: str


class ChatRequest(Sampled, kw_only=True):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: Effort | None = None
    # other services' names for how much to think, and whether to tell
    reasoning: ThinkingOptions | None = None
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_options(self, template: str) -> dict[str, Any]:
        """What the chat template takes beside the messages: how much to think, under the names
        that templates read."""
        found: dict[str, Any] = {}
        if (effort := self.effort) is not None:
            knows = any(f"{mark}{effort}{mark}" in template for mark in "'\"")
            thinks = effort != NO_EFFORT
            found = {
                "reasoning_effort": effort if knows else EFFORTS.get(effort, effort),
                "enable_thinking": thinks,
                "thinking": thinks,
            }
        return {**found, **(self.chat_template_kwargs or {})}

    @property
    def effort(self) -> str | None:
        """How much to think, by whichever name it was asked for; None: as the model does."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort
        if self.reasoning is not None and self.reasoning.effort is not None:
            return self.reasoning.effort
        thinks = [self.enable_thinking]
        thinks += [None if self.thinking is None else self.thinking.type != "disabled"]
        thinks += [None if self.reasoning is None else self.reasoning.enabled]
        said = next((each for each in thinks if each is not None), None)
        return None if said is None else DEFAULT_EFFORT if said else NO_EFFORT

    @property
    def tells_thoughts(self) -> bool:
        """Whether the answer's thoughts are wanted."""
        hides = self.reasoning is not None and self.reasoning.exclude is True
        return self.include_reasoning is not False and not hides

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message."""
        last = self.messages[-1] if self.messages else None
        begins = last is not None and bool(last.prefix or last.partial)
        return bool(self.continue_final_message) or begins

    @property
    def requires_call(self) -> bool:
        return isinstance(self.tool_choice, ToolChoice) or self.tool_choice == "required"

    @property
    def offered(self) -> list[Tool]:
        """The functions that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def parameters(self) -> dict[str, Schema]:
        """The schemas of the offered functions' arguments by their names."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.offered}


AnyRequest = TypeVar("AnyRequest", bound=msgspec.Struct)


@cache
def _shape(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The fields of a kind of request as they were sent: finding them costs little, whatever they
    hold, and making the objects that they describe a second for 8 MiB."""
    names = dict.fromkeys((*kind.__struct_fields__, *refused_by(kind)))
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    return msgspec.defstruct(kind.__name__, fields)


def _check_sizes(shape: msgspec.Struct) -> None:
    """Raises ApiError (400) for fields that hold more objects than any request needs."""
    for name in shape.__struct_fields__:
        size_bytes = len(getattr(shape, name))
        if name not in PROMPT_FIELDS and size_bytes > REQUEST.field_bytes_max:
            raise bad_request(
                f"{name} has {size_bytes} bytes; {REQUEST.field_bytes_max} at most", name
            )
    for name in ("messages", "input", "system"):
        items = bytes(getattr(shape, name, b""))
        if items.startswith(b"["):
            count = len(msgspec.json.decode(items, type=list[msgspec.Raw]))
            if count > MESSAGES_MAX:
                raise bad_request(f"{name} has {count} of them; {MESSAGES_MAX} at most", name)
    prompt = bytes(getattr(shape, "prompt", b""))
    if not prompt.startswith(b"["):
        return
    if b'"' in prompt:  # texts, and then nothing but texts
        try:
            msgspec.json.decode(prompt, type=list[str])
        except msgspec.ValidationError:
            raise bad_request("prompt mixes texts and token ids", "prompt") from None
    elif prompt.count(b"[") > REQUEST.prompts_max + 1:
        raise bad_request(f"prompt has more than {REQUEST.prompts_max} prompts", "prompt")


def _mended(body: bytes) -> bytes:
    """The same JSON with U+FFFD for each half of a character alone. Programs that cut a text at
    a number of UTF-16 units send these, and then with every later turn of the conversation."""
    return _HALF_ALONE.sub(rb"\\ufffd", body)


def parse_request(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """The request in ``body``; raises ApiError (400) that names the field at fault.

    Numbers may be written as other languages and older clients write them (``64.0``, ``"64"``),
    an empty object as ``[]``, and the body may begin with a byte order mark.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        try:
            shape = msgspec.json.decode(body, type=_shape(kind))
        except msgspec.DecodeError as error:
            if isinstance(error, msgspec.ValidationError) or (whole := _mended(body)) == body:
                raise
            body = whole
            shape = msgspec.json.decode(body, type=_shape(kind))
        _check_sizes(shape)
        check_fields(shape, refused_by(kind))
        names = shape.__struct_fields__
        short = {name: bytes(getattr(shape, name)) for name in names if name not in PROMPT_FIELDS}
        if mended := mended_fields(short, kind):
            given = {name: getattr(shape, name) for name in names}
            given |= {name: msgspec.Raw(raw) for name, raw in mended.items()}
            body = msgspec.json.encode({name: raw for name, raw in given.items() if bytes(raw)})
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise mistake(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None


def with_allowed_tools(request: ChatRequest) -> ChatRequest:
    """The same request with those of its functions alone that ``tool_choice`` allows; raises
    ApiError (400)."""
    choice = request.tool_choice
    if not isinstance(choice, ToolChoice) or choice.function is not None:
        return request
    if (allowed := choice.allowed_tools) is None:
        raise bad_request("tool_choice names no function", "tool_choice")
    names = {tool.function.name for tool in allowed.tools}
    tools = [tool for tool in request.tools or () if tool.function.name in names]
    if unknown := names - {tool.function.name for tool in tools}:
        reason = f"tool_choice names {min(unknown)[:200]!r}, which tools has not"
        raise bad_request(reason, "tool_choice")
    return msgspec.structs.replace(request, tools=tools or None, tool_choice=allowed.mode)


def check_supported(request: CompletionRequest | ChatRequest) -> None:
    """Raises ApiError (400) for what would be answered wrongly, or has too many parts."""
    refused: dict[str, bool]
    if isinstance(request, ChatRequest):
        _check_counts(request.messages)
        refused = {
            **_not_read(request.messages),
            "modalities": bool(request.modalities) and request.modalities != ["text"],
            "top_logprobs": bool(request.top_logprobs) and not request.logprobs,
        }
    else:
        refused = {
            "suffix": bool(request.suffix),
            "best_of": request.best_of is not None and request.best_of != (request.n or 1),
        }
    for param, is_refused in refused.items():
        if is_refused and param == "top_logprobs":
            raise bad_request("top_logprobs is for requests with logprobs: true", param)
        if is_refused:
            raise bad_request(f"{param} is not supported here: leave it out", param)


def _check_counts(messages: Sequence[Message]) -> None:
    """Raises ApiError (400) for more than any conversation has: templates go through all of it,
    many times, and some interfaces have several messages in one."""
    contents = (each.content for each in messages if isinstance(each.content, list))
    counts = {
        "messages": (len(messages), MESSAGES_MAX),
        "calls": (sum(len(each.tool_calls or ()) for each in messages), MESSAGES_MAX),
        "parts": (sum(map(len, contents)), REQUEST.parts_max),
    }
    for what, (count, most) in counts.items():
        if count > most:
            raise bad_request(f"messages has {count} {what} in all; {most} at most", "messages")


def _not_read(messages: Sequence[Message]) -> dict[str, bool]:
    """Where messages have what a model of texts would have to see, or what has another name here
    (``function_call``: ``tool_calls``); raises ApiError (400) for parts that are no text."""
    found = {}
    for at, message in enumerate(messages):
        for name in ("audio", "function_call", "images"):
            found[f"messages[{at}].{name}"] = bool(getattr(message, name))
        parts = message.content if isinstance(message.content, list) else ()
        for part_at, part in enumerate(parts if message.role != "tool" else ()):
            if not part.is_text:
                raise not_text(f"messages[{at}].content[{part_at}].type", part.type)
    return found


Prompts = tuple[str, ...] | tuple[tuple[int, ...], ...]


def prompts_of(request: CompletionRequest) -> Prompts:
    """The prompts of a completion: all text or all token ids; raises ApiError (400)."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return (prompt,)
    whole = tuple(prompt)
    if whole and all(isinstance(each, int) for each in whole):
        return (tuple(each for each in whole if isinstance(each, int)),)
    if not 1 <= len(whole) <= REQUEST.prompts_max:
        raise bad_request(
            f"prompt has {len(whole)} prompts; 1 to {REQUEST.prompts_max} are taken", "prompt"
        )
    texts = tuple(each for each in whole if isinstance(each, str))
    ids = tuple(tuple(each) for each in whole if isinstance(each, list))
    if len(texts) == len(whole):
        return texts
    if len(ids) == len(whole):
        return ids
    raise bad_request("prompt mixes texts and token ids", "prompt")


def size_of(request: CompletionRequest | ChatRequest) -> int:
    """What a request gives a template and a tokenizer to do, in characters."""
    if isinstance(request, ChatRequest):
        messages = sum(
            REQUEST.message_characters + message.characters for message in request.messages
        )
        return messages + len(msgspec.json.encode(request.offered))
    if isinstance(request.prompt, str):
        return 1 + len(request.prompt)
    return sum(1 if isinstance(each, int) else 1 + len(each) for each in request.prompt)


def request_options(
    request: CompletionRequest | ChatRequest,
    defaults: SamplingDefaults,
    max_new_tokens: int | None,
    grammar: str = "",
) -> GenerationOptions:
    """What a request asks of the swarm; raises ApiError (400)."""
    logprobs: int | None
    if isinstance(request, ChatRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        prompt_logprobs = None
    else:
        logprobs = request.logprobs
        prompt_logprobs = request.logprobs if request.echo else None

    if max_new_tokens is not None and (request.min_tokens or 0) > max_new_tokens:
        reason = f"min_tokens is {request.min_tokens}, more than {max_new_tokens}, the most here"
        raise bad_request(reason, "min_tokens")

    def chosen(name: str) -> Any:
        value = getattr(request, name)
        return defaults.get(name) if value is None else value

    try:
        return GenerationOptions(
            max_new_tokens=max_new_tokens,
            min_new_tokens=request.min_tokens or 0,
            top_k=max(0, chosen("top_k") or 0),  # vLLM's -1 is all
            logit_bias=_bias(request.logit_bias or {}),
            # vLLM's, and llama.cpp's: -1 is any.
            seed=None if request.seed in (None, -1) else request.seed & ((1 << 63) - 1),
            stop=request.stop or (),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            # vLLM's: the smaller, the earlier; 0 is everybody's.
            priority=Priority.HIGH if (request.priority or 0) < 0 else Priority.NORMAL,
            prefix_cache=PrefixCache(request.prefix_cache or PrefixCache.OWN),
            cache_salt=request.cache_salt or "",
            speculate=request.speculate is not False,
            **{name: value for name in ALIKE if (value := chosen(name)) is not None},
        )
    except UserError as error:
        raise mistake_in(request, error) from None


def mistake_in(request: msgspec.Struct, error: UserError) -> ApiError:
    """The error of options that cannot be, with the field at fault where the request has it."""
    param = error.field if error.field in request.__struct_fields__ else None
    return bad_request(str(error), param)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    # Keys are counted and measured first: a stranger may choose numbers whose hashes are the same.
    if len(given) > SESSION_BOUNDS.biased_tokens_max:
        said = f"logit_bias has {len(given)} tokens; {SESSION_BOUNDS.biased_tokens_max} at most"
        raise bad_request(said, "logit_bias")
    if not all(_TOKEN_ID.fullmatch(token_id) for token_id in given):
        raise bad_request("logit_bias takes token ids as keys", "logit_bias")
    return {int(token_id): bias for token_id, bias in given.items()}


def seeded(options: GenerationOptions, index: int) -> GenerationOptions:
    """The options of choice ``index`` of several: another seed each, the first as it was asked."""
    if options.seed is None or index == 0:
        return options
    return options.but(seed=(options.seed + index) & ((1 << 63) - 1))


def wanted_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    """The most new tokens that a request asks for; None where it leaves that open."""
    wanted = request.max_completion_tokens
    if wanted is None:
        wanted = request.max_tokens
    if wanted is None and isinstance(request, CompletionRequest):
        wanted = COMPLETION_TOKENS_DEFAULT
    return None if wanted == -1 else wanted


def open_tokens(room: int, free: int, left: int | None) -> int:
    """New tokens for an answer that asks for no number, at least 1: the context has ``room``, peers
    have KV free for ``free``, and the key has ``left`` (None: any number)."""
    most = min(room, max(REQUEST.chat_tokens_least, free // REQUEST.free_share))
    return max(1, most if left is None else min(most, left))


def check_stops(stops: Sequence[str]) -> None:
    """Raises ApiError (400) for stop strings that no text contains."""
    if any(not stop for stop in stops):
        raise bad_request("stop has an empty text", "stop")
