"""Remembers, while a peer runs, through whom its network is reached without it.

A founder that comes back would else found a second network beside its own, and a peer that joined
through one that is gone would find nobody.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from dht.errors import NetworkError
from dht.identity.dialling import DialRule
from dht.messages.types import NodeState
from dht.records.directory import Directory
from dht.remembered import ADDRESSES_MAX

logger = logging.getLogger(__name__)

LOOK_S = 10.0


def addresses_to_keep(
    own: Sequence[str], given: Sequence[str], met: Sequence[str], *, founded: bool
) -> tuple[str, ...]:
    """The addresses to remember, ``ADDRESSES_MAX`` at most: a founder's own one first, else the
    first that was given, then those of peers met."""
    first, *others = own if founded else (*given, *own)
    rest = (*given, *others) if founded else others
    return tuple(dict.fromkeys((first, *met, *rest)))[:ADDRESSES_MAX]


def founded_by(peer_id: str, remembered: Sequence[str]) -> bool:
    """Whether addresses that :func:`addresses_to_keep` gave are those of this founder."""
    return bool(remembered) and remembered[0].endswith(f"/p2p/{peer_id}")


async def met_addresses(directory: Directory, own_id: str, rule: DialRule) -> tuple[str, ...]:
    """One address each of the other peers that serve, as far as ``rule`` would dial it; those that
    were seen here first come first. Raises NetworkError."""
    nodes = (await directory.nodes_as_seen()).values()
    serving = (n for n in nodes if n.peer_id != own_id and n.state is NodeState.SERVING)
    oldest = sorted(serving, key=lambda n: (n.joined_unix_s, n.peer_id))
    admitted = (rule.admitted(n.peer_id, n.addresses)[:1] for n in oldest)
    return tuple(address for one in admitted for address in one)[:ADDRESSES_MAX]


async def remember_others(
    directory: Directory, own_id: str, rule: DialRule, keep: Callable[[Sequence[str]], None]
) -> None:
    """Call ``keep`` with :func:`met_addresses` whenever they are others than before, forever.

    While nobody else is there, who was there before stays remembered.
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
