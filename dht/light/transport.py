"""The transport of light peers: libp2p in Python alone, and the DHT through full peers.

It needs neither hivemind nor its daemon nor uvloop, so it runs where they do not: on Windows and
macOS. A light peer listens and serves like any other, but is not a node of the DHT.
"""

import asyncio
import time
from collections.abc import Mapping
from random import SystemRandom
from typing import Any

from dht.errors import NetworkError, UserError
from dht.identity.dialling import DialRule
from dht.identity.multiaddr import circuits_of, dialled_of, ranked, split_all, unanswered
from dht.records.access import AskedRecords
from dht.records.signed import RecordGuard, RecordSigner
from dht.transport.config import CONNECT_LIMIT_S, OWN_ADDRESS, TransportConfig, expanded
from dht.transport.interface import OPEN_LIMIT_S, Contact, Stream, StreamHandler
from dht.transport.listening import check_free
from dht.transport.streams import StreamHandlers


class LightTransport:
    """A :class:`dht.transport.interface.Transport`; make one with :meth:`create`."""

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self.peer_id = config.identity.peer_id
        self._handlers = StreamHandlers(config.budget)
        self.stream_errors = self._handlers.errors
        """Number of failed incoming streams, by the type of the error."""
        self._signer = RecordSigner(config.identity)
        self.addresses: tuple[str, ...] = ()
        self._bound: tuple[str, ...] = ()
        """Where it listens, on all of this machine's addresses or on one."""
        self._host: Any = None
        self._closed = False
        self._given = split_all(config.initial_peers)
        self._given.pop(config.identity.peer_id, None)
        self._dials = DialRule.of(config.initial_peers, ())
        self._records = AskedRecords(
            self._open_helper,
            self._signer,
            RecordGuard(on_other_version=self._handlers.versions.note),
            self._given,
            SystemRandom(),
            time.time,
            self._handlers.versions,
            self._handlers.budget.parties,
        )

    @classmethod
    async def create(cls, config: TransportConfig) -> "LightTransport":
        """Start libp2p and reach one of ``config.initial_peers``, which must be full peers.

        Raises UserError for malformed addresses, a taken port, a missing library or no initial
        peers, NetworkError when no peer answers within ``config.connect_timeout_s``.
        """
        if not config.initial_peers:
            raise UserError(
                "a peer without hivemind's daemon cannot found a swarm, for it is no part of the"
                " DHT: give --initial-peers, or found the swarm on Linux or in WSL2"
            )
        self = cls(config)
        limit_s = min(config.connect_timeout_s, CONNECT_LIMIT_S)
        try:
            async with asyncio.timeout(limit_s):
                await self._start(limit_s)
                try:
                    await self._records.greet()
                except NetworkError as error:
                    raise unanswered(config.initial_peers, [str(error)]) from None
        except TimeoutError:
            await self.close()
            waited = f"no answer within {limit_s:.0f} s"
            raise unanswered(config.initial_peers, [waited]) from None
        except BaseException:
            await self.close()
            raise
        return self

    def sign(self, data: bytes) -> bytes:
        return self._config.identity.sign(data)

    def now(self) -> float:
        return self._records.clock.now()

    @property
    def clock_note(self) -> str:
        return self._records.clock.note

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._check_alive()
        self._handlers.by_protocol[protocol] = handler
        await self._host.serve(protocol)

    async def open_stream(
        self, peer_id: str, protocol: str, *, addresses: tuple[str, ...] = ()
    ) -> Stream:
        told = self._dials.admitted(peer_id, addresses)
        through = [c for c in circuits_of(peer_id, told) if f"/p2p/{self.peer_id}/" not in c]
        dialled = (*dialled_of(peer_id, told), *through)
        return await self._open_dialled(peer_id, protocol, dialled)

    async def store(self, key: str, value: bytes, *, expires_unix_s: float) -> bool:
        self._check_alive()
        return await self._records.store(key, value, expires_unix_s)

    async def get(self, key: str, *, latest: bool = False) -> Mapping[str, bytes]:
        self._check_alive()
        return await self._records.get(key, latest=latest)

    def contact(self) -> Contact:
        return self._records.contact(self._handlers)

    def rejoin(self) -> None:
        """Does nothing: each read asks those again that were given and met."""

    async def wait_ended(self) -> str:
        await self._host.ended.wait()
        return f"libp2p has ended: {self._host.last_words}"

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._handlers.close()
        await self._records.close()
        if self._host is not None:
            # Shielded: a caller that gives up waiting must not leave the thread behind.
            await asyncio.shield(asyncio.ensure_future(self._host.stop()))

    async def _start(self, limit_s: float) -> None:
        config = self._config
        listen = config.listen_addresses()
        for address in listen:
            check_free(address)
        # The import takes seconds: in a thread, so that the loop goes on.
        host_of = await asyncio.to_thread(_load)
        self._host = host_of(config.identity, self._on_stream, config.budget)
        self._bound = await self._host.start(listen, limit_s=limit_s)
        self._read_addresses()
        self._dials = DialRule.of(config.initial_peers, self.addresses)
        self._handlers.adopt(config.parts.keep(self._keep_addresses, ends_process=False))

    def _read_addresses(self) -> None:
        reached = self._config.announce_addresses or expanded(self._bound)
        found = ranked([f"{address}/p2p/{self.peer_id}" for address in reached])
        self.addresses = found or self.addresses

    async def _keep_addresses(self) -> None:
        """Read this peer's addresses again and again: networks change."""
        while True:
            await asyncio.sleep(OWN_ADDRESS.look_s)
            self._read_addresses()

    def _on_stream(self, protocol: str, stream: Any) -> None:
        handler = self._handlers.by_protocol.get(protocol)
        if handler is None or self._closed:
            stream.abandon()
            return
        self._handlers.start(handler, stream)

    async def _open_helper(self, peer_id: str, protocol: str, addresses: tuple[str, ...]) -> Stream:
        """Open a metered stream to a helper, at the owner's addresses or else at ``addresses``."""
        told = self._dials.admitted(peer_id, addresses)
        dialled = self._given.get(peer_id) or dialled_of(peer_id, told)
        stream = await self._open_dialled(peer_id, protocol, dialled)
        return self._config.metered(protocol, stream)

    async def _open_dialled(self, peer_id: str, protocol: str, dialled: tuple[str, ...]) -> Stream:
        """Open a stream as the interface describes, at checked addresses without the peer id."""
        self._check_alive()
        if peer_id == self.peer_id:
            return self._handlers.open_to_self(peer_id, protocol)
        try:
            async with asyncio.timeout(OPEN_LIMIT_S):
                stream: Stream = await self._host.open(peer_id, protocol, dialled)
        except TimeoutError:
            raise NetworkError(
                f"peer {peer_id} did not answer within {OPEN_LIMIT_S:.0f} s"
            ) from None
        except NetworkError as error:
            raise NetworkError(f"cannot open a stream to peer {peer_id}: {error}") from error
        return stream

    def _check_alive(self) -> None:
        if self._closed:
            raise NetworkError("this peer has left the network")
        if self._host is None or self._host.ended.is_set():
            words = self._host.last_words if self._host is not None else "it never started"
            raise NetworkError(f"libp2p has ended: {words}")


def _load() -> Any:
    """The class of the host; raises UserError where py-libp2p is missing or hivemind is loaded."""
    import sys

    if "hivemind" in sys.modules or "hivemind.proto" in sys.modules:
        raise UserError("hivemind is loaded: one process has one transport, chosen at its start")
    try:
        from dht.light.host import LightHost
    except ImportError as error:
        raise UserError(
            f"the light transport needs py-libp2p ({error}); install it: pip install '.[light]'"
        ) from error
    return LightHost
