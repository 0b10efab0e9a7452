"""What a JSON schema says of a value's type, through its references and alternatives. Pure.

A schema is a stranger's: each place in it is looked at once, however many references lead there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

from client.gateway.structured.text_patterns import KNOWN_FORMATS

Schema = Mapping[str, Any]
Path = tuple[str, ...]
"""Where a schema is in the document that has it: the steps of a JSON pointer."""
TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that say nothing of a value."""
_HOLDS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    "uniqueItems": (False,),
}
"""What keywords say that holds for every value: programs write it by themselves, and llguidance
knows no such keyword."""
_DRAFT = re.compile(
    r"(?:http://json-schema\.org/draft-0[3-7]|https://json-schema\.org/draft/20(?:19-09|20-12))/schema#?"
)
"""Fixed by JSON Schema: the names of its versions. Programs write others, which nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaConfig:
    """How much of a stranger's schema is looked at, and what counts as a place in it."""

    steps_a_place: int = 32
    """Steps from the root for which a place counts as one more: each question walks them again."""
    chars_a_place: int = 1024
    """Characters of a URI for which it counts as one place more: URIs grow with each ``$id`` on the
    way, and one that is long is a part of all those below it."""
    read_places_max: int = 256
    """Places that are looked at for the type of one argument; beyond, it may be any."""
    arguments_max: int = 1024
    """Arguments of one answer whose types are looked up; those of any more may be any."""


SCHEMAS = SchemaConfig()


class TooManyPlaces(Exception):
    """A schema leads to more places than are looked at."""


class SchemaDocument:
    """A schema with all that it refers to within itself (JSON Schema 2020-12, 8.2)."""

    def __init__(self, root: object, places_max: int) -> None:
        """``places_max`` bounds what is looked at, in places, over all questions together. A deep
        place counts as several, and so does a long URI."""
        self.root: Schema = root if isinstance(root, Mapping) else {}
        self._left = places_max
        self._named: dict[str, Path] | None = None

    def at(self, path: Path) -> Schema:
        """The schema at ``path``; an empty one, which is true of all values, where none is."""
        found = self._find(path)
        return found if isinstance(found, Mapping) else {}

    def _find(self, path: Path) -> object:
        found: object = self.root
        for step in path:
            found = _within(found, step)
        return found

    def _spend(self, path: Path, more: int = 0) -> None:
        """Count a look at ``path``, and ``more`` places. Raises TooManyPlaces."""
        self._left -= 1 + len(path) // SCHEMAS.steps_a_place + more
        if self._left < 0:
            raise TooManyPlaces

    def _joined(self, base: str, reference: str) -> str:
        """The URI that ``reference`` stands for within ``base``. Raises TooManyPlaces."""
        self._spend((), (len(base) + len(reference)) // SCHEMAS.chars_a_place)
        try:
            return urljoin(base, reference)
        except ValueError:
            return reference

    def target(self, path: Path) -> Path | None:
        """Where the reference in the schema at ``path`` leads; None: to nothing in here. Raises
        TooManyPlaces."""
        reference = self.at(path).get("$ref")
        if not isinstance(reference, str):
            return None
        base, uri = self._base(path)
        within, _, fragment = reference.partition("#")
        resource: Path | None = base
        if within:
            uri = self._joined(uri, within)
            resource = self._resources().get(uri)
        if resource is None or not fragment:
            to = resource
        elif fragment.startswith("/"):
            steps = unquote(fragment[1:]).split("/")
            self._spend((), len(steps) // SCHEMAS.steps_a_place)
            to = (*resource, *(step.replace("~1", "/").replace("~0", "~") for step in steps))
        else:
            to = self._resources().get(f"{uri}#{unquote(fragment)}")
        return to if to is not None and isinstance(self._find(to), Mapping) else None

    def _base(self, path: Path) -> tuple[Path, str]:
        """The schema that references at ``path`` are relative to, and its URI: the innermost with
        an ``$id``, or the root."""
        base: Path = ()
        uri = ""
        found: object = self.root
        for depth in range(len(path) + 1):
            if (name := _id_of(found)) is not None:
                base, uri = path[:depth], self._joined(uri, name)
            found = _within(found, path[depth]) if depth < len(path) else None
        return base, uri

    def _resources(self) -> Mapping[str, Path]:
        """Where the schemas are that have an ``$id`` or an ``$anchor``, by their URIs."""
        if self._named is None:
            self._named = {"": ()}
            ahead: list[tuple[Path, Schema, str]] = [((), self.root, "")]
            while ahead:
                path, schema, uri = ahead.pop()
                self._spend(path, len(uri) // SCHEMAS.chars_a_place)
                if (name := _id_of(schema)) is not None:
                    uri = self._joined(uri, name)
                    self._named.setdefault(uri, path)
                if isinstance(anchor := schema.get("$anchor"), str):
                    self._named.setdefault(f"{uri}#{anchor}", path)
                ahead += [((*path, *steps), each, uri) for steps, each in subschemas(schema)]
        return self._named

    def follow(self, path: Path) -> Path | None:
        """Where the reference at ``path`` leads, or the only schema of its ``allOf``; ``path``
        where it has neither, or says more beside them. None: it leads to nothing in here. Raises
        TooManyPlaces."""
        schema = self.at(path)
        said = schema.keys() - ANNOTATIONS
        parts = schema.get("allOf")
        if said == {"allOf"} and isinstance(parts, list) and len(parts) == 1:
            return (*path, "allOf", "0")
        return self.target(path) if said == {"$ref"} else path

    def leaves(self, path: Path) -> list[Path]:
        """The alternatives of a value at ``path``, without those that are only made of others.

        One that cannot be followed is among them as it is. Raises TooManyPlaces.
        """
        found, seen, ahead = [], {path}, [path]
        while ahead:
            here = ahead.pop()
            self._spend(here)
            to = self.follow(here)
            following = [] if to is None or to == here else [to]
            if to == here:
                schema = self.at(here)
                name = next((n for n in ("anyOf", "oneOf") if n in schema), "")
                branches = schema.get(name)
                if schema.keys() - ANNOTATIONS == {name} and isinstance(branches, list):
                    self._spend((), len(branches))
                    following = [(*here, name, str(at)) for at in range(len(branches))]
            if not following:
                found.append(here)
            for each in reversed(following):
                if each not in seen:
                    seen.add(each)
                    ahead.append(each)
        return found

    def types(self, path: Path) -> frozenset[str] | None:
        """The JSON types that a value may have at ``path``; None: any. Raises TooManyPlaces."""
        leaves = self.leaves(path)
        found = [self.types_of_leaf(leaf) for leaf in leaves]
        known = [types for types in found if types is not None]
        return frozenset[str]().union(*known) if found and len(known) == len(found) else None

    def types_of_property(self, key: str) -> frozenset[str] | None:
        """The JSON types that a property of the document's value may have, wherever the document
        describes it; None: any. Raises TooManyPlaces."""
        found: list[frozenset[str] | None] = []
        seen: set[Path] = {()}
        ahead: list[Path] = [()]
        while ahead:
            here = ahead.pop()
            self._spend(here)
            schema = self.at(here)
            if key in properties_of(schema):
                found.append(self.types((*here, "properties", key)))
            parts = [steps for steps, _ in subschemas(schema) if steps[0] in _ALSO_SAID]
            to = self.target(here)
            following = [(*here, *steps) for steps in parts] + ([] if to is None else [to])
            ahead += [each for each in following if each not in seen]
            seen.update(following)
        known = [types for types in found if types is not None]
        return frozenset[str]().union(*known) if found and len(known) == len(found) else None

    def types_of_leaf(self, path: Path) -> frozenset[str] | None:
        """The types that the schema at ``path`` names itself; None: any."""
        schema = self.at(path)
        kind = schema.get("type")
        if isinstance(kind, str):
            return frozenset({kind})
        if isinstance(kind, list):
            return frozenset(each for each in kind if isinstance(each, str))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return frozenset(TYPES.get(type(value), "") for value in values)
        return None

    def alone(self, path: Path = ()) -> Schema:
        """A document that says of its value what this one says at ``path``.

        Its references are pointers from its own root, and each schema that they lead to is in it
        once. Formats that only describe a value, and what holds for all, are left out. Raises
        TooManyPlaces, and LostReference for one that leads to nothing in here.
        """
        if not _is_rewritten(self.at(path)):
            return self.at(path)
        pointers: dict[Path, str] = {path: "#"}
        ahead: list[Path] = []

        def pointer(at: Path) -> str:
            to = self.target(at)
            if to is None:
                raise LostReference(str(self.at(at)["$ref"]))
            if to not in pointers:
                pointers[to] = f"#/$defs/{len(pointers)}"
                ahead.append(to)
            return pointers[to]

        def copied(at: Path, schema: Schema) -> dict[str, Any]:
            self._spend(at)
            left_out = _PLACES | _idle(schema)
            found = {name: value for name, value in schema.items() if name not in left_out}
            if isinstance(schema.get("$ref"), str):
                found["$ref"] = pointer(at)
            for steps, each in subschemas({**found}):
                made = copied((*at, *steps), each)
                if len(steps) == 1:
                    found[steps[0]] = made
                    continue
                inside = found[steps[0]]
                if inside is schema[steps[0]]:
                    inside = found[steps[0]] = inside.copy()
                inside[int(steps[1]) if isinstance(inside, list) else steps[1]] = made
            return found

        document = copied(path, self.at(path))
        definitions: dict[str, Any] = {}
        while ahead:
            to = ahead.pop()
            definitions[pointers[to].rpartition("/")[2]] = copied(to, self.at(to))
        return {**document, "$defs": definitions} if definitions else document


def _within(found: object, step: str) -> object:
    """What a step of a JSON pointer leads to; None where nothing is."""
    if isinstance(found, Mapping):
        return found.get(step)
    if isinstance(found, list) and step.isdecimal() and len(step) < 8:
        return found[int(step)] if int(step) < len(found) else None
    return None


class LostReference(Exception):
    """A reference of a schema that leads to nothing in it."""


def _id_of(schema: object) -> str | None:
    found = schema.get("$id") if isinstance(schema, Mapping) else None
    return found.rstrip("#") if isinstance(found, str) and not found.startswith("#") else None


_DEFINITIONS = ("$defs", "definitions")
_PLACES = frozenset({*_DEFINITIONS, "$id", "$anchor"})
"""What a schema says of where it and others are."""
_ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_ALSO_SAID = ("allOf", "anyOf", "oneOf")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = (*_DEFINITIONS, "dependencies", "dependentSchemas", "patternProperties", "properties")


def subschemas(schema: Schema) -> Iterator[tuple[Path, Schema]]:
    """The schemas directly within one, and the steps to each (JSON Schema 2020-12, 10 and 11)."""
    for name, value in schema.items():
        if name in _ONE and isinstance(value, Mapping):
            yield (name,), value
        elif name in _SEVERAL and isinstance(value, list):
            yield from (
                ((name, str(at)), each)
                for at, each in enumerate(value)
                if isinstance(each, Mapping)
            )
        elif name in _BY_NAME and isinstance(value, Mapping):
            yield from (
                ((name, key), each) for key, each in value.items() if isinstance(each, Mapping)
            )


def with_empty_objects(schema: Any) -> Any:
    """A schema with ``{}`` wherever it has ``[]`` in the place of a schema, or of schemas by
    name: some languages have one empty value for both."""
    if schema == []:
        return {}
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _SEVERAL and isinstance(value, list):
            found[name] = [with_empty_objects(each) for each in value]
        elif name in _ONE:
            found[name] = with_empty_objects(value)
        elif name in _BY_NAME and isinstance(value, Mapping):
            found[name] = {key: with_empty_objects(each) for key, each in value.items()}
        elif name in _BY_NAME and value == []:
            found[name] = {}
    return found


def properties_of(schema: object) -> Mapping[str, Schema]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _idle(schema: Schema) -> set[str]:
    """The keywords of a schema that say nothing that a grammar follows."""
    found = {name for name, values in _HOLDS.items() if name in schema and schema[name] in values}
    for name, is_known in (("format", KNOWN_FORMATS.__contains__), ("$schema", _DRAFT.fullmatch)):
        told = schema.get(name)
        found |= {name} if isinstance(told, str) and not is_known(told) else set()
    return found


def _is_rewritten(schema: Schema) -> bool:
    """Whether a schema, or one within it, refers to anything or has what is to be left out."""
    ahead = [schema]
    while ahead:
        found = ahead.pop()
        if isinstance(found.get("$ref"), str) or _idle(found):
            return True
        ahead += [each for _, each in subschemas(found)]
    return False


class ArgumentTypes:
    """The types of functions' arguments, each looked up once."""

    def __init__(self, parameters: Mapping[str, Schema]) -> None:
        """``parameters`` has the schemas of the functions' arguments by the functions' names."""
        self._parameters = parameters
        self._known: dict[tuple[str, str], frozenset[str] | None] = {}

    def of(self, function: str, key: str) -> frozenset[str] | None:
        """The JSON types that an argument may have; None: any."""
        schema = self._parameters.get(function)
        known = (function, key)
        if schema is None or (
            known not in self._known and len(self._known) >= SCHEMAS.arguments_max
        ):
            return None
        if known not in self._known:
            try:
                self._known[known] = SchemaDocument(
                    schema, SCHEMAS.read_places_max
                ).types_of_property(key)
            except TooManyPlaces:
                self._known[known] = None
        return self._known[known]
