"""``anabranch alive``: whether this machine's peer is well, as it knows itself.

For health checks. The exit code is 0 where it is well or still starting, and 1 where it stands
still, is gone, or others do not see it. With several GPUs all their peers must be well.
"""

import sys
import time
from pathlib import Path

from dht.command_line import EXIT_DONE, EXIT_MACHINE, Parser, exit_code_of
from dht.process.home import at_home
from node.owner.own_health import health_file, why_unwell
from node.peer.join_options import DEFAULT_IDENTITY


def _work() -> int:
    parser = Parser(
        prog="python -m node.alive",
        description="Say whether this machine's peer is well, as it knows itself.",
        epilog="example: %(prog)s --identity ~/.anabranch/identity.key",
        exit_codes="0 it is, 1 it is not, 2 your mistake",
    )
    parser.add_argument(
        "--identity", type=Path, default=DEFAULT_IDENTITY, metavar="FILE", help="as in join"
    )
    path = health_file(at_home(parser.parse_args().identity, "--identity FILE"))
    stem = path.name.removesuffix(".health.json")
    files = sorted({path, *path.parent.glob(f"{stem}-gpu*.health.json")})
    for file in files:
        if trouble := why_unwell(file, time.monotonic()):
            print(f"{file.name.removesuffix('.health.json')}: {trouble}")
            return EXIT_MACHINE
    return EXIT_DONE


def run() -> int:
    """The command; returns its exit code."""
    return exit_code_of(_work)


if __name__ == "__main__":
    sys.exit(run())
