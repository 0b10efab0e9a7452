"""The stage server: sessions of many clients over this peer's layers.

It receives, lets :mod:`node.stage_session` decide, and performs: reserve, run, send on, free.
Everything happens on the event loop's thread except the engine's steps. See docs/protocol.md for
the order of frames.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dht import wire
from dht.channel import FrameSender
from dht.messages import (
    Activations,
    FinishReason,
    RefusalCode,
    RingToken,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionOpen,
    SessionRefused,
    Tokens,
    TokensAttach,
)
from dht.transport import (
    Transport,
)
from node.hops import HopConfig, HopTable
from node.stage_session import (
    Chunk,
    StageSession,
    StageState,
    StageView,
    refusal_of,
    session_key,
)
from node.steps import Outbox, StepRequest, StepResult
from node.tensors import Rows, RowsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Bounds of the stage server."""

    chunk_tokens: int = 128
    """Prompt tokens per prefill chunk: the next stage starts when the first chunk is done."""
    sessions_max: int = 512
    sessions_per_client_max: int = 64
    idle_s: float = 60.0
    """A session without progress for so long is closed and its client told."""
    finished_s: float = 30.0
    """How long the answer of a finished session is kept for a client that attaches late."""
    queued_bytes_max: int = 4 << 20
    """The first stage feeds no further prefill chunk while more waits for the next link."""
    keepalive_s: float = 1.0
    hops: HopConfig = field(default_factory=HopConfig)


class StageEngine(Protocol):
    """What the stage server needs of an engine; see :mod:`node.stage_engine`."""

    @property
    def view(self) -> StageView: ...

    @property
    def wire_dtype(self) -> str: ...

    @property
    def hidden(self) -> int: ...

    def reserve(self, key: str, tokens: int) -> str | None: ...

    def free(self, key: str) -> None: ...

    def submit(self, request: StepRequest) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Live:
    """A session with its connections."""

    session: StageSession
    upstream: FrameSender
    touched_s: float
    attached: FrameSender | None = None
    attached_position: int = 0

    @property
    def hop_peers(self) -> tuple[str, ...]:
        peers = (self.session.next_peer, self.session.ring_peer)
        return tuple(peer for peer in peers if peer is not None)


class StageServer:
    """Serves sessions over one engine. ``counters`` says what was dropped, refused and why."""

    def __init__(self, transport: Transport, engine: StageEngine, config: StageConfig) -> None:
        self._transport = transport
        self._engine = engine
        self._config = config
        self._live: dict[str, _Live] = {}
        self._hops = HopTable(transport, config.hops, self)
        self._hop_use: Counter[str] = Counter()
        self._stalled_feeds: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters: Counter[str] = Counter()
        self.serialisation_s = 0.0
        """Time spent between tensors and frames, both ways, writing included."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last session has freed its KV."""

    @property
    def sessions(self) -> int:
        """Sessions that hold KV here."""
        return sum(live.session.state is not StageState.FINISHED for live in self._live.values())

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no session holds KV here; False when ``limit_s`` passed before."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Reap idle sessions and resume stalled feeds, until cancelled."""
        loop = asyncio.get_running_loop()
        beat_s = loop.time()
        while True:
            await asyncio.sleep(0.05 if self._stalled_feeds else self._config.keepalive_s / 4)
            now_s = loop.time()
            for key in list(self._stalled_feeds):
                self._stalled_feeds.discard(key)
                if (live := self._live.get(key)) is not None:
                    self._feed(live)
            if now_s - beat_s >= self._config.keepalive_s:
                beat_s = now_s
                self._beat(now_s)

    def _beat(self, now_s: float) -> None:
        for live in list(self._live.values()):
            session = live.session
            idle_s = now_s - live.touched_s
            if session.state is StageState.FINISHED:
                if idle_s > self._config.finished_s:
                    self._forget(live)
            elif idle_s > self._config.idle_s:
                self.counters["idle"] += 1
                self._fail(live, self._transport.peer_id, f"no progress for {idle_s:.0f} s")

    async def close(self, reason: str) -> None:
        """Fail what is left, telling clients and neighbours why, and end all hops."""
        for live in list(self._live.values()):
            if live.session.state is not StageState.FINISHED:
                self._fail(live, self._transport.peer_id, reason)
        await asyncio.sleep(0)
        await self._hops.close()

    def fail_outside(self, start: int, end: int, reason: str) -> None:
        """Fail sessions whose layers here are not within ``[start, end)`` (a plan changed)."""
        for live in list(self._live.values()):
            stage = live.session.stage
            inside = start <= stage.start and stage.end <= end
            if live.session.state is not StageState.FINISHED and not inside:
                self._fail(live, self._transport.peer_id, reason)

    # What streams bring (see node.stage_streams)

    def close_from(self, key: str, upstream: FrameSender) -> None:
        """The client closed its stream, or it ended."""
        if (live := self._live.get(key)) is not None and live.upstream is upstream:
            self._close(live)

    def attach(self, attach: TokensAttach, client: str, sender: FrameSender) -> bool:
        """Send the session's tokens to ``sender``; False where that client has none here."""
        live = self._live.get(session_key(attach.session, attach.epoch))
        if live is None or not live.session.is_last or live.session.open.client != client:
            return False
        live.attached, live.attached_position = sender, attach.position
        self._send_tokens(live)
        return True

    def detach(self, key: str, sender: FrameSender) -> None:
        """The token stream ended; the session goes on and may be attached to again."""
        if (live := self._live.get(key)) is not None and live.attached is sender:
            live.attached = None

    def close_by_neighbour(self, peer_id: str, close: SessionClose) -> None:
        """A stage of the same route closes the session; others may not."""
        live = self._live.get(session_key(close.session, close.epoch))
        if live is not None and self._is_neighbour(live, peer_id):
            self._close(live)

    def upstream_lost(self, peer_id: str, upstream: FrameSender) -> None:
        """The stream from the stage before ended: its sessions cannot go on."""
        for live in list(self._live.values()):
            if live.upstream is upstream and live.session.state is not StageState.FINISHED:
                self._fail(live, peer_id, "the connection to it ended")

    @staticmethod
    def _is_neighbour(live: _Live, peer_id: str) -> bool:
        route = live.session.open.route
        return peer_id == live.session.previous_peer or (
            live.session.is_first and peer_id == route[-1].peer_id
        )

    # Opening

    def open(self, open_: SessionOpen, upstream: FrameSender) -> None:
        """Reserve and pass the open on, or answer with a refusal."""
        refusal = refusal_of(open_, self._engine.view) or self._refuse_for_room(open_)
        session = StageSession(open=open_)
        if refusal is None:
            no_kv = self._engine.reserve(session.key, session.kv_tokens)
            refusal = None if no_kv is None else (RefusalCode.NO_KV, no_kv)
        if refusal is not None:
            code, reason = refusal
            self.counters[f"refused_{code}"] += 1
            upstream.send(self._refused(open_, self._transport.peer_id, code, reason))
            return
        now_s = asyncio.get_running_loop().time()
        live = _Live(session=session, upstream=upstream, touched_s=now_s)
        self._live[session.key] = live
        self._idle.clear()
        self._hop_use.update(live.hop_peers)
        if session.is_last:
            session.state = StageState.ACTIVE
            upstream.send(SessionAccepted(session=open_.session, epoch=open_.epoch))
            if session.ring_peer is not None:
                self._hops.get(session.ring_peer, open_.addresses[0])
            return
        following = open_.hop + 1
        hop = self._hops.get(open_.route[following].peer_id, open_.addresses[following])
        hop.send(replace(open_, hop=following))

    def _refuse_for_room(self, open_: SessionOpen) -> tuple[RefusalCode, str] | None:
        if session_key(open_.session, open_.epoch) in self._live:
            return RefusalCode.BAD_REQUEST, "this session is open already"
        if self.sessions >= self._config.sessions_max:
            return RefusalCode.TOO_MANY, f"{self.sessions} sessions are open, that is the limit"
        mine = sum(live.session.open.client == open_.client for live in self._live.values())
        if mine >= self._config.sessions_per_client_max:
            return RefusalCode.TOO_MANY, f"you have {mine} sessions here, that is the limit"
        return None

    @staticmethod
    def _refused(open_: SessionOpen, peer: str, code: RefusalCode, reason: str) -> SessionRefused:
        return SessionRefused(
            session=open_.session, epoch=open_.epoch, peer_id=peer, code=code, reason=reason[:512]
        )

    # Events of hops

    def hop_replied(
        self, peer_id: str, message: SessionAccepted | SessionRefused | SessionFailed
    ) -> None:
        """A later stage answered; pass it up, and free here unless it accepted."""
        live = self._live.get(session_key(message.session, message.epoch))
        if live is None or live.session.next_peer != peer_id:
            self.counters["stale_replies"] += 1
            return
        if isinstance(message, SessionAccepted):
            live.session.state = StageState.ACTIVE
            live.upstream.send(message)
            self._feed(live)
            return
        live.upstream.send(message)
        self._forget(live)

    def hop_lost(self, peer_id: str, reason: str) -> None:
        """Every session that needs the lost hop fails, or is refused while it opens."""
        for live in list(self._live.values()):
            session = live.session
            if peer_id not in live.hop_peers or session.state is StageState.FINISHED:
                continue
            if session.state is StageState.OPENING:
                refused = self._refused(session.open, peer_id, RefusalCode.UNREACHABLE, reason)
                live.upstream.send(refused)
                self._forget(live)
            else:
                self._fail(live, peer_id, reason)

    def hop_in_use(self, peer_id: str) -> bool:
        """Whether a session here sends to ``peer_id``."""
        return self._hop_use[peer_id] > 0

    # Work

    def take_inputs(self, key: str, position: int, token_ids: tuple[int, ...]) -> None:
        """First stage: prompt or ring tokens of a session."""
        live = self._live.get(key)
        if live is None or not live.session.add_inputs(position, token_ids):
            self.counters["stale_inputs"] += 1
            return
        self._touch(live)
        self._feed(live)

    def take_ring(self, peer_id: str, tokens: Sequence[RingToken]) -> None:
        """First stage: tokens that ``peer_id`` sampled, if it is the route's last stage."""
        for token in tokens:
            key = session_key(token.session, token.epoch)
            live = self._live.get(key)
            if live is None or not live.session.is_first:
                self.counters["stale_inputs"] += 1
            elif live.session.open.route[-1].peer_id != peer_id:
                self.counters["foreign_frames"] += 1
            else:
                self.take_inputs(key, token.position, (token.token_id,))

    def take_activations(
        self, peer_id: str, activations: Activations, body: bytes | memoryview
    ) -> None:
        """Rows of several sessions from the stage before. Raises MalformedError."""
        if activations.dtype != self._engine.wire_dtype:
            raise wire.MalformedError(
                f"activations in {activations.dtype}; this peer takes {self._engine.wire_dtype}"
            )
        if activations.hidden != self._engine.hidden:
            raise wire.MalformedError(
                f"activations of width {activations.hidden}; the model's is {self._engine.hidden}"
            )
        started_s = time.perf_counter()
        counts = [item.tokens for item in activations.items]
        try:
            parts = Rows.split(body, activations.dtype, activations.hidden, counts)
        except RowsError as error:
            raise wire.MalformedError(str(error)) from error
        self.serialisation_s += time.perf_counter() - started_s
        for item, rows in zip(activations.items, parts, strict=True):
            live = self._live.get(session_key(item.session, item.epoch))
            if live is None:
                self.counters["stale_activations"] += 1
                continue
            if live.session.is_first or live.session.previous_peer != peer_id:
                self.counters["foreign_frames"] += 1
                continue
            chunk = live.session.take_rows(item.position, item.tokens)
            if chunk is None:
                self.counters["stale_activations"] += 1
                continue
            self._touch(live)
            self._submit(live, chunk, rows)

    def _feed(self, live: _Live) -> None:
        """First stage: give the engine the session's next chunk, unless the link is behind."""
        session = live.session
        if not session.is_first:
            return
        if session.next_peer is not None:
            hop = self._hops.find(session.next_peer)
            if hop is not None and hop.queued_bytes > self._config.queued_bytes_max:
                self._stalled_feeds.add(session.key)
                return
        chunk = session.next_chunk(self._config.chunk_tokens)
        if chunk is not None:
            self._submit(live, chunk, None)

    def _submit(self, live: _Live, chunk: Chunk, rows: Rows | None) -> None:
        key = live.session.key
        self._engine.submit(StepRequest(key=key, session=live.session, chunk=chunk, rows=rows))

    def on_results(self, results: Sequence[StepResult]) -> None:
        """Results of one engine step: send rows and tokens on, coalesced by next peer."""
        outbox = Outbox()
        for result in results:
            session = result.request.session
            live = self._live.get(session.key)
            if live is None or session.state is StageState.FINISHED:
                self.counters["dropped_results"] += 1
                continue
            self._touch(live)
            session.in_flight = False
            if result.error is not None:
                self.counters["engine_errors"] += 1
                self._fail(live, self._transport.peer_id, result.error)
                continue
            if result.rows is not None and session.next_peer is not None:
                outbox.add_rows(session.next_peer, result)
            if result.token_id is not None:
                self._take_sampled(live, result.token_id, outbox)
            self._feed(live)
        started_s = time.perf_counter()
        for peer_id, message, body in outbox.frames(self._engine.wire_dtype, self._engine.hidden):
            self._hops.get(peer_id).send(message, body)
        self.serialisation_s += time.perf_counter() - started_s

    def _take_sampled(self, live: _Live, token_id: int, outbox: Outbox) -> None:
        session = live.session
        position = session.add_sampled(token_id)
        if session.finish_reason is None:
            if session.ring_peer is None:
                self.take_inputs(session.key, position, (token_id,))
            else:
                token = RingToken(
                    session=session.open.session,
                    epoch=session.open.epoch,
                    position=position,
                    token_id=token_id,
                )
                outbox.add_token(session.ring_peer, token)
        self._send_tokens(live)
        if session.finish_reason is not None:
            self._finish(live)

    def _send_tokens(self, live: _Live) -> None:
        if live.attached is None:
            return
        session = live.session
        token_ids = session.sampled_from(live.attached_position)
        if not token_ids and session.finish_reason is None:
            return
        live.attached.send(
            Tokens(
                session=session.open.session,
                epoch=session.open.epoch,
                position=live.attached_position,
                token_ids=token_ids,
                finish_reason=session.finish_reason,
            )
        )
        live.attached_position += len(token_ids)

    # Ends

    def _finish(self, live: _Live) -> None:
        """The answer is complete: free here, and tell the first stage, which tells the rest."""
        session = live.session
        session.state = StageState.FINISHED
        self.counters["finished"] += 1
        self._release(live)
        if session.ring_peer is not None:
            self._hops.get(session.ring_peer).send(self._close_of(session))

    def _close(self, live: _Live) -> None:
        """Free here and below. Closing a finished session at its last stage keeps the log."""
        session = live.session
        if session.state is StageState.FINISHED:
            return
        self._close_below(session)
        if session.is_last and live.attached is not None:
            session.finish_reason = FinishReason.CANCELLED
            self._send_tokens(live)
        self.counters["closed"] += 1
        self._forget(live)

    def _fail(self, live: _Live, peer_id: str, reason: str) -> None:
        """Tell the client through every way that is left, and free here and below."""
        session = live.session
        failed = SessionFailed(
            session=session.open.session,
            epoch=session.open.epoch,
            peer_id=peer_id,
            reason=reason[:512],
        )
        self.counters["failed"] += 1
        live.upstream.send(failed)
        if live.attached is not None:
            live.attached.send(failed)
        self._close_below(session)
        self._forget(live)

    def _close_below(self, session: StageSession) -> None:
        if session.next_peer is None:
            return
        hop = self._hops.find(session.next_peer)
        if hop is not None:  # a lost hop ended the session at its far end too
            hop.send(self._close_of(session))

    def _forget(self, live: _Live) -> None:
        session = live.session
        if self._live.pop(session.key, None) is None:
            return
        self._stalled_feeds.discard(session.key)
        if session.state is not StageState.FINISHED:
            self._release(live)

    def _release(self, live: _Live) -> None:
        self._engine.free(live.session.key)
        self._hop_use.subtract(live.hop_peers)
        if self.sessions == 0:
            self._idle.set()
            self.on_idle()

    @staticmethod
    def _close_of(session: StageSession) -> SessionClose:
        return SessionClose(session=session.open.session, epoch=session.open.epoch)

    def _touch(self, live: _Live) -> None:
        live.touched_s = asyncio.get_running_loop().time()
