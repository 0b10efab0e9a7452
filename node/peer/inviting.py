"""Asks others into a peer's network: an invitation in words, an offer on the local network."""

import argparse
import asyncio
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial

from dht.checkpoints.hub import local_path
from dht.command_line import COMMAND
from dht.errors import UserError
from dht.identity.multiaddr import is_loopback
from dht.messages.types import ModelSpec
from dht.networks.connecting import chosen_transport
from dht.networks.invitation import invitation_to, text_of
from dht.networks.local_network import Offer, offer_of_peer
from dht.process.supervision import PartFunction, beside
from dht.records.directory import Directory
from dht.transport.config import ANY_HOSTS, TransportKind
from dht.transport.listening import listens
from node.owner.reporter import Reporter
from node.peer.first_steps import is_bundled
from node.peer.naming import machine_name

ALONE_LOOK_S = 5.0
"""Time between two looks whether this machine is on a network by now."""
ANNOUNCED_S = 2.0
"""Time within which something must answer at an announced address."""


async def refuse_other_weights(
    directory: Directory, mine: ModelSpec, said_fingerprint: str
) -> None:
    """Raise UserError if the network serves other weights under this name, or if those that it was
    said to serve (a fingerprint's first digits, perhaps none) are others."""
    others = [record.model for record in (await directory.nodes()).values()]
    if others and all(model.fingerprint != mine.fingerprint for model in others):
        raise UserError(
            f"this swarm serves other weights as {mine.name}: theirs are"
            f" {others[0].fingerprint[:12]}, yours {mine.fingerprint[:12]}"
        )
    if not mine.fingerprint.startswith(said_fingerprint):
        raise UserError(
            f"the network was said to serve {mine.name} with fingerprint"
            f" {said_fingerprint[:16]}; yours is {mine.fingerprint[:16]}: these are other"
            " weights"
        )


def invite(
    arguments: argparse.Namespace,
    addresses: Sequence[str],
    spec: ModelSpec,
    reporter: Reporter,
) -> None:
    """Print commands for others with an invitation to this peer, which is at ``addresses``."""
    given = arguments.initial_peers
    known = (*addresses, *given) if arguments.founded else (*given, *addresses)
    invitation = invitation_to(arguments.network, known, spec.name, spec.fingerprint)
    text = text_of(invitation)
    reporter.event("invitation", text=text)
    if is_alone(arguments, addresses):
        reporter.say(
            "This machine is on no network now: only programs on it reach this peer. An invitation"
            " for others is printed once it is."
        )
        return
    command = _command()
    is_here_alone = local_path(arguments.model) and not is_bundled(arguments.model)
    at_home = " --model FILES" if is_here_alone else ""
    reporter.say(f"This peer's address is {addresses[0]}")
    reporter.say("Invite others (on this machine with an --identity FILE of their own):")
    reporter.paste(f"{command} join {text}{at_home}")
    reporter.say("Anyone asks with:")
    reporter.paste(f"{command} ask {text} --prompt 'One morning'")
    reporter.picture(text)


def is_alone(arguments: argparse.Namespace, addresses: Sequence[str]) -> bool:
    """Whether nobody else can reach this peer, although its owner means them to."""
    anywhere = arguments.host in ANY_HOSTS and not arguments.announce
    return anywhere and all(is_loopback(address) for address in addresses)


async def keep_inviting(
    arguments: argparse.Namespace,
    addresses: Callable[[], Sequence[str]],
    spec: ModelSpec,
    reporter: Reporter,
) -> None:
    """Print the invitation once this machine is on a network, where it was on none."""
    alone = is_alone(arguments, addresses())
    while True:
        await asyncio.sleep(ALONE_LOOK_S)
        before, alone = alone, is_alone(arguments, addresses())
        if before and not alone:
            invite(arguments, addresses(), spec, reporter)


async def warn_of_silent(announced: Sequence[str], reporter: Reporter) -> None:
    """Say which of the addresses that the owner announces nothing answers at, as seen from here."""
    places = [(host, port) for _, _, host, _, port in (each.split("/") for each in announced)]
    found = await asyncio.gather(*(listens(host, int(p), ANNOUNCED_S) for host, p in places))
    for host, port in (each for each, well in zip(places, found, strict=True) if not well):
        reporter.say(
            f"--announce {host}:{port}: nothing answers there from here. Unless a router keeps its"
            " own network out, it is wrong, and others reach this peer nowhere."
        )


def _command() -> str:
    """``anabranch`` where a shell finds it, else what runs the same with this Python."""
    if shutil.which(COMMAND) is not None:
        return COMMAND
    try:
        path = os.path.relpath(sys.executable)
    except ValueError:  # on another drive
        path = sys.executable
    return f"{shlex.quote(sys.executable if path.startswith(os.pardir) else path)} -m {COMMAND}"


def offer_here(
    arguments: argparse.Namespace,
    addresses: Sequence[str],
    spec: ModelSpec,
    reporter: Reporter,
) -> Offer | None:
    """What ``--local`` tells this local network; None where nobody could join through this peer."""
    if chosen_transport(arguments.transport) is TransportKind.LIGHT:
        reporter.stands(
            "offer", "A light peer lets nobody in, so it is not offered on this network"
        )
        return None
    name = arguments.name or machine_name() or platform.node()
    try:
        offer = offer_of_peer(name, arguments.network, addresses, spec.name, spec.fingerprint)
    except UserError as error:
        reporter.stands("offer", f"Not offered on this network: {error}")
        return None
    reporter.stands("offer", f"Offered on this network (--local): {offer}")
    return offer


async def keep_offering(
    arguments: argparse.Namespace,
    addresses: Callable[[], Sequence[str]],
    spec: ModelSpec,
    reporter: Reporter,
    advertise: PartFunction,
) -> None:
    """Advertise :func:`offer_here` until cancelled, anew whenever this machine's addresses change.

    Raises as ``advertise``.
    """
    while True:
        here = set(addresses())
        offer = offer_here(arguments, addresses(), spec, reporter)
        async with beside(*([] if offer is None else [partial(advertise, offer)])):
            while set(addresses()) == here:  # noqa: ASYNC110  nobody tells of a change
                await asyncio.sleep(ALONE_LOOK_S)
