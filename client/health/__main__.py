"""``python -m client.health``: the public page of a swarm's health, until Ctrl-C."""

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

from client.health.inviting import page_invitation
from dht.command_line import EXIT_DONE, Parser, command_of, on_interrupt
from dht.errors import UserError
from dht.networks.invitation import read_invitation, text_of
from dht.process.terminal import printable
from dht.swarm_options import add_model, add_swarm, settle_swarm

NO_INVITATION = "none"
STALE_ROUNDS, STALE_S = 2, 60.0
"""A state older than both of these is shown as not known."""


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.health",
        usage="%(prog)s [anabranch:…] [--model M] [options]",
        description="Serve a page that says whether a swarm is healthy and why, until Ctrl-C.",
        epilog="example: %(prog)s anabranch:… --data health.sqlite",
        exit_codes="0 stopped, 1 it failed, 2 your mistake, 3 no swarm",
    )
    add = parser.add_argument
    add_swarm(parser)
    add_model(parser)
    add("--host", default="127.0.0.1", metavar="H", help="listen here (127.0.0.1)")
    add("--port", type=int, default=8080, metavar="P", help="0 takes any (8080)")
    add("--data", type=Path, metavar="FILE", help="keep the history here (else: until it ends)")
    add(
        "--every",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between its own requests (30)",
    )
    add(
        "--invite",
        metavar="anabranch:…",
        help=f"invitation in the commands that visitors copy, or {NO_INVITATION}"
        " (to the public ones of the addresses given)",
    )
    add(
        "--thank",
        nargs="+",
        default=[],
        metavar="ID=NAME",
        help="name these peers, whose owners asked for it, with the layers and hours seen here",
    )
    arguments = parser.parse_args()
    settle_swarm(arguments, model="")
    return arguments


async def main(arguments: argparse.Namespace) -> int:
    """Connect, look and serve until a signal comes."""
    from client.health.app import Page
    from client.health.given import thanked_of
    from client.health.history import History
    from client.health.prober import Prober, ProberConfig
    from client.health.state import aged
    from client.pages.listening import PageRunner, close_idle, listen, runner_of
    from client.remembering import lasting_swarm, remember_swarm

    if not 0 <= arguments.port <= 65_535:
        raise UserError(f"--port is {arguments.port}; it must be between 0 and 65535")
    if not 1 <= arguments.every <= 86_400:
        raise UserError(f"--every is {arguments.every}; it must be between 1 and 86400")
    thanked = thanked_of(arguments.thank)
    if arguments.invite not in (None, NO_INVITATION):
        read_invitation(arguments.invite)
    async with AsyncExitStack() as stack:  # a wrong --data is told before anybody is asked
        history = stack.enter_context(closing(History(arguments.data)))
        swarm = await stack.enter_async_context(lasting_swarm(arguments, wait_s=0.0))
        remember_swarm(arguments, swarm)
        invitation = _invitation(arguments, swarm.text.name)
        config = ProberConfig(every_s=arguments.every, invitation=invitation, thanked=thanked)
        prober = Prober(swarm, history, config)
        limit_s = STALE_ROUNDS * arguments.every + STALE_S
        parts = swarm.reader.parts
        page = Page(
            lambda: aged(prober.state, swarm.transport.now(), limit_s),
            refresh_s=10,
            parts=parts,
        )
        runner = runner_of(page.app, keepalive_s=15.0, kind=PageRunner)
        await runner.setup()
        assert runner.server is not None  # noqa: S101  setup() made it
        try:
            async with parts.beside(prober.run, partial(close_idle, runner.server)):
                port = await listen(runner, arguments.host, arguments.port)
                host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
                url = f"http://{host}:{port}/"
                print(f"health page at {url} (Ctrl-C stops)", flush=True)
                stop = asyncio.Event()
                with on_interrupt(stop.set):
                    await stop.wait()
        finally:
            await runner.cleanup()
    return EXIT_DONE


def _invitation(arguments: argparse.Namespace, model: str) -> str:
    """The invitation for visitors; empty: none. Says on stderr which addresses a made one holds.

    Of remembered addresses only the first counts, by which this user entered once: the others are
    those of volunteers who served this user, and nobody gave them away.
    """
    if arguments.invite is not None:
        return "" if arguments.invite == NO_INVITATION else str(arguments.invite)
    entered = arguments.initial_peers[:1] if arguments.recalled else arguments.initial_peers
    said = arguments.said_fingerprint if model == arguments.said_model else ""
    made = page_invitation(arguments.network, entered, model, arguments.fingerprint or said)
    if made is None:
        told = "no public address was given: visitors see commands without an invitation (--invite)"
    else:
        where = ", ".join(each.partition("/p2p/")[0] for each in made.addresses)
        told = f"visitors are invited through {where} (--invite {NO_INVITATION}: they are not)"
    print(printable(told), file=sys.stderr, flush=True)
    return "" if made is None else text_of(made)


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
