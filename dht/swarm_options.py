"""Options that say which swarm and which model a command is for, and what they mean."""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dht.checkpoints.hub import HubId, local_path, served_name, typed_model
from dht.command_line import COMMAND, Parser, place_of
from dht.errors import NetworkError, UserError
from dht.networks.invitation import (
    INVITATION_BOUNDS,
    Invitation,
    is_invitation,
    is_network,
    read_invitation,
)
from dht.networks.local_network import LOCAL_NETWORK, chosen
from dht.networks.remembered import Remembered, UnreadableError, memory_file, recall, shown
from dht.process.terminal import print_note
from dht.records.directory import DEFAULT_NETWORK
from dht.transport.config import TransportKind

PEERS_VARIABLE = "ANABRANCH_PEERS"


def add_swarm(parser: Parser) -> None:
    """Add the options that name the swarm and the transport, the same in all commands.

    They are an invitation, ``--initial-peers``, ``--local``, ``--network`` and ``--transport`` (a
    :class:`TransportKind`). :func:`settle_swarm` says what they mean.
    """
    parser.add_argument(
        "invitation",
        nargs="?",
        type=partial(_invitation, parser),
        metavar="anabranch:…",
        help="invitation, as join prints it",
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="find each other on this local network",
    )
    parser.add_rare(
        "--initial-peers",
        nargs="+",
        default=[],
        metavar="ADDR",
        help=f"peers' addresses or an invitation (${PEERS_VARIABLE}, or as last)",
    )
    parser.add_rare(
        "--network",
        metavar="NAME",
        help=f"name of the network ({DEFAULT_NETWORK})",
    )
    parser.add_rare(
        "--transport",
        type=TransportKind,
        choices=tuple(TransportKind),
        default=TransportKind.AUTO,
        metavar="T",
        help="daemon, light (pure Python), or auto (auto)",
    )
    parser.add_rare("--verbose", action="store_true", help="also print causes, in libp2p's words")


def add_model(parser: Parser) -> None:
    """Add a consumer's ``--model`` and ``--fingerprint``."""
    parser.add_argument(
        "--model",
        type=typed_model,
        metavar="M",
        help="directory, .gguf, hub id org/name[:file], or its name",
    )
    parser.add_rare(
        "--fingerprint",
        default="",
        metavar="HEX",
        help="fingerprint of its weights, as join prints it; a directory or hub id knows it",
    )


def _invitation(parser: Parser, text: str) -> str:
    if not is_invitation(text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no invitation{place_of(parser, text)}")
    return text


def settle_swarm(
    arguments: argparse.Namespace,
    *,
    may_found: bool = False,
    model: str | None = None,
    any_model: bool = False,
    say: Callable[[str], None] = print_note,
) -> None:
    """Replace the options of the swarm by what they mean; ``say`` in a line where that came from.

    Addresses come from the command line, else with ``--local`` from peers on this local network,
    else from ``ANABRANCH_PEERS``, else from what is remembered; the last is never mixed with what
    the user typed of another network. ``model`` is the default; an empty one leaves the model to
    the network. With ``any_model`` neither an invitation nor the memory fills in the model, and
    several may be found here. With ``may_found`` there may be no addresses: a command that names a
    model then founds a network. Raises UserError, and NetworkError where nobody is found here.

    ``arguments.recalled`` says whether the addresses were remembered; ``said_model`` and
    ``said_fingerprint`` are what an invitation or the memory says of the model.
    """
    if arguments.network is not None and not is_network(arguments.network):
        limits = f"1 to {INVITATION_BOUNDS.network_max} printable characters, no /"
        raise UserError(f"--network is {arguments.network[:80]!r}; it takes {limits}")
    typed = [each for each in (arguments.invitation, *arguments.initial_peers) if each is not None]
    here = getattr(arguments, "local", False)
    if here and typed and not may_found:
        raise UserError("--local looks for peers itself; give it or an address, not both")
    given = typed
    if not typed and not here:
        given = os.environ.get(PEERS_VARIABLE, "").replace(",", " ").split()
    arguments.recalled, arguments.said_model, arguments.said_fingerprint = False, "", ""
    invitations = [read_invitation(each) for each in given if is_invitation(each)]
    if len(invitations) > 1:
        raise UserError("there are several invitations; give one")
    addresses = [each for each in given if not is_invitation(each)]
    found = None
    if here and not typed:
        found = _found_here(arguments, say, may_found=may_found, any_model=any_model)
    if found is not None:
        addresses = list(found.addresses)
        _take_invitation(arguments, found, "offer", any_model=any_model)
        say(f"{_what(found)}, as offered here")
    elif invitations:
        (invitation,) = invitations
        addresses = [*invitation.addresses, *addresses]
        _take_invitation(arguments, invitation, any_model=any_model)
        where = invitation.addresses[0].partition("/p2p/")[0]
        say(f"{_what(invitation)}, by an invitation to {where}")
    elif not given and not (may_found and arguments.model is not None):
        remembered = _recalled(arguments, say)
        if remembered is not None:
            addresses = list(remembered.initial_peers)
            _take_remembered(arguments, remembered, say, any_model=any_model)
            arguments.recalled = True
        elif not may_found:
            raise UserError(
                "which network? give an invitation (anabranch:…) or --initial-peers ADDR; none is"
                " remembered here (--help lists what else names one)"
            )
    if given and not typed:
        say(f"peers are those of {PEERS_VARIABLE}")
    arguments.initial_peers = list(dict.fromkeys(addresses))
    arguments.network = arguments.network or DEFAULT_NETWORK
    arguments.model = arguments.model or model
    if arguments.model is None:
        raise UserError("which model? give --model: its directory, its hub id, or its name")


def _found_here(
    arguments: argparse.Namespace, say: Callable[[str], None], *, may_found: bool, any_model: bool
) -> Invitation | None:
    """What peers on this local network offer, all of it shown; None where nobody offers anything
    and the command ``may_found``. Raises UserError and NetworkError."""
    from dht.networks.mdns import look

    say("looking on this network for peers that joined with --local…")
    offers = look()
    for offer in offers[: LOCAL_NETWORK.offers_max]:
        say(str(offer))
    if len(offers) > LOCAL_NETWORK.offers_max:
        say(f"… and {len(offers) - LOCAL_NETWORK.offers_max} more, which are left aside")
    found = chosen(
        offers[: LOCAL_NETWORK.offers_max],
        network=arguments.network,
        model=None if arguments.model is None else served_name(arguments.model),
        fingerprint=getattr(arguments, "fingerprint", ""),
        any_model=any_model,
    )
    if found is None:
        which = "" if arguments.network is None else f" of network {arguments.network[:80]!r}"
        nobody = f"nobody{which} on this network was started with --local"
        if not may_found:
            raise NetworkError(
                f"{nobody}: start a peer with `{COMMAND} join --local`, or give an invitation"
            )
        say(nobody + ("" if arguments.model is None else ": this peer founds a network"))
    return found


def _take_invitation(
    arguments: argparse.Namespace,
    said: Invitation,
    kind: str = "invitation",
    *,
    any_model: bool,
) -> None:
    """Fill in what an invitation (of this ``kind``) says and the user did not; raises UserError
    where they differ."""
    if arguments.network not in (None, said.network):
        raise UserError(
            f"the {kind} is to network {said.network}, --network is {arguments.network[:80]!r}"
        )
    arguments.network = said.network
    arguments.said_model, arguments.said_fingerprint = said.model, said.fingerprint
    if arguments.model is None and said.model and not any_model:
        if Path(said.model).exists():  # an invitation says nothing about files here
            raise UserError(
                f"the {kind} names the model {said.model}, and so is a file here called; say"
                f" --model ./{said.model} if that is meant"
            )
        arguments.model = said.model
    if arguments.model is not None and served_name(arguments.model) == said.model:
        mine = getattr(arguments, "fingerprint", "") or said.fingerprint
        if not mine.startswith(said.fingerprint) and not said.fingerprint.startswith(mine):
            raise UserError(
                f"the {kind} is to {said.model} with fingerprint {said.fingerprint},"
                f" --fingerprint is {mine[:80]!r}"
            )
        arguments.fingerprint = mine


def _what(said: Invitation) -> str:
    return f"network {said.network}" + (f", model {said.model}" if said.model else "")


def _recalled(arguments: argparse.Namespace, say: Callable[[str], None]) -> Remembered | None:
    """What is remembered, unless the user names another network."""
    try:
        remembered = recall()
    except UnreadableError as error:
        say(str(error))
        return None
    if remembered is None or arguments.network in (None, remembered.network):
        return remembered
    raise UserError(
        f"network {remembered.network} is remembered, --network is {arguments.network[:80]!r}: give"
        " an invitation to that one, or --initial-peers"
    )


def _take_remembered(
    arguments: argparse.Namespace,
    remembered: Remembered,
    say: Callable[[str], None],
    *,
    any_model: bool,
) -> None:
    """Fill in what is remembered and the user did not say."""
    arguments.network = remembered.network
    arguments.said_model = remembered.model_name
    arguments.said_fingerprint = remembered.fingerprint
    if not any_model:
        arguments.model = arguments.model or remembered.model or None
    name = "" if arguments.model is None else served_name(arguments.model)
    # A directory and a hub id hold the peers to their own files.
    if name == remembered.model_name and _is_bare(arguments.model):
        arguments.fingerprint = getattr(arguments, "fingerprint", "") or remembered.fingerprint
    path = memory_file()
    where = "" if path is None else f", remembered in {shown(path)}"
    say(f"network {remembered.network}{where}; forget with `{COMMAND} forget`")


def _is_bare(model: str) -> bool:
    return HubId.parse(model) is None and local_path(model) is None
