"""Outbound links to other stages: one stream per next peer, shared by all sessions.

A hop carries opens, activations and ring tokens down the route, and accepts, refusals and failures
back. While sessions use it, it is pinged and watched
(:mod:`coordinator.policies.failure.detector`). Silence, or a stuck engine, counts as a broken
connection, because a stopped process never breaks its connections.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from coordinator.policies.failure.detector import Dead, PeerWatch, PingNow, WatchConfig
from coordinator.policies.links.scheduler import LinkScheduler, TrafficClass
from dht.budget import DIALS, Budget
from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.kv import KvTaken
from dht.messages.session import (
    Delivered,
    MigrationReady,
    Ping,
    Pong,
    SessionAccepted,
    SessionFailed,
    SessionLeaving,
    SessionRefused,
)
from dht.messages.types import RECORD_BOUNDS
from dht.process.newest import Newest
from dht.process.supervision import Supervisor, end_all, loop_s
from dht.transport.interface import HOP_PROTOCOL, Stream, Transport
from node.links.framed_stream import LinkSender
from node.links.lent_traffic import LentTraffic as Lent

logger = logging.getLogger(__name__)

UNREACHABLE = "cannot be reached"
"""The only reason given to others for a hop that did not open. Clients name peers, whose records
name addresses, so what was found there (a closed port, another protocol, nothing) only goes into
this peer's log."""

DIALS_REFUSED = "too many peers were dialled lately that did not answer before"
"""The reason given to others where :meth:`HopTable.admits` says no."""

AddressesOf = Callable[[str], Awaitable[tuple[str, ...]]]
"""Finds the addresses in a peer's own record; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopConfig:
    """Settings of a hop; times in seconds."""

    open_s: float = 4.0
    """Time limit to open the stream, after which the peer counts as unreachable."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    """When a peer that sessions use counts as lost although its stream is open."""
    idle_s: float = 60.0
    """Time after which an unused hop is closed."""
    scheduler: Callable[[], LinkScheduler] = LinkScheduler
    """Makes the scheduler of a hop, which decides the order in which frames leave."""


HopReply = SessionAccepted | SessionRefused | SessionFailed | SessionLeaving | MigrationReady
"""Messages about a session from its next stage."""


class HopEvents(Protocol):
    """Callbacks of a hop to its owner, on the event loop's thread."""

    def hop_replied(self, peer_id: str, message: HopReply) -> None: ...

    def kv_taken(self, peer_id: str, taken: KvTaken) -> None: ...

    def hop_lost(self, peer_id: str, reason: str) -> None: ...

    def hop_in_use(self, peer_id: str) -> bool: ...


class Hop:
    """The stream to one next peer, opened on first use. Frames sent before it is open wait."""

    def __init__(
        self,
        transport: Transport,
        addresses_of: AddressesOf,
        config: HopConfig,
        events: HopEvents,
        lent: Lent,
        peer_id: str,
    ) -> None:
        self.peer_id = peer_id
        self._addresses_of = addresses_of
        self._transport = transport
        self._config = config
        self._events = events
        self._lent = lent
        self._stream: Stream | None = None
        self._sender: LinkSender | None = None
        self._early: list[tuple[object, bytes | memoryview, TrafficClass | None]] = []

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait behind a slow link."""
        return 0 if self._sender is None else self._sender.queued_bytes

    @property
    def link(self) -> LinkScheduler | None:
        """The link's scheduler with its measurements; None before the stream is open."""
        return None if self._sender is None else self._sender.scheduler

    def send(
        self,
        message: object,
        body: bytes | memoryview = b"",
        *,
        traffic: TrafficClass | None = None,
    ) -> None:
        """Send one frame without waiting; a session's rows stay in order."""
        if self._sender is None:
            self._early.append((message, body, traffic))
        else:
            self._sender.send(message, body, traffic=traffic)

    @property
    def opened(self) -> bool:
        return self._sender is not None

    async def run(self) -> str:
        """Open, read, write and watch until the hop is lost or idle; returns the reason."""
        try:
            async with asyncio.timeout(self._config.open_s):
                stream = self._stream = await self._transport.open_stream(
                    self.peer_id, HOP_PROTOCOL, addresses=await self._addresses_of(self.peer_id)
                )
        except (NetworkError, TimeoutError) as error:
            logger.info("%s cannot be reached: %s", self.peer_id, str(error) or "no answer")
            return UNREACHABLE
        loop = asyncio.get_running_loop()
        sender = LinkSender(
            stream,
            self._config.scheduler(),
            lambda: int(loop.time() * 1e6),
            self._lent.up,
        )
        for message, body, traffic in self._early:
            sender.send(message, body, traffic=traffic)
        self._early.clear()
        self._sender = sender
        watch = PeerWatch(config=self._config.watch, heard_s=loop.time())
        tasks = [
            asyncio.create_task(work)
            for work in (
                sender.run(),
                self._read(stream, sender, watch),
                self._watch(sender, watch),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result() or "stream ended"
        except (NetworkError, PeerError) as error:
            return str(error)
        finally:
            await end_all(tasks)

    async def close(self) -> None:
        """Close the stream, which may take a while if its last bytes cannot leave."""
        if self._stream is not None:
            await self._stream.close()

    async def _read(self, stream: Stream, sender: LinkSender, watch: PeerWatch) -> str:
        while True:
            frame = await codec.read_frame(stream, limit_bytes=1 << 16)
            watch.heard(loop_s())
            match frame.message:
                case (
                    SessionAccepted()
                    | SessionRefused()
                    | SessionFailed()
                    | SessionLeaving()
                    | MigrationReady()
                ) as reply:
                    self._events.hop_replied(self.peer_id, reply)
                case KvTaken() as taken:
                    self._events.kv_taken(self.peer_id, taken)
                case Delivered() as delivered:
                    sender.acknowledged(delivered)
                case Pong() as pong:
                    watch.answered(pong.nonce, pong.stalled_s, pong.step_p95_s, loop_s())
                case other:
                    raise codec.MalformedError(f"{type(other).__name__} is no reply on a hop")

    async def _watch(self, sender: LinkSender, watch: PeerWatch) -> str:
        used_s = loop_s()
        while True:
            now_s = loop_s()
            if not self._events.hop_in_use(self.peer_id):
                watch.unused(now_s)
                if now_s - used_s > self._config.idle_s:
                    return "idle"
            else:
                used_s = now_s
                match watch.tick(now_s):
                    case Dead(reason=reason):
                        return reason
                    case PingNow(nonce=nonce):
                        sender.send(Ping(nonce=nonce))
            await asyncio.sleep(max(0.0, watch.wake_at_s - loop_s()))


class HopTable:
    """All outbound hops of one peer. A lost hop is reported once and forgotten.

    Peers are dialled at the addresses in their own records alone, never at those in an open.
    """

    def __init__(
        self,
        transport: Transport,
        addresses_of: AddressesOf,
        config: HopConfig,
        events: HopEvents,
        lent: Lent | None = None,
        parts: Supervisor | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._parts = parts or Supervisor()
        self._hop_to = partial(Hop, transport, addresses_of, config, events, lent or Lent())
        self._events = events
        self._reached: Newest[str, None] = Newest(RECORD_BOUNDS.peers_max)
        """Peers that answered when they were dialled last."""
        self._dials = (budget or Budget()).rate(DIALS)
        self._hops: dict[str, Hop] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def admits(self, peer_id: str, client: str) -> bool:
        """Whether ``peer_id`` may get a hop because ``client`` named it.

        Only dials of peers that did not answer their last dial count: a client that names peers
        which answer costs nothing, and one that has this peer dial in vain is soon refused.
        """
        if peer_id in self._hops or peer_id in self._reached:
            return True
        return self._dials.take(client, 1, loop_s())

    def get(self, peer_id: str) -> Hop:
        """The hop to ``peer_id``, opened if necessary."""
        hop = self._hops.get(peer_id)
        if hop is None:
            hop = self._hops[peer_id] = self._hop_to(peer_id)
            task = asyncio.create_task(self._run(hop), name=f"hop to {peer_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return hop

    def find(self, peer_id: str) -> Hop | None:
        """The open hop to ``peer_id``, if there is one."""
        return self._hops.get(peer_id)

    def links(self) -> dict[str, LinkScheduler]:
        """Schedulers of all open hops by peer, with their measurements."""
        return {peer_id: hop.link for peer_id, hop in self._hops.items() if hop.link is not None}

    async def _run(self, hop: Hop) -> None:
        reason = "failed"
        try:
            reason = await hop.run()
        except Exception as error:  # noqa: BLE001  recorded; the next use opens another hop
            self._parts.note("Hop.run", error)
        finally:
            self._reached.pop(hop.peer_id, None)
            if hop.opened:
                self._reached[hop.peer_id] = None
            if self._hops.get(hop.peer_id) is hop:
                del self._hops[hop.peer_id]
            self._events.hop_lost(hop.peer_id, reason)
            await hop.close()  # now that nobody uses it any more

    async def close(self) -> None:
        await end_all(self._tasks)
