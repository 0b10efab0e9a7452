"""Writes the grammar of answers that call functions, out of the form that calls have. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client.gateway.errors import bad_request
from client.gateway.structured.call_formats import CallFormat, Hole, MarkOrHole, steps_of
from client.gateway.structured.channels import Channels
from client.gateway.structured.grammar import literal, of_schema
from client.gateway.structured.schemas import Schema, properties_of, resolved, types_of

NO_PARAMETERS: Schema = {"type": "object", "properties": {}}
NOT_HERE = ("pattern", "format", "allOf", "not", "if")
"""What a schema may ask of a string, and no grammar of a text without quotes follows here."""
ALTERNATIVES = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties")
"""What a schema may ask of all arguments together, and no grammar follows that has them apart."""
BLANK = r'"\n"?'
ANYTHING = r"[\s\S]*"


def calls_grammar(
    form: CallFormat,
    functions: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool,
    marks: Mapping[str, str],
    channels: Channels | None = None,
) -> str:
    """The grammar of an answer that calls ``functions`` (each with ``name``, ``parameters``).

    ``marks`` has the terms of marks that are special tokens, by the mark. Without ``required``,
    the answer may be text, too, with calls in it or behind it. Raises ApiError (400) for a schema
    that cannot be followed in this form.
    """
    return _CallsGrammar(form, marks, channels).text(functions, required, parallel)


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a function: where its value stands."""

    function: str
    key: str
    root: Schema
    """The schema of all arguments."""
    ends: str
    """What stands behind the value."""


class _CallsGrammar:
    def __init__(
        self, form: CallFormat, marks: Mapping[str, str], channels: Channels | None
    ) -> None:
        self._form = form
        self._marks = marks
        self._says_at_once = channels.says_at_once if form.in_channel and channels else ""
        self._rules: list[str] = []
        self._special = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None

    def text(self, functions: Sequence[Mapping[str, Any]], required: bool, parallel: bool) -> str:
        """The whole grammar."""
        form, mark, steps = self._form, self._literal, steps_of(self._form.form)
        parallel = parallel and not form.in_channel
        if Hole.JSON in steps:
            calls, body = self._json(functions, parallel), self._terms(steps, {Hole.JSON: "call"})
        else:
            calls, body = " | ".join(map(self._call, functions)), "call"
        self._rules.append(f"call: {calls}")
        first = form.begins or form.opens
        rest = [mark(form.opens)] if form.begins else []
        rest += [body, mark(form.closes)]
        if parallel and form.closes:
            rest.append(f"({BLANK} {mark(form.opens)} {body} {mark(form.closes)})*")
        behind = " ".join(filter(None, (*rest, mark(form.ends))))
        return "\n".join([self._start(first, behind, required), *self._rules])

    def _start(self, first: str, behind: str, required: bool) -> str:
        calls = f"{self._literal(first)} {behind}".strip()
        if required:
            return f"start: {calls}"
        if not first:
            self._rules.append(r"TEXT: /[^{\s][\s\S]*/")
            return f"start: TEXT? | {calls}"
        if self._says_at_once:
            self._rules.append(r"TEXT: /[\s\S]+/")
            return f"start: {self._literal(self._says_at_once)} TEXT? | {calls}"
        if first in self._marks:
            self._rules.append(r"TEXT: /[\s\S]+/")
            return f"start: TEXT? ({calls})?"
        # A terminal takes all that it can: what ends with the mark has to end at the first one.
        escaped = _escaped(first)
        self._rules.append(f"TEXT: /{ANYTHING}/ & ~/{ANYTHING}{escaped}{ANYTHING}/")
        self._rules.append(f"until[lazy]: /{ANYTHING}{escaped}/")
        return f"start: TEXT? | until {behind}"

    def _json(self, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
        """Calls as objects with name and arguments: in a list where no mark ends each."""
        inside = self._form.arguments_name
        call: dict[str, Any] = {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"name": {"const": function["name"]}, inside: _schema(function)},
                    "required": ["name", inside],
                    "additionalProperties": False,
                }
                for function in functions
            ]
        }
        if self._form.closes or not self._form.opens:
            return of_schema(call)
        most = {} if parallel else {"maxItems": 1}
        return of_schema({"type": "array", "items": call, "minItems": 1, **most})

    def _call(self, function: Mapping[str, Any]) -> str:
        """The term of a call of ``function``."""
        schema = _schema(function)
        steps = steps_of(self._form.form)
        holes = {Hole.NAME: literal(function["name"])}
        if Hole.ARGUMENTS in steps:
            holes[Hole.ARGUMENTS] = self._rule(of_schema(schema))
        else:
            holes[Hole.EACH] = self._arguments(function["name"], schema)
        return self._terms(steps, holes)

    def _arguments(self, function: str, schema: Schema) -> str:
        """The terms of all arguments, in the order of the schema."""
        schema = resolved(schema, schema)
        if wrong := next((name for name in ALTERNATIVES if name in schema), None):
            raise _not_here(function, "parameters", wrong)
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        described = properties_of(schema)
        terms = []
        for key in dict.fromkeys((*described, *map(str, required))):
            term = self._argument(function, key, described.get(key, {}), schema)
            terms.append(term if key in required else f"({term})?")
        return " ".join(terms)

    def _argument(self, function: str, key: str, schema: object, root: Schema) -> str:
        steps = steps_of(self._form.argument)
        at = steps.index(Hole.VALUE)
        before, behind = steps[:at], steps[at + 1 :]
        begins = literal("\n") if before[-1] is Hole.BREAK else ""
        ends = next(step for step in behind if isinstance(step, str))
        rest = behind[behind.index(ends) + 1 :]
        ends = ("\n" if behind[0] is Hole.BREAK else "") + ends
        before = before[:-1] if begins else before
        value = self._value(_Argument(function, key, root, ends), schema)
        holes = {Hole.KEY: self._literal(key)}
        terms = (self._terms(before, holes), begins, value, self._terms(rest, {}))
        return " ".join(filter(None, terms))

    def _value(self, at: "_Argument", schema: object) -> str:
        """The term of a value and of what ends it."""
        schema, ends = resolved(schema, at.root), self._literal(at.ends)
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list) and branches:
            return "(" + " | ".join(self._value(at, branch) for branch in branches) + ")"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({' | '.join(map(literal, texts))}) {ends}"
        types = types_of(schema, at.root)
        if types is not None and "string" not in types:
            named = {name: at.root[name] for name in ("$defs", "definitions") if name in at.root}
            return f"{self._rule(of_schema({**named, **schema}))} {ends}"
        if wrong := next((name for name in NOT_HERE if name in schema), None):
            raise _not_here(at.function, at.key, wrong)
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if not isinstance(least, int) or not (most == "" or isinstance(most, int)):
            raise _not_here(at.function, at.key, "a length that is no number")
        # What ends the text stands at its end alone, and what closes the call nowhere in it.
        mark, closes = _escaped(at.ends.strip("\n")), _escaped(self._form.closes)
        name = f"VALUE{len(self._rules)}"
        self._rules.append(
            rf"{name}: /[\s\S]{{{least},{most}}}{_escaped(at.ends)}/"
            rf" & ~/{ANYTHING}{mark}[\s\S]+/ & ~/{ANYTHING}{closes}{ANYTHING}/"
        )
        return name

    def _rule(self, term: str) -> str:
        """The name of a rule for ``term``: what a grammar reads as JSON stands alone."""
        name = f"json{len(self._rules)}"
        self._rules.append(f"{name}: {term}")
        return name

    def _terms(self, steps: Sequence[MarkOrHole], holes: Mapping[Hole, str]) -> str:
        terms = []
        for step in steps:
            match step:
                case Hole.BREAK:
                    terms.append(BLANK)
                case str():
                    terms.append(self._literal(step))
                case _:
                    terms.append(holes.get(step, ""))
        return " ".join(filter(None, terms))

    def _literal(self, text: str) -> str:
        """Exactly ``text``, with its special tokens."""
        parts = [text] if self._special is None else self._special.split(text)
        return " ".join(self._marks.get(part, literal(part)) for part in parts if part)


def _schema(function: Mapping[str, Any]) -> Schema:
    found: Schema = function.get("parameters") or NO_PARAMETERS
    return found


def _escaped(text: str) -> str:
    """``text`` within a regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _not_here(function: str, argument: str, name: str) -> Exception:
    return bad_request(
        f"{function}: {argument} has {name}, which cannot be followed in this model's way to write"
        " calls: leave it out, or the call unforced",
        "tools",
    )
