"""Messages as people type and paste them, and the history of what they typed."""

from pathlib import Path

import pytest

from tests.unit.client.terminal.typing_on import Terminal

pytest.importorskip("readline")

PROGRAM = """
import asyncio, sys
from pathlib import Path
from client.terminal.typed import read_message, start_editor

async def main():
    while (message := await read_message()) is not None:
        print(f"<{message!r}>")
    print("left")

start_editor(Path(sys.argv[1]))
asyncio.run(main())
"""
UP, SEARCH = "\x1b[A", "\x12"


def typing(history: Path, term: str = "xterm") -> Terminal:
    return Terminal(PROGRAM, str(history), term=term)


def test_marks_begin_and_end_a_message_of_many_lines(tmp_path: Path) -> None:
    with typing(tmp_path / "history", term="dumb") as terminal:
        terminal.until("> ")
        terminal.type('"""one\n')
        terminal.until("… ")
        terminal.type("\n")
        terminal.until("… ")
        terminal.type('  three"""\n')
        terminal.until(r"<'one\n\n  three'>")
        terminal.until("> ")
        terminal.type('"""on one line"""\n')
        terminal.until("<'on one line'>")
        terminal.until("> ")
        terminal.type('say """ aloud\n')
        terminal.until('<\'say """ aloud\'>')
        terminal.until("> ")
        terminal.type('"""never ended\n')
        terminal.until("… ")
        terminal.type("\x04")
        terminal.until("<'never ended'>")
        terminal.until("> ")
        terminal.type("\x04")
        terminal.until("left")


def test_what_is_pasted_comes_as_one_message(tmp_path: Path) -> None:
    with typing(tmp_path / "history") as terminal:
        terminal.until("> ")
        terminal.type("look: \x1b[200~def f():\n    return 1\n\x1b[201~\r")
        terminal.until(r"<'look: def f():\n    return 1\n'>")


def test_the_history_is_searched_by_beginnings_and_by_parts(tmp_path: Path) -> None:
    history = tmp_path / "kept" / "history"
    with typing(history) as terminal:
        for line in ("hello otter", "the blue boat", "help me"):
            terminal.until("> ")
            terminal.type(f"{line}\r")
            terminal.until(f"<'{line}'>")
        terminal.until("> ")
        terminal.type("\x04")
        terminal.until("left")
        assert terminal.process.wait(60) == 0
    assert history.stat().st_mode & 0o77 == 0, "nobody else may read it"
    with typing(history) as terminal:
        terminal.until("> ")
        terminal.type(f"hel{UP}{UP}\r")
        terminal.until("<'hello otter'>")
        terminal.until("> ")
        terminal.type(f"{SEARCH}blue\r")
        terminal.until("<'the blue boat'>")
