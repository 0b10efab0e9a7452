"""Writes the grammar of answers that call functions, out of the form that calls have. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client.gateway.errors import bad_request
from client.gateway.structured.call_formats import CallFormat, Hole, MarkOrHole, steps_of
from client.gateway.structured.channels import Channels
from client.gateway.structured.grammar import PLACES_MAX, literal, of_document, of_regex, too_large
from client.gateway.structured.schemas import (
    Path,
    Schema,
    SchemaDocument,
    TooManyPlaces,
    properties_of,
)
from client.gateway.structured.text_patterns import ANYTHING, patterns_of
from dht.messages.session import SESSION_BOUNDS

NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
REFERENCES = ("$dynamicRef", "$recursiveRef", "$ref")
NOT_HERE = frozenset({"allOf", "anyOf", "if", "not", "oneOf", *REFERENCES})
"""What a schema may ask of a string, and no grammar of a text without quotes follows here."""
ALTERNATIVES = (
    "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "const", "enum", "dependencies",
    "dependentRequired", "dependentSchemas", "maxProperties", "minProperties", *REFERENCES,
)  # fmt: skip
"""What a schema may ask of all arguments together, and no grammar follows that has them apart."""
BLANK = r'"\n"?'
BLANKS = r"/[ \n]{0,4}/"
SOMETHING = r"[\s\S]+"
SPACE = r"WS: /[ \t\n]{1,24}/"


def calls_grammar(
    form: CallFormat,
    functions: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool,
    marks: Mapping[str, str],
    channels: Channels | None = None,
    otherwise: str | None = None,
    opened: bool = False,
) -> str:
    """The grammar of an answer that calls ``functions`` (each with ``name``, ``parameters``).

    ``marks`` has the terms of tokens that stand in the model's marks, by their text, where bytes
    do not match them. Without ``required``, the answer may be something else: what the term
    ``otherwise`` says, or text, with calls in it or behind it. Thoughts may stand in front of text
    and calls where nothing is demanded of them; ``opened``: the prompt ends within thoughts. Raises
    ApiError (400) for a schema that cannot be followed in this form, or is too large.
    """
    grammar = _CallsGrammar(form, marks, channels, opened)
    try:
        return grammar.text(functions, required, parallel, otherwise)
    except TooManyPlaces:
        raise too_large() from None


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a function: where its value stands."""

    function: str
    key: str
    document: SchemaDocument
    """The schema of all arguments."""
    ends: tuple[MarkOrHole, ...]
    """What stands behind the value: a break or not, and a mark."""


class _CallsGrammar:
    def __init__(
        self, form: CallFormat, marks: Mapping[str, str], channels: Channels | None, opened: bool
    ) -> None:
        self._form = form
        self._marks = marks
        self._channels = channels
        self._opened = opened
        self._says_at_once = channels.says_at_once if form.in_channel and channels else ""
        self._rules: list[str] = []
        self._left = SESSION_BOUNDS.grammar_bytes_max
        longest = sorted(marks, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if marks else None

    def text(
        self,
        functions: Sequence[Mapping[str, Any]],
        required: bool,
        parallel: bool,
        otherwise: str | None,
    ) -> str:
        """The whole grammar."""
        form, mark, steps = self._form, self._literal, steps_of(self._form.form)
        parallel = parallel and not form.in_channel
        self._add(f"call: {' | '.join(map(self._call, functions))}")
        body = "call"
        if Hole.JSON in steps:
            self._add(SPACE)
            if form.is_list:
                more = '(WS? "," WS? call)*' if parallel else ""
                self._add(f'calls: "[" WS? call {more} WS? "]"')
            body = self._terms(steps, {Hole.JSON: "calls" if form.is_list else "call"})
        first = form.begins or form.opens
        rest = [mark(form.opens)] if form.begins else []
        rest += [body, mark(form.closes)]
        if parallel and form.opens and not form.is_list:
            rest.append(f"({BLANK} {mark(form.opens)} {body} {mark(form.closes)})*")
        behind = " ".join(filter(None, (*rest, mark(form.ends))))
        start = self._start(first, behind, required, otherwise)
        return "\n".join([start, *self._rules])

    def _start(self, first: str, behind: str, required: bool, otherwise: str | None) -> str:
        calls = f"{self._literal(first)} {behind}".strip()
        if required:
            return f"start: {calls}"
        if otherwise is not None:
            self._add(f"otherwise: {otherwise}")
            says = self._literal(self._says_at_once)
            return f"start: {says} otherwise | {calls}"
        self._add(f"free: {self._free(first, behind, calls)}")
        return f"start: {self._thoughts()}"

    def _thoughts(self) -> str:
        """The term of a free answer, with the thoughts that may stand in front of it. Where their
        marks are no tokens, any text has them already, but one that begins with a call."""
        channels = self._channels
        if channels is None or (channels.says and not self._form.in_channel):
            return "free"
        opens, closes = channels.thoughts
        if self._parts(closes)[0] not in self._marks:
            if self._form.opens and not channels.says:
                return "free"
            before = "" if self._opened else _escaped(opens)
            end = channels.closes[0]
            self._add(f"thoughts[lazy]: /{before}{ANYTHING}{_escaped(end)}/")
            then = self._literal(closes.removeprefix(end))
            return f"(thoughts {then} {BLANKS})? free"
        self._add(rf"THOUGHT: /{SOMETHING}/")
        ended = f"{self._literal(closes)} {BLANKS}"
        if self._opened and not channels.says:
            return f"THOUGHT? ({ended} free)?"
        return f"({self._literal(opens)} THOUGHT? {ended})? free"

    def _free(self, first: str, behind: str, calls: str) -> str:
        """The term of a text, with calls in it or behind it."""
        if not first:
            self._add(r"TEXT: /[^{\s][\s\S]*/")
            return f"TEXT? | {calls}"
        if self._says_at_once:
            self._add(f"TEXT: /{SOMETHING}/")
            return f"{self._literal(self._says_at_once)} TEXT? | {calls}"
        parts = self._parts(first)
        if parts[0] in self._marks:
            self._add(f"TEXT: /{SOMETHING}/")
            return f"TEXT? ({calls})?"
        # A terminal takes all that it can: what ends with the mark has to end at the first one.
        escaped = _escaped(parts[0])
        self._add(f"TEXT: /{ANYTHING}/ & ~/{ANYTHING}{escaped}{ANYTHING}/")
        self._add(f"until[lazy]: /{ANYTHING}{escaped}/")
        then = " ".join(self._marks.get(part, literal(part)) for part in parts[1:])
        return f"TEXT? | until {then} {behind}"

    def _call(self, function: Mapping[str, Any]) -> str:
        """The term of a call of ``function``."""
        schema = _schema(function)
        steps = steps_of(self._form.form)
        if Hole.JSON in steps:
            return self._object(function["name"], self._rule(_of_object(schema)))
        holes = {Hole.NAME: literal(function["name"]), Hole.ID: f"/{self._form.id_form}/"}
        if Hole.ARGUMENTS in steps:
            holes[Hole.ARGUMENTS] = self._rule(_of_object(schema))
        else:
            document = SchemaDocument(schema, PLACES_MAX)
            holes[Hole.EACH] = self._arguments(function["name"], document)
        return self._terms(steps, holes)

    def _object(self, name: str, arguments: str) -> str:
        """The term of a JSON object with a function's name and its arguments.

        The arguments are a document of their own, so that their references stay what they are.
        """
        form = self._form
        members = [(form.function_name, literal(json.dumps(name)))]
        members.append((form.arguments_name, arguments))
        if form.id_name:
            members.insert(0, (form.id_name, r'/"[0-9a-zA-Z_-]{1,24}"/'))
        texts = (f'{literal(json.dumps(key))} WS? ":" WS? {value}' for key, value in members)
        inside = ' WS? "," WS? '.join(texts)
        return f'"{{" WS? {inside} WS? "}}"'

    def _arguments(self, function: str, document: SchemaDocument) -> str:
        """The terms of all arguments, in the order of the schema."""
        path = self._followed(document, ())
        schema = document.at(path)
        if wrong := next((name for name in ALTERNATIVES if name in schema), None):
            raise _not_here(function, "parameters", wrong)
        required = schema.get("required")
        required = dict.fromkeys(map(str, required if isinstance(required, list) else ()))
        terms = []
        for key in dict.fromkeys((*properties_of(schema), *required)):
            term = self._argument(function, key, document, (*path, "properties", key))
            terms.append(term if key in required else f"({term})?")
        return " ".join(terms)

    @staticmethod
    def _followed(document: SchemaDocument, path: Path) -> Path:
        """Where the references of ``path`` end; ``path`` itself where they lead nowhere."""
        seen = {path}
        while (to := document.follow(path)) is not None and to not in seen:
            seen.add(to)
            path = to
        return path

    def _argument(self, function: str, key: str, document: SchemaDocument, path: Path) -> str:
        steps = steps_of(self._form.argument)
        at = steps.index(Hole.VALUE)
        before, behind = steps[:at], steps[at + 1 :]
        begins = literal("\n") if before[-1] is Hole.BREAK else ""
        end = 1 + next(n for n, step in enumerate(behind) if isinstance(step, str))
        before = before[:-1] if begins else before
        value = self._value(_Argument(function, key, document, behind[:end]), path)
        holes = {Hole.KEY: self._literal(key)}
        terms = (self._terms(before, holes), begins, value, self._terms(behind[end:], {}))
        return " ".join(filter(None, terms))

    def _value(self, at: "_Argument", path: Path) -> str:
        """The term of a value and of what ends it: each of its alternatives once, as a rule."""
        leaves = at.document.leaves(path)
        terms = dict.fromkeys(self._alternative(at, leaf) for leaf in leaves)
        return f"({' | '.join(terms)})"

    def _alternative(self, at: "_Argument", path: Path) -> str:
        document, schema = at.document, at.document.at(path)
        ends = self._literal("".join(_text_of(step) for step in at.ends))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return self._rule(f"({' | '.join(map(literal, texts))}) {ends}")
        types = document.types_of_leaf(path)
        if types is not None and "string" not in types:
            return self._rule(f"{self._rule(of_document(document, path))} {ends}")
        if wrong := next(iter(sorted(NOT_HERE & schema.keys())), None):
            raise _not_here(at.function, at.key, wrong)
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if not isinstance(least, int) or not (most == "" or isinstance(most, int)):
            raise _not_here(at.function, at.key, "a length that is no number")
        patterns = patterns_of(schema)
        if patterns is None:
            raise _not_here(at.function, at.key, "pattern" if "pattern" in schema else "format")
        return self._any_text(f"{{{int(least)},{most}}}", patterns, at.ends)

    def _any_text(self, lengths: str, patterns: list[str], ends: tuple[MarkOrHole, ...]) -> str:
        """The term of a text of some lengths that matches all ``patterns``, and of what ends it."""
        mark = next(step for step in ends if isinstance(step, str))
        breaks = "\n" if ends[0] is Hole.BREAK else ""
        parts = self._parts(mark)
        name = f"VALUE{len(self._rules)}"
        if parts[0] in self._marks:  # no text has that token
            also = "".join(f" & {of_regex(each)[:-1]}{_escaped(breaks)}/" for each in patterns)
            self._add(rf"{name}: /[\s\S]{lengths}{_escaped(breaks)}/{also}")
            lengths_may_be_none = lengths.startswith("{0,") and not breaks and not patterns
            return f"{name}{'?' if lengths_may_be_none else ''} {self._literal(mark)}"
        # What ends the text stands at its end alone, and what closes the call nowhere in it.
        closes = self._parts(self._form.closes)
        barred = "" if closes[0] in self._marks else _escaped(self._form.closes)
        barred = f" & ~/{ANYTHING}{barred}{ANYTHING}/" if barred else ""
        first, then = parts[0], parts[1:]
        end = _escaped(breaks + first)
        also = "".join(f" & {of_regex(each)[:-1]}{end}/" for each in patterns)
        self._add(
            rf"{name}: /[\s\S]{lengths}{end}/"
            rf" & ~/{ANYTHING}{_escaped(first)}[\s\S]+/{barred}{also}"
        )
        return " ".join((name, *(self._marks.get(part, literal(part)) for part in then)))

    def _add(self, rule: str) -> None:
        self._left -= len(rule.encode(errors="replace")) + 1
        if self._left < 0:
            raise too_large()
        self._rules.append(rule)

    def _rule(self, term: str) -> str:
        """The name of a rule for ``term``: what a grammar reads as JSON stands alone."""
        name = f"part{len(self._rules)}"
        self._add(f"{name}: {term}")
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

    def _parts(self, text: str) -> list[str]:
        """``text`` in parts, each a token that is named or a text without any; one at least."""
        parts = [text] if self._special is None else self._special.split(text)
        return [part for part in parts if part] or [""]

    def _literal(self, text: str) -> str:
        """Exactly ``text``, with its special tokens."""
        parts = self._parts(text)
        return " ".join(self._marks.get(part, literal(part)) for part in parts if part)


def _text_of(step: MarkOrHole) -> str:
    return step if isinstance(step, str) else "\n" if step is Hole.BREAK else ""


def _schema(function: Mapping[str, Any]) -> Schema:
    found: Schema = function.get("parameters") or NO_PARAMETERS
    types = SchemaDocument(found, PLACES_MAX).types_of_leaf(())
    if types is not None and "object" not in types:
        reason = f"{function['name']}: the parameters of a function are an object"
        raise bad_request(f"{reason}, and no {' or '.join(sorted(types))}", "tools")
    return found


def _of_object(schema: Schema) -> str:
    """The term of arguments in JSON: an object, also where the schema forgets to say so."""
    said = {name: value for name, value in schema.items() if value or name not in _MAY_BE_EMPTY}
    return of_document(SchemaDocument({**said, "type": "object"}, PLACES_MAX))


_MAY_BE_EMPTY = ("properties", "required")
"""What programs write as null, or as a list, where there are none."""


def _escaped(text: str) -> str:
    """``text`` within a regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _not_here(function: str, argument: str, name: str) -> Exception:
    return bad_request(
        f"{function}: {argument} has {name}, which cannot be followed in this model's way to write"
        " calls: leave it out, or the call unforced",
        "tools",
    )
