"""Finds whether others can reach this peer, by asking other peers to dial it back from outside.

A peer behind NAT sees nothing wrong from the inside. So it asks a few others to open a connection
to the address from which they see it come, at the port on which it listens. A peer can only have
itself dialled, a few times a minute, and no other address.
"""

import asyncio
import ipaddress
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from zlib import crc32

from dht.budget import DIALS_BACK, DIALS_BACK_OPEN, DIALS_BACK_TO, REQUESTS, Budget
from dht.errors import NetworkError, PeerError, UserError
from dht.identity.multiaddr import CIRCUIT, host_of
from dht.messages import codec
from dht.messages.peer import ReachAnswer, ReachRequest
from dht.messages.types import NodeRecord, Reach
from dht.records.directory import Directory
from dht.transport.interface import REACH_PROTOCOL, Stream, Transport
from dht.transport.listener import GREETING, greets, identity_of
from dht.transport.requests import ask
from node.links.dial_back_findings import Findings
from node.links.relay_slots import WATCH_EVERY_S, Relays


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachConfig:
    """Limits of dial-backs, and how often a peer has itself dialled back; times in seconds."""

    dial_s: float = 4.0
    answer_s: float = 8.0
    asked: int = 3
    """Peers that are asked at a time."""
    direct_every_s: float = 900.0
    """While others get through."""
    relayed_every_s: float = 60.0
    """While a relay takes calls."""
    unknown_every_s: float = 15.0
    """Otherwise."""


REACH = ReachConfig()


class ReachServer:
    """Dials back the peers that ask, at the address they come from and nowhere else."""

    def __init__(
        self,
        transport: Transport,
        limits: ReachConfig = REACH,
        budget: Budget | None = None,
    ) -> None:
        self._transport = transport
        self._limits = limits
        budget = budget or Budget()
        self._requests = budget.rate(REQUESTS)
        self._hosts = budget.rate(DIALS_BACK_TO)
        self._dials = budget.rate(DIALS_BACK)
        self._open = budget.held(DIALS_BACK_OPEN)

    async def start(self) -> None:
        await self._transport.serve(REACH_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        async with asyncio.timeout(self._limits.answer_s):
            message = (await codec.read_frame(stream, limit_bytes=1 << 10)).message
            if not isinstance(message, ReachRequest):
                raise codec.MalformedError(f"{type(message).__name__} asks for no dial back")
            host, now_s = stream.remote_host, asyncio.get_running_loop().time()
            if not self._requests.take(stream.remote_peer_id, 1, now_s):
                raise NetworkError("this peer took its share of requests")
            reached = await self._dial(stream.remote_peer_id, host, message.port)
            await codec.send_frame(stream, ReachAnswer(reached=reached, host=host[:128]))

    async def _dial(self, peer_id: str, host: str, port: int) -> bool | None:
        """Whether the peer answers there; None if this one cannot tell or will not look."""
        now_s = asyncio.get_running_loop().time()
        if not host or not self._open.take(peer_id):
            return None
        try:
            if not (self._hosts.take(host, 1, now_s) and self._dials.take(peer_id, 1, now_s)):
                return None
            async with asyncio.timeout(self._limits.dial_s):
                return await _is_there(peer_id, host, port)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False
        finally:
            self._open.give_back(peer_id)


async def _is_there(peer_id: str, host: str, port: int) -> bool:
    """Whether libp2p answers at a port, and is not another peer: behind one router, or within one
    machine, several may have been given the same port."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        return await greets(reader, writer) and await identity_of(reader, writer) in {None, peer_id}
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def port_of(addresses: tuple[str, ...]) -> int | None:
    """The TCP port in a peer's listening addresses; None if it listens on none."""
    for address in addresses:
        parts = address.split("/")
        if CIRCUIT not in address and len(parts) > 4 and parts[3] == "tcp":
            with suppress(ValueError):
                return int(parts[4])
    return None


@asynccontextmanager
async def greeter(host: str, port: int) -> AsyncIterator[int]:
    """Listen on a port and answer as libp2p would; yields the port's number.

    Raises UserError if it cannot listen there.
    """

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        with suppress(OSError):
            await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(greet, host, port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)  # asyncio says more of it
        raise UserError(
            f"cannot listen on {host} port {port} ({why}): name another port with --port"
        ) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def ask_back(
    transport: Transport, peer_id: str, where: tuple[str, ...], port: int
) -> ReachAnswer | None:
    """Ask ``peer_id`` to dial this peer's ``port``; None if it does not answer."""
    try:
        async with asyncio.timeout(REACH.answer_s):
            request = ReachRequest(port=port)
            answer = await ask(transport, peer_id, REACH_PROTOCOL, request, addresses=where)
    except (NetworkError, PeerError, TimeoutError):
        return None
    return answer.message if isinstance(answer.message, ReachAnswer) else None


class ReachKeeper:
    """Has this peer dialled back from time to time, and keeps the conclusion.

    While others do not get through, it holds slots at relays.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        on_change: Callable[[Reach, tuple[str, ...]], None],
        *,
        relays: Relays,
    ) -> None:
        """``on_change`` gets how others reach this peer, and at which addresses beside its own."""
        self._transport = transport
        self._directory = directory
        self._on_change = on_change
        self._relays = relays
        self._every_s = {Reach.DIRECT: REACH.direct_every_s, Reach.RELAYED: REACH.relayed_every_s}
        self._looks = 0
        self._findings = Findings()
        self._told: tuple[Reach, tuple[str, ...]] = (Reach.UNKNOWN, ())
        self.settled = asyncio.Event()
        """Set once a dial-back succeeded, or all peers asked first have answered."""

    @property
    def reach(self) -> Reach:
        """How others reach this peer, as last given to ``on_change``."""
        return self._told[0]

    async def run(self) -> None:
        """Ask for dial-backs at intervals until cancelled."""
        while True:
            await self.look()
            await self._rest(self._every_s.get(self.reach, REACH.unknown_every_s))

    async def _rest(self, pause_s: float) -> None:
        """Wait until the next look, which comes at once where this peer's addresses change. Relays
        are watched meanwhile; another replaces one that is lost."""
        clock, here = asyncio.get_running_loop(), set(self._transport.addresses)
        until_s = clock.time() + pause_s
        while (left_s := until_s - clock.time()) > 0:
            await asyncio.sleep(min(left_s, WATCH_EVERY_S))
            if set(self._transport.addresses) != here:
                self._findings = Findings()  # what was found was so in another network
                return
            if await self._relays.lost():
                with suppress(NetworkError):
                    await self._relays.hold(await self._directory.nodes())
                self._conclude()

    async def look(self) -> None:
        """Ask some peers once, and hold or release relays."""
        try:
            nodes = await self._directory.nodes()
            await self._ask_some(nodes)
            if self._findings.suspect:
                await self._relays.hold(nodes)
            else:
                self._relays.let_go()
        except NetworkError:
            pass  # with nobody to ask just now, earlier findings stand
        self._conclude()
        self.settled.set()

    async def _ask_some(self, nodes: Mapping[str, NodeRecord]) -> None:
        me = self._transport.peer_id
        port = port_of(self._transport.addresses)
        if port is None:  # it listens nowhere, or where nobody can be asked to dial
            self._findings.closed = not self._transport.addresses
            return
        self._looks += 1
        # Other peers each time, in an order of this peer's own.
        others = sorted(nodes.keys() - {me}, key=lambda p: crc32(f"{self._looks}{me}{p}".encode()))
        async with asyncio.TaskGroup() as group:
            for peer_id in others[: REACH.asked]:
                group.create_task(self._note(peer_id, nodes[peer_id].addresses, port))

    async def _note(self, peer_id: str, where: tuple[str, ...], port: int) -> None:
        answer = await ask_back(self._transport, peer_id, where, port)
        self._findings.note(peer_id, answer, asyncio.get_running_loop().time())
        if answer is not None and answer.reached:
            self._conclude()
            self.settled.set()

    def _conclude(self) -> None:
        circuits = self._relays.addresses
        now_s = asyncio.get_running_loop().time()
        reach = self._findings.conclude(now_s, relayed=bool(circuits))
        if reach is Reach.DIRECT:
            circuits = self._seen_from_outside()
        if reach is Reach.UNKNOWN and self.reach is not Reach.RELAYED:
            return
        if (reach, circuits) != self._told:
            self._told = (reach, circuits)
            self._on_change(reach, circuits)

    def _seen_from_outside(self) -> tuple[str, ...]:
        """Address of a router that forwards a port to this peer, if there is one."""
        host, port = self._findings.host, port_of(self._transport.addresses)
        if not host or any(host_of(each) == host for each in self._transport.addresses):
            return ()
        version = ipaddress.ip_address(host).version
        return (f"/ip{version}/{host}/tcp/{port}/p2p/{self._transport.peer_id}",)
