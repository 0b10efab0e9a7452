"""A terminal on paper: what is on it, and what scrolled out of it, after rich wrote to it."""

import io
import re

_PARTS = re.compile(r"\x1b\[(?P<number>[?\d;]*)(?P<kind>[A-Za-z])|(?P<char>.)", re.DOTALL)


class Terminal(io.StringIO):
    """Takes what is written to a terminal of this size."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        super().__init__()
        self.width, self.height = width, height

    def isatty(self) -> bool:
        """Say that this is a terminal."""
        return True

    def lines(self) -> list[str]:
        """All lines that somebody would see, those that scrolled out included, without empty ones
        at the end."""
        rows: list[list[str]] = [[]]
        row = column = 0
        for part in _PARTS.finditer(self.getvalue()):
            if part["kind"] is not None:
                top = max(0, len(rows) - self.height)
                if part["kind"] == "A":
                    row = max(top, row - int(part["number"] or 1))
                elif part["kind"] == "K":
                    assert part["number"] == "2", "the whole line"
                    rows[row] = []
                else:
                    assert part["kind"] in "hlm", "nothing else is written here"
                continue
            char = part["char"]
            if char == "\r":
                column = 0
                continue
            if char == "\n" or column == self.width:
                row, column = row + 1, 0
                if row == len(rows):
                    rows.append([])
            if char != "\n":
                here = rows[row]
                here += " " * (column + 1 - len(here))
                here[column] = char
                column += 1
        seen = ["".join(each).rstrip() for each in rows]
        while seen and not seen[-1]:
            seen.pop()
        return seen
