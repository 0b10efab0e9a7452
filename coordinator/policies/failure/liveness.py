"""Which of the watched peers answer pings, and whether others confirm that one does not."""

import asyncio
from collections.abc import Collection, Mapping

from coordinator.policies.failure.pinger import BY_PEERS, Pinger
from dht.errors import NetworkError, PeerError
from dht.messages.peer import Witness, WitnessRequest
from dht.process.supervision import Supervisor
from dht.transport.interface import PLAN_PROTOCOL, Transport
from dht.transport.requests import ask

WITNESS_S = 2.0
"""Maximum wait for witnesses' answers on a silent peer."""


class Liveness:
    """Pings the watched peers. A silent peer stays silent until it answers again."""

    def __init__(self, transport: Transport, parts: Supervisor | None = None) -> None:
        self._transport = transport
        self._pinger = Pinger(transport, BY_PEERS, parts=parts)
        self._addresses: dict[str, tuple[str, ...]] = {}

    @property
    def silent(self) -> frozenset[str]:
        """Peers that did not answer lately. They stay watched until they answer."""
        return frozenset(p for p in self._addresses if self._pinger.state_of(p).silent)

    def watch(self, peers: Collection[str], known: Mapping[str, tuple[str, ...]]) -> None:
        """Watch exactly ``peers`` and the silent peers among ``known``, which says where they are
        now: one that was silent may come back elsewhere."""
        kept = self.silent & known.keys()
        self._addresses = {p: known.get(p, ()) for p in sorted({*kept, *peers})}
        self._pinger.watch(self._addresses)

    def answers(self, peer_id: str) -> bool | None:
        """Whether a watched peer answers; None: not watched, or failed but not yet silent."""
        state = self._pinger.state_of(peer_id)
        if state.silent:
            return False
        return True if state.answered_unix_s is not None and state.misses == 0 else None

    async def confirm_silent(
        self, peer_id: str, witnesses: Mapping[str, tuple[str, ...]]
    ) -> bool | None:
        """Whether ``witnesses`` (addresses by peer id) confirm that a silent peer does not answer.

        False if any witness gets answers; None if no witness can tell; True without witnesses.
        """
        if not witnesses:
            return True
        said = await asyncio.gather(
            *(self._witness(peer, peer_id, where) for peer, where in witnesses.items())
        )
        if any(said):
            return False
        return True if False in said else None

    async def _witness(self, witness: str, peer_id: str, addresses: tuple[str, ...]) -> bool | None:
        try:
            async with asyncio.timeout(WITNESS_S):
                request = WitnessRequest(peer_id=peer_id)
                answer = await ask(
                    self._transport, witness, PLAN_PROTOCOL, request, addresses=addresses
                )
        except (NetworkError, PeerError, TimeoutError):
            return None
        reply = answer.message
        return reply.answers if isinstance(reply, Witness) and reply.peer_id == peer_id else None

    async def close(self) -> None:
        """Stop all pings; :meth:`watch` starts them again."""
        await self._pinger.close()
