"""Requests of OpenAI's interface: their schema, their bounds, and what they ask of the swarm.

Pure. The structures are the schema of the OpenAPI document, too. Unknown fields are ignored, as
vLLM does; known ones that would change an answer and are not built are refused by name. Fields
below "vLLM's" are what vLLM adds to OpenAI's interface, under its names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from client.answer.generation import GenerationOptions
from client.gateway.errors import bad_request
from dht.errors import UserError
from dht.messages.session import Priority

MESSAGES_MAX = 4096
PROMPT_FIELDS = frozenset({"prompt", "messages"})
FIELD_BYTES_MAX = 256 << 10
"""Maximum size of any other field: 16 stop strings of 1,024 escaped characters have 192 KiB."""
MESSAGE_CHARACTERS = 64
"""Characters that take as long as a message alone."""
PROMPTS_MAX = 256
CHOICES_MAX = 16
STOPS_MAX = 16
STOP_CHARS_MAX = 1024
PROMPT_TOKENS_MAX = 1 << 20
COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default for completions."""

TokenIds = Annotated[list[int], Meta(max_length=PROMPT_TOKENS_MAX)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
Stop = Annotated[str, Meta(max_length=STOP_CHARS_MAX)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 22)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream brings besides text."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str = "text"


class Sampled(msgspec.Struct, kw_only=True):
    """What both kinds of requests have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    max_tokens: Tokens | None = None
    # vLLM's
    top_k: int | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Tokens | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=32)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    add_special_tokens: bool | None = None


class CompletionRequest(Sampled, kw_only=True):
    """``/v1/completions``. ``prompt`` is text, token ids, or a list of either."""

    prompt: str | Annotated[list[str | int | TokenIds], Meta(max_length=PROMPT_TOKENS_MAX)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class TextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Meta(max_length=MESSAGES_MAX)] | None = None
    name: str | None = None

    @property
    def characters(self) -> int:
        """Number of characters of the content."""
        if isinstance(self.content, list):
            return sum(1 + len(part.text) for part in self.content)
        return len(self.content or "")

    def as_dict(self) -> dict[str, Any]:
        """What a chat template sees."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": content or "", **named}


class ChatRequest(Sampled, kw_only=True):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


Request = TypeVar("Request", CompletionRequest, ChatRequest)


_SHAPES: dict[type, type[msgspec.Struct]] = {
    kind: msgspec.defstruct(
        kind.__name__, [(name, msgspec.Raw, msgspec.Raw()) for name in kind.__struct_fields__]
    )
    for kind in (CompletionRequest, ChatRequest)
}
"""The fields of each kind of request as they were sent: finding them costs little, whatever they
hold, and making the objects that they describe a second for 8 MiB."""


def _check_sizes(shape: msgspec.Struct) -> None:
    """Raises ApiError (400) for fields that hold more objects than any request needs."""
    for name in shape.__struct_fields__:
        size_bytes = len(getattr(shape, name))
        if name not in PROMPT_FIELDS and size_bytes > FIELD_BYTES_MAX:
            raise bad_request(f"{name} has {size_bytes} bytes; {FIELD_BYTES_MAX} at most", name)
    messages = bytes(getattr(shape, "messages", b""))
    if messages.startswith(b"["):
        count = len(msgspec.json.decode(messages, type=list[msgspec.Raw]))
        if count > MESSAGES_MAX:
            raise bad_request(f"messages has {count} of them; {MESSAGES_MAX} at most", "messages")
    prompt = bytes(getattr(shape, "prompt", b""))
    if not prompt.startswith(b"["):
        return
    if b'"' in prompt:  # texts, and then nothing but texts
        try:
            msgspec.json.decode(prompt, type=list[str])
        except msgspec.ValidationError:
            raise bad_request("prompt mixes texts and token ids", "prompt") from None
    elif prompt.count(b"[") > PROMPTS_MAX + 1:
        raise bad_request(f"prompt has more than {PROMPTS_MAX} prompts", "prompt")


def parse_request(body: bytes, kind: type[Request]) -> Request:
    """The request in ``body``; raises ApiError (400) that names the field at fault."""
    try:
        _check_sizes(msgspec.json.decode(body, type=_SHAPES[kind]))
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        if param is None and said.startswith("Object missing required field"):
            param = said.split("`")[1]
        raise bad_request(f"{param or 'the body'}: {said}", param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None


def check_supported(request: CompletionRequest | ChatRequest) -> None:
    """Raises ApiError (400) for what would be answered wrongly."""
    refused: dict[str, bool]
    if isinstance(request, ChatRequest):
        refused = {
            "tools": bool(request.tools),
            "functions": bool(request.functions),
            "response_format": request.response_format is not None
            and request.response_format.type != "text",
            "modalities": bool(request.modalities) and request.modalities != ["text"],
            "top_logprobs": request.top_logprobs is not None and not request.logprobs,
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


Prompts = tuple[str, ...] | tuple[tuple[int, ...], ...]


def prompts_of(request: CompletionRequest) -> Prompts:
    """The prompts of a completion: all text or all token ids; raises ApiError (400)."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return (prompt,)
    whole = tuple(prompt)
    if whole and all(isinstance(each, int) for each in whole):
        return (tuple(each for each in whole if isinstance(each, int)),)
    if not 1 <= len(whole) <= PROMPTS_MAX:
        raise bad_request(
            f"prompt has {len(whole)} prompts; 1 to {PROMPTS_MAX} are taken", "prompt"
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
        return sum(MESSAGE_CHARACTERS + message.characters for message in request.messages)
    if isinstance(request.prompt, str):
        return 1 + len(request.prompt)
    return sum(1 if isinstance(each, int) else 1 + len(each) for each in request.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Sampling where a request says nothing: the model's own, as vLLM takes them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> "Defaults":
        """From a ``generation_config.json``; values that cannot be are left out."""
        found: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            value = generation_config.get(name)
            if value is None:
                continue
            try:
                GenerationOptions(**{name: value})
            except UserError:
                continue
            found[name] = value
        return cls(**found)


def request_options(
    request: CompletionRequest | ChatRequest, defaults: Defaults, max_new_tokens: int | None
) -> GenerationOptions:
    """What a request asks of the swarm; raises ApiError (400)."""
    logprobs: int | None
    if isinstance(request, ChatRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        prompt_logprobs = None
    else:
        logprobs = request.logprobs
        prompt_logprobs = request.logprobs if request.echo else None

    def chosen(name: str) -> Any:
        value = getattr(request, name)
        return getattr(defaults, name) if value is None else value

    try:
        return GenerationOptions(
            max_new_tokens=max_new_tokens,
            min_new_tokens=request.min_tokens or 0,
            temperature=chosen("temperature"),
            top_p=chosen("top_p"),
            top_k=max(0, chosen("top_k")),  # vLLM's -1 is all
            min_p=chosen("min_p"),
            repetition_penalty=chosen("repetition_penalty"),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=_bias(request.logit_bias or {}),
            seed=None if request.seed is None else request.seed & ((1 << 63) - 1),
            stop=request.stop or (),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            # vLLM's: the smaller, the earlier; 0 is everybody's.
            priority=Priority.HIGH if (request.priority or 0) < 0 else Priority.NORMAL,
        )
    except UserError as error:
        raise bad_request(str(error)) from None


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise bad_request("logit_bias takes token ids as keys", "logit_bias") from None


def seeded(options: GenerationOptions, index: int) -> GenerationOptions:
    """The options of choice ``index`` of several: another seed each, the first as it was asked."""
    if options.seed is None or index == 0:
        return options
    return replace(options, seed=(options.seed + index) & ((1 << 63) - 1))


def wanted_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    """The most new tokens that a request asks for; None where it leaves that open."""
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            return request.max_completion_tokens
        return request.max_tokens
    return COMPLETION_TOKENS_DEFAULT if request.max_tokens is None else request.max_tokens


def check_stops(stops: Sequence[str]) -> None:
    """Raises ApiError (400) for stop strings that no text contains."""
    if any(not stop for stop in stops):
        raise bad_request("stop has an empty text", "stop")
