"""The chat's prompt on a terminal."""

import signal

import pytest

from tests.unit.client.terminal.typing_on import SAID_S, Terminal

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


@pytest.mark.parametrize("editor", ["readline", "none"])
def test_ctrl_c_at_a_prompt_says_how_to_leave_and_prompts_again(editor: str) -> None:
    with Terminal(PROGRAM, editor) as terminal:
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
