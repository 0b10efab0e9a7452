"""How answers are written: as they are, or part by part in another interface's form. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from client.gateway.errors import ApiError
from client.gateway.protocols.messages import Function, Message, Tool, ToolCall
from client.gateway.protocols.requests import ChatRequest, CompletionRequest
from dht.process.json_file import Json


class HasText(Protocol):
    """A part of a message."""

    @property
    def text(self) -> str: ...


def text_in(content: str | Sequence[HasText] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def message_from(
    role: str, said: Sequence[str], calls: Sequence[ToolCall] = (), thoughts: Sequence[str] = ()
) -> Message:
    """A chat's message out of its parts."""
    return Message(
        role=role,
        content="\n".join(said) if said else None,
        tool_calls=list(calls) or None,
        reasoning_content="\n".join(thoughts) if thoughts else None,
    )


def begins_answer(messages: Sequence[Message]) -> bool | None:
    """Whether the last of ``messages`` is what the answer goes on with; None: it is not."""
    last = messages[-1] if messages else None
    said = last is not None and last.role == "assistant" and last.content and not last.tool_calls
    return bool(said) or None


def tool_from(
    name: str, description: str | None, parameters: Json | None, strict: bool | None
) -> Tool:
    """A chat's tool; ``parameters`` is a JSON schema."""
    return Tool(
        function=Function(name=name, description=description, parameters=parameters, strict=strict)
    )


LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
"""What ends a line to some who read streams (``str.splitlines``), and how JSON writes it."""


def one_line(event: Json) -> bytes:
    """An event as JSON on one line, whoever reads lines."""
    found = msgspec.json.encode(event)
    for end, written in LINE_ENDS.items():
        found = found.replace(end, written)
    return found


class Kind(Enum):
    """What a part of an answer is."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """How long an answer has taken so far, in seconds."""

    first_s: float
    """From the request to the first token, or until now."""
    whole_s: float


class AnswerWriter(ABC):
    """Writes the answer of one request in an interface's form, whole or event by event."""

    media = "text/event-stream; charset=utf-8"
    """The type of a stream."""
    ended = b""
    """What a whole stream ends with."""

    @property
    def beat(self) -> bytes:
        """What a stream brings while nothing else comes: a comment, which clients pass over."""
        return b": the answer is being made\n\n"

    def framed(self, event: Json) -> bytes:
        """The bytes of an event; where it has a type, that is its name, too."""
        name = f"event: {event['type']}\n" if "type" in event else ""
        return name.encode() + b"data: " + one_line(event) + b"\n\n"

    @abstractmethod
    def whole(self, answer: Json) -> Json:
        """The object for a whole answer of OpenAI's chats or completions."""

    def begin(  # noqa: B027  most need nothing of it
        self, prompt_tokens: int, created: int, took: Callable[[], Took]
    ) -> None:
        """Learn the number of tokens of the prompt, when the answer began (Unix time, seconds), and
        who tells how long it took, once these are known and before any chunk."""

    @abstractmethod
    def push(self, chunk: Json) -> list[Json]:
        """The events of a chunk; the one with the usage, the last one, ends the answer."""

    @abstractmethod
    def failed(self, error: ApiError) -> list[Json]:
        """The events that end a stream with an error."""


class AsItIs(AnswerWriter):
    """OpenAI's chats and completions."""

    ended = b"data: [DONE]\n\n"

    def __init__(self, request: ChatRequest | CompletionRequest) -> None:
        """Takes the argument of all writers and does not need it."""

    def whole(self, answer: Json) -> Json:
        return answer

    def push(self, chunk: Json) -> list[Json]:
        return [chunk]

    def failed(self, error: ApiError) -> list[Json]:
        return [error.body]


class PartWriter(AnswerWriter):
    """Parts a chat's answer into thoughts, text and calls, one after the other."""

    def __init__(self) -> None:
        self.index = -1
        """Place of the part that came last."""
        self._open: Kind | None = None

    @abstractmethod
    def _begin(self, kind: Kind, call: Json) -> list[Json]:
        """The events that begin part ``index``; ``call`` is empty for all but calls."""

    @abstractmethod
    def _grow(self, kind: Kind, text: str) -> list[Json]:
        """The events of new text of the part that is open: of a call its arguments."""

    @abstractmethod
    def _end(self, kind: Kind) -> list[Json]:
        """The events that end the part that is open."""

    def take(self, delta: Json) -> list[Json]:
        """The events of a chat's delta, or of its whole message."""
        found: list[Json] = []
        for kind, name in ((Kind.THOUGHT, "reasoning_content"), (Kind.TEXT, "content")):
            if text := delta.get(name):
                found += [] if self._open is kind else self._next(kind, {})
                found += self._grow(kind, text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                found += self._next(Kind.CALL, call)
            if arguments := call["function"]["arguments"]:
                found += self._grow(Kind.CALL, arguments)
        return found

    def _next(self, kind: Kind, call: Json) -> list[Json]:
        found = self.close()
        self.index += 1
        self._open = kind
        return found + self._begin(kind, call)

    def close(self) -> list[Json]:
        """The events that end the part that is open, if one is."""
        kind, self._open = self._open, None
        return [] if kind is None else self._end(kind)
