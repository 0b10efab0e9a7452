"""Writes the grammar that an answer has to follow, out of what a request asks for. Pure.

Grammars are Lark in llguidance's dialect, which stages follow (docs/protocol.md).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from client.gateway.errors import ApiError, bad_request
from client.gateway.structured.schemas import LostReference, Path, SchemaDocument, TooManyPlaces

PLACES_MAX = 1 << 14
"""Places in schemas that one grammar is made of: each takes some bytes of the 64 KiB that it may
have."""
WHITESPACE = {"whitespace_pattern": r"[ \t\n]{0,24}"}
"""JSON may be laid out; without a bound a model could go on with whitespace for ever."""


def of_schema(schema: Mapping[str, Any]) -> str:
    """Text that is JSON by ``schema``, as a term of a grammar; raises ApiError (400)."""
    return of_document(SchemaDocument(schema, PLACES_MAX))


def of_document(document: SchemaDocument, path: Path = ()) -> str:
    """Text that is JSON by what ``document`` says at ``path``, as a term of a grammar; raises
    ApiError (400)."""
    try:
        schema = document.alone(path)
    except LostReference as error:
        raise bad_request(f"a JSON schema refers to {str(error)[:200]!r}, which it lacks") from None
    except TooManyPlaces:
        raise too_large() from None
    except RecursionError:
        raise bad_request("a JSON schema nests too deep") from None
    options = schema.get("x-guidance")
    options = options if isinstance(options, Mapping) else {}
    whitespace = {} if "whitespace_flexible" in options else WHITESPACE
    bounded = {**schema, "x-guidance": {**whitespace, **options}}
    try:
        return f"%json {json.dumps(bounded, ensure_ascii=False)}"
    except RecursionError:
        raise bad_request("a JSON schema nests too deep") from None


def too_large() -> ApiError:
    """The error of a schema that would make a grammar too large."""
    return bad_request("a JSON schema refers to too much: its grammar would be too large")


def of_regex(regex: str) -> str:
    """Text that ``regex`` matches as a whole, as a term of a grammar."""
    escaped = re.sub(r"\\.|/|\n", _escaped, regex, flags=re.DOTALL)
    return f"/{escaped}/"


def _escaped(found: "re.Match[str]") -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def of_choice(choices: Sequence[str]) -> str:
    """One of ``choices``, as a term of a grammar."""
    return " | ".join(literal(choice) for choice in choices)


def literal(text: str) -> str:
    """Exactly ``text``, as a term of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def schema_in(given: object, param: str) -> Mapping[str, Any]:
    """The JSON schema in a field, which is an object or its text; raises ApiError (400)."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{param} is not JSON: {error}", param) from None
    if not isinstance(given, Mapping):
        raise bad_request(f"{param} is no JSON schema: an object is taken", param)
    return given
