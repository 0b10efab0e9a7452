"""Where a text stands in the JSON that it has in it, piece by piece. Pure."""

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["\\{}\[\]]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class JsonText:
    """Follows strings and brackets of JSON that begins with ``{``, or with ``[`` if that is meant;
    what is before and between such values is passed."""

    def __init__(self, opens: str = "{") -> None:
        """``opens`` has the brackets that a value may begin with."""
        self._opens = opens
        self._skipped = False
        """Whether the next character belongs to an escape."""
        self.depth = 0
        """Brackets that are open."""
        self.in_string = False

    def push(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self.step(text, at)

    def step(self, text: str, at: int) -> int:
        """Follow ``text`` from ``at`` on through the next character that changes anything; returns
        where it was read up to."""
        if self._skipped:
            self._skipped = False
            return at + 1
        found = (_IN_STRING if self.in_string else _OUTSIDE).search(text, at)
        if found is None:
            return len(text)
        mark = found[0]
        if self.in_string:
            self.in_string = mark != '"'
            self._skipped = mark == "\\"
        elif not self.depth:
            self.depth = int(mark in self._opens)
        elif mark == '"':
            self.in_string = True
        elif mark in "{[":
            self.depth += 1
        elif mark in "}]":
            self.depth -= 1
        return found.end()


def escaped(text: str) -> str:
    """``text`` as it stands within a JSON string, without what ends one: models write line breaks
    into strings as they are."""
    return _CONTROL.sub(lambda found: _ESCAPES.get(found[0], f"\\u{ord(found[0]):04x}"), text)
