"""A terminal's screen and what scrolled off it, as far as rich moves a cursor about."""

import re

MOVES = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?(\d+)([hl])|\r|\n|[^\x1b\r\n]+")


class Screen:
    """Lines by what was written so far; styles are left out."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> int:
        for found in MOVES.finditer(re.sub(r"\x1b\[[\d;]*m", "", text)):
            word = found.group()
            if word == "\r":
                self._column = 0
            elif word == "\n":
                self._row, self._column = self._row + 1, 0
                if self._row == len(self.lines):
                    self.lines.append("")
            elif found.group(2) == "A":
                self._row -= int(found.group(1) or 1)
                assert self._row >= 0
            elif found.group(2) == "K":
                self.lines[self._row] = ""
            elif found.group(4) is None:
                assert not word.startswith("\x1b"), word
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = (
                    line[: self._column] + word + line[self._column + len(word) :]
                )
                self._column += len(word)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """The lines, without what stands behind and below them."""
        lines = [line.rstrip() for line in self.lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines
