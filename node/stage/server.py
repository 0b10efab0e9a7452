"""The stage server: runs many clients' sessions over this peer's layers.

It receives, lets :mod:`node.sessions.session` decide, and performs the effects: reserve, run, send,
free. Everything but the engine's steps happens on the event loop's thread. docs/protocol.md gives
the order of frames. Opening is in :mod:`node.stage.opening`, rows and tokens in
:mod:`node.stage.pipeline`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from coordinator.admission.rules import headroom
from coordinator.routing.balance import Movable, PeerLoad
from dht.budget import Budget
from dht.messages.kv import KvTaken
from dht.messages.session import FinishReason, Pong, SessionClose, SessionOpen, TokensAttach
from dht.supervision import Supervisor
from dht.transport.frame_sender import FrameSender
from dht.transport.interface import Transport
from node.links.hops import AddressesOf, HopReply, HopTable
from node.links.lent_traffic import LentTraffic
from node.sessions.activation_log import ActivationLog
from node.sessions.session import StageEvent, StageState
from node.sessions.session_table import Live, SessionTable
from node.stage.config import StageConfig, StageEngine
from node.stage.kv_migration import KvMover
from node.stage.opening import Opening, close_of
from node.stage.pipeline import StagePipeline, row_bytes_of
from node.stage.stage_kv import RETURN_LEAST_S, StageKv

MOVE_S = 3.0
"""A session that should give way has ``MOVE_S`` to move to a freer holder; then it is put out."""

__all__ = ["StageConfig", "StageEngine", "StageServer"]


class StageServer:
    """Serves sessions over one engine. ``counters`` counts drops and refusals by reason."""

    def __init__(
        self,
        transport: Transport,
        engine: StageEngine,
        config: StageConfig,
        traffic: LentTraffic | None = None,
        *,
        addresses_of: AddressesOf,
        bandwidth_from: Callable[[str], float | None] = lambda peer_id: None,
        on_idle: Callable[[], None] = lambda: None,
        parts: Supervisor | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Start ``engine`` and serve over it.

        ``addresses_of`` finds where other stages are dialled
        (:meth:`dht.records.directory.Directory.addresses_of`).
        ``bandwidth_from`` returns the measured bandwidth of the link from a peer to this one, in
        bytes/s, or None if unknown; it decides how a session that moves here gets its KV
        (:mod:`node.stage.migration_choice`). ``on_idle`` is called when the last session has freed
        its KV.
        """
        self.traffic = traffic or LentTraffic()
        self._me = transport.peer_id
        self._sign = transport.sign
        self._config = config
        self._leaves = False
        self._relief: dict[str, str] = {}
        self._moving_s: dict[str, float] = {}
        """Until when sessions that should give way may take to move, by name in the engine."""
        self.taker_of: Callable[[Movable], str | None] = lambda session: None
        """Finds a freer holder for a session that should give way."""
        self.counters: Counter[str] = Counter()
        self._hops = HopTable(
            transport, addresses_of, config.hops, self, self.traffic, parts, budget
        )
        log = ActivationLog(row_bytes_of(engine), config.log_bytes_max)
        self._engine = engine
        self.kv = StageKv(engine, self._make_way)
        self._table = SessionTable(self._free_kv, log, self._drop_work, on_idle)
        if budget is not None:
            budget.parties.work = self._table.knows
            self._table.account = self.kv.account = budget.parties.account
        self.pipeline = StagePipeline(
            engine,
            self.kv,
            config,
            self._table,
            self._hops,
            self.counters,
            fail=self._fail,
            refuse=self._pause,
            finish=self._finish,
            cancel_move=self._cancel_move,
        )
        self._opening = Opening(
            self._me,
            engine,
            self.kv,
            config,
            self._table,
            self._hops,
            self.pipeline,
            self.counters,
            bandwidth_from,
            transport.now,
            transport.sign,
            self._put_out_resting,
            self._make_way,
        )
        self.copies = KvMover(
            self._me,
            engine,
            self.kv,
            config,
            self._table,
            self._hops,
            self.counters,
            drop=self._table.forget,
            sign=transport.sign,
        )
        engine.start(self.pipeline.on_results)

    @property
    def sessions(self) -> int:
        """Number of sessions that hold KV here."""
        return self._table.holding

    @property
    def helped(self) -> int:
        """Number of answers made with this stage's help since the start: as the last stage, or as
        one before it, which the last one closes. Answers that were lost here do not count."""
        return self.counters["finished"] + self.counters["closed"]

    @property
    def serialisation_s(self) -> float:
        """Seconds spent converting tensors to frames and frames to tensors, writing included."""
        return self.pipeline.serialisation_s

    @property
    def log_bytes(self) -> int:
        """Host memory held by logged rows, from which lost stages' replacements are rebuilt."""
        return self._table.log.bytes_held

    def _free_kv(self, key: str) -> None:
        self.pipeline.drop(key)
        self._moving_s.pop(key, None)
        self.kv.free(key)
        if self.kv.waiting:  # not at once: who frees may be in the midst of taking
            asyncio.get_running_loop().call_soon(self.pipeline.resume_without_kv)

    def _drop_work(self, key: str) -> None:
        self.pipeline.drop(key)
        self._engine.drop(key)

    def _make_way(self, key: str) -> bool:
        """Have a session move to a freer holder, or pause it; False while it may still move."""
        live = self._table.of_key(key)
        if live is None:
            self.kv.free(key)
            return True
        now_s = asyncio.get_running_loop().time()
        if key not in self._moving_s:
            here = {each.session: each for each in self.movable()}
            movable = here.get(live.session.key)
            to = None if movable is None else self.taker_of(movable)
            if to is not None:
                self._moving_s[key] = now_s + MOVE_S
                self.counters["asked_to_make_way"] += 1
                live.tell_leaving(self._me, self._sign, to)
        if now_s < self._moving_s.get(key, now_s):
            return False
        self._put_out(live, now_s)
        return True

    def _put_out(self, live: Live, now_s: float) -> None:
        """Free a session here for others; its owner opens it again and replays it."""
        self.counters["gave_way"] += 1
        after_s = self._opening.room_after_s(live.session, now_s)
        self.kv.give_way(live.session.kv_key, now_s)
        self._tell_put_out(live, "its KV is needed for other sessions", after_s)

    def _put_out_resting(self, live: Live) -> None:
        """Like :meth:`_put_out`, for a session that makes no progress: no room is left for it."""
        self.counters["rested"] += 1
        self._tell_put_out(live, "it made no progress, and others need its place", RETURN_LEAST_S)

    def _tell_put_out(self, live: Live, reason: str, after_s: float) -> None:
        live.tell_failed(self._me, reason, self._me, self._sign, after_s)
        self._table.forget(live)

    def _cancel_move(self, live: Live, reason: str) -> None:
        self._opening.not_logged(live, reason)

    def pong(self, nonce: int) -> Pong:
        """The answer to a ping, with this stage's step times."""
        pace = self.pipeline.pace
        stalled_s = pace.stalled_s(asyncio.get_running_loop().time())
        return Pong(nonce=nonce, stalled_s=stalled_s, step_p95_s=pace.p95_s)

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no session holds KV here; False after ``limit_s``."""
        return await self._table.wait_idle(limit_s)

    async def run(self) -> None:
        """Close idle sessions and resume stalled feeds, until cancelled."""
        loop = asyncio.get_running_loop()
        beat_s = loop.time()
        while True:
            await self._table.wait_any()
            await asyncio.sleep(0.05 if self.pipeline.stalled else self._config.keepalive_s / 4)
            now_s = loop.time()
            self.pipeline.resume_stalled()
            self._give_up_paused(now_s)
            self._give_up_waiting(now_s)
            if now_s - beat_s >= self._config.keepalive_s:
                beat_s = now_s
                self._beat(now_s)
                self._tell_leaving()

    def _give_up_waiting(self, now_s: float) -> None:
        """Put out sessions that have waited for KV for too long."""
        if self.kv.waiting:
            self.pipeline.resume_without_kv()
        for key in self.kv.overdue(now_s):
            if (live := self._table.of_key(key)) is not None:
                self._put_out(live, now_s)

    def _give_up_paused(self, now_s: float) -> None:
        """End paused sessions whose next attempt has not come in time."""
        for live in self._table:
            if live.session.state is not StageState.PAUSED:
                continue
            idle_s = now_s - live.touched_s
            if idle_s > (self._config.paused_moving_s if self._leaves else self._config.paused_s):
                self.counters["paused_too_long"] += 1
                self._fail(live, f"no new route for {idle_s:.0f} s")

    def _beat(self, now_s: float) -> None:
        for live in self._table:
            idle_s = now_s - live.touched_s
            match live.session.state:
                case StageState.FINISHED:
                    if idle_s > self._config.finished_s:
                        self._table.forget(live)
                case StageState.PAUSED:
                    pass  # see _give_up_paused
                case _:
                    if idle_s > self._config.idle_s:
                        self.counters["idle"] += 1
                        self._fail(live, f"no progress for {idle_s:.0f} s")

    def move_all(self) -> None:
        """Ask owners to move their sessions away.

        They are asked again every keepalive until they have moved, or until :meth:`stay`.
        """
        self._leaves = True
        self._tell_leaving()

    def stay(self) -> None:
        """Stop asking owners to move sessions away, and serve on."""
        self._leaves = False

    def relieve(self, moves: Mapping[str, str]) -> None:
        """Ask owners of the sessions in ``moves``, and no others, to move to the named peers.

        The owners are asked again every keepalive until they have moved, or until the next call.
        """
        fresh = {key: to for key, to in moves.items() if self._relief.get(key) != to}
        self._relief = dict(moves)
        for key, to in fresh.items():
            if (live := self._table.get(key)) is not None:
                self.counters["relief_asked"] += 1
                live.tell_leaving(self._me, self._sign, to)

    def _tell_leaving(self) -> None:
        for live in self._table:
            if live.session.state is not StageState.ACTIVE:
                continue
            if self._leaves:
                live.tell_leaving(self._me, self._sign)
            elif (to := self._relief.get(live.session.key)) is not None:
                live.tell_leaving(self._me, self._sign, to)

    # Load

    @property
    def kv_tokens_free(self) -> int:
        """KV tokens that are neither promised to a session nor held by one."""
        return self.kv.room.free_tokens

    @property
    def wanted_tokens(self) -> int:
        """KV tokens that should be free: urgent sessions' headroom, the last refused demand, and
        what sessions here wait for."""
        capacity = self.kv.room.capacity_tokens
        demand = self._opening.demand.wanted(asyncio.get_running_loop().time())
        kept = headroom(capacity) if self._table.serves_urgent else 0
        kept += self.kv.waiting * self._engine.page_tokens
        return kept + (demand if kept + demand <= capacity else 0)

    @property
    def load(self) -> PeerLoad:
        """The peer's load, for its freeness; no layers while its sessions are to leave."""
        view = self._engine.view
        serving = view.serving and not self._leaves
        return PeerLoad(
            start=view.start if serving else 0,
            end=view.end if serving else 0,
            free_tokens=self.kv_tokens_free,
            wanted_tokens=self.wanted_tokens,
            sessions=self._table.holding,
        )

    def movable(self) -> list[Movable]:
        """Sessions that could move elsewhere while they decode."""
        return self._table.movable(asyncio.get_running_loop().time(), self.kv.room.charged_of)

    def holding(self) -> dict[str, None]:
        """Keys of the sessions that hold KV here, in order."""
        return {live.session.key: None for live in self._table if live.session.holds_kv}

    async def close(self, reason: str) -> None:
        """Fail the remaining sessions, tell clients and neighbours why, and end all hops."""
        self.fail_all(reason)
        await asyncio.sleep(0)
        await self._hops.close()

    def fail_all(self, reason: str) -> None:
        """Fail all sessions that hold KV here."""
        for live in self._table:
            if live.session.holds_kv:
                self._fail(live, reason)

    # Messages from streams (node.stage.streams)

    def open(self, open_: SessionOpen, upstream: FrameSender) -> None:
        """Take the session over or reserve KV, then pass the open on; or answer with a refusal."""
        self._opening.open(open_, upstream)

    def close_from(self, session: str, upstream: FrameSender) -> None:
        """Close the session of an ended client stream; harmless if another has been opened."""
        if (live := self._table.get(session)) is not None and live.upstream is upstream:
            self._close(live)

    def close_for(self, close: SessionClose, client: str) -> None:
        """Free this stage at its own client's request, as it is not on the route any more."""
        live = self._table.get(close.session)
        if live is None or live.session.open.client != client:
            return
        if close.attempt >= live.session.open.attempt:
            self._close(live)

    def attach(self, attach: TokensAttach, client: str, sender: FrameSender) -> bool:
        """Send the session's tokens to ``sender``; False if the client has no such session here."""
        live = self._table.find(attach.session, attach.attempt)
        if live is None or not live.session.is_last or live.session.open.client != client:
            return False
        live.attached, live.attached_position = sender, attach.position
        live.attached_scores = 0
        self.pipeline.send_tokens(live)
        return True

    def detach(self, session: str, sender: FrameSender) -> None:
        """Stop sending tokens on an ended stream; the session may be attached to again."""
        if (live := self._table.get(session)) is not None and live.attached is sender:
            live.attached = None

    def close_by_neighbour(self, peer_id: str, close: SessionClose) -> None:
        """Close the session if a neighbouring stage of its route asks for it; others may not."""
        live = self._table.find(close.session, close.attempt)
        if live is not None and self._is_neighbour(live, peer_id):
            self._close(live, close.tokens)

    def upstream_lost(self, peer_id: str, upstream: FrameSender) -> None:
        """Pause the sessions whose stream from the stage before ended."""
        for live in self._table:
            if live.upstream is upstream and live.session.holds_kv:
                self._pause(live, peer_id, "the connection to it ended")

    @staticmethod
    def _is_neighbour(live: Live, peer_id: str) -> bool:
        route = live.session.open.route
        return peer_id == live.session.previous_peer or (
            live.session.is_first and peer_id == route[-1].peer_id
        )

    # Events of hops

    def hop_replied(self, peer_id: str, message: HopReply) -> None:
        """Handle an answer from the next stage."""
        self._opening.replied(peer_id, message)

    def kv_taken(self, peer_id: str, taken: KvTaken) -> None:
        """Record how much KV a new stage has written."""
        self.copies.told(peer_id, taken)

    def hop_lost(self, peer_id: str, reason: str) -> None:
        """Pause sessions that need the lost hop, or refuse those still opening."""
        self.copies.lost(peer_id, reason)
        for live in self._table:
            if peer_id not in live.hop_peers or not live.session.holds_kv:
                continue
            if live.warming is not None and live.warming.next_peer == peer_id:
                self._opening.move_failed(live, peer_id, reason)
                if peer_id not in live.hop_peers:
                    continue
            if live.session.state is StageState.OPENING:
                self._opening.unreachable(live, peer_id, reason)
            else:
                self._pause(live, peer_id, reason)

    def hop_in_use(self, peer_id: str) -> bool:
        """Whether a session here sends to ``peer_id``."""
        return self._table.hop_in_use(peer_id) or self.copies.uses(peer_id)

    # Ends

    def _pause(self, live: Live, lost: str, reason: str) -> None:
        """Keep the session for its owner's next attempt, and tell the owner who was lost."""
        if live.session.state is StageState.PAUSED:
            return
        if live.session.on(StageEvent.NEIGHBOUR_LOST):
            self.counters["paused"] += 1
            live.touch()
            live.tell_failed(lost, reason, self._me, self._sign)

    def _finish(self, live: Live) -> None:
        """Complete an answer: free it here, and tell the first stage, which tells the rest."""
        session = live.session
        self.counters["finished"] += 1
        rows = session.open.prompt_tokens + len(session.sampled) - 1
        self.kv.settle(session.kv_key, rows)
        self._table.finish(live)
        if session.ring_peer is not None:
            self._hops.get(session.ring_peer).send(close_of(session, rows))

    def _close(self, live: Live, tokens: int = 0) -> None:
        """Free the session here and at the stages after; a finished one is kept for its client.

        ``tokens``: as in :class:`SessionClose`.
        """
        session = live.session
        if session.state is StageState.FINISHED:
            return
        if session.next_peer is not None:
            hop = self._hops.find(session.next_peer)
            if hop is not None:  # beyond a lost hop, the session ends by its own time limit
                hop.send(close_of(session, tokens))
        self.kv.settle(session.kv_key, tokens)
        if (warming := live.warming) is not None and warming.copies:
            hop = self._hops.find(warming.next_peer)
            if hop is not None:
                open_ = warming.open
                hop.send(SessionClose(session=open_.session, attempt=open_.attempt))
        if session.is_last and live.attached is not None:
            session.finish_reason = FinishReason.CANCELLED
            self.pipeline.send_tokens(live)
        self.counters["closed"] += 1
        self._table.forget(live)

    def _fail(self, live: Live, reason: str) -> None:
        """Give the session up at this stage; other stages keep theirs for the next attempt."""
        self.counters["failed"] += 1
        live.tell_failed(self._me, reason, self._me, self._sign)
        self._table.forget(live)
