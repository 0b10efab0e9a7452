"""``anabranch forget``: forgets the network that is remembered."""

import argparse
import sys

from dht.command_line import EXIT_DONE, Parser, command_of
from dht.networks.remembered import forget, shown


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    return Parser(
        prog="python -m client.forget",
        description="Forget the network that was used last, its model and its fingerprint.",
        epilog="example: %(prog)s",
        exit_codes="0 done, 2 the file cannot be removed",
    ).parse_args()


async def main(_: argparse.Namespace) -> int:
    """Remove the file, and say so."""
    path = forget()
    print("no network was remembered" if path is None else f"forgotten: {shown(path)} is removed")
    return EXIT_DONE


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
