"""Names of functions as models see them: short, and without what no call could be read with. Pure.

Programs that name functions of many servers go beyond the 64 characters that OpenAI's interface
takes, and that calls in answers are read with.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from msgspec.structs import replace

from client.gateway.protocols.messages import FunctionName, Message, ToolChoice
from client.gateway.protocols.requests import ChatRequest
from client.gateway.structured.calls import NAME, NAME_CHARS_MAX

_FOREIGN = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesConfig:
    """How a name is shortened: its beginning, and a digest of all of it behind a ``_``."""

    digest_chars: int = 8
    """Enough to tell the few hundred functions of a request apart."""

    @property
    def head_chars(self) -> int:
        return NAME_CHARS_MAX - 1 - self.digest_chars


CONFIG = NamesConfig()


def shown(name: str) -> str:
    """The name that models see."""
    if NAME.fullmatch(name):
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[: CONFIG.digest_chars]
    return f"{_FOREIGN.sub('_', name)[: CONFIG.head_chars]}_{digest}"


def with_shown_names(request: ChatRequest) -> tuple[ChatRequest, Mapping[str, str]]:
    """The request with the names that models see, and those of its own by these."""
    given = {shown(tool.function.name): tool.function.name for tool in request.tools or ()}
    choice = request.tool_choice
    if isinstance(choice, ToolChoice):
        choice = replace(choice, function=FunctionName(name=shown(choice.name)))
    tools = [
        replace(tool, function=replace(tool.function, name=shown(tool.function.name)))
        for tool in request.tools or ()
    ]
    messages = [_with_shown_names(message) for message in request.messages]
    return replace(request, tools=tools or None, tool_choice=choice, messages=messages), given


def _with_shown_names(message: Message) -> Message:
    if message.role == "tool" and message.name:
        return replace(message, name=shown(message.name))
    if not message.tool_calls:
        return message
    calls = [
        replace(call, function=replace(call.function, name=shown(call.function.name)))
        for call in message.tool_calls
    ]
    return replace(message, tool_calls=calls)
