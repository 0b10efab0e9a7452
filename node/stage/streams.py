"""Serves the streams that clients and other stages open to a stage server.

A stream that ends or breaks the protocol is closed and counted; other streams are not affected.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dht.budget import FRAME_BYTES, OPENS, PINGS, Budget, RateLimit
from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.kv import KvCopy, KvPages
from dht.messages.session import (
    SESSION_BOUNDS,
    Activations,
    MigrationReady,
    Ping,
    Prompt,
    RefusalCode,
    RingTokens,
    SessionClose,
    SessionOpen,
    TokensAttach,
)
from dht.process.supervision import end_all, loop_s
from dht.transport.frame_sender import FrameSender
from dht.transport.interface import (
    HOP_PROTOCOL,
    SESSION_PROTOCOL,
    TOKENS_PROTOCOL,
    Stream,
    StreamHandler,
    Transport,
)
from node.links.framed_stream import LinkReader
from node.sessions.life import failed_of, refused_of
from node.stage.server import StageServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """What strangers may send on streams to a stage, and for how long."""

    pause_s: float = 1.0
    """Time for which nothing is read from who sends too many pings or opens."""
    control_bytes_max: int = 1 << 12
    token_id_bytes_max: int = 5
    """Bytes of the longest token id in a message."""
    first_frame_s: float = 15.0
    """Time within which the first frame of a stream must come; otherwise it is closed."""
    credit_s: float = 0.02
    """Interval at which held-back credit is looked at again."""
    holding_s: float = 10.0
    """Interval at which a stage that holds credit back says so: a sender that hears nothing for
    ``SENDING.stalled_s`` takes its link for dead."""
    client_silence_s: float = 30.0
    """Silence after which a client is gone (clients ping) and its session is freed."""
    hop_silence_s: float = 120.0
    """Silence after which a hop is closed; stages ping hops in use, close others after a minute."""
    part_s: float = 60.0
    """Longest pause within a frame that comes in parts."""


READING = StreamConfig()


class StageStreams:
    """Reads streams and hands their messages to a :class:`node.stage.server.StageServer`."""

    def __init__(
        self,
        transport: Transport,
        stage: StageServer,
        budget: Budget | None = None,
    ) -> None:
        """``budget`` bounds what unfinished frames take."""
        self._transport = transport
        self._stage = stage
        self._budget = budget or Budget()

    async def start(self) -> None:
        """Accept streams from clients and other stages."""
        await self._transport.serve(SESSION_PROTOCOL, self._counted(self._serve_client))
        await self._transport.serve(TOKENS_PROTOCOL, self._counted(self._serve_tokens))
        await self._transport.serve(HOP_PROTOCOL, self._counted(self._serve_hop))

    def _counted(self, handler: StreamHandler) -> StreamHandler:
        async def run(stream: Stream) -> None:
            try:
                await handler(stream)
            except PeerError as error:
                self._stage.counters["malformed"] += 1
                logger.info("closed a stream from %s: %s", stream.remote_peer_id, error)
                raise
            except NetworkError:
                self._stage.counters["streams_ended"] += 1
            except TimeoutError:
                self._stage.counters["streams_silent"] += 1

        return run

    async def _read(self, stream: Stream, limit_s: float, limit_bytes: int) -> codec.Frame:
        async with asyncio.timeout(limit_s):
            room = self._budget.held(FRAME_BYTES).of(stream.remote_peer_id)
            return await codec.read_frame(stream, limit_bytes=limit_bytes, room=room)

    async def _serve_client(self, stream: Stream) -> None:
        """Serve one attempt of a client's session: an open, its prompt, and its close.

        A close alone frees a stage that is no longer on the session's route.
        """
        frame = await self._read(stream, READING.first_frame_s, codec.FRAME_BOUNDS.bytes_max)
        open_ = frame.message
        if isinstance(open_, SessionClose):
            self._stage.close_for(open_, stream.remote_peer_id)
            return
        if isinstance(open_, KvCopy):
            await self._copy_kv(stream, open_)
            return
        if not isinstance(open_, SessionOpen) or open_.hop != 0:
            raise codec.MalformedError("a session's stream starts with an open at hop 0")
        if open_.client != stream.remote_peer_id:
            raise codec.MalformedError("a session is opened by its own client")
        await self._turn(stream, OPENS)
        async with _sending(stream) as sender:
            try:
                self._stage.open(open_, sender)
                while await self._take_from_client(stream, open_, sender):
                    pass
            finally:
                self._stage.close_from(open_.session, sender)

    async def _copy_kv(self, stream: Stream, order: KvCopy) -> None:
        """Copy a session's KV to another peer for its client, until done or the client is gone."""
        copying = asyncio.create_task(self._stage.copies.send(order, stream.remote_peer_id))
        most = READING.control_bytes_max
        gone = asyncio.create_task(codec.read_frame(stream, limit_bytes=most))
        try:
            await asyncio.wait({copying, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not copying.done():
                return
            if (refused := copying.result()) is None:
                await codec.send_frame(
                    stream, MigrationReady(session=order.session, attempt=order.attempt)
                )
                return
            told = refused_of(order, self._transport.peer_id, RefusalCode.NO_COPY, refused)
            await codec.send_frame(stream, told)
        finally:
            await end_all((copying, gone))

    async def _take_from_client(
        self, stream: Stream, open_: SessionOpen, sender: FrameSender
    ) -> bool:
        """Handle one frame of a client's session; False when the client closes."""
        await sender.room()
        token_ids = min(open_.prompt_tokens, SESSION_BOUNDS.message_tokens_max)
        longest = READING.control_bytes_max + READING.token_id_bytes_max * token_ids
        frame = await self._read(stream, READING.client_silence_s, longest)
        mine = (open_.session, open_.attempt)
        match frame.message:
            case Prompt() as prompt if (prompt.session, prompt.attempt) == mine:
                self._stage.pipeline.take_inputs(*mine, prompt.position, prompt.token_ids)
            case SessionClose():
                return False
            case Ping() as ping:
                await self._pong(stream, ping, sender)
            case other:
                raise codec.MalformedError(f"{type(other).__name__} is not for a session's stream")
        return True

    async def _serve_tokens(self, stream: Stream) -> None:
        """Send the tokens of a session, whose last stage is here, to its client."""
        attach = (
            await self._read(stream, READING.first_frame_s, READING.control_bytes_max)
        ).message
        if not isinstance(attach, TokensAttach):
            raise codec.MalformedError("a token stream starts with an attach")
        async with _sending(stream) as sender:
            refused = self._stage.attach(attach, stream.remote_peer_id, sender)
            if refused is not None:
                me = self._transport.peer_id
                failed = failed_of(attach, me, me, refused)
                await codec.send_frame(stream, failed)
                return
            try:
                while True:
                    await sender.room()
                    frame = await self._read(
                        stream, READING.client_silence_s, READING.control_bytes_max
                    )
                    if not isinstance(frame.message, Ping):
                        raise codec.MalformedError("only pings follow an attach")
                    await self._pong(stream, frame.message, sender)
            finally:
                self._stage.detach(attach.session, sender)

    async def _serve_hop(self, stream: Stream) -> None:
        """Serve the stage before: opens, activations, ring tokens and closes of many sessions."""
        peer_id = stream.remote_peer_id
        reader = LinkReader(stream, self._budget)
        async with _sending(stream) as sender:
            held = asyncio.Event()
            crediting = asyncio.create_task(self._keep_crediting(reader, sender, held))
            try:
                limit_s = READING.first_frame_s
                while True:
                    async with asyncio.timeout(limit_s):
                        frame = await reader.read()
                    if frame is not None and isinstance(frame.message, Ping):
                        await self._pong(stream, frame.message, sender)
                    elif frame is not None:
                        if isinstance(frame.message, SessionOpen):
                            await self._turn(stream, OPENS)
                        self._take_from_stage(peer_id, frame, sender)
                    self._credit(reader, sender)
                    if reader.holds:
                        held.set()
                    limit_s = READING.part_s if reader.unfinished else READING.hop_silence_s
                    await sender.room()
            finally:
                reader.close()
                self._stage.upstream_lost(peer_id, sender)  # before anything that may be cancelled
                await end_all((crediting,))

    async def _pong(self, stream: Stream, ping: Ping, sender: FrameSender) -> None:
        await self._turn(stream, PINGS)
        sender.send(self._stage.pong(ping.nonce))

    async def _turn(self, stream: Stream, limit: RateLimit) -> None:
        """Let others have the loop; for a while, where the peer sends too many of something."""
        now_s = loop_s()
        within = self._budget.rate(limit).take(stream.remote_peer_id, 1, now_s)
        await asyncio.sleep(0.0 if within else READING.pause_s)

    def _credit(self, reader: LinkReader, sender: FrameSender, *, due: bool = False) -> None:
        hold = self._stage.pipeline.behind or self._stage.traffic.down_exceeded
        delivered = reader.acknowledgement(hold=hold, due=due)
        if delivered is not None:
            sender.send(delivered)

    async def _keep_crediting(
        self, reader: LinkReader, sender: FrameSender, held: asyncio.Event
    ) -> None:
        """Give held-back credit as soon as this stage has caught up, and say until then that it is
        held back."""
        while True:
            await held.wait()
            told_s = loop_s()
            while reader.holds:
                await asyncio.sleep(READING.credit_s)
                due = loop_s() - told_s >= READING.holding_s
                told_s = loop_s() if due else told_s
                self._credit(reader, sender, due=due)
            held.clear()

    def _take_from_stage(self, peer_id: str, frame: codec.Frame, sender: FrameSender) -> None:
        match frame.message:
            case Activations() as activations:
                self._stage.pipeline.take_activations(peer_id, activations, frame.body)
            case KvPages() as pages:
                self._stage.copies.take(peer_id, pages, frame.body, sender.send)
            case RingTokens(tokens=tokens):
                self._stage.pipeline.take_ring(peer_id, tokens)
            case SessionOpen() as open_:
                if open_.hop == 0 or open_.hop >= len(open_.route):
                    raise codec.MalformedError("an open over a hop is for a later stage")
                if open_.route[open_.hop - 1].peer_id != peer_id:
                    raise codec.MalformedError("an open comes from the stage before")
                self._stage.open(open_, sender)
            case SessionClose() as close:
                self._stage.close_by_neighbour(peer_id, close)
            case other:
                raise codec.MalformedError(f"{type(other).__name__} is not for a hop")


@asynccontextmanager
async def _sending(stream: Stream) -> AsyncIterator[FrameSender]:
    """Yield a sender for the stream's answers; the sender's pump and the block end together."""
    sender = FrameSender(stream)
    try:
        async with asyncio.TaskGroup() as group:
            pump = group.create_task(sender.run())
            yield sender
            pump.cancel()
    except* (NetworkError, PeerError, TimeoutError) as errors:
        raise errors.exceptions[0] from None
