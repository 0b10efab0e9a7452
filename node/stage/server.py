"""The stage server: runs many clients' sessions over this peer's layers.

What comes from streams, links and time becomes events of :mod:`node.sessions.life`, which
:mod:`node.stage.shell` performs. Everything but the engine's steps happens on the event loop's
thread. docs/protocol.md gives the order of frames. Opening is in :mod:`node.stage.opening`, rows
and tokens in :mod:`node.stage.pipeline`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from coordinator.policies.admission.rules import headroom
from coordinator.policies.routing.balance import PeerLoad
from dht.budget import Budget
from dht.identity.grant import is_own_word
from dht.messages import codec
from dht.messages.kv import KvTaken
from dht.messages.session import (
    Pong,
    RefusalCode,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionLeaving,
    SessionRefused,
    TokensAttach,
)
from dht.process.supervision import Supervisor, loop_s
from dht.transport.frame_sender import FrameSender
from dht.transport.interface import Transport
from node.links.hops import AddressesOf, HopReply, HopTable
from node.links.lent_traffic import LentTraffic
from node.sessions import life
from node.sessions.session import StageState
from node.stage.config import StageConfig, StageEngine
from node.stage.kv_migration import KvMover
from node.stage.opening import Opening
from node.stage.pipeline import StagePipeline
from node.stage.shell import StageShell

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
        (:mod:`node.stage.moving`). ``on_idle`` is called when the last session has freed
        its KV.
        """
        self.traffic = traffic or LentTraffic()
        self._config = config
        self._engine = engine
        self._leaves = False
        self._relief: dict[str, str] = {}
        self._hops = HopTable(
            transport, addresses_of, config.hops, self, self.traffic, parts, budget
        )
        self.shell = StageShell(transport, engine, config, self._hops, on_idle)
        self.counters = self.shell.counters
        self.kv = self.shell.kv
        self._table = self.shell.table
        if budget is not None:
            budget.parties.work = self._table.knows
            self._table.account = self.kv.account = budget.parties.account
        self.pipeline = StagePipeline(self.shell, budget)
        self._opening = Opening(self.shell, bandwidth_from)
        self.copies = KvMover(self.shell)
        self.open, self.movable = self._opening.open, self.shell.movable
        self.wait_idle = self._table.wait_idle
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

    def pong(self, nonce: int) -> Pong:
        """The answer to a ping, with this stage's step times."""
        pace = self.shell.pace
        stalled_s = pace.stalled_s(loop_s())
        return Pong(nonce=nonce, stalled_s=stalled_s, step_p95_s=pace.p95_s)

    async def run(self) -> None:
        """Close idle sessions and resume stalled feeds, until cancelled."""
        beat_s = loop_s()
        while True:
            await self._table.wait_any()
            await asyncio.sleep(0.05 if self.pipeline.stalled else self._config.keepalive_s / 4)
            now_s = loop_s()
            self.pipeline.resume_stalled()
            self._give_up_idle(now_s)
            self._give_up_waiting(now_s)
            if now_s - beat_s >= self._config.keepalive_s:
                beat_s = now_s
                self._tell_leaving()

    def _give_up_waiting(self, now_s: float) -> None:
        """Put out sessions that have waited for KV for too long."""
        if self.kv.waiting:
            self.shell.resume_without_kv()
        for key in self.kv.overdue(now_s):
            if (live := self._table.of_key(key)) is not None:
                self.shell.put_out(live, now_s)

    def _give_up_idle(self, now_s: float) -> None:
        """End sessions without progress, finished ones included."""
        config, leaves = self._config, self._leaves
        known_token_s = config.hops.watch.known_token_s
        limits_s = {
            StageState.FINISHED: config.finished_s,
            StageState.PAUSED: config.paused_moving_s if leaves else config.paused_s,
        }
        for live in self._table:
            session, idle_s = live.session, now_s - live.touched_s
            state, limit_s = session.state, limits_s.get(session.state, config.idle_s)
            ran = session.done_position > session.kept_tokens
            if state is StageState.ACTIVE and ran and not session.answers:
                limit_s += known_token_s * session.open.prompt_tokens  # a stage before may be new
            if idle_s <= limit_s:
                continue
            if state is StageState.FINISHED:
                self.shell.step(live, life.Expired())
            elif state is StageState.PAUSED:
                self.counters["paused_too_long"] += 1
                self.shell.fail(live, f"no new route for {idle_s:.0f} s")
            else:
                self.counters["idle"] += 1
                self.shell.fail(live, f"no progress for {idle_s:.0f} s")

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
                self.shell.step(live, life.Leaves(to=to))

    def _tell_leaving(self) -> None:
        for live in self._table:
            to = "" if self._leaves else self._relief.get(live.session.key)
            if to is not None:
                self.shell.step(live, life.Leaves(to=to))

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
        demand = self._opening.demand.wanted(loop_s())
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
                self.shell.fail(live, reason)

    # Messages from streams (node.stage.streams)

    def close_from(self, session: str, upstream: FrameSender) -> None:
        """Close the session of an ended client stream, or end the move that it asked for; harmless
        if another has been opened."""
        if (live := self._table.get(session)) is None:
            return
        if live.upstream is upstream:
            self.shell.step(live, life.close_of(live.session.open))
        elif live.session.move is not None and live.session.move.upstream is upstream:
            self.shell.step(live, life.MoveDropped())

    def close_for(self, close: SessionClose, client: str) -> None:
        """Free this stage at its own client's request, as it is not on the route any more."""
        live = self._table.get(close.session)
        if live is None or live.session.open.client != client:
            return
        if close.attempt >= live.session.open.attempt:
            self.shell.step(live, life.close_of(live.session.open))

    def attach(self, attach: TokensAttach, client: str, sender: FrameSender) -> str | None:
        """Send the session's tokens to ``sender``; returns why if it does not."""
        live = self._table.find(attach.session, attach.attempt)
        if live is None or not live.session.is_last or live.session.open.client != client:
            return "this peer has no such session"
        if live.attaches >= self._config.attaches_max:
            self.counters["attached_too_often"] += 1
            return f"this attempt's tokens were asked for {live.attaches} times"
        live.attaches += 1
        live.attached, live.attached_position = sender, attach.position
        live.attached_scores = 0
        live.send_tokens()
        return None

    def detach(self, session: str, sender: FrameSender) -> None:
        """Stop sending tokens on an ended stream; the session may be attached to again."""
        if (live := self._table.get(session)) is not None and live.attached is sender:
            live.attached = None

    def close_by_neighbour(self, peer_id: str, close: SessionClose) -> None:
        """Close the session, or end its move, if a neighbouring stage of its route asks for it;
        others may not."""
        if (live := self._table.get(close.session)) is None:
            return
        session, move = live.session, live.session.move
        moving = None if move is None else move.open.attempt
        before, closing = session.previous_peer, session.closing_peer
        if close.attempt == session.open.attempt and peer_id in (before, closing):
            self.shell.step(live, close)
        elif close.attempt == moving and peer_id == before:
            self.shell.step(live, life.MoveDropped())

    def upstream_lost(self, peer_id: str, upstream: FrameSender) -> None:
        """Pause the sessions whose stream from the stage before ended."""
        for live in self._table:
            if live.upstream is upstream:
                lost = life.Lost(peer_id=peer_id, reason="the connection to it ended")
                self.shell.step(live, lost)

    # Events of hops

    def hop_replied(self, peer_id: str, message: HopReply) -> None:
        """Handle an answer from the next stage.

        Raises MalformedError for another stage's word that this one did not sign: the owner could
        not tell who made it up. What the next stage refuses without a signature, because it takes
        the open for somebody else's, fails as the link to it.
        """
        live, log = self._table.get(message.session), self.shell.log
        words = SessionRefused | SessionFailed | SessionLeaving
        if live is not None and isinstance(message, words) and not is_own_word(message):
            if not (isinstance(message, SessionRefused) and _disowns(message, peer_id)):
                raise codec.MalformedError("passes on what the stage that it names did not say")
            message = replace(message, by=self.shell.me, code=RefusalCode.UNREACHABLE)
        move = None if live is None else live.session.move
        if live is not None and move is not None and message.attempt == move.open.attempt:
            if peer_id == move.next_peer:
                done = live.session.done_position
                logged = isinstance(message, SessionAccepted) and log.covers(
                    message.session, message.position, done
                )
                self.shell.step(live, life.MoveReplied(message=message, logged=logged))
                self.pipeline.copy_certain(live)
            return
        live = self._table.find(message.session, message.attempt)
        if live is None or live.session.next_peer != peer_id:
            self.counters["stale_replies"] += 1
            return
        if isinstance(message, SessionAccepted):
            own = live.session.next_position
            logged = log.covers(message.session, message.position, own)
            self.shell.step(live, life.Accepted(position=message.position, logged=logged))
            self.pipeline.push(live)
        else:
            self.shell.step(live, message)

    def kv_taken(self, peer_id: str, taken: KvTaken) -> None:
        """Record how much KV a new stage has written."""
        self.copies.told(peer_id, taken)

    def hop_lost(self, peer_id: str, reason: str) -> None:
        """Pause sessions that need the lost hop, or refuse those still opening."""
        self.copies.lost(peer_id, reason)
        for live in self._table:
            if peer_id in live.session.hop_peers:
                self.shell.step(live, life.HopLost(peer_id=peer_id, reason=reason))

    def hop_in_use(self, peer_id: str) -> bool:
        """Whether a session here sends to ``peer_id``."""
        return self._table.hop_in_use(peer_id) or self.copies.uses(peer_id)

    # Ends


def _disowns(refused: SessionRefused, peer_id: str) -> bool:
    """Whether a neighbour refuses an open as one that its client did not send: it signs nothing."""
    return not refused.signature and refused.by == refused.peer_id == peer_id
