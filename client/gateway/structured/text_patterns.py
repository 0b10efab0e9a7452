"""What a JSON schema asks of a text, as regular expressions that match all of it. Pure.

For values that stand in answers without quotes, where no grammar of JSON follows the schema.
"""

import re
from collections.abc import Mapping
from typing import Any

ANYTHING = r"[\s\S]*"
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OF_DAYS = r"[0-9]+(D|M([0-9]+D)?|Y([0-9]+M([0-9]+D)?)?)"
_OF_HOURS = r"T[0-9]+(S|M([0-9]+S)?|H([0-9]+M([0-9]+S)?)?)"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}[Tt ]{_TIME}",
    "duration": f"P({_OF_DAYS}({_OF_HOURS})?|{_OF_HOURS}|[0-9]+W)",
    "email": rf"[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]+@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "time": _TIME,
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Formats by name (JSON Schema validation 2020-12, 7.3)."""
KNOWN_FORMATS = frozenset({*FORMATS, "ipv6", "unknown"})
"""Those that a grammar of JSON follows; any other only describes a value (7.2.3)."""
_CLASSES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL)
"""Escapes and classes. One that never ends goes on to the end of the text: each of many would else
be looked for through all that is behind it."""


def patterns_of(schema: Mapping[str, Any]) -> list[str] | None:
    """The expressions that a text has to match by ``format`` and ``pattern``; None: one of them
    cannot be written so."""
    found = []
    named = schema.get("format")
    if isinstance(named, str) and named in KNOWN_FORMATS - {"unknown"}:
        if named not in FORMATS:
            return None
        found.append(FORMATS[named])
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        whole = _whole(pattern)
        if whole is None:
            return None
        found.append(whole)
    return found


def _whole(pattern: str) -> str | None:
    """An expression that matches a text in which ``pattern`` is found; None: it has ends of the
    text at other places than its own."""
    bare = _CLASSES.sub("x", pattern)
    begins, ends = bare.startswith("^"), bare.endswith("$")
    inside = bare[begins : len(bare) - ends]
    is_split = (begins or ends) and "|" in re.sub(r"\([^()]*\)", "", inside)
    if "^" in inside or "$" in inside or is_split:
        return None
    core = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else ANYTHING}({core}){'' if ends else ANYTHING}"
