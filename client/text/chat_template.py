"""The model's own chat template, rendered without ``transformers`` (and so without torch).

Templates come with the model, messages from anybody: they are rendered in Jinja's immutable
sandbox, with the same environment, filters and globals as ``transformers`` gives them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from client.text.ends import special_tokens
from dht.checkpoints.hub import TOOL_USE_TEMPLATE
from dht.errors import UserError
from dht.process.json_file import object_or_empty

_END = "zqendqz"
"""Stands behind the text of a message that is continued, to tell where it ends."""
_SPACE = "\v"
"""Stands behind that: a template that trims the text leaves it out."""
_CANNOT_RENDER = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises that asks something for what it does not have."""


class TakesTooLong(UserError):
    """A template did not end in the time that it has for a conversation."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  the name and the type are Jinja's

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> Any:
        return caller()


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes characters for HTML; a prompt is no HTML. The options are those of
    # transformers, in their order.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


class ChatTemplate:
    """Renders messages into the prompt that the model was trained on."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """``tool_use`` is the model's other template, for chats with functions, where it has one.

        Raises UserError for an invalid template.
        """
        self.source = source
        self.tool_source = source if tool_use is None else tool_use
        """The template of chats with functions."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
            self._tool_template = (
                self._template if tool_use is None else environment.from_string(tool_use)
            )
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise UserError(f"the model's chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate | None":
        """The templates in a model's directory; None where it has none.

        Of several by name, ``tool_use`` is for chats with functions, and ``default`` for all others
        (``PreTrainedTokenizerBase.get_chat_template``). Templates in files of their own take the
        place of all others. Raises UserError.
        """
        config = object_or_empty(directory / "tokenizer_config.json")
        within = _by_name(config.get("chat_template"))
        within |= _by_name(object_or_empty(directory / "chat_template.json").get("chat_template"))
        named: dict[str, str] = {}
        for name, file in (("default", "chat_template.jinja"), ("tool_use", TOOL_USE_TEMPLATE)):
            path = directory / file
            if path.is_file():
                try:
                    named[name] = path.read_text(encoding="utf-8")
                except (OSError, ValueError) as error:
                    raise UserError(f"{path} cannot be read: {error}") from error
        named = named or within
        tool_use = named.get("tool_use")
        source = named.get("default", tool_use)
        if source is None:
            return None
        special = {name: each["content"] for name, each in special_tokens(directory).items()}
        return cls(source, special, tool_use)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        late: Callable[[], bool] = lambda: False,
    ) -> str:
        """The prompt's text, special tokens included; raises UserError with the template's reason,
        and TakesTooLong where it is not whole before ``late`` says so.

        ``continue_final_message`` ends it behind the last message's content. ``tools`` are
        functions in OpenAI's form, ``options`` what the template takes beside.
        """
        template = self._template if tools is None else self._tool_template
        shown = [dict(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] = _with_end(shown[-1]["content"])
        try:
            pieces = template.generate(
                {
                    "documents": None,
                    **(options or {}),
                    "messages": shown,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    **self._special_tokens,
                }
            )
            text = "".join(_before(late, pieces))
        except jinja2.TemplateError as error:
            raise UserError(f"the model's chat template refuses these messages: {error}") from None
        except _CANNOT_RENDER as error:
            raise UserError(
                f"the model's chat template cannot render these messages: {error}"
            ) from None
        if not continue_final_message:
            return text
        before, end, behind = text.rpartition(_END)
        if not end:
            raise UserError("the final message cannot be continued: the template leaves it out")
        return before if behind.startswith(_SPACE) else before.rstrip()

    def written_call(self, call: Mapping[str, Any], tool: Mapping[str, Any]) -> str:
        """What the template writes for an answer that is ``call`` (``name``, ``arguments``) of
        ``tool``, in OpenAI's form; empty where it writes none behind a prompt."""
        asked = {"role": "user", "content": "?"}
        called = [{"id": "a1B2c3D4e", "type": "function", "function": call}]
        answer = {"role": "assistant", "content": "", "tool_calls": called}
        try:
            prompt = self.render([asked], tools=[tool])
            whole = self.render([asked, answer], add_generation_prompt=False, tools=[tool])
        except UserError:
            return ""
        return whole.removeprefix(prompt) if whole.startswith(prompt) else ""


def _before(late: Callable[[], bool], pieces: Iterator[str]) -> Iterator[str]:
    for piece in pieces:
        if late():
            raise TakesTooLong("the model's chat template takes too long for these messages")
        yield piece


def _with_end(content: Any) -> Any:
    """The content of a message, a text or a list of one part, with a word behind its text."""
    if isinstance(content, list):
        return [{**part, "text": _with_end(part.get("text"))} for part in content]
    if not (text := str(content or "")).strip():
        raise UserError("the final message cannot be continued: it has no text")
    return text + _END + _SPACE


def _by_name(found: object) -> dict[str, str]:
    """Templates by name: a file has one, or several as a list or an object."""
    if isinstance(found, list):
        each_named = (each for each in found if isinstance(each, dict))
        found = {str(each.get("name")): each.get("template") for each in each_named}
    if not isinstance(found, dict):
        found = {"default": found}
    return {
        name: source
        for name, source in found.items()
        if isinstance(name, str) and isinstance(source, str)
    }
