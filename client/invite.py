"""``anabranch invite``: an invitation to the network that is remembered, for others."""

import argparse
import importlib
import sys

from dht.checkpoints.hub import served_name
from dht.command_line import EXIT_DONE, Parser, command_of, pip_install
from dht.errors import UserError
from dht.networks.invitation import invitation_to, text_of
from dht.swarm_options import add_model, add_swarm, settle_swarm


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.invite",
        usage="%(prog)s [options]",
        description="Print an invitation to the network that is remembered, or to the one given.",
        epilog="example: %(prog)s --qr",
        exit_codes="0 done, 2 your mistake",
    )
    add_swarm(parser)
    add_model(parser)
    parser.add_argument("--qr", action="store_true", help="as a QR code, too (needs segno)")
    arguments = parser.parse_args()
    settle_swarm(arguments)
    return arguments


async def main(arguments: argparse.Namespace) -> int:
    """Print the invitation; nobody is asked."""
    name = served_name(arguments.model)
    known = arguments.said_fingerprint if name == arguments.said_model else ""
    fingerprint = arguments.fingerprint or known
    text = text_of(invitation_to(arguments.network, arguments.initial_peers, name, fingerprint))
    print(text)
    if arguments.qr:
        try:
            segno = importlib.import_module("segno")
        except ImportError:
            raise UserError(f"a QR code needs segno: {pip_install('segno')}") from None
        segno.make(text, micro=False).terminal(compact=True)
    return EXIT_DONE


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
