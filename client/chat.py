"""``python -m client.chat``: talk with a swarm's model in the terminal.

Ctrl-C stops an answer and not the program; Ctrl-D or ``/exit`` ends it.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import aclosing, suppress
from pathlib import Path

from client.answer.generation import NEW_TOKENS_DEFAULT, GenerationOptions
from client.generate import add_generation, figures, generation_options, print_note, show
from client.remembering import remember_swarm, settled_swarm
from client.swarm.swarm import Swarm
from client.text.chat_template import ChatTemplate
from client.text.conversation import Conversation, Turn, fitted
from client.text.tokenizer import Tokenizer
from dht.command_line import (
    EXIT_DONE,
    Parser,
    add_model,
    add_swarm,
    on_interrupt,
    run_command,
    settle_swarm,
)
from dht.errors import NetworkError, SwarmError, UserError

HISTORY = Path("~/.anabranch/chat_history")
HISTORY_LINES_MAX = 1000
PROMPT = "> "
HELP = (
    "/reset forgets the conversation, /system TEXT sets instructions (without TEXT: none),"
    " /exit or Ctrl-D leaves; Ctrl-C stops an answer."
)
PLAIN = "This model has no chat template: it goes on writing your text"


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.chat",
        usage="%(prog)s [anabranch:…] [--model M] [options]",
        description="Talk with a swarm's model. Ctrl-C stops the answer, Ctrl-D leaves.",
        epilog="example: %(prog)s anabranch:… --model models/brook",
        exit_codes="0 left, 2 your mistake, 3 the swarm cannot be reached",
    )
    add = parser.add_argument
    add_swarm(parser)
    add_model(parser)
    add("--system", default="", metavar="TEXT", help="instructions that stand before everything")
    add("--no-history", action="store_true", help=f"do not keep what you type ({HISTORY})")
    add_generation(parser)
    arguments = parser.parse_args()
    settle_swarm(arguments, model="")
    return arguments


class Chat:
    """One conversation over one swarm; reads lines from ``stdin``, writes to ``stdout``."""

    def __init__(self, swarm: Swarm, options: GenerationOptions, system: str) -> None:
        text = swarm.text
        if text.tokenizer is None:
            raise UserError(f"{text.name} has no tokenizer here: give its directory")
        self._swarm = swarm
        self._tokenizer: Tokenizer = text.tokenizer
        self._options = options
        self._template = None if text.directory is None else ChatTemplate.load(text.directory)
        self._system = system
        self._conversation = Conversation().with_system(system)
        self._answering: asyncio.Task[None] | None = None
        self._stopping = False

    def interrupt(self) -> None:
        """Stop the answer, if there is one."""
        if self._answering is not None:
            # Both: a cancellation that meets one of the session's own may be taken for that.
            self._stopping = True
            self._answering.cancel()
        else:
            print_note("\n(Ctrl-D or /exit leaves)")
            _prompt_again()

    async def run(self) -> None:
        """Lines until the end of input."""
        if self._template is None:
            unused = ", and --system is not used" if self._system else ""
            print_note(f"{PLAIN}{unused}.")
        if sys.stdin.isatty():
            print_note(HELP)
        while (line := await _read_line()) is not None:
            match line.strip().partition(" "):
                case ("", _, _):
                    continue
                case ("/exit" | "/quit", _, _):
                    return
                case (command, _, text) if command.startswith("/"):
                    print_note(f"({self._command(command, text.strip())})")
                case _:
                    await self._turn(line)

    def _command(self, command: str, text: str) -> str:
        """Do what a line with a slash says; returns what was done, in words."""
        if command == "/help":
            return HELP
        if command == "/reset":
            turns = sum(turn.role == "user" for turn in self._conversation.turns)
            self._conversation = Conversation().with_system(self._system)
            kept = "; the instructions stay" if self._system else ""
            return f"forgot {turns} {'message' if turns == 1 else 'messages'} of yours{kept}"
        if command != "/system":
            return f"there is no command {command[:40]}; {HELP}"
        if text and self._template is None:
            return f"{PLAIN}, and takes no instructions"
        self._system = text
        self._conversation = self._conversation.with_system(text)
        return "instructions set, from the next answer on" if text else "there are no instructions"

    async def _turn(self, line: str) -> None:
        before = self._conversation
        self._conversation = before.said("user", line)
        self._stopping = False
        self._answering = asyncio.create_task(self._answer(), name="answer")
        try:
            await self._answering
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            print_note("\n(stopped)")
        except (UserError, SwarmError, NetworkError) as error:
            self._conversation = before
            print_note(f"error: {' '.join(str(error).split())}")
        finally:
            self._answering = None

    async def _answer(self) -> None:
        """One answer; what was shown of it is remembered however it ends."""
        spec = await self._swarm.reader.ready_spec()
        room = spec.context_tokens - (self._options.max_new_tokens or NEW_TOKENS_DEFAULT)
        prompt, left_out = fitted(self._conversation, self._encode, room)
        if left_out:
            print_note(f"(the oldest {left_out} turns no longer fit and are left out)")
        running = self._swarm.begin(prompt, self._options)
        shown: list[str] = []
        try:
            async with aclosing(aiter(running)) as pieces:
                async for piece in pieces:
                    if self._stopping:
                        raise asyncio.CancelledError
                    shown.append(piece.text)
                    show(piece.text)
        finally:
            self._conversation = self._conversation.said("assistant", "".join(shown))
        sys.stdout.write("\n")
        sys.stdout.flush()
        print_note(figures(running.answer()))

    def _encode(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        if self._template is None:
            return self._tokenizer.encode(Conversation(turns=tuple(turns)).plain_text())
        text = self._template.render([turn.as_message() for turn in turns])
        return self._tokenizer.encode(text, special_tokens=False)


async def _read_line() -> str | None:
    """A line without its end, or None at the end of input; the loop goes on meanwhile."""
    prompt = PROMPT if sys.stdin.isatty() else ""
    try:
        return await asyncio.to_thread(input, prompt)
    except EOFError:
        if prompt:
            print(flush=True)  # what comes next begins its own line
        return None
    except UnicodeDecodeError:
        raise UserError("what was typed is not valid UTF-8 text") from None


def _prompt_again() -> None:
    """The prompt below a note, with what was typed so far: who reads the line knows of no note."""
    if sys.stdin.isatty():
        editor = sys.modules.get("readline")  # without it the terminal drops what was typed
        typed = editor.get_line_buffer() if editor is not None else ""
        print(f"{PROMPT}{typed}", end="", flush=True)


def _keep_history(path: Path) -> None:
    """Lines typed before, for the arrow keys; only where there is a terminal and readline."""
    import atexit

    path = path.expanduser()
    try:
        import readline
    except ImportError:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES_MAX)

    def save() -> None:
        with suppress(OSError):
            readline.write_history_file(path)

    atexit.register(save)


async def main(arguments: argparse.Namespace) -> int:
    """Connect and talk until the end of input."""
    options = generation_options(arguments)
    if sys.stdin.isatty() and not arguments.no_history:
        _keep_history(HISTORY)
    async with settled_swarm(arguments, lambda text: print_note(f"({text})")) as swarm:
        remember_swarm(arguments, swarm)
        await swarm.ready_text()
        chat = Chat(swarm, options, arguments.system)
        with on_interrupt(chat.interrupt, (signal.SIGINT,)):
            await chat.run()
    return EXIT_DONE


def run() -> int:
    """Run the command; returns its exit code."""
    return run_command(parse, main)


if __name__ == "__main__":
    sys.exit(run())
