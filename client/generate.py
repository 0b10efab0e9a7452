"""``python -m client.generate``: text streams to stdout, figures go to stderr.

``--json`` prints one object instead: ``text``, ``token_ids``, ``prompt_tokens``,
``finish_reason``, ``ttft_s``, ``tpot_s``, ``route``, ``plan_epoch``, ``failovers``.
"""

import argparse
import json
import sys
from dataclasses import asdict

from client.generation import NEW_TOKENS_DEFAULT, Answer, GenerationOptions
from client.swarm import DEFAULT_NETWORK, Swarm, SwarmConfig
from dht.command_line import EXIT_DONE, Parser, run_command
from dht.errors import NetworkError, UserError


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.generate",
        description="Ask a swarm for text. The text streams to stdout, figures go to stderr.",
        epilog="exit codes: 0 done, 2 your mistake, 3 the swarm cannot serve this now,"
        " 130 interrupted",
    )
    parser.add_argument(
        "--initial-peers",
        nargs="+",
        required=True,
        metavar="ADDR",
        help="multiaddresses of peers, as node.join prints them",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="directory with the model's tokenizer, or the name that peers serve it under",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue; - reads it from stdin")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="exact token ids instead of text")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"length of the answer at most (default {NEW_TOKENS_DEFAULT}, less where the context"
        " ends)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample among the likeliest tokens that make up this probability (default 1: all)",
    )
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens (default)")
    parser.add_argument("--seed", type=int, help="same seed, same answer (default: drawn)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        help="end before this text; may be given several times",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after end-of-text")
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for layers that nobody holds (default 60)",
    )
    parser.add_argument("--network", default=DEFAULT_NETWORK, help="name of the network")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


def prompt_of(arguments: argparse.Namespace) -> str | tuple[int, ...]:
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


def as_json(answer: Answer) -> str:
    """The answer as the one JSON object that is this command's contract."""
    fields = asdict(answer)
    fields["route"] = [
        {"peer": stage.peer_id, "start": stage.start, "end": stage.end} for stage in answer.route
    ]
    return json.dumps(fields, ensure_ascii=False)


def figures(answer: Answer) -> str:
    """One line for people: how long it took and who computed it."""
    rate = f", {1 / answer.tpot_s:.1f} tokens/s" if answer.tpot_s > 0 else ""
    route = " → ".join(
        f"{stage.peer_id[-8:]} [{stage.start}, {stage.end})" for stage in answer.route
    )
    noun = "failover" if answer.failovers == 1 else "failovers"
    failovers = f", {answer.failovers} {noun}" if answer.failovers else ""
    return (
        f"{len(answer.token_ids)} tokens after a prompt of {answer.prompt_tokens}"
        f" ({answer.finish_reason}): first after {answer.ttft_s:.2f} s{rate}{failovers}"
        f" over {route}"
    )


async def main(arguments: argparse.Namespace) -> int:
    """Connect, stream the answer, print the figures."""
    options = GenerationOptions(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
    prompt = prompt_of(arguments)
    if not 0 <= arguments.wait <= 86_400:
        raise UserError(f"--wait is {arguments.wait}; it must be between 0 and 86400 seconds")
    swarm = Swarm.connect(
        arguments.initial_peers,
        model=arguments.model,
        config=SwarmConfig(network=arguments.network, wait_s=arguments.wait),
        on_status=lambda text: print(text, file=sys.stderr, flush=True),
    )
    try:
        await swarm.__aenter__()
    except NetworkError as error:
        raise UserError(str(error)) from error
    try:
        running = swarm.begin(prompt, options)
        async for piece in running:
            if not arguments.json:
                text = piece.text if swarm.tokenizer is not None else f"{_ids(piece.token_ids)}"
                sys.stdout.write(text)
                sys.stdout.flush()
        answer = running.answer()
    finally:
        await swarm.__aexit__(None, None, None)
    if arguments.json:
        print(as_json(answer))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        print(figures(answer), file=sys.stderr)
    return EXIT_DONE


def _ids(token_ids: tuple[int, ...]) -> str:
    return "".join(f"{token_id} " for token_id in token_ids)


if __name__ == "__main__":
    sys.exit(run_command(parse, main))
