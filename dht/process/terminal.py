"""What commands write to people: lines for a terminal, nothing in them that controls it."""

import logging
import re
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from dht.process.news import TEXTS_MAX, News


def cut_between_words(text: str, width: int) -> str:
    """``text`` in lines of at most ``width`` characters; a longer word has a line of its own, so
    that it can be copied."""
    lines = text.split("\n")
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )


def print_lines(text: str, out: TextIO | None = None) -> None:
    """Print text of others' words, to stdout if ``out`` is None; a terminal gets it cut between
    words."""
    out, text = out or sys.stdout, printable(text)
    if out.isatty():
        text = cut_between_words(text, shutil.get_terminal_size().columns)
    print(text, file=out, flush=True)


def print_note(text: str) -> None:
    """Write a line to stderr, beside what a command answers."""
    print_lines(text, sys.stderr)


def console_of_rich(**named: Any) -> Any:
    """A console of rich's that ends a command as ``print`` does where nobody reads on."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich's own ends the process with code 1
            raise BrokenPipeError

    return Piped(**named)


@contextmanager
def saying(text: str) -> Iterator[None]:
    """Show on a terminal, for as long as the context lasts, what the command is doing."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text of others without the characters that control a terminal; line ends and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.levelno == logging.WARNING:  # hivemind renames it for the whole process
            record = logging.makeLogRecord({**record.__dict__, "levelname": "WARNING"})
        # Indented: no line within others' words is taken for a record of its own.
        return printable(super().format(record)).replace("\n", "\n  ")


class StderrHandler(logging.StreamHandler[TextIO]):
    """Logs in printable lines to what ``sys.stderr`` is at that moment.

    While a live view is on the terminal, rich has its own stream there, which writes above the
    view; lines written past that stream would tear the view. The same line is written again after
    :data:`dht.process.news.AGAIN_S` at the earliest, with how often it was left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._news = News()
        self._left_out: Counter[str] = Counter()
        self.setFormatter(_Printable("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless it says what was written a short while ago."""
        text = self.format(record)
        if not self._news.takes_again(text, time.monotonic()):
            self._left_out[text] += 1
            return
        self.stream = sys.stderr
        if left_out := self._left_out.pop(text, 0):
            record = logging.makeLogRecord(
                {**record.__dict__, "msg": f"{record.getMessage()} ({left_out} times more)"}
            )
            record.args = ()
        if len(self._left_out) > TEXTS_MAX:
            self._left_out.clear()
        super().emit(record)
