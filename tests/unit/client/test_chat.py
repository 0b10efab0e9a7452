"""The chat's prompt on a terminal."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

PROGRAM = """
import asyncio, signal, sys
from types import SimpleNamespace
from client.chat import Chat, on_interrupt
from client.answer.generation import GenerationOptions
from client.text.tokenizer import ModelText

if "readline" in sys.argv:
    import readline

async def main():
    swarm = SimpleNamespace(text=ModelText(name="paper", tokenizer=object()))
    chat = Chat(swarm, GenerationOptions(), "")
    with on_interrupt(chat.interrupt, (signal.SIGINT,)):
        await chat.run()
    print("left")

asyncio.run(main())
"""
SAID_S = 60.0


class Terminal:
    """The chat on a terminal of its own; nobody is asked anything."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=Path(__file__).parents[3],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str) -> str:
        """What is shown up to and with ``text``, since the last look."""
        while text not in self.shown:
            ready, _, _ = select.select([self._ours], [], [], SAID_S)
            assert ready, f"{text!r} never came after {self.shown!r}"
            self.shown += os.read(self._ours, 4096).decode().replace("\r\n", "\n")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.parametrize("editor", ["readline", "none"])
def test_ctrl_c_at_a_prompt_says_how_to_leave_and_prompts_again(editor: str) -> None:
    terminal = Terminal(editor)
    try:
        terminal.until("\n> ")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.until("\n> ") == "\n(Ctrl-D or /exit leaves)\n> "
        if editor == "readline":
            terminal.type("/hel")
            terminal.until("/hel")
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.until("\n> /hel") == "\n(Ctrl-D or /exit leaves)\n> /hel"
            terminal.type("p\n")
            assert "forgets the conversation" in terminal.until("\n> ")
        terminal.type("\x04")
        assert terminal.until("left") == "\nleft", "what comes next begins its own line"
        assert terminal.process.wait(SAID_S) == 0
    finally:
        terminal.close()
