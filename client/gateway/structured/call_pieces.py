"""Calls as they come, in the form of a table: the name, then the arguments in pieces. Pure.

What is told cannot be taken back: a call that turns out to be broken stays as it was told.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from client.gateway.structured.call_formats import CallFormat, Hole, MarkOrHole, steps_of
from client.gateway.structured.calls import BARE_NAME, ID, NAME, Call, value_of, written
from client.gateway.structured.json_text import JsonText, escaped
from client.gateway.structured.schemas import ArgumentTypes

HEAD_CHARS_MAX = 1024
"""Characters before the arguments of a call; behind more, calls are told when they are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegun:
    """A call begins. Its arguments follow as :class:`CallGrows`."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrows:
    """The next piece of the JSON text of the arguments of the call that began last."""

    arguments: str


CallPiece = CallBegun | CallGrows


class CallPieces:
    """Reads the text of calls from behind the mark that opens them."""

    def __init__(self, form: CallFormat, types: ArgumentTypes, name: str = "") -> None:
        """``name``: the function, where it stood before this text, which is its arguments."""
        self.begun = 0
        """Number of calls that were told of."""
        self._form = form
        self._types = types
        self._name = name
        self._text = ""
        """What came and is not read yet."""
        self._found: list[CallPiece] = []
        self._told: list[str] = []
        """The arguments of the call that began last, as far as they were told."""
        self._is_complete = True
        """Whether they are all of them."""
        self._is_lost = False
        """Whether nothing more is understood."""
        self._reading = self._read_json() if form.is_json else self._read_tags()

    def push(self, text: str) -> list[CallPiece]:
        self._found = []
        if not self._is_lost:
            self._text += text
            self._is_lost = next(self._reading, True) is not None
        return _merged(self._found)

    def rest_of(self, call: Call) -> list[CallPiece]:
        """What was not told of the call that began last, which was read as a whole."""
        told = "".join(self._told)
        rest = call.arguments.removeprefix(told)
        if self._is_complete or len(rest) + len(told) != len(call.arguments):
            return []
        return [CallGrows(arguments=rest)]

    def _begin(self, name: str) -> None:
        self.begun += 1
        self._name, self._is_complete = name, False
        self._told.clear()
        self._found.append(CallBegun(name=name))

    def _grow(self, arguments: str) -> None:
        if arguments:
            self._told.append(arguments)
            self._found.append(CallGrows(arguments=arguments))

    # These read what there is and yield for more; one that ends understands no more.

    def _head(self, pattern: "re.Pattern[str]") -> Iterator[None]:
        """Read up to the arguments, and begin a call; ends without one where none comes."""
        while (found := pattern.match(self._text)) is None:
            if len(self._text) > HEAD_CHARS_MAX:
                return
            yield
        self._text = self._text[found.end() :]
        self._begin(next(each for each in found.groups() if each is not None))

    def _read_json(self) -> Iterator[None]:
        pattern = None if self._form.in_channel else _json_head(self._form)
        while True:
            began = self.begun
            if pattern is None:
                self._begin(self._name)
            else:
                yield from self._head(pattern)
            if self.begun == began:
                return
            yield from self._json_arguments()
            if not self._is_complete or pattern is None:
                return

    def _json_arguments(self) -> Iterator[None]:
        place = JsonText()
        while True:
            text, at = self._text, 0
            if not self._told:
                text = text.lstrip()
                if text and not text.startswith("{"):
                    return
            while at < len(text):
                in_string, before = place.in_string, at
                at = place.step(text, at)
                self._grow(escaped(text[before:at]) if in_string else text[before:at])
                if not place.depth:
                    self._text, self._is_complete = text[at:], True
                    return
            self._text = ""
            yield

    def _read_tags(self) -> Iterator[None]:
        head, behind = _tags_head(self._form), _behind_arguments(self._form)
        argument = steps_of(self._form.argument)
        first = next(step for step in argument if isinstance(step, str))
        at = argument.index(Hole.VALUE)
        key = re.compile(_pattern(argument[:at]))
        while True:
            began = self.begun
            yield from self._head(head)
            if self.begun == began:
                return
            between = "{"
            while True:
                self._text = self._text.lstrip()
                if self._text.startswith(first):
                    while (found := key.match(self._text)) is None:
                        if len(self._text) > HEAD_CHARS_MAX:
                            return
                        yield
                    if argument[at - 1] is Hole.BREAK and found.end() == len(self._text):
                        yield  # the line break behind the key may come next
                        continue
                    self._text = self._text[found.end() :]
                    name = found[1].strip()
                    self._grow(f"{between}{json.dumps(name, ensure_ascii=False)}: ")
                    between = ", "
                    yield from self._value(name, argument[at + 1 :])
                elif behind and self._text.startswith(behind):
                    self._text = self._text[len(behind) :]
                    break
                elif not any(mark.startswith(self._text) for mark in (first, behind) if mark):
                    return
                else:
                    yield
            self._grow("{}" if between == "{" else "}")
            self._is_complete = True

    def _value(self, name: str, ends: tuple[MarkOrHole, ...]) -> Iterator[None]:
        """Read a value and what ends it: a text piece by piece, anything else once it is whole."""
        mark = next(step for step in ends if isinstance(step, str))
        types = self._types.of(self._name, name)
        is_text = types == frozenset({"string"})
        held = len(mark) + 1  # the mark and the line break before it may have begun
        parts: list[str] = []
        if is_text:
            self._grow('"')
        while (end := self._text.find(mark)) < 0:
            certain = max(0, len(self._text) - held)
            value, self._text = self._text[:certain], self._text[certain:]
            if is_text:
                self._grow(_in_string(value))
            else:
                parts.append(value)
            yield
        value, self._text = self._text[:end], self._text[end + len(mark) :]
        value = value.removesuffix("\n") if ends[0] is Hole.BREAK else value
        if is_text:
            self._grow(_in_string(value) + '"')
        else:
            self._grow(written(value_of("".join((*parts, value)), types)))


def _merged(pieces: list[CallPiece]) -> list[CallPiece]:
    """The same pieces, with those joined that grow one call: each bracket may be one."""
    found: list[CallPiece] = []
    for grows, group in groupby(pieces, lambda piece: isinstance(piece, CallGrows)):
        same = list(group)
        texts = [piece.arguments for piece in same if isinstance(piece, CallGrows)]
        found += [CallGrows(arguments="".join(texts))] if grows else same
    return found


def _in_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _pattern(steps: tuple[MarkOrHole, ...]) -> str:
    """A regular expression of the steps before arguments or a value, as they are read.

    No two parts in a row match the same characters: a long stretch of white space is not parted
    between them in all ways. A key takes the white space behind it along.
    """
    found = []
    for at, step in enumerate(steps):
        match step:
            case Hole.BREAK:
                # All but a value pass white space themselves.
                found.append(r"\n?" if at + 1 == len(steps) else "")
            case Hole.NAME:
                found.append(rf"\s*({NAME.pattern})")
            case Hole.ID:
                found.append(rf"\s*{ID.pattern}")
            case Hole.KEY:
                found.append(r"([^<>\"]{1,256})")
            case str():
                blanks = "" if at and steps[at - 1] is Hole.KEY else r"\s*"
                found.append(f"{blanks}{re.escape(step.strip())}")
    return "".join(found)


def _json_head(form: CallFormat) -> "re.Pattern[str]":
    """What stands before the arguments of a call, behind what ended the last one."""
    opens = f"{re.escape(form.opens)}|" if form.opens else ""
    # Possessive: nothing that follows begins with what it takes, but for white space.
    between = rf"(?:{opens}[\s\[\],;}}])*+"
    steps = steps_of(form.form)
    if Hole.JSON not in steps:
        before = _pattern(steps[: steps.index(Hole.ARGUMENTS)])
        return re.compile(rf"{between}{before}\s*(?=\{{)")
    name = rf'"{re.escape(form.function_name)}"\s*:\s*"({NAME.pattern})"'
    number = rf'(?:"{re.escape(form.id_name)}"\s*:\s*(?:"[^"\\]*"|[0-9]+)\s*,\s*)?'
    head = rf'\{{\s*{number}{name}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
    return re.compile(rf"{between}(?:{head}|{BARE_NAME})" if form.is_list else rf"{between}{head}")


def _tags_head(form: CallFormat) -> "re.Pattern[str]":
    steps = steps_of(form.form)
    name = _pattern(steps[: steps.index(Hole.EACH)])
    # A name may go on: what is behind it tells that it does not.
    return re.compile(
        rf"{name}(?=[\s<])" if Hole.NAME is steps[steps.index(Hole.EACH) - 1] else name
    )


def _behind_arguments(form: CallFormat) -> str:
    """The mark behind the last argument; empty: the call's own end."""
    steps = steps_of(form.form)
    rest = steps[steps.index(Hole.EACH) + 1 :]
    return next((step.strip() for step in rest if isinstance(step, str)), "") or form.closes
