"""``anabranch networks``: the public networks that are listed, and which of them answer now."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dht.command_line import EXIT_DONE, EXIT_SWARM, Parser, command_of
from dht.errors import NetworkError, SwarmError, UserError
from dht.identity.peer_id import Identity
from dht.networks.connecting import observe
from dht.networks.invitation import invitation_to, text_of
from dht.networks.public_networks import (
    FILE_BYTES_MAX,
    Entry,
    doubles,
    entry_of,
    read_list,
    toml_of,
    wrong_with,
)
from dht.process.home import at_home
from dht.process.terminal import print_lines
from dht.swarm_options import add_swarm, settle_swarm
from dht.transport.config import TransportKind

LISTED = Path(__file__).with_name("networks.toml")
"""The list that ships with this software."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookConfig:
    """How listed networks are asked."""

    at_once: int = 4
    """Networks asked at once: each takes a transport of its own."""
    limit_s: float = 20.0
    """Time after which one that has not answered is called silent."""


LOOK = LookConfig()
NONE_LISTED = (
    "No public network is listed yet. Ask somebody for an invitation, or found one:"
    " `anabranch join`; docs/public-page.md says how to have it listed."
)


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.networks",
        usage="%(prog)s [options]\n       %(prog)s --announce --contact URL [anabranch:…]",
        description="List public networks, and say which answer now; or sign an entry for yours.",
        epilog="example: %(prog)s",
        exit_codes="0 one answers or none is listed, 2 your mistake, 3 none answers",
    )
    parser.add_argument("--list", type=Path, default=LISTED, metavar="FILE", help="another list")
    parser.add_argument("--json", action="store_true", help="a JSON list on stdout")
    parser.add_argument("--announce", action="store_true", help="print a signed entry for yours")
    parser.add_argument("--contact", metavar="URL", help="of who runs it: https://… or mail")
    parser.add_argument("--about", default="", metavar="TEXT", help="a sentence about it")
    identity = "its founder's key (~/.anabranch/identity.key)"
    own = Path("~/.anabranch/identity.key")
    parser.add_argument("--identity", type=Path, default=own, metavar="FILE", help=identity)
    add_swarm(parser)
    arguments = parser.parse_args()
    if bool(arguments.announce) != bool(arguments.contact):
        raise UserError("--announce and --contact go together: people must know whom to ask")
    if arguments.about and not arguments.announce:
        raise UserError("--about goes with --announce: it is a sentence of your entry")
    if arguments.invitation and not arguments.announce:
        raise UserError(
            "an invitation goes with --announce; `anabranch models` looks at one network"
        )
    arguments.model = None
    if arguments.announce:
        settle_swarm(arguments, model="")
    return arguments


def read_file(path: Path) -> tuple[Entry, ...]:
    """The entries of a list that are to be believed; of others it is said why not, on stderr.

    Raises UserError.
    """
    try:
        with path.open("rb") as file:
            entries = read_list(file.read(FILE_BYTES_MAX + 1))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    twice, kept = doubles(entries), []
    for entry in entries:
        wrong = "its name is there twice" if entry.name in twice else wrong_with(entry)
        if wrong:
            print(f"left out: {entry.name!r}: {wrong}", file=sys.stderr)
        else:
            kept.append(entry)
    return tuple(kept)


async def answer_of(entry: Entry, kind: TransportKind, turn: asyncio.Semaphore) -> str:
    """What the network serves now, in words; empty where nobody answers."""
    from coordinator.plans.catalogue.reading import network_models, served_models

    try:
        async with turn, asyncio.timeout(LOOK.limit_s):
            transport = await observe(entry.said.addresses, kind)
            try:
                specs = await network_models(transport, entry.name, (entry.founder,))
                models = await served_models(transport, entry.name, specs)
            finally:
                await transport.close()
    except (NetworkError, SwarmError, UserError, TimeoutError):
        return ""
    # Anybody may announce other models in it, or other weights under this name.
    digits = entry.said.fingerprint
    (*found,) = (m for m in models if m.replicas and m.spec.fingerprint.startswith(digits))
    if not found:
        return "answers, and does not serve its model now"
    return f"serves it now, by {found[0].peers} peer{'s' * (found[0].peers > 1)}"


async def announce(arguments: argparse.Namespace) -> int:
    """Print an entry for the network that is remembered or given, signed by its founder."""
    invitation = invitation_to(
        arguments.network,
        arguments.initial_peers,
        arguments.said_model,
        arguments.said_fingerprint,
    )
    founder = Identity.load_or_create(at_home(arguments.identity, "--identity FILE"))
    try:
        entry = entry_of(
            text_of(invitation), founder, contact=arguments.contact, about=arguments.about
        )
    finally:
        founder.release()
    print(toml_of(entry), end="")
    return EXIT_DONE


async def main(arguments: argparse.Namespace) -> int:
    """Print the list, or an entry for it."""
    if arguments.announce:
        return await announce(arguments)
    entries = read_file(arguments.list)
    turn = asyncio.Semaphore(LOOK.at_once)
    kind = arguments.transport
    answers = await asyncio.gather(*(answer_of(entry, kind, turn) for entry in entries))
    if arguments.json:
        found = zip(entries, answers, strict=True)
        print(json.dumps([{**shown(entry), "now": answer} for entry, answer in found]))
    else:
        print_lines(table(entries, answers))
    return EXIT_DONE if any(answers) or not entries else EXIT_SWARM


def shown(entry: Entry) -> dict[str, str]:
    """The entry for programs."""
    return {name: getattr(entry, name) for name in Entry.__struct_fields__}


def table(entries: Sequence[Entry], answers: Sequence[str]) -> str:
    """The entries as lines for people, those that answer first."""
    if not entries:
        return NONE_LISTED
    lines = []
    for entry, answer in sorted(zip(entries, answers, strict=True), key=lambda each: not each[1]):
        about = f": {entry.about}" if entry.about else ""
        lines += [
            f"{entry.name}{about}",
            f"  {entry.model}: {answer or 'does not answer now'}; contact: {entry.contact}",
            f"  {entry.invitation}",
        ]
    return "\n".join([*lines, "Peers can read the prompts that they serve."])


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
