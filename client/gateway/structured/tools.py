"""Calls of functions in answers: how a model writes them, read from its text piece by piece. Pure.

Which way a model writes calls is found in its chat template, never by its name.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from client.gateway.structured.grammar import literal, of_schema

OPENS, CLOSES = "<tool_call>", "</tool_call>"
MISTRAL, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
THINKS, THOUGHT = "<think>", "</think>"
NOT_JSON_CALL = re.compile(r"<function=")
MARKS = (OPENS, CLOSES, MISTRAL, ARGUMENTS, PYTHON_TAG, THINKS, THOUGHT)
"""Tokens that part an answer, and stay in its text though a tokenizer may call them special."""
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")


class ToolFormat(Enum):
    """How a model writes its calls."""

    TAGS = "tags"
    """JSON between ``<tool_call>`` and ``</tool_call>``, as Hermes and Qwen do."""
    MISTRAL = "mistral"
    """Everything behind ``[TOOL_CALLS]``: a JSON list, or names with JSON behind each."""
    BARE = "bare"
    """A whole answer of JSON objects, as Llama 3 does, perhaps behind ``<|python_tag|>``."""


def tool_format(template: str) -> ToolFormat | None:
    """How the model of this chat template writes calls; None where that is not known."""
    if MISTRAL in template:
        return ToolFormat.MISTRAL
    if OPENS in template:
        return None if NOT_JSON_CALL.search(template) else ToolFormat.TAGS
    if PYTHON_TAG in template or ('"parameters"' in template and "tools" in template):
        return ToolFormat.BARE
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that an answer makes. ``arguments`` is a JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """Text between the marks of thinking."""

    text: str


AnswerPart = str | Thought | Call


class AnswerReader:
    """Parts an answer's text into thoughts, text and calls; how the text is cut changes nothing."""

    def __init__(self, calls: ToolFormat | None, *, thinks: bool, opened: bool = False) -> None:
        """``thinks``: whether the answer may begin with thoughts; ``opened``: whether the prompt
        opened them already."""
        self._calls = calls
        self._thinking = thinks
        self._opened = opened
        self._held = ""
        self._begun = False
        """Whether text came that is no space."""
        self._in_call = False

    def push(self, text: str) -> list[AnswerPart]:
        """Parts that became certain with ``text``."""
        self._held += text
        found: list[AnswerPart] = []
        while (step := self._step()) is not None:
            found += step
        return _joined(found)

    def flush(self) -> list[AnswerPart]:
        """The parts that were held back, at the end of the answer."""
        held, self._held = self._held, ""
        if not held:
            return []
        if self._thinking and self._opened:
            return [Thought(text=held)]
        if self._in_call or (self._calls is ToolFormat.BARE and not self._begun):
            found = _calls_in(held.removeprefix(OPENS) if self._in_call else held)
            return list(found) if found else [held]
        return [held]

    def _step(self) -> list[AnswerPart] | None:
        """Parts off the text that is held back; None where more of it has to come first."""
        if not self._held:
            return None
        if self._thinking:
            return self._think()
        match self._calls:
            case ToolFormat.TAGS:
                return self._tagged()
            case ToolFormat.MISTRAL if self._in_call:
                return None
            case ToolFormat.MISTRAL:
                before = self._before(MISTRAL)
                self._in_call = self._held.startswith(MISTRAL)
                return before
            case ToolFormat.BARE if not self._begun:
                return self._bare()
        held, self._held = self._held, ""
        return [held]

    def _think(self) -> list[AnswerPart] | None:
        if not self._opened:
            stripped = self._held.lstrip()
            if stripped.startswith(THINKS):
                self._held, self._opened = stripped[len(THINKS) :], True
                return []
            if THINKS.startswith(stripped):
                return None
            self._thinking = False
            return []
        if self._held.startswith(THOUGHT):
            self._held = self._held[len(THOUGHT) :]
            self._thinking = False
            return []
        before = self._before(THOUGHT)
        return None if before is None else [Thought(text=str(text)) for text in before]

    def _tagged(self) -> list[AnswerPart] | None:
        if not self._held.startswith(OPENS):
            self._in_call = False
            before = self._before(OPENS)
            self._in_call = self._held.startswith(OPENS)
            return before
        self._in_call = True
        end = self._held.find(CLOSES)
        if end < 0:
            return None
        whole, self._held = self._held[: end + len(CLOSES)], self._held[end + len(CLOSES) :]
        self._in_call = False
        found = _calls_in(whole[len(OPENS) : -len(CLOSES)])
        return list(found) if found else [whole]

    def _bare(self) -> list[AnswerPart] | None:
        stripped = self._held.lstrip()
        if stripped.startswith(PYTHON_TAG):
            self._held = stripped[len(PYTHON_TAG) :]
            return []
        if not stripped or stripped[0] == "{" or PYTHON_TAG.startswith(stripped):
            return None
        self._begun = True
        return []

    def _before(self, mark: str) -> list[AnswerPart] | None:
        """Text before ``mark``, or before what may become it; None where there is none."""
        at = self._held.find(mark)
        if at < 0:
            at = len(self._held) - _beginning(self._held, mark)
        if at == 0:
            return [] if self._held.startswith(mark) else None
        text, self._held = self._held[:at], self._held[at:]
        return [text]


def _beginning(text: str, mark: str) -> int:
    """Number of characters at the end of ``text`` that ``mark`` begins with."""
    return next(
        (
            size
            for size in range(min(len(mark) - 1, len(text)), 0, -1)
            if text.endswith(mark[:size])
        ),
        0,
    )


def _joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    found: list[AnswerPart] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(text=last.text + part.text)
        elif part:
            found.append(part)
    return found


def _calls_in(text: str) -> tuple[Call, ...]:
    """The calls that make up the whole of ``text``; none where anything else is in it."""
    text = text.strip()
    if text.startswith(MISTRAL):
        text = text[len(MISTRAL) :].lstrip()
    decoder, found, at = json.JSONDecoder(), [], 0
    try:
        while at < len(text):
            named = _NAMED.match(text, at)
            value, at = decoder.raw_decode(text, named.end() if named else at)
            if named:
                value = {"name": named[1], "arguments": value}
            for each in value if isinstance(value, list) else [value]:
                call = _call(each)
                if call is None:
                    return ()
                found.append(call)
            rest = text[at:].lstrip(" \t\r\n;,").removeprefix(MISTRAL)
            at = len(text) - len(rest)
    except (ValueError, RecursionError):
        return ()
    return tuple(found)


def _call(value: object) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(name=value["name"], arguments=arguments) if isinstance(arguments, str) else None


def calls_grammar(
    form: ToolFormat,
    functions: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool,
    marks: Mapping[str, str],
) -> str:
    """The grammar of an answer that calls ``functions`` (each with ``name``, ``parameters``).

    ``marks`` has the terms of marks that are special tokens, by the mark. Without ``required``,
    the answer may be text, too, with calls in it or behind it.
    """
    inside = "parameters" if form is ToolFormat.BARE else "arguments"
    call: dict[str, Any] = {"anyOf": [_call_schema(function, inside) for function in functions]}

    def mark(text: str) -> str:
        return marks.get(text, literal(text))

    many: dict[str, Any] = {"type": "array", "items": call, "minItems": 1}
    if form is ToolFormat.TAGS:
        begins = OPENS
        rest = f'"\\n" body "\\n" {mark(CLOSES)}'
        rest += f' ("\\n"? {mark(OPENS)} {rest})*' if parallel else ""
        body = call
    elif form is ToolFormat.MISTRAL:
        begins, rest = MISTRAL, "body"
        body = many if parallel else {**many, "maxItems": 1}
    else:
        begins, rest, body = "", "body", call
    rules = [f"body: {of_schema(body)}"]
    calls = f"{mark(begins)} {rest}" if begins else rest
    if required:
        return "\n".join([f"start: {calls}", *rules])
    if not begins:
        rules.append(r"TEXT: /[^{\s][\s\S]*/")
        return "\n".join([f"start: TEXT? | {calls}", *rules])
    if begins in marks:
        rules.append(r"TEXT: /[\s\S]+/")
        return "\n".join([f"start: TEXT? ({calls})?", *rules])
    # A terminal takes all that it can: what ends with the mark has to end at the first one.
    anything, escaped = r"[\s\S]*", re.escape(begins)
    rules.append(f"TEXT: /{anything}/ & ~/{anything}{escaped}{anything}/")
    rules.append(f"until[lazy]: /{anything}{escaped}/")
    return "\n".join([f"start: TEXT? | until {rest}", *rules])


def _call_schema(function: Mapping[str, Any], inside: str) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, inside: parameters},
        "required": ["name", inside],
        "additionalProperties": False,
    }
