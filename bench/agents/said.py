"""What clients send and read, whatever their forms of it are."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = "brook"
TOOL = "look"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": TOOL, "parameters": SCHEMA}}
FORMAT = {"name": "place", "schema": {**SCHEMA, "additionalProperties": False}}


class Refused(Exception):
    """The gateway answered with status 400, and this text."""


@dataclass(slots=True)
class Said:
    """What a client read of an answer."""

    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Id, name and arguments of each."""


@dataclass(slots=True)
class Turn:
    """A message."""

    role: str
    text: str = ""
    calls: Sequence[tuple[str, str, str]] = ()
    answers: str = ""
    """Id of the call that this is the result of."""


Ask = Callable[..., Awaitable[Said]]
"""Takes the gateway's address, turns, and whether it offers a ``tool`` and asks for a ``schema``.
Raises Refused."""


def chat_messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns as OpenAI's chats have them."""
    messages: list[dict[str, Any]] = []
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
    return messages


def chat_options(*, tools: bool, schema: bool) -> dict[str, Any]:
    """What OpenAI's chats take beside messages."""
    more: dict[str, Any] = {"tools": [FUNCTION]} if tools else {}
    if schema:
        more["response_format"] = {"type": "json_schema", "json_schema": FORMAT}
    return more
