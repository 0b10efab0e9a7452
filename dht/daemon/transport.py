"""The transport over hivemind: its libp2p daemon for streams, its Kademlia node for records.

All code runs on the caller's event loop; the only other process is the daemon, see
:mod:`dht.daemon.process`. hivemind takes seconds to import and is imported where it is used.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

from dht.daemon import lean_hivemind
from dht.daemon.control import LibP2PStream, ask, asking_daemon, parse_known, parse_peers, raw_id
from dht.daemon.process import DaemonConfig, P2pDaemon
from dht.errors import MachineError, NetworkError, UserError
from dht.identity.dialling import DialRule
from dht.identity.multiaddr import by_peer, host_of, ranked, unanswered
from dht.messages.peer import SignedRecord
from dht.messages.types import RECORD_BOUNDS
from dht.process.newest import Newest
from dht.process.supervision import PartFunction, loop_s
from dht.records.access import AskedRecords, RecordAccess, SharedRecords
from dht.records.helper import RecordHelper
from dht.records.signed import RecordGuard, RecordSigner
from dht.transport.config import CONNECT_LIMIT_S, OWN_ADDRESS, TransportConfig, expanded
from dht.transport.interface import (
    OPEN_LIMIT_S,
    RECORDS_PROTOCOL,
    RELAY_PROTOCOL,
    RELAY_STOP_PROTOCOL,
    Contact,
    Stream,
    StreamHandler,
)
from dht.transport.listening import listens
from dht.transport.relay_server import RelayServer
from dht.transport.streams import StreamHandlers

AGAIN_S = 2.0
"""Time for which a peer that could not be dialled is not dialled again at the same addresses."""
REJOIN_PERIOD_S = 15.0
"""Period of greetings to who is missing: within a minute of a cut's end all are back, with time for
a greeting on a busy machine and for what follows it."""
LISTENS_S = 3.0
"""Time for a missing peer to take a connection."""
ADDRESSES_PERIOD_S = OWN_ADDRESS.look_s
SOCKETS_PERIOD_S = 5.0
"""Period of looks at whether the daemon's sockets are there."""
ALREADY_SET = "already set"
"""What the daemon says of a protocol that it has a handler for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceConfig:
    """When a daemon counts as standing still."""

    silent_max: int = 4
    """Questions in a row that it may leave unanswered: it has well over a minute, and answers in
    milliseconds. They are counted, as a process that was stopped itself has heard nothing."""


SILENCE = SilenceConfig()
_log = logging.getLogger(__name__)


def _wall_s() -> float:
    """This machine's clock in Unix seconds, as hivemind reads it."""
    from hivemind.utils import get_dht_time

    now_s: float = get_dht_time()
    return now_s


class HivemindTransport:
    """A :class:`dht.transport.interface.Transport`; make one with :meth:`create`."""

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self.peer_id = config.identity.peer_id
        self._handlers = StreamHandlers(config.budget)
        self.stream_errors = self._handlers.errors
        """Number of failed incoming streams, by the type of the error."""
        self._signer = RecordSigner(config.identity)
        self._reached: Newest[str, None] = Newest(RECORD_BOUNDS.peers_max)
        """Peers to which a stream was opened before."""
        self._lost: dict[tuple[str, tuple[str, ...]], float] = {}
        """When peers could not be dialled at their addresses last, by the loop's clock."""
        self.addresses: tuple[str, ...] = ()
        own = (*config.announce_addresses, *expanded(config.listen_addresses()))
        self._dials = DialRule.of(config.initial_peers, own)
        self._daemon: P2pDaemon | None = None
        self._control_path = Path()
        self._p2p: Any = None
        self._node: Any = None
        self._guard = RecordGuard(on_other_version=self._handlers.versions.note)
        self.rejected_records: Counter[str] = Counter()
        """Number of DHT records refused since the start, by the type of the error."""
        self._records: RecordAccess | None = None
        self._closed = False
        self._cut_off = asyncio.Event()
        """Set where this peer seems to be cut off: whoever is missing is greeted at once."""
        self._running: asyncio.Task[None] | None = None

    @classmethod
    async def create(cls, config: TransportConfig) -> "HivemindTransport":
        """Start the daemon and join the network through ``config.initial_peers``.

        Raises UserError for malformed addresses or a taken port, NetworkError when no peer answers
        within ``config.connect_timeout_s`` (15 s at most).
        """
        _quiet_hivemind()
        self = cls(config)
        peers = parse_peers(config.initial_peers)
        limit_s = min(config.connect_timeout_s, CONNECT_LIMIT_S)
        try:
            async with asyncio.timeout(limit_s):
                await self._start()
                await self._relay()
                await self._join(peers)
            await self._help_others(peers)
        except TimeoutError:
            await self.close()
            waited = f"no answer within {limit_s:.0f} s"
            if not config.initial_peers:
                raise NetworkError(f"the p2p daemon: {waited}") from None
            raise unanswered(config.initial_peers, [waited]) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def _relay(self) -> None:
        """Answer those who ask for a relay, in the daemon's place; refuse them without the option.

        A client that listens nowhere is no relay: nobody can reach it.
        """
        config = self._config
        if config.client_mode:
            return
        relay = RelayServer(
            self,
            config.budget,
            offers=config.relays and config.wants_nat_traversal(),
            metered=partial(config.metered, RELAY_STOP_PROTOCOL),
            pause=config.pause,
        )

        async def serve(stream: Stream) -> None:
            await relay.serve(config.metered(RELAY_PROTOCOL, stream, served=True))

        await self.serve(RELAY_PROTOCOL, serve)

    async def _help_others(self, peers: dict[str, tuple[bytes, ...]]) -> None:
        """Watch the daemon; serve records to light peers and keep this peer's own, unless it is a
        client."""
        parts = self._config.parts
        works: list[PartFunction] = [self._keep_addresses, self._watch_sockets]
        if isinstance(self._records, SharedRecords):
            helper = RecordHelper(self._records, self._config.budget)

            async def tell(stream: Stream) -> None:
                await helper.serve(self._config.metered(RECORDS_PROTOCOL, stream, served=True))

            await self.serve(RECORDS_PROTOCOL, tell)
            works.append(partial(self._records.run, parts))
            works.append(partial(self._keep_joined, self._records, peers))
        self._running = self._handlers.adopt(parts.run(*works))

    @property
    def daemon_pid(self) -> int:
        """Process id of the p2p daemon."""
        return self._daemon.pid if self._daemon is not None else 0

    def sign(self, data: bytes) -> bytes:
        return self._config.identity.sign(data)

    def now(self) -> float:
        if isinstance(self._records, AskedRecords):
            return self._records.clock.now()
        return _wall_s()

    @property
    def clock_note(self) -> str:
        return self._records.clock.note if isinstance(self._records, AskedRecords) else ""

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._check_alive()
        known = protocol in self._handlers.by_protocol
        self._handlers.by_protocol[protocol] = handler
        if known:  # for example after a restart of a part of the peer
            return

        async def on_stream(
            info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            peer_id, host = info.peer_id.to_base58(), host_of(str(info.addr))
            self._dials = self._dials.seen_at((host,))
            self._lost = {at: then_s for at, then_s in self._lost.items() if at[0] != peer_id}
            now_serving = self._handlers.by_protocol.get(protocol)
            if now_serving is None:  # the registration failed on the way back
                writer.transport.abort()
                return
            self._handlers.start(
                now_serving, LibP2PStream(peer_id, reader, writer, remote_host=host)
            )

        try:
            await asking_daemon(self._p2p.add_binary_stream_handler(protocol, on_stream))
        except BaseException as error:
            # Nobody else uses this daemon: it had taken a registration that failed here.
            if isinstance(error, NetworkError) and ALREADY_SET in str(error):
                return
            del self._handlers.by_protocol[protocol]
            raise

    async def open_stream(
        self, peer_id: str, protocol: str, *, addresses: tuple[str, ...] = ()
    ) -> Stream:
        """Open a stream as the interface describes, within 10 s.

        A stream on a protocol that the peer is known to speak opens without a round trip. A peer
        that has frozen since then is only noticed by its silence, so the first answer needs a time
        limit.
        """
        self._check_alive()
        if peer_id == self.peer_id:
            return self._handlers.open_to_self(peer_id, protocol)
        try:
            async with asyncio.timeout(OPEN_LIMIT_S):
                return await self._open(peer_id, protocol, addresses)
        except TimeoutError:
            self._reached.pop(peer_id, None)
            raise NetworkError(
                f"peer {peer_id} did not answer within {OPEN_LIMIT_S:.0f} s"
            ) from None

    async def store(self, key: str, value: bytes, *, expires_unix_s: float) -> bool:
        self._check_alive()
        return await self._access.store(key, value, expires_unix_s)

    async def get(self, key: str, *, latest: bool = False) -> Mapping[str, bytes]:
        self._check_alive()
        return await self._access.get(key, latest=latest)

    # A full peer's operations in the DHT (dht.records.access)

    async def search(self, key: str) -> None:
        self._check_alive()
        # Found records go through the validator's guard, which then holds each author's newest one
        # of all replicas, and never an older one than was read before.
        await asking_daemon(self._node.get(key, latest=True))

    async def put(self, record: SignedRecord, data: bytes) -> bool:
        from dht.daemon import kademlia

        self._check_alive()
        stored: bool = await asking_daemon(kademlia.store(self._node, record, data))
        return stored

    def contact(self) -> Contact:
        return self._access.contact(self._handlers)

    def rejoin(self) -> None:
        self._cut_off.set()

    async def wait_ended(self) -> str:
        if self._daemon is None:
            return "the p2p daemon never started"
        ended = asyncio.create_task(self._daemon.ended.wait())
        try:
            await asyncio.wait({ended, self._running or ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self._running is not None and self._running.done() and not self._closed:
            self._running.result()
        return f"the p2p daemon is gone: {self._daemon.last_words()}"

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._records is not None:
            await self._records.close()
        await self._handlers.close()
        p2p, node, daemon = self._p2p, self._node, self._daemon
        if node is not None:
            node.is_alive = False  # its background loops end; its handlers end with the daemon
        tasks: list[asyncio.Task[None]] = []
        if p2p is not None:
            control = p2p._client.control
            tasks = [t for t in (p2p._listen_task, control._read_task, control._write_task) if t]
            tasks += control._handler_tasks.values()
            for task in tasks:
                task.cancel()
            # Pending calls would otherwise wait for their time-outs.
            for call in list(control._pending_calls.values()):
                if not call.done():
                    call.set_exception(ConnectionAbortedError("this peer has left the network"))
        if daemon is not None:
            # Shielded: a caller that gives up waiting must not leave the daemon behind.
            await asyncio.shield(asyncio.ensure_future(daemon.stop()))
        await asyncio.gather(*tasks, return_exceptions=True)
        if p2p is not None:
            await p2p.shutdown()

    async def _start(self) -> None:
        import hivemind
        from hivemind.p2p import P2P
        from hivemind.utils.multiaddr import Multiaddr

        from dht.daemon import kademlia

        config = self._config
        self._daemon = await P2pDaemon.start(
            DaemonConfig(
                binary=Path(hivemind.__file__).parent / "hivemind_cli" / "p2pd",
                identity=config.identity,
                host_addresses=config.listen_addresses(),
                announce_addresses=config.announce_addresses,
                nat_traversal=config.wants_nat_traversal(),
            )
        )
        self._control_path = self._daemon.control_path
        # hivemind puts its sockets under a fixed prefix in /tmp; this uses the private directory.
        prefix = {"_UNIX_SOCKET_PREFIX": f"/unix{self._daemon.directory}/"}
        attached = type("PrivateP2P", (P2P,), prefix)
        self._p2p = await asking_daemon(
            attached.replicate(Multiaddr(f"/unix{self._control_path}"))  # type: ignore[attr-defined]
        )
        if self._p2p.peer_id.to_base58() != self.peer_id:
            raise UserError("the identity file was exchanged while this peer started; start again")
        given = by_peer(config.initial_peers, lambda address: (_named(address), address))
        shared = (
            *(self._open_helper, self._signer, self._guard, given, SystemRandom(), _wall_s),
            self._handlers.versions,
            self._handlers.budget.parties,
        )
        if config.client_mode:
            self._records = AskedRecords(*shared)
            return
        self._records = SharedRecords(*shared, dht=self)
        self._node = await kademlia.create_node(
            self._p2p, self._guard, self.rejected_records, config.budget
        )
        await self._read_addresses()

    @property
    def _access(self) -> RecordAccess:
        if self._records is None:
            raise NetworkError("this peer is not connected yet")
        return self._records

    async def _open_helper(self, peer_id: str, protocol: str, where: tuple[str, ...]) -> Stream:
        stream = await self.open_stream(peer_id, protocol, addresses=where)
        return self._config.metered(protocol, stream)

    async def _read_addresses(self) -> None:
        try:
            visible = await asking_daemon(self._p2p.get_visible_maddrs(latest=True))
        except ValueError:  # none: a client listens nowhere, and networks go away for a while
            return
        self.addresses = ranked([str(each) for each in visible]) or self.addresses
        self._dials = self._dials.seen_at(map(host_of, self.addresses))

    async def _keep_addresses(self) -> None:
        """Read this peer's addresses again and again: port mappings and networks change. End this
        process where the daemon no longer answers it: the network would seem to be cut."""
        silent = 0
        while True:
            await asyncio.sleep(ADDRESSES_PERIOD_S)
            try:
                async with asyncio.timeout(OPEN_LIMIT_S):
                    await self._read_addresses()
                silent = 0
            except NetworkError as error:
                _log.debug("cannot read this peer's addresses: %s", error)
            except TimeoutError:
                silent += 1
                if silent == SILENCE.silent_max:
                    raise MachineError(
                        f"the p2p daemon, process {self.daemon_pid}, no longer answers: it was"
                        " stopped, or the machine has no memory left; start this peer again"
                    ) from None

    async def _watch_sockets(self) -> None:
        """End this process where its daemon's sockets are gone: it would look alive and be deaf."""
        while True:
            await asyncio.sleep(SOCKETS_PERIOD_S)
            daemon = self._daemon
            if daemon is None or self._closed or daemon.ended.is_set():
                continue
            if not daemon.can_be_reached():
                raise MachineError(
                    f"the p2p daemon's socket in {daemon.directory} was removed by another program,"
                    " and nobody reaches this peer any more; start it again, and let nobody else"
                    " clean that directory"
                )

    async def _join(self, peers: dict[str, tuple[bytes, ...]]) -> None:
        """Reach at least one of ``peers``; a full peer also learns of their neighbours."""
        others = [item for item in peers.items() if item[0] != self.peer_id]
        if not others:
            return
        if self._config.client_mode:
            try:
                await self._access.greet()
            except NetworkError as error:
                raise unanswered(self._config.initial_peers, [str(error)]) from None
            return
        results = await asyncio.gather(
            *(self._greet(peer, dialed) for peer, dialed in others), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if len(errors) == len(others):
            raise unanswered(self._config.initial_peers, [str(error) for error in errors])
        try:
            await self._access.greet()
        except NetworkError as error:
            # The DHT's own messages have no version of ours: without this, the peer would join a
            # network in which nobody takes its records.
            if self._access.speak_otherwise:
                raise NetworkError(f"this network cannot be joined: {error}") from None
        with suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                await self._node.find_nearest_nodes([self._node.node_id])

    async def _greet(self, peer_id: str, dialed: Sequence[bytes]) -> None:
        """Connect to a peer and join its routing table.

        Raises NetworkError for a peer that is away, too busy to answer, or not a full peer.
        """
        from dht.daemon import kademlia

        try:
            async with asyncio.timeout(OPEN_LIMIT_S):
                await self._connect(peer_id, dialed)
                await asking_daemon(kademlia.greet(self._node, peer_id))
        except TimeoutError:
            raise NetworkError(
                f"peer {peer_id} did not answer within {OPEN_LIMIT_S:.0f} s"
            ) from None

    async def _keep_joined(
        self, records: SharedRecords, given: dict[str, tuple[bytes, ...]]
    ) -> None:
        """Greet again who is missing, so that a network cut in two becomes one.

        Whoever greets first tells both sides; that holds for two networks of one name and model
        that come to know each other, too.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REJOIN_PERIOD_S):
                    await self._cut_off.wait()
            self._cut_off.clear()
            missing = self._missing(given)
            met = records.asked.absent()
            for peer_id, addresses in met.items():
                missing[peer_id] = parse_known(self._dials.admitted(peer_id, addresses))
            missing.pop(self.peer_id, None)
            answered = await asyncio.gather(
                *(self._answers(peer_id, dialed) for peer_id, dialed in missing.items())
            )
            back = [peer_id for peer_id, there in zip(missing, answered, strict=True) if there]
            for peer_id in back:
                records.asked.has_answered(peer_id)
            if back:
                await records.search_nodes()

    def _missing(self, given: dict[str, tuple[bytes, ...]]) -> dict[str, Sequence[bytes]]:
        """The given and the remembered peers that are not in the routing table, with addresses."""
        from hivemind.p2p import PeerID

        named: dict[str, Sequence[bytes]] = {}
        for address in self._config.remembered_peers:
            peer_id = _named(address)
            if admitted := self._dials.admitted(peer_id, (address,)):
                named[peer_id] = [*named.get(peer_id, ()), *parse_known(admitted)]
        named |= given
        known = self._node.protocol.routing_table.peer_id_to_uid
        return {p: dialed for p, dialed in named.items() if PeerID.from_base58(p) not in known}

    async def _answers(self, peer_id: str, dialed: Sequence[bytes]) -> bool:
        """Whether a missing peer answers a greeting."""
        try:
            if not await _any_listens(dialed):
                return False  # each dial that fails makes the daemon's next one wait longer
            await self._greet(peer_id, dialed)
        except NetworkError as error:
            _log.debug("peer %s is still away: %s", peer_id, error)
            return False
        return True

    async def _open(self, peer_id: str, protocol: str, addresses: tuple[str, ...]) -> Stream:
        addresses = self._dials.admitted(peer_id, addresses)
        if not addresses and not await self._is_connected(peer_id):
            # The daemon would ask strangers where it is, and dial what they say.
            raise NetworkError(
                f"cannot reach peer {peer_id}: it is not connected, and no address of it is known"
                " that may be dialled"
            )
        if addresses and peer_id not in self._reached:
            await self._dial(peer_id, addresses)
        try:
            stream = await self._open_known(peer_id, protocol)
        except NetworkError:
            again = addresses and peer_id in self._reached
            self._reached.pop(peer_id, None)
            if not again:
                raise
            await self._dial(peer_id, addresses)
            stream = await self._open_known(peer_id, protocol)
        self._reached[peer_id] = None
        return stream

    async def _dial(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """Connect to a peer, unless it could not be dialled there a moment ago and has not come
        back by itself since: for each failed dial, the daemon asks all others where the peer is."""
        now_s = loop_s()
        self._lost = {at: then_s for at, then_s in self._lost.items() if now_s < then_s + AGAIN_S}
        if (peer_id, addresses) in self._lost:
            raise NetworkError(f"cannot reach peer {peer_id}: it did not answer a moment ago")
        try:
            await self._connect(peer_id, parse_known(addresses))
        except NetworkError:
            self._lost[peer_id, addresses] = now_s
            raise

    async def _is_connected(self, peer_id: str) -> bool:
        connected = await asking_daemon(self._p2p.list_peers())
        return any(each.peer_id.to_base58() == peer_id for each in connected)

    async def _open_known(self, peer_id: str, protocol: str) -> Stream:
        from hivemind.proto import p2pd_pb2

        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=raw_id(peer_id), proto=[protocol]),
        )
        reader, writer = await ask(
            self._control_path, request, f"cannot open a stream to peer {peer_id}"
        )
        return LibP2PStream(peer_id, reader, writer)

    async def _connect(self, peer_id: str, dialed: Sequence[bytes]) -> None:
        from hivemind.proto import p2pd_pb2

        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=raw_id(peer_id), addrs=dialed),
        )
        _, writer = await ask(self._control_path, request, f"cannot reach peer {peer_id}")
        writer.close()

    def _check_alive(self) -> None:
        if self._closed:
            raise NetworkError("this peer has left the network")
        if self._daemon is None or self._daemon.ended.is_set():
            words = self._daemon.last_words() if self._daemon is not None else "it never started"
            raise NetworkError(f"the p2p daemon is gone: {words}")


async def _any_listens(dialed: Sequence[bytes]) -> bool:
    """Whether something listens at one of the addresses, as far as that can be seen without libp2p:
    names and addresses through relays count as listening."""
    from hivemind.utils.multiaddr import Multiaddr

    async def may_listen(address: bytes) -> bool:
        parts = str(Multiaddr(address)).split("/")
        if len(parts) != 5 or parts[1] not in {"ip4", "ip6"}:
            return True
        return await listens(parts[2], int(parts[4]), LISTENS_S)

    return any(await asyncio.gather(*map(may_listen, dialed)))


def _named(address: str) -> str:
    """The peer id at the end of an address that was checked before."""
    return address.rstrip("/").rpartition("/p2p/")[2]


def _quiet_hivemind() -> None:
    """Hide hivemind's log from users, who get our errors; ANABRANCH_DEBUG shows it."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    lean_hivemind.prepare_hivemind()
    import hivemind.utils.logging as hivemind_logging

    logging.addLevelName(logging.WARNING, "WARNING")  # it renames it for the whole program
    hivemind_logging.use_hivemind_log_handler("nowhere")
    level = logging.DEBUG if os.environ.get("ANABRANCH_DEBUG") else logging.ERROR
    logging.getLogger("hivemind").setLevel(level)
