"""Writes the grammar that an answer has to follow, out of what a request asks for. Pure.

Grammars are Lark in llguidance's dialect, which stages follow (docs/protocol.md).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from client.gateway.errors import bad_request

WHITESPACE = {"whitespace_pattern": r"[ \t\n]{0,24}"}
"""JSON may be laid out; without a bound a model could go on with whitespace for ever."""


def of_schema(schema: Mapping[str, Any]) -> str:
    """Text that is JSON by ``schema``, as a term of a grammar; raises ApiError (400)."""
    options = schema.get("x-guidance")
    options = options if isinstance(options, Mapping) else {}
    whitespace = {} if "whitespace_flexible" in options else WHITESPACE
    bounded = {**schema, "x-guidance": {**whitespace, **options}}
    try:
        return f"%json {json.dumps(bounded, ensure_ascii=False)}"
    except RecursionError:
        raise bad_request("a JSON schema nests too deep") from None


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
