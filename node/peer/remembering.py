"""Remembers through which peers a network is reached while this peer is away, and comes back by
them, to the model that it served.

Otherwise a founder that comes back would found a second network beside its own, and a peer that
joined through one that is gone would find nobody. The network is this user's, whose other commands
remember it, too; the model is this peer's, and is kept beside its identity.
"""

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dht.checkpoints.hub import absolute_model
from dht.errors import NetworkError
from dht.identity.dialling import DialRule
from dht.messages.types import RECORD_BOUNDS, ModelSpec, NodeState
from dht.networks.remembered import (
    Remembered,
    addresses_of_network,
    is_remembered,
    memory_file,
    remember,
    write_kept,
)
from dht.process.json_file import value_or_none
from dht.records.directory import Directory
from dht.transport.interface import Transport
from node.owner.reporter import Reporter

logger = logging.getLogger(__name__)

LOOK_S = 10.0
SERVED_BYTES_MAX = 16 << 10


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a peer served last, and in which network."""

    network: str
    model: str
    """The value of ``--model``: a whole path or a hub id."""
    model_name: str
    fingerprint: str


def _served_file(identity: Path) -> Path:
    return identity.expanduser().with_suffix(".served.json")


def served_before(identity: Path, network: str) -> Served | None:
    """What the peer with this key file served in that network; None where it is not known."""
    served = value_or_none(_served_file(identity), Served, SERVED_BYTES_MAX)
    return served if served is not None and served.network == network else None


def remember_served(arguments: argparse.Namespace, spec: ModelSpec, reporter: Reporter) -> None:
    """Keep what this peer serves now beside its identity, where anything is to be remembered."""
    if memory_file() is None:
        return
    served = Served(
        network=arguments.network,
        model=absolute_model(arguments.model),
        model_name=spec.name,
        fingerprint=spec.fingerprint,
    )
    write_kept(_served_file(arguments.identity), served, reporter.say)


def addresses_to_keep(
    own: Sequence[str], given: Sequence[str], met: Sequence[str], *, founded: bool
) -> tuple[str, ...]:
    """The addresses to remember, ``RECORD_BOUNDS.addresses_max`` at most: a founder's own one
    first, else the first that was given, then those of peers met."""
    first, *others = own if founded else (*given, *own)
    rest = (*given, *others) if founded else others
    return tuple(dict.fromkeys((first, *met, *rest)))[: RECORD_BOUNDS.addresses_max]


def founded_by(peer_id: str, remembered: Sequence[str]) -> bool:
    """Whether addresses that :func:`addresses_to_keep` gave are those of this founder."""
    return bool(remembered) and remembered[0].endswith(f"/p2p/{peer_id}")


def settle_addresses(arguments: argparse.Namespace, peer_id: str) -> None:
    """Set ``arguments.founded``, leave this peer's own addresses out of the remembered ones, and
    set ``arguments.remembered_peers``: those of this network that were not given otherwise."""
    arguments.founded = not arguments.initial_peers
    if arguments.recalled:
        arguments.founded = founded_by(peer_id, arguments.initial_peers)
    if arguments.recalled or arguments.local:
        own = f"/p2p/{peer_id}"
        arguments.initial_peers = [a for a in arguments.initial_peers if not a.endswith(own)]
    arguments.remembered_peers = [
        address
        for address in addresses_of_network(arguments.network)
        if address not in arguments.initial_peers and not address.endswith(f"/p2p/{peer_id}")
    ]


async def connect_or_found(
    arguments: argparse.Namespace, connect: Callable[[], Awaitable[Transport]], reporter: Reporter
) -> Transport:
    """Connect by ``connect``, which reads ``arguments``; raises as ``connect``.

    Who was given peers of which none answers joins through those that it remembers of that network:
    the founder may have moved. A founder that is answered by none of the peers that it remembers
    founds its network once more.
    """
    try:
        return await connect()
    except NetworkError:
        if arguments.initial_peers and arguments.remembered_peers:
            given = arguments.initial_peers
            reporter.say("Nobody answers there; trying peers of this network that are remembered")
            arguments.initial_peers = [*arguments.remembered_peers]
            with suppress(NetworkError):
                return await connect()
            arguments.initial_peers = given
        if not (arguments.founded and arguments.initial_peers):
            raise
    reporter.say("Nobody of those who were here before answers")
    arguments.initial_peers = []
    return await connect()


async def met_addresses(directory: Directory, own_id: str, rule: DialRule) -> tuple[str, ...]:
    """One address each of the other peers that serve, as far as ``rule`` would dial it; those that
    were seen here first come first. Raises NetworkError."""
    nodes = (await directory.nodes_as_seen()).values()
    serving = (n for n in nodes if n.peer_id != own_id and n.state is NodeState.SERVING)
    oldest = sorted(serving, key=lambda n: (n.joined_unix_s, n.peer_id))
    admitted = (rule.admitted(n.peer_id, n.addresses)[:1] for n in oldest)
    return tuple(address for one in admitted for address in one)[: RECORD_BOUNDS.addresses_max]


async def remember_others(
    directory: Directory, own_id: str, rule: DialRule, keep: Callable[[Sequence[str]], None]
) -> None:
    """Call ``keep`` with :func:`met_addresses` whenever they have changed, until cancelled.

    While nobody else is there, the peers met last stay remembered.
    """
    before: tuple[str, ...] = ()
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            met = await met_addresses(directory, own_id, rule)
        except NetworkError as error:
            logger.info("cannot see who else is there: %s", error)
            continue
        if met and met != before:
            keep(met)
            before = met


def remember_network(
    arguments: argparse.Namespace,
    own: Sequence[str],
    met: Sequence[str],
    spec: ModelSpec,
    reporter: Reporter,
) -> None:
    """Remember a peer's network for this user's next commands: to be reached at its ``own``
    addresses, those it was given, and those of peers ``met``."""
    kept = addresses_to_keep(own, arguments.initial_peers, met, founded=arguments.founded)
    remember(
        Remembered(
            network=arguments.network,
            initial_peers=kept,
            model=absolute_model(arguments.model),
            model_name=spec.name,
            fingerprint=spec.fingerprint,
        ),
        reporter.say,
    )


async def keep_remembering(
    arguments: argparse.Namespace,
    transport: Transport,
    directory: Directory,
    spec: ModelSpec,
    reporter: Reporter,
) -> None:
    """Keep the remembered addresses up to date, until the owner forgets the network or uses
    another."""

    def keep(met: Sequence[str]) -> None:
        if is_remembered(arguments.network, spec.name):
            remember_network(arguments, transport.addresses, met, spec, reporter)

    rule = DialRule.of(arguments.initial_peers, transport.addresses)
    await remember_others(directory, transport.peer_id, rule, keep)
