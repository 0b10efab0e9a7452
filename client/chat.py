"""``python -m client.chat``: talk with a swarm's model in the terminal.

Ctrl-C stops an answer and not the program; Ctrl-D or ``/exit`` ends it.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from client.answer.defaults import defaults_of
from client.answer.generation import GenerationOptions
from client.generate import add_generation, figures, generation_options, show
from client.remembering import remember_swarm, settled_swarm
from client.swarm.long_answer import LongAnswer, can_go_on
from client.swarm.one_answer import Generation
from client.swarm.swarm import Swarm
from client.terminal.route_words import RouteWords
from client.terminal.typed import MANY_LINES, prompt_again, read_message, start_editor
from client.text.chat_prompt import chat_ids, chat_template_of
from client.text.conversation import Conversation, Turn, fitted
from client.text.tokenizer import Tokenizer
from dht.command_line import EXIT_DONE, Parser, command_of, on_interrupt
from dht.errors import NetworkError, SwarmError, UserError
from dht.messages.session import FinishReason
from dht.messages.types import kv_tokens_least
from dht.process.terminal import print_note, printable
from dht.swarm_options import add_model, add_swarm, settle_swarm

if TYPE_CHECKING:
    from client.terminal.answer_view import AnswerView

HISTORY = Path("~/.anabranch/chat_history")
ANSWER_TOKENS = 1024
"""Room that is asked for at a time for an answer whose length nobody said; at first more, while
peers surely have KV for it."""
HELP = (
    "/reset forgets the conversation, /system TEXT sets instructions (without TEXT: none),"
    f" {MANY_LINES} begins and ends a message of many lines, /exit or Ctrl-D leaves;"
    " Ctrl-C stops an answer."
)
PLAIN = "This model has no chat template: it goes on writing your text"


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.chat",
        usage="%(prog)s [anabranch:…] [--model M] [options]",
        description="Talk with a swarm's model. Ctrl-C stops the answer, Ctrl-D leaves.",
        epilog="example: %(prog)s anabranch:…",
        exit_codes="0 left, 2 your mistake, 3 the swarm cannot be reached",
    )
    add = parser.add_argument
    add_swarm(parser)
    add_model(parser)
    add("--system", default="", metavar="TEXT", help="instructions that stand before everything")
    add("--no-history", action="store_true", help=f"do not keep what you type ({HISTORY})")
    add_generation(
        parser,
        length="until it ends",
        temperature="default: as the model says",
        scores=False,
    )
    arguments = parser.parse_args()
    settle_swarm(arguments, model="")
    return arguments


class Chat:
    """One conversation over one swarm; reads lines from ``stdin``, writes to ``stdout``."""

    def __init__(self, swarm: Swarm, options: GenerationOptions, system: str) -> None:
        """``options`` without ``max_new_tokens``: an answer goes on until it ends."""
        text = swarm.text
        if text.tokenizer is None:
            raise UserError(f"{text.name} has no tokenizer here: give its directory")
        self._swarm = swarm
        self._tokenizer: Tokenizer = text.tokenizer
        self._options = options
        self._template = chat_template_of(text)
        self._system = system
        self._conversation = Conversation().with_system(system)
        self._answering: asyncio.Task[None] | None = None
        self._stopping = False
        self._view: AnswerView | None = None

    def interrupt(self) -> None:
        """Stop the answer, if there is one."""
        if self._answering is not None:
            # Both: a cancellation that meets one of the session's own may be taken for that.
            self._stopping = True
            self._answering.cancel()
        else:
            print_note("\n(Ctrl-D or /exit leaves)")
            prompt_again()

    def say(self, text: str) -> None:
        """Tell what the swarm says of itself."""
        if self._view is None:  # it has words of its own for what happens to the answer
            print_note(f"({text})")

    async def run(self) -> None:
        """Lines until the end of input."""
        if self._template is None:
            unused = ", and --system is not used" if self._system else ""
            print_note(f"{PLAIN}{unused}.")
        if sys.stdin.isatty():
            print_note(HELP)
        while (line := await read_message()) is not None:
            match line.strip().partition(" "):
                case ("", _, _):
                    continue
                case ("/exit" | "/quit", _, _):
                    return
                case (command, _, text) if command.startswith("/") and "\n" not in line:
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
        wanted = self._options.max_new_tokens
        least = wanted or min(ANSWER_TOKENS, spec.context_tokens // 2)
        prompt, left_out = fitted(self._conversation, self._encode, spec.context_tokens - least)
        if left_out:
            print_note(f"(the oldest {left_out} turns no longer fit and are left out)")
        if wanted is None:
            whole = min(spec.context_tokens, max(kv_tokens_least(spec), len(prompt) + least))
            wanted = whole - len(prompt)
        running: Generation | LongAnswer
        if can_go_on(self._options):
            running = LongAnswer(
                self._swarm,
                self._tokenizer,
                prompt,
                self._options,
                context_tokens=spec.context_tokens,
                first_tokens=wanted,
                part_tokens=ANSWER_TOKENS,
                continues=self._template is None,
            )
        else:
            running = self._swarm.begin(prompt, replace(self._options, max_new_tokens=wanted))
            running.continues = self._template is None
        shown: list[str] = []
        try:
            with self._showing(running) as show:
                async with aclosing(aiter(running)) as pieces:
                    async for piece in pieces:
                        if self._stopping:
                            raise asyncio.CancelledError
                        shown.append(piece.text)
                        show(piece.text)
        finally:
            self._conversation = self._conversation.said("assistant", "".join(shown))
        answer = running.answer()
        if isinstance(running, LongAnswer):
            if running.cut:
                print_note(f"(cut off: {running.cut})")
        elif answer.finish_reason is FinishReason.LENGTH and self._options.max_new_tokens is None:
            print_note(
                f"(cut off after {wanted} tokens; --max-new-tokens says how many there may be)"
            )
        print_note(figures(answer, self._swarm.view.nodes))

    @contextmanager
    def _showing(self, running: Generation | LongAnswer) -> Iterator[Callable[[str], None]]:
        """What shows pieces of an answer: on a terminal as they come to look, and below them what
        happens to its route; elsewhere as they are."""
        if not sys.stdout.isatty():
            try:
                yield show
            finally:
                sys.stdout.write("\n")
                sys.stdout.flush()
            return
        from rich.console import Console

        from client.terminal.answer_view import answer_view

        words = RouteWords(self._swarm.view.name_of)
        markdown = self._template is not None
        with answer_view(Console(highlight=False), markdown=markdown) as view:
            running.on_route = lambda status: view.note(words.line(status))
            self._view = view
            try:
                yield lambda text: view.write(printable(text))
            finally:
                self._view = None

    def _encode(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        if self._template is None:
            return self._tokenizer.encode(Conversation(turns=tuple(turns)).plain_text())
        messages = [turn.as_message() for turn in turns]
        return chat_ids(self._template, self._tokenizer, messages)


async def main(arguments: argparse.Namespace) -> int:
    """Connect and talk until the end of input."""
    generation_options(arguments)  # mistakes are told before anybody is asked
    if sys.stdin.isatty():
        start_editor(None if arguments.no_history else HISTORY)
    chat: Chat | None = None

    def say(text: str) -> None:
        if chat is None:
            print_note(f"({text})")
        else:
            chat.say(text)

    async with settled_swarm(arguments, say) as swarm:
        remember_swarm(arguments, swarm)
        await swarm.ready_text()
        directory = swarm.text.directory
        if directory is not None:
            for name, value in defaults_of(directory).items():
                setattr(arguments, name, getattr(arguments, name, value))
        chat = Chat(swarm, generation_options(arguments), arguments.system)
        with on_interrupt(chat.interrupt, (signal.SIGINT,)):
            await chat.run()
    return EXIT_DONE


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
