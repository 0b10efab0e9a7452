"""Holds slots at relays for a peer that others cannot reach."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from zlib import crc32

from dht.errors import NetworkError, PeerError
from dht.messages.types import NodeRecord, Reach
from dht.transport.interface import Transport
from dht.transport.relay_reservation import ask_slot, circuit_addresses, reserve

logger = logging.getLogger(__name__)

WATCH_EVERY_S, WATCH_S = 5.0, 2.5
"""Interval at which relays are asked whether they are there, and time limit for the answer. One
that answers neither of two requests is replaced at once: until then callers find nobody."""
INTRODUCED_S, INTRODUCED_TRIES = 1.0, 4
"""Pause before a relay that refused a newcomer is asked again, and how often: relays take peers of
the network alone, and may not have read yet that this is one."""


def relay_candidates(nodes: Mapping[str, NodeRecord], me: str) -> list[str]:
    """Peers that can relay for ``me``: they offer it and others dialled them back.

    Each peer gets an order of its own, so that not all take the same relays.
    """
    able = [
        peer_id
        for peer_id, record in nodes.items()
        if peer_id != me
        and record.reach is Reach.DIRECT
        and record.relays
        and circuit_addresses(peer_id, record.addresses, me)
    ]
    return sorted(able, key=lambda peer_id: crc32(f"{me}{peer_id}".encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """How many relays a peer holds a slot at."""

    relays: int = 2
    """Number of relays that a peer holds; one of them may go at any time."""
    tried_max: int = 4
    """Maximum number of new relays asked per look."""
    misses_max: int = 2
    """Number of failed renewals in a row after which a relay is given up."""
    reserve_s: float = 6.0


RELAY_SLOTS = RelayConfig()


class Relays:
    """The slots that this peer holds at relays; :meth:`hold` renews them."""

    def __init__(
        self,
        transport: Transport,
        introduce: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """``introduce`` tells the network that this peer is there, before relays are asked; it
        returns whether the network did not know before."""
        self._transport = transport
        self._introduce = introduce
        self._held: dict[str, tuple[tuple[str, ...], int]] = {}
        self._refused: set[str] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which others reach this peer through its relays."""
        return tuple(address for addresses, _ in self._held.values() for address in addresses)

    def let_go(self) -> None:
        """Stop using relays; their reservations lapse by themselves."""
        self._held.clear()

    async def hold(self, nodes: Mapping[str, NodeRecord]) -> None:
        """Renew the slots held, and reserve others if these are too few."""
        me = self._transport.peer_id
        able = relay_candidates(nodes, me)
        await asyncio.gather(*(self._renew(relay_id, nodes, able) for relay_id in [*self._held]))
        free = [each for each in able if each not in self._held.keys() | self._refused]
        if not free:
            self._refused.clear()  # they get another chance at the next look
        new = self._introduce is not None and bool(free) and await self._introduce()
        for left in reversed(range(INTRODUCED_TRIES if new else 1)):
            for relay_id in free[: RELAY_SLOTS.tried_max]:
                if len(self._held) >= RELAY_SLOTS.relays:
                    return
                addresses = nodes[relay_id].addresses
                if relay_id in self._held:
                    continue
                if await self._granted(relay_id, addresses):
                    self._held[relay_id] = (circuit_addresses(relay_id, addresses, me), 0)
                elif not left:
                    self._refused.add(relay_id)
            if self._held or not left:
                return
            await asyncio.sleep(INTRODUCED_S)

    async def lost(self) -> bool:
        """Ask the relays that are held, and give up those that do not answer; returns whether
        there were any."""
        held = [*self._held]
        alive = await asyncio.gather(*(self._answers(relay_id) for relay_id in held))
        gone = [relay_id for relay_id, answers in zip(held, alive, strict=True) if not answers]
        for relay_id in gone:
            logger.info("relay %s does not answer", relay_id)
            self._held.pop(relay_id, None)
            self._refused.add(relay_id)
        return bool(gone)

    async def _answers(self, relay_id: str) -> bool:
        """Whether a relay says anything when it is asked for the slot again, twice."""
        for _ in range(2):
            with suppress(NetworkError, PeerError, TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await ask_slot(self._transport, relay_id)
                    return True
        return False

    async def _renew(
        self, relay_id: str, nodes: Mapping[str, NodeRecord], able: Sequence[str]
    ) -> None:
        addresses, misses = self._held[relay_id]
        if relay_id in able and await self._granted(relay_id, nodes[relay_id].addresses):
            me = self._transport.peer_id
            self._held[relay_id] = (circuit_addresses(relay_id, nodes[relay_id].addresses, me), 0)
        elif misses + 1 < RELAY_SLOTS.misses_max:
            self._held[relay_id] = (addresses, misses + 1)
        else:
            del self._held[relay_id]

    async def _granted(self, relay_id: str, addresses: tuple[str, ...]) -> bool:
        try:
            async with asyncio.timeout(RELAY_SLOTS.reserve_s):
                await reserve(self._transport, relay_id, addresses)
        except (NetworkError, PeerError, TimeoutError) as error:
            logger.info("no slot at relay %s: %s", relay_id, error)
            return False
        return True
