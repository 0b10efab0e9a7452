"""What an attack has at hand: its targets, its identities, its time, and the count of what it sent.

An attacker is a process of its own with a transport of its own, like any peer: it knows addresses,
reads records and signs its own. It holds no secret of the honest side.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from dht.errors import NetworkError, PeerError
from dht.identity.multiaddr import split
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.types import ModelSpec, NodeRecord, NodeState, RouteStage
from dht.networks.connecting import connect
from dht.records.directory import DEFAULT_NETWORK, Directory
from dht.transport.config import TransportConfig
from dht.transport.interface import Stream, StreamHandler, Transport
from testing.paths import ROOT

MODEL = ROOT / "models" / "brook"
AGAIN_S = 0.2
"""Pause after an attempt that failed: a closed door is knocked at, not leant on."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """What an attacker sent, and what came of it."""

    bytes: int = 0
    """Bytes written to streams and connections, before encryption."""
    streams: int = 0
    identities: int = 0
    records: int = 0
    """Records told to others, renewals included."""
    frames: int = 0
    """Messages, requests and connections that count as one attempt each."""
    came: int = 0
    """Streams that honest peers and clients opened to the attacker."""
    gained: int = 0
    """What nobody may have: sessions in another's name, dials on order, answers
    to other sites, layers for other weights."""
    refused: Counter[str] = field(default_factory=Counter)
    """Attempts that were refused or closed, by how."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self) | {"refused": dict(+self.refused)}


class CountedStream:
    """A stream whose writes are counted in :class:`Sent`."""

    def __init__(self, stream: Stream, sent: Sent) -> None:
        self._stream = stream
        self._sent = sent
        self.remote_peer_id = stream.remote_peer_id
        self.remote_host = stream.remote_host
        self.read_exactly = stream.read_exactly
        self.read_some = stream.read_some
        self.drain = stream.drain
        self.close = stream.close

    def write(self, data: bytes) -> None:
        self._sent.bytes += len(data)
        self._stream.write(data)

    async def say(self, message: object, body: bytes = b"") -> None:
        """Send one frame."""
        self._sent.frames += 1
        await codec.send_frame(self, message, body)

    async def hear(self) -> Any:
        """The next message."""
        return (await codec.read_frame(self)).message


class Target:
    """The honest side as an attacker sees it; use as an async context manager.

    ``peers`` are full addresses of honest peers, ``gateway`` is the URL of a gateway or empty. The
    ``seconds`` begin with the first attempt: what an attacker needs to get ready does not count.
    """

    def __init__(self, peers: tuple[str, ...], gateway: str, seconds: float) -> None:
        self.peers = peers
        self.gateway = gateway
        self.ids = tuple(split(address)[0] for address in peers)
        self.sent = Sent()
        self._seconds = seconds
        self._until_s: float | None = None
        self._open = AsyncExitStack()

    @property
    def left_s(self) -> float:
        """Seconds until the attack ends."""
        if self._until_s is None:
            return self._seconds
        return self._until_s - asyncio.get_running_loop().time()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def enter(self, *, serves: bool = False) -> Transport:
        """One more identity in the network; with ``serves``, others can open streams to it."""
        config = TransportConfig(
            identity=Identity.generate(),
            host="127.0.0.1",
            initial_peers=self.peers,
            client_mode=not serves,
            nat_traversal=False,
        )
        transport = await connect(config)
        self._open.push_async_callback(transport.close)
        self.sent.identities += 1
        return transport

    async def stream(self, transport: Transport, peer_id: str, protocol: str) -> CountedStream:
        """A stream to a target, which stays open until the attack closes it."""
        addresses = tuple(address for address in self.peers if address.endswith(peer_id))
        stream = await transport.open_stream(peer_id, protocol, addresses=addresses)
        self.sent.streams += 1
        return CountedStream(stream, self.sent)

    async def serve(
        self,
        transport: Transport,
        protocol: str,
        handler: Callable[[CountedStream], Awaitable[None]],
    ) -> None:
        """Answer streams of others with ``handler``, and count them."""

        async def counted(stream: Stream) -> None:
            self.sent.came += 1
            await handler(CountedStream(stream, self.sent))

        run: StreamHandler = counted
        await transport.serve(protocol, run)

    async def again(self, step: Callable[[], Awaitable[None]], every_s: float = 0.0) -> None:
        """Repeat ``step`` until the time is over; what it meets with is counted."""
        self._until_s = self._until_s or asyncio.get_running_loop().time() + self._seconds
        while (left_s := self.left_s) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await step()
                    await asyncio.sleep(every_s)
            except (NetworkError, PeerError, OSError, TimeoutError) as error:
                if self.left_s > 0:
                    self.sent.refused[type(error).__name__] += 1
                    await asyncio.sleep(AGAIN_S)

    async def at_once(
        self, steps: list[Callable[[], Awaitable[None]]], every_s: float = 0.0
    ) -> Sent:
        """Repeat all of ``steps`` beside each other until the time is over."""
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(self.again(step, every_s))
        return self.sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the honest peers' records say."""

    directory: Directory
    nodes: dict[str, NodeRecord]
    """Node records of the targets that serve, by peer id."""
    route: tuple[NodeRecord, ...]
    """A chain of them over all layers."""

    @property
    def model(self) -> ModelSpec:
        return self.route[0].model

    def stages(self) -> tuple[RouteStage, ...]:
        """The chain as a session's open has it."""
        ends = [0, *(record.end for record in self.route)]
        return tuple(
            RouteStage(peer_id=record.peer_id, start=start, end=record.end)
            for start, record in zip(ends, self.route, strict=False)
        )


async def look(target: Target, transport: Transport) -> Seen:
    """Read who serves what. Raises NetworkError while the targets do not hold all layers."""
    directory = Directory(transport, DEFAULT_NETWORK, MODEL.name)
    while target.left_s > 0:
        nodes = {
            peer_id: record
            for peer_id, record in (await directory.nodes()).items()
            if peer_id in target.ids and record.state is NodeState.SERVING
        }
        if route := chain_of(nodes):
            return Seen(directory=directory, nodes=nodes, route=route)
        await asyncio.sleep(AGAIN_S)
    raise NetworkError("the targets do not hold all layers")


def chain_of(nodes: dict[str, NodeRecord]) -> tuple[NodeRecord, ...]:
    """Peers that hold all layers one after the other, longest spans first; empty: none do."""
    chain: list[NodeRecord] = []
    while not chain or chain[-1].end < chain[-1].model.layers:
        at = chain[-1].end if chain else 0
        reaching = [node for node in nodes.values() if node.start <= at < node.end]
        if not reaching:
            return ()
        chain.append(max(reaching, key=lambda node: node.end))
    return tuple(chain)


Attack = Callable[[Target], Awaitable[Sent]]
