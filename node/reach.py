"""Whether others can reach this peer: another peer dials it back, from outside.

A peer behind NAT sees nothing wrong from the inside. So it asks a few others to open a connection
to the address that they see it come from, at the port that it listens on. Nothing else is dialled
for anybody: who asks can only have itself looked at, a few times a minute.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from zlib import crc32

from dht import wire
from dht.directory import Directory
from dht.errors import NetworkError, PeerError
from dht.messages import ReachAnswer, ReachRequest
from dht.rates import Rates
from dht.transport import REACH_PROTOCOL, Stream, Transport
from dht.types import Reach

GREETING = b"\x13/multistream/1.0.0\n"
"""What every libp2p listener says first (multistream-select 1.0)."""
ASKED = 3
RELAYED = "/p2p-circuit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachLimits:
    """Times in seconds."""

    dial_s: float = 4.0
    answer_s: float = 8.0
    per_peer_s: float = 20.0
    """One dial for a peer, and for an address, in so long; three at once."""
    burst: float = 3.0
    all_per_s: float = 2.0
    at_once: int = 16


class ReachServer:
    """Dials back those who ask, where they come from and nowhere else."""

    def __init__(self, transport: Transport, limits: ReachLimits | None = None) -> None:
        self._transport = transport
        self._limits = limits = limits or ReachLimits()
        self._peers = Rates(per_s=1 / limits.per_peer_s, burst=limits.burst)
        self._hosts = Rates(per_s=1 / limits.per_peer_s, burst=limits.burst)
        self._all = Rates(per_s=limits.all_per_s, burst=10 * limits.all_per_s)
        self._dialling = 0

    async def start(self) -> None:
        """Accept requests."""
        await self._transport.serve(REACH_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        async with asyncio.timeout(self._limits.answer_s):
            message = (await wire.read_frame(stream, limit_bytes=1 << 10)).message
            if not isinstance(message, ReachRequest):
                raise wire.MalformedError(f"{type(message).__name__} asks for no dial back")
            host = stream.remote_host
            reached = await self._dial(stream.remote_peer_id, host, message.port)
            await wire.send_frame(stream, ReachAnswer(reached=reached, host=host[:128]))

    async def _dial(self, peer_id: str, host: str, port: int) -> bool | None:
        """Whether libp2p answers there; None where this peer cannot say or will not look."""
        now_s = asyncio.get_running_loop().time()
        if not host or self._dialling >= self._limits.at_once:
            return None
        if not (
            self._peers.take(peer_id, 1, now_s)
            and self._hosts.take(host, 1, now_s)
            and self._all.take("", 1, now_s)
        ):
            return None
        self._dialling += 1
        try:
            async with asyncio.timeout(self._limits.dial_s):
                return await _greets(host, port)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False
        finally:
            self._dialling -= 1


async def _greets(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(GREETING)
        return await reader.readexactly(len(GREETING)) == GREETING
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def reach_of(
    transport: Transport,
    others: Mapping[str, tuple[str, ...]],
    limits: ReachLimits | None = None,
) -> Reach:
    """How others reach this peer, as up to three of ``others`` (with addresses) find it."""
    port = port_of(transport.addresses)
    if port is None:
        return Reach.NONE
    limit_s = (limits or ReachLimits()).answer_s
    asked = [
        _ask(transport, peer_id, where, port, limit_s)
        for peer_id, where in list(others.items())[:ASKED]
    ]
    return concluded(await asyncio.gather(*asked), transport.addresses)


def concluded(said: Sequence[ReachAnswer | None], addresses: tuple[str, ...]) -> Reach:
    """What follows from what others found; None stands for one that did not answer.

    A neighbour on the same local network gets through where the world does not, so it counts only
    where nobody looked from outside.
    """
    tried = [answer for answer in said if answer is not None and answer.reached is not None]
    outside = [answer for answer in tried if is_public(answer.host)]
    if any(answer.reached for answer in outside or tried):
        return Reach.DIRECT
    if any(RELAYED in address for address in addresses):
        return Reach.RELAYED
    return Reach.NONE if tried else Reach.UNKNOWN


def is_public(host: str) -> bool:
    """Whether an IP address is one of the internet's."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def port_of(addresses: tuple[str, ...]) -> int | None:
    """The TCP port that a peer listens on, by its addresses; None where it listens nowhere."""
    for address in addresses:
        parts = address.split("/")
        if RELAYED not in address and len(parts) > 4 and parts[3] == "tcp":
            with suppress(ValueError):
                return int(parts[4])
    return None


async def _ask(
    transport: Transport, peer_id: str, where: tuple[str, ...], port: int, limit_s: float
) -> ReachAnswer | None:
    try:
        async with asyncio.timeout(limit_s):
            stream = await transport.open_stream(peer_id, REACH_PROTOCOL, addresses=where)
            try:
                await wire.send_frame(stream, ReachRequest(port=port))
                answer = (await wire.read_frame(stream, limit_bytes=1 << 10)).message
            finally:
                await stream.close()
    except (NetworkError, PeerError, TimeoutError):
        return None
    return answer if isinstance(answer, ReachAnswer) else None


class ReachKeeper:
    """Has this peer dialled back from time to time, and knows what came of it."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        on_change: Callable[[Reach], None],
        *,
        sure_every_s: float = 900.0,
        else_every_s: float = 60.0,
        unknown_every_s: float = 15.0,
    ) -> None:
        """Every ``sure_every_s`` while others get through, ``unknown_every_s`` while nobody has
        tried, otherwise every ``else_every_s``."""
        self._transport = transport
        self._directory = directory
        self._on_change = on_change
        self._else_every_s = else_every_s
        self._every_s = {Reach.DIRECT: sure_every_s, Reach.UNKNOWN: unknown_every_s}
        self._looks = 0
        self.reach = Reach.UNKNOWN

    async def run(self) -> None:
        """Look again and again until cancelled; the first time is the caller's."""
        while True:
            await asyncio.sleep(self._every_s.get(self.reach, self._else_every_s))
            await self.look()

    async def look(self) -> None:
        """Ask others once."""
        try:
            nodes = await self._directory.nodes()
            me = self._transport.peer_id
            self._looks += 1
            # Others each time, and not the same ones as everybody asks.
            others = sorted(
                nodes.keys() - {me}, key=lambda p: crc32(f"{self._looks}{me}{p}".encode())
            )
            found = await reach_of(self._transport, {p: nodes[p].addresses for p in others})
        except NetworkError:
            found = Reach.UNKNOWN
        # Nobody to ask just now changes nothing about what others found before.
        if found is not Reach.UNKNOWN and found is not self.reach:
            self.reach = found
            self._on_change(found)
