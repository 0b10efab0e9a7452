"""``python -m client.generate``: text streams to stdout, figures go to stderr.

``--json`` prints one object instead: ``text``, ``token_ids``, ``prompt_tokens``,
``finish_reason``, ``ttft_s``, ``tpot_s``, of which ``computed_s`` and ``waited_s``, ``route``,
``plan_version``, ``failovers``, ``fingerprint``, ``cached_tokens``, ``drafted_tokens``; where they
were asked also ``logprobs`` and ``prompt_logprobs`` as lists of ``{token_id, logprob, top}``.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from client.answer.answer import Answer, PrefixCache
from client.answer.generation import FLAGS, NEW_TOKENS_DEFAULT, GenerationOptions
from client.pages.clean import namer
from client.remembering import remember_swarm, settled_swarm
from client.text.chat_prompt import chat_template_of
from dht.command_line import EXIT_DONE, Parser, command_of
from dht.errors import UserError
from dht.messages.session import Priority
from dht.messages.types import NodeRecord, layers_text
from dht.process.terminal import print_note, printable
from dht.swarm_options import add_model, add_swarm, settle_swarm

USUAL = frozenset({"max-new-tokens", "temperature", "top-k", "top-p", "seed", "stop"})
"""Options that most people give; ``--help-all`` shows the rest."""
SCORES = ("logprobs", "prompt_logprobs")


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.generate",
        usage="%(prog)s [anabranch:…] --prompt TEXT [options]",
        description="Ask a swarm for text. The text streams to stdout, figures go to stderr.",
        epilog='example: %(prog)s anabranch:… --prompt "One morning"',
        exit_codes="0 done, 2 your mistake, 3 not served now, 130 interrupted",
    )
    add_swarm(parser)
    add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what you ask; - reads it from stdin")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids instead of text")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of chatting")
    add_generation(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for slow peers and missing layers (60)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    settle_swarm(arguments, model="")
    return arguments


def add_generation(
    parser: Parser,
    *,
    length: str = str(NEW_TOKENS_DEFAULT),
    temperature: str = "default",
    scores: bool = True,
) -> None:
    """Flags with the names of :class:`GenerationOptions`; what is not given keeps its default.

    ``length`` and ``temperature`` say in the help what holds without these two. ``scores`` adds
    log probabilities, for commands that print them.
    """

    def add(name: str, **named: Any) -> None:
        (parser.add_argument if name in USUAL else parser.add_rare)(f"--{name}", **named)

    add(
        "priority",
        choices=tuple(Priority),
        default=argparse.SUPPRESS,
        help="high may use memory that full peers keep free, and is run first (normal)",
    )
    said = {"max_new_tokens": length, "temperature": temperature}
    for option, (kind, flag) in FLAGS.items():
        if not scores and option in SCORES:
            continue
        text = f"{flag.help} ({said[option]})" if option in said else flag.help
        name = option.replace("_", "-")
        add(name, type=kind, default=argparse.SUPPRESS, metavar=flag.metavar, help=text)
    repeated: tuple[tuple[str, str, str], ...] = (
        ("logit-bias", "ID:BIAS", "added to a token's logit; may be repeated"),
        ("stop", "TEXT", "end before this text; may be repeated"),
        ("stop-token-ids", "ID", "end with this token; may be repeated"),
    )
    for name, metavar, text in repeated:
        add(name, action="append", default=[], metavar=metavar, help=text)
    add(
        "no-speculation",
        dest="speculate",
        action="store_false",
        default=argparse.SUPPRESS,
        help="let no stage draft tokens; the answer is the same",
    )
    add(
        "prefix-cache",
        choices=tuple(PrefixCache),
        default=argparse.SUPPRESS,
        help="whose requests may reuse the KV of this prompt (own)",
    )
    add("ignore-eos", action="store_true", help="continue after end-of-text")


def generation_options(arguments: argparse.Namespace) -> GenerationOptions:
    """The options among the arguments; raises UserError."""
    given = {
        name.name: getattr(arguments, name.name)
        for name in fields(GenerationOptions)
        if name.name in arguments
    }
    try:
        given["stop_token_ids"] = [int(token_id) for token_id in arguments.stop_token_ids]
        pairs = [pair.split(":") for pair in arguments.logit_bias]
        given["logit_bias"] = {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise UserError(
            "--stop-token-ids takes a token id, --logit-bias a token id and a number, such as 17:-5"
        ) from None
    return GenerationOptions(**given)


def given_prompt(arguments: argparse.Namespace) -> str | tuple[int, ...]:
    """The prompt as text or ids; raises UserError for what is neither."""
    if arguments.prompt_ids is None:
        try:
            return sys.stdin.read() if arguments.prompt == "-" else str(arguments.prompt)
        except UnicodeDecodeError:
            raise UserError("the prompt on stdin is not valid UTF-8 text") from None
    try:
        return tuple(int(part) for part in arguments.prompt_ids.split(",") if part.strip())
    except ValueError:
        raise UserError(
            f"--prompt-ids takes numbers with commas, not {arguments.prompt_ids[:40]!r}"
        ) from None


def show(text: str) -> None:
    """Write a piece of the answer at once: made printable for a terminal, else as it is."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class AnswerLine:
    """The answer on stdout as it comes, and notes on stderr, none of which begins in its midst."""

    def __init__(self) -> None:
        self._is_open = False
        """Whether the answer's last line has not ended."""

    def show(self, text: str) -> None:
        """Write a piece of the answer."""
        show(text)
        self._is_open = not text.endswith("\n") if text else self._is_open

    def note(self, text: str) -> None:
        """Write a line to stderr: on a terminal that shows the answer, too, below it."""
        if self._is_open and sys.stdout.isatty() and sys.stderr.isatty():
            sys.stderr.write("\n")
            self._is_open = False
        print_note(text)

    def end(self) -> None:
        """End the answer's last line where it is open: an error comes next."""
        if self._is_open:
            self.show("\n")


def answer_json(answer: Answer) -> str:
    """The answer as the one JSON object that is this command's contract."""
    shown = asdict(answer)
    for name in ("logprobs", "prompt_logprobs"):
        if shown[name] is None:
            del shown[name]
    shown["route"] = [
        {"peer": stage.peer_id, "start": stage.start, "end": stage.end} for stage in answer.route
    ]
    return json.dumps(shown, ensure_ascii=False)


def figures(answer: Answer, nodes: Mapping[str, NodeRecord]) -> str:
    """One line for people: how long it took and who computed it, by the names in ``nodes``."""
    rate = f", {1 / answer.tpot_s:.1f} tokens/s{_spent(answer)}" if answer.tpot_s > 0 else ""
    name_of = namer(nodes)
    route = " → ".join(
        f"{name_of(stage.peer_id)} ({layers_text((stage.start, stage.end))})"
        for stage in answer.route
    )
    left = "peer" if answer.failovers == 1 else "peers"
    failovers = f", {answer.failovers} {left} left on the way" if answer.failovers else ""
    return (
        f"{len(answer.token_ids)} tokens after a prompt of {answer.prompt_tokens}"
        f" ({answer.finish_reason}): first after {answer.ttft_s:.2f} s{rate}{failovers}"
        f" over {route}"
    )


def _spent(answer: Answer) -> str:
    """Where the time of a token went, in words; empty where no stage said so."""
    if answer.computed_s + answer.waited_s <= 0:
        return ""
    return (
        f" (of {1000 * answer.tpot_s:.0f} ms per token {1000 * answer.computed_s:.0f} computing,"
        f" {1000 * answer.waited_s:.0f} in queues, {1000 * answer.way_s:.0f} on the way)"
    )


async def main(arguments: argparse.Namespace) -> int:
    """Connect, stream the answer, print the figures."""
    options = generation_options(arguments)
    if not arguments.json and (options.logprobs, options.prompt_logprobs) != (None, None):
        raise UserError("log probabilities are printed with --json alone; give that, too")
    prompt = given_prompt(arguments)
    if not 0 <= arguments.wait <= 86_400:
        raise UserError(f"--wait is {arguments.wait}; it must be between 0 and 86400 seconds")
    line = AnswerLine()
    async with settled_swarm(arguments, line.note, wait_s=arguments.wait) as swarm:
        if isinstance(prompt, str) or options.stop:
            await swarm.ready_text()
        has_text = swarm.text.tokenizer is not None
        if isinstance(prompt, str) and not arguments.raw and chat_template_of(swarm.text):
            prompt = await swarm.chat_prompt(prompt)
        running = swarm.begin(prompt, options)
        try:
            async for piece in running:
                if not arguments.json:
                    line.show(piece.text if has_text else _ids(piece.token_ids))
            answer = running.answer()
        except BaseException:
            line.end()
            raise
        if arguments.json:
            print(answer_json(answer), flush=True)
        else:
            line.show("\n")
        remember_swarm(arguments, swarm, answer.route)
        if not arguments.json:
            print_note(figures(answer, swarm.view.nodes))
    return EXIT_DONE


def _ids(token_ids: tuple[int, ...]) -> str:
    return "".join(f"{token_id} " for token_id in token_ids)


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
