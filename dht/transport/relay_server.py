"""Passes on calls to peers that others cannot reach, by libp2p's circuit relay v2.

The daemon's own relay takes anybody's calls on any protocol and counts nothing. This one answers in
its place: for peers alone that need one here (:class:`dht.budget.Parties`), within the budget, on
streams that are metered as all others are. A call ends when one of its ends closes it, or says
nothing for ``RelayServerConfig.idle_s``. It has no other limit in time, which would break a healthy
answer: bytes per second bound it. Both ends secure the call once more, so what passes here is
ciphertext.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from dht.budget import RELAY_BYTES, RELAY_CALLS, RELAY_SLOTS, Budget
from dht.errors import NetworkError, PeerError
from dht.identity.peer_id import peer_id_bytes, peer_id_of
from dht.messages import codec
from dht.process.supervision import first_of, loop_s
from dht.transport.interface import RELAY_STOP_PROTOCOL, Stream, Transport
from dht.transport.metered import no_pause
from dht.transport.relay_messages import (
    HopRequest,
    HopType,
    Status,
    StopType,
    connect_message,
    hop_request,
    read_message,
    status_of,
    with_status,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayServerConfig:
    """What callers and those with a slot may take of a relay."""

    slot_s: float = 150.0
    """Time for which a slot is granted: who holds it asks again every minute, and may miss once."""
    idle_s: float = 600.0
    """Time without a byte after which a call ends; libp2p's own keep-alives come every 30 s."""
    answer_s: float = 10.0
    """Time limit for each message of the peer that calls or is called."""
    chunk_bytes: int = 32 << 10
    wait_s: float = 0.1
    """Interval at which bytes above the rate are tried again; meanwhile nothing is read."""


RELAYING = RelayServerConfig()


class RelayServer:
    """Answers the streams of :data:`dht.transport.interface.RELAY_PROTOCOL`."""

    def __init__(
        self,
        transport: Transport,
        budget: Budget,
        *,
        offers: bool,
        metered: Callable[[Stream], Stream] = lambda stream: stream,
        pause: Callable[[], Awaitable[None]] = no_pause,
    ) -> None:
        """``offers``: whether this peer relays at all; without it everybody is refused.

        ``metered`` counts the bytes of the second half of a call; ``pause`` waits until bytes that
        are not urgent may leave, as the owner lends the connection.
        """
        self._transport = transport
        self._offers = offers
        self._metered = metered
        self._pause = pause
        self._needs = budget.parties
        self._slots = budget.held(RELAY_SLOTS)
        self._calls = budget.held(RELAY_CALLS)
        self._bytes = budget.rate(RELAY_BYTES)
        self._until_s: dict[str, float] = {}
        """The peers that hold a slot, and until when, by the event loop's clock."""

    async def serve(self, stream: Stream) -> None:
        """Grant a slot, or carry one call until it ends."""
        async with asyncio.timeout(RELAYING.answer_s):
            request = hop_request(await read_message(stream))
        if request.kind == HopType.RESERVE:
            await self._answer(stream, self._reserve(stream.remote_peer_id), slot=True)
        elif request.kind == HopType.CONNECT:
            await self._connect(stream, request)
        else:
            raise codec.MalformedError(f"a relay is asked for {request.kind}")

    @property
    def slots(self) -> frozenset[str]:
        """The peers that hold a slot now."""
        self._expire()
        return frozenset(self._until_s)

    def _reserve(self, peer_id: str) -> int:
        """Grant or renew a slot; returns the status of the answer."""
        self._expire()
        if not self._offers or not self._needs.needs_relay(peer_id):
            return Status.DENIED
        if peer_id not in self._until_s and not self._slots.take(peer_id):
            return Status.FULL
        self._until_s[peer_id] = loop_s() + RELAYING.slot_s
        return Status.OK

    def _expire(self) -> None:
        now_s = loop_s()
        for peer_id in [each for each, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[peer_id]
            self._slots.give_back(peer_id)

    async def _connect(self, stream: Stream, request: HopRequest) -> None:
        caller, called = stream.remote_peer_id, peer_id_of(request.peer)
        if called not in self.slots or called == caller:
            await self._answer(stream, Status.NO_SLOT)
            return
        if not self._calls.take(caller):
            await self._answer(stream, Status.FULL)
            return
        try:
            try:
                onward = await self._call(caller, called)
            except (NetworkError, PeerError, TimeoutError):
                await self._answer(stream, Status.FAILED)
                return
            try:
                await self._answer(stream, Status.OK)
                await self._carry((caller, called), stream, onward)
            finally:
                await onward.close()
        finally:
            self._calls.give_back(caller)

    async def _call(self, caller: str, called: str) -> Stream:
        """A stream to the peer that is called, which has taken the call."""
        opened = await self._transport.open_stream(called, RELAY_STOP_PROTOCOL)
        stream = self._metered(opened)
        try:
            async with asyncio.timeout(RELAYING.answer_s):
                stream.write(connect_message(StopType.CONNECT, peer_id_bytes(caller)))
                await stream.drain()
                if (status := status_of(await read_message(stream))) != Status.OK:
                    raise NetworkError(f"peer {called} takes no call: status {status}")
        except BaseException:
            await stream.close()
            raise
        return stream

    async def _carry(self, ends: tuple[str, str], near: Stream, far: Stream) -> None:
        """Pass bytes on both ways until one end closes the call, or nobody says anything."""
        try:
            await first_of(self._pump(ends, near, far), self._pump(ends, far, near))
        finally:
            await near.close()

    async def _pump(self, ends: tuple[str, str], source: Stream, sink: Stream) -> None:
        with suppress(NetworkError, TimeoutError):
            while True:
                async with asyncio.timeout(RELAYING.idle_s):
                    data = await source.read_some(RELAYING.chunk_bytes)
                while not self._bytes.take_between(ends, len(data), loop_s()):  # noqa: ASYNC110
                    await asyncio.sleep(RELAYING.wait_s)
                await self._pause()
                sink.write(data)
                async with asyncio.timeout(RELAYING.idle_s):
                    await sink.drain()

    async def _answer(self, stream: Stream, status: int, *, slot: bool = False) -> None:
        granted = slot and status == Status.OK
        until_s = int(self._transport.now() + RELAYING.slot_s) if granted else None
        async with asyncio.timeout(RELAYING.answer_s):
            stream.write(with_status(HopType.STATUS, status, until_s))
            await stream.drain()
