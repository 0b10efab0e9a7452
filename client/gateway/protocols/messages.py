"""Messages of OpenAI's chats, with the functions and calls in them. Pure."""

import logging
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from client.text.arrangement import Arguments

logger = logging.getLogger(__name__)
MESSAGES_MAX = 4096
TOOLS_MAX = 128
"""Fixed by OpenAI's interface."""
ToolName = Annotated[str, Meta(min_length=1, max_length=1024)]
"""Names that models cannot write are shortened for them (:mod:`…protocols.tool_names`)."""


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call. ``parameters`` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """The function in OpenAI's form, as chat templates take it."""
        described = {"name": self.name, "description": self.description or ""}
        parameters = {"type": "object", **(self.parameters or {})}
        if not parameters.get("properties"):  # templates walk through them
            parameters["properties"] = {}
        return {"type": "function", "function": {**described, "parameters": parameters}}


class Tool(msgspec.Struct, kw_only=True):
    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """The functions that may be called, of those in ``tools``."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(max_length=TOOLS_MAX)]


class ToolChoice(msgspec.Struct, kw_only=True):
    """The one function to call, or those that may be called."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def name(self) -> str:
        """The function to call; empty: none is named."""
        return "" if self.function is None else self.function.name


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Any = "{}"
    """A text or an object; programs keep what a model wrote, also where it was neither."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that an earlier answer made."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function", ""] | None = "function"
    """Programs that put calls together out of pieces leave it empty."""


def unseen(what: str) -> str:
    """The text in the place of something that the model cannot see."""
    return f"[{what}, which this model cannot see]"


UNSEEN = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "an image"),
    **dict.fromkeys(("document", "file", "input_file"), "a file"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "a recording"),
    **dict.fromkeys(("video", "video_url", "input_video"), "a video"),
}
"""What parts are that no text is, by their types in the interfaces that programs speak."""
TEXTS = frozenset(
    {"input_text", "output_text", "reasoning_text", "refusal", "summary_text", "text"}
)
"""Types of parts that are text."""


class Part(msgspec.Struct, kw_only=True):
    """A part of a message. What no text is, is taken in the results of calls alone, where a text
    stands in its place: one that a tool brings would else end the conversation."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def is_text(self) -> bool:
        return self.type in TEXTS

    @property
    def told(self) -> str:
        """What the model is told of it."""
        if self.is_text:
            return self.text or self.refusal or ""
        return unseen(UNSEEN.get(self.type, f"a part of type {self.type[:80]!r}"))


Parts = list[Part]


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[Parts, Meta(max_length=MESSAGES_MAX)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOLS_MAX)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """``reasoning_content`` by another name."""
    refusal: str | None = None
    prefix: bool | None = None
    """Whether the answer goes on with this message, which is the last."""
    partial: bool | None = None
    """``prefix`` by another name."""
    # What some programs send, and is refused by name: it says something that no prompt would.
    audio: Any = None
    function_call: Any = None
    images: Any = None

    @property
    def thoughts(self) -> str | None:
        """What the model thought before it said this."""
        return self.reasoning_content or self.reasoning

    @property
    def characters(self) -> int:
        """Number of characters of the content and its calls."""
        called = len(msgspec.json.encode(self.tool_calls or ()))
        called += len(self.thoughts or "") + len(self.refusal or "")
        if isinstance(self.content, list):
            return called + sum(1 + len(part.told) for part in self.content)
        return called + len(self.content or "")

    def as_dict(self) -> dict[str, Any]:
        """What a chat template sees."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.told for part in content)
        found: dict[str, Any] = {"role": self.role, "content": content or self.refusal or ""}
        told = {"name": self.name, "tool_call_id": self.tool_call_id}
        told["reasoning_content"] = self.thoughts
        found |= {name: value for name, value in told.items() if value is not None}
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return found


def _arguments(given: object) -> Arguments | str:
    """Arguments of an earlier call: as an object, or as the text that they are. A model that wrote
    them wrong sees what it wrote; refused, they would end the conversation."""
    found = given
    if isinstance(given, str):
        with suppress(msgspec.DecodeError, RecursionError):
            found = msgspec.json.decode(given or "{}")
    if isinstance(found, dict):
        return Arguments(found)
    if found is None or found == []:  # some languages have one empty value for both
        return Arguments()
    logger.debug("the arguments of a call in the history are no JSON object: taken as text")
    return given if isinstance(given, str) else msgspec.json.encode(given).decode()
