"""Calls of functions as an answer writes them, read by the form of a table. Pure."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from client.gateway.structured.call_formats import CallFormat, Hole, MarkOrHole, steps_of
from client.gateway.structured.schemas import TYPES, ArgumentTypes, Schema

NAME_CHARS_MAX = 64
"""Fixed by OpenAI's interface: maximum characters of a function's name."""
NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{NAME_CHARS_MAX}}}(?![A-Za-z0-9_.-])")
"""The names that functions may have."""
ID = re.compile(r"[0-9A-Za-z_.:-]{1,64}(?![0-9A-Za-z_.:-])")
BARE_NAME = rf"({NAME.pattern})\s*(?:\[CALL_ID\]\s*{ID.pattern}\s*)?(?:\[ARGS\]\s*)?(?=\{{)"
"""A name that arguments in JSON follow. White space matches at one place alone: where two follow
each other, a long stretch is parted between them in all ways."""
_NAMED = re.compile(rf"\s*{BARE_NAME}")
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;,]*")
_PYTHON = {"True": True, "False": False, "None": None}
"""Values that some templates show to their models as Python writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that an answer makes. ``arguments`` is a JSON text."""

    name: str
    arguments: str


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number, strict=False)
"""Models write line breaks into strings as they are."""


def calls_in(
    text: str,
    form: CallFormat,
    parameters: Mapping[str, Schema] | ArgumentTypes,
    *,
    is_whole: bool,
) -> tuple[Call, ...]:
    """The calls that make up all of ``text``, from the mark that opens a call to the one that
    closes it; none where anything else is in it.

    ``parameters`` has the schemas of functions' arguments by the functions' names, or their types.
    An answer that
    ended before the closing mark is not ``is_whole``; a call counts then only if its form shows
    that nothing of it is missing.
    """
    types = parameters if isinstance(parameters, ArgumentTypes) else ArgumentTypes(parameters)
    inside = text.removeprefix(form.opens).strip()
    if is_whole and form.closes:
        inside = inside.removesuffix(form.closes).rstrip()
    steps = steps_of(form.form)
    try:
        if Hole.JSON in steps:
            return tuple(_json_calls(inside, form))
        last = next(step for step in reversed(steps) if step is not Hole.BREAK)
        if last is Hole.EACH and not is_whole:
            return ()
        with suppress(ValueError):
            return tuple(_formed_calls(inside, form, types))
        # Where nothing closes a call, models write it as their forebears did, too: as JSON alone.
        return () if form.closes or form.in_channel else tuple(_json_calls(inside, form))
    except (ValueError, RecursionError):
        return ()


def call_of(name: str, arguments: str) -> Call | None:
    """A call whose arguments came as the text of a JSON object; None where they are none."""
    try:
        return _call(name, json.loads(arguments, parse_constant=_no_number, strict=False))
    except (ValueError, RecursionError):
        return None


def _call(name: str, arguments: object) -> Call:
    """A call with the arguments that were read; raises ValueError."""
    if NAME.fullmatch(name) is None or not isinstance(arguments, dict):
        raise ValueError
    return Call(name=name, arguments=written(arguments))


def written(value: object) -> str:
    """A value as JSON; raises ValueError for a number that JSON has not."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # halves of a character, which JSON may name and UTF-8 may not
        text = json.dumps(value)
    return text


def _json_calls(text: str, form: CallFormat) -> Iterator[Call]:
    """Calls as JSON objects, in a list or one behind the other; raises ValueError."""
    at = 0
    while at < len(text):
        named = _NAMED.match(text, at)
        value, at = _DECODER.raw_decode(text, named.end() if named else at)
        if named:
            yield _call(named[1], value)
        else:
            for each in value if isinstance(value, list) else [value]:
                yield _json_call(each, form)
        at = _behind(_BETWEEN, text, at)
        if form.opens and text.startswith(form.opens, at):
            at = _behind(_SPACE, text, at + len(form.opens))


def _behind(pattern: "re.Pattern[str]", text: str, at: int) -> int:
    """Where the match of ``pattern`` at ``at`` ends."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _json_call(value: object, form: CallFormat) -> Call:
    if not isinstance(value, dict):
        raise ValueError
    name = value.get(form.function_name, value.get("name"))
    if not isinstance(name, str):
        raise ValueError
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}", parse_constant=_no_number, strict=False)
    return _call(name, {} if arguments in (None, []) else arguments)


def _formed_calls(text: str, form: CallFormat, types: ArgumentTypes) -> Iterator[Call]:
    """Calls in a form of names and arguments, one behind the other where a mark begins each;
    raises ValueError."""
    reading = _Reading(text, form, types)
    steps = (step for step in steps_of(form.form) if step is not Hole.BREAK)
    many = isinstance(next(steps), str)
    yield reading.call()
    while reading.at < len(text):
        # Where nothing closes a call, the next one begins with its mark.
        if not (many or (not form.closes and reading.opens())):
            raise ValueError
        yield reading.call()


class _Reading:
    """Reads a text by the marks and holes of a form, from the left to the right."""

    def __init__(self, text: str, form: CallFormat, types: ArgumentTypes) -> None:
        self._text = text
        self._opens = form.opens
        self._form = steps_of(form.form)
        self._argument = steps_of(form.argument)
        self._types = types
        self.at = 0
        """Where the text is read up to."""

    def call(self) -> Call:
        """The next call; raises ValueError."""
        name = ""
        arguments: object = {}
        for step in self._form:
            match step:
                case Hole.NAME:
                    name = self._matched(NAME)
                case Hole.ARGUMENTS:
                    self._skip()
                    arguments, self.at = _DECODER.raw_decode(self._text, self.at)
                case Hole.ID:
                    self._matched(ID)
                case Hole.EACH:
                    arguments = dict(self._each(name))
                case str():
                    self._mark(step)
        self._skip()
        return _call(name, arguments)

    def opens(self) -> bool:
        """Whether the mark that opens a call comes next; it is passed."""
        if not self._text.startswith(self._opens, self.at):
            return False
        self.at += len(self._opens)
        return True

    def _each(self, function: str) -> Iterator[tuple[str, Any]]:
        first = next(step for step in self._argument if isinstance(step, str))
        self._skip()
        while self._text.startswith(first, self.at):
            yield self._key_and_value(function)
            self._skip()

    def _key_and_value(self, function: str) -> tuple[str, Any]:
        key, value = "", ""
        for at, step in enumerate(self._argument):
            match step:
                case Hole.KEY:
                    key = self._until(self._argument[at + 1 :]).strip()
                case Hole.VALUE:
                    if self._argument[at - 1] is Hole.BREAK and self._text.startswith(
                        "\n", self.at
                    ):
                        self.at += 1
                    value = self._until(self._argument[at + 1 :])
                case str():
                    self._mark(step)
        return key, value_of(value, self._types.of(function, key))

    def _skip(self) -> None:
        """Pass white space."""
        self.at = _behind(_SPACE, self._text, self.at)

    def _mark(self, mark: str) -> None:
        self._skip()
        if not self._text.startswith(mark, self.at):
            raise ValueError
        self.at += len(mark)

    def _matched(self, pattern: "re.Pattern[str]") -> str:
        self._skip()
        found = pattern.match(self._text, self.at)
        if found is None:
            raise ValueError
        self.at = found.end()
        return found[0]

    def _until(self, steps: tuple[MarkOrHole, ...]) -> str:
        """The text before the next mark of ``steps``."""
        mark = next(step for step in steps if isinstance(step, str))
        end = self._text.index(mark, self.at)
        found = self._text[self.at : end]
        self.at = end
        return found.removesuffix("\n") if steps[0] is Hole.BREAK else found


def value_of(text: str, types: frozenset[str] | None) -> Any:
    """The value that a text stands for by the types that it may have (None: any): a string is the
    text as it is, anything else is JSON where the text parses."""
    if types == frozenset({"string"}):
        return text
    bare = text.strip()
    try:
        value = json.loads(bare, parse_constant=_no_number, strict=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        if bare not in _PYTHON or types is None:
            return text
        value = _PYTHON[bare]
    kind = TYPES[type(value)]
    if types is None:
        return text if kind == "string" else value
    fits = kind in types or (kind == "integer" and "number" in types)
    return value if "string" not in types or (fits and kind != "string") else text
