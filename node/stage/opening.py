"""Opens a session's attempt at one stage: take over or reserve, pass the open on, resume.

An open travels down the route and its answer travels back up. On the way up, every stage learns the
position from which the next stage needs rows, and tells the stage before the position from which it
needs rows itself. A replaced stage asks for all rows and gets them from the log of the stage before
(docs/protocol.md, "A lost stage").
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from coordinator.admission.room import KvAsk
from coordinator.admission.rules import (
    CLAIM_SHARE,
    QUEUE_PLACES,
    Demand,
    StageLoad,
    TurnedAway,
    claim_fits,
    decodes_wait,
    headroom,
    prompt_turn_s,
    prompts_wait,
    queue_is_long,
    retry_after_s,
)
from dht.identity.grant import grant_refusal, is_own_word, own_word
from dht.messages import codec
from dht.messages.session import (
    MigrationReady,
    Priority,
    RefusalCode,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
)
from dht.transport.frame_sender import FrameSender
from node.kv.page_names import PageNames
from node.links.hops import DIALS_REFUSED, HopReply, HopTable
from node.sampling.grammar import GrammarError, GrammarState
from node.sessions.session import StageEvent, StageSession, StageState, resume_at
from node.sessions.session_table import Live, MigrationTarget, SessionTable
from node.stage.config import StageConfig, StageEngine
from node.stage.migration_choice import Rebuild, Way
from node.stage.open_checks import refusal_of
from node.stage.pipeline import StagePipeline, row_bytes_of
from node.stage.stage_kv import RETURN_LEAST_S, StageKv, claim_of

TOKEN_BYTES = 4
"""Approximate size of a token id on the wire."""


class Opening:
    """Handles opens from the stage before and answers from the stage after."""

    def __init__(
        self,
        me: str,
        engine: StageEngine,
        kv: StageKv,
        config: StageConfig,
        table: SessionTable,
        hops: HopTable,
        pipeline: StagePipeline,
        counters: Counter[str],
        bandwidth_from: Callable[[str], float | None],
        now: Callable[[], float],
        sign: Callable[[bytes], bytes],
        put_out: Callable[[Live], None],
        make_way: Callable[[str], bool],
    ) -> None:
        """``bandwidth_from`` returns the measured bandwidth of the link from a peer to this one, in
        bytes/s, or None if unknown; ``now`` the network's time, in Unix seconds; ``sign`` signs as
        ``me``; ``put_out`` frees a session that rests here and tells its owner when to come back;
        ``make_way`` frees one that runs, by its name in the engine, or asks it to move and returns
        False."""
        self._me = me
        self._engine = engine
        self._kv = kv
        self._config = config
        self._table = table
        self._hops = hops
        self._pipeline = pipeline
        self._counters = counters
        self._turned_away = TurnedAway()
        self.demand = Demand()
        """The latest refusal for lack of KV."""
        self._bandwidth_from = bandwidth_from
        self._now = now
        self._sign = sign
        self._put_out = put_out
        self._make_way = make_way

    def open(self, open_: SessionOpen, upstream: FrameSender) -> None:
        """Take the session over or reserve KV, then pass the open on; or answer with a refusal."""
        if (ungranted := grant_refusal(open_, self._now())) is not None:
            self._counters["ungranted"] += 1
            upstream.send(self._refused(open_, self._me, *ungranted))
            return
        before = self._table.get(open_.session)
        if open_.migrate_until is not None and before is not None:
            self._announce_move(before, open_, upstream)
            return
        live = self._begin(open_, upstream)
        if not isinstance(live, Live):
            self._counters[f"refused_{live.code}"] += 1
            upstream.send(live)
            return
        session = live.session
        if session.is_last or open_.hop == open_.migrate_until:
            if session.is_last and open_.sampling.grammar:
                live.reading = asyncio.create_task(self._accept_with_grammar(live))
            else:
                self._accept_as_last(live)
            return
        self._hops.get(_next_peer(open_)).send(replace(open_, hop=open_.hop + 1))

    def _accept_as_last(self, live: Live) -> None:
        """Accept as the last stage that the open is for."""
        session = live.session
        session.on(StageEvent.ACCEPTED)
        session.importing = session.is_warming and self._way(session.open) is Way.COPY
        self._accept(live)
        # Connect to the next stage now, also when a move only begins: rows need not wait then.
        if len(session.open.route) > 1:
            self._hops.get(_next_peer(session.open))

    async def _accept_with_grammar(self, live: Live) -> None:
        """Accept once the grammar is read and has followed the answer so far, or refuse."""
        open_ = live.session.open
        found: GrammarState | GrammarError
        try:
            answer = open_.history[len(open_.history) - open_.answered :]
            account = self._table.account(open_.client)
            found = await self._engine.grammar(account, open_.sampling, answer)
        except GrammarError as error:
            found = error
        session = live.session
        if session.open is not open_:  # another attempt's
            return
        live.reading = None
        if isinstance(found, GrammarError):
            self._counters[f"refused_{found.code}"] += 1
            self._refused_below(live, self._refused(open_, self._me, found.code, str(found)))
        elif session.history is not None:
            session.history.grammar = found
            self._accept_as_last(live)

    def _announce_move(self, live: Live, open_: SessionOpen, upstream: FrameSender) -> None:
        """Pass a planned move on to the new stages, as a stage that goes on serving."""
        current = live.session
        following = open_.hop + 1
        if (
            refusal_of(open_, self._me, self._engine.view, taken_over=True) is not None
            or not current.can_take_over(open_)
            or current.state is not StageState.ACTIVE
            or current.is_warming
            or following >= len(open_.route)
        ):
            reason = "this stage cannot take part in the move"
            upstream.send(self._refused(open_, self._me, RefusalCode.BAD_REQUEST, reason))
            return
        next_peer = _next_peer(open_)
        if (refusal := self._refuse_dial(open_)) is not None:
            upstream.send(self._refused(open_, self._me, *refusal))
            return
        warming = MigrationTarget(
            open=open_,
            upstream=upstream,
            next_peer=next_peer,
            copies=next_peer != current.next_peer,
        )
        self._table.warm(live, warming)
        hop = self._hops.get(next_peer)
        log = self._table.log
        logged = not warming.copies or log.covers(current.key, 0, current.done_position)
        hop.send(replace(open_, hop=following, rows_logged=logged))

    def _way(self, open_: SessionOpen) -> Way:
        """The cheapest way for this new stage of a move to get the session's KV."""
        stage, first = open_.route[open_.hop], open_.hop == 0
        upstream = open_.client if first else open_.route[open_.hop - 1].peer_id
        source, stateful = open_.copy_from, self._engine.state_tokens > 0
        way = Rebuild(
            tokens=open_.prompt_tokens,
            kv_row_bytes=self._engine.kv_row_bytes(stage.start, stage.end),
            row_bytes=TOKEN_BYTES if first else row_bytes_of(self._engine),
            kv_bytes_per_s=0.0 if source is None or stateful else self._bandwidth_from(source),
            rows_bytes_per_s=self._bandwidth_from(upstream),
            row_s=self._pipeline.sizer.row_s,
            beside_rows=self._pipeline.sizer.beside() if self._table.holding > 1 else None,
            logged=open_.rows_logged,
            stages_above=open_.hop,
        ).cheapest()
        self._counters[f"move_by_{way}"] += 1
        return way

    def _move_replied(self, live: Live, warming: MigrationTarget, message: HopReply) -> None:
        """Pass the new stages' answer to a move up; if they accept, send them copies of rows."""
        waits = warming.copies and not warming.ready
        if waits and isinstance(message, SessionAccepted) and message.rows:
            session, log = live.session, self._table.log
            if not log.covers(session.key, message.position, session.done_position):
                self.not_logged(live, "the rows so far are not logged here")
                return
            self._pipeline.copy_rows(live, message.position)
        warming.upstream.send(message)
        if isinstance(message, SessionRefused | SessionFailed):
            self._table.warm(live, None)

    def not_logged(self, live: Live, reason: str) -> None:
        """Cancel a move for which this stage lacks rows; the session stays where it is."""
        if (warming := live.warming) is not None:
            code = RefusalCode.NOT_HELD
            warming.upstream.send(self._refused(warming.open, self._me, code, reason))
            self._table.warm(live, None)

    def _begin(self, open_: SessionOpen, upstream: FrameSender) -> Live | SessionRefused:
        """Start the session's new attempt, or return why not and change nothing."""
        before = self._table.get(open_.session)
        kept = before is not None and before.session.can_take_over(open_)
        refusal = refusal_of(open_, self._me, self._engine.view, taken_over=kept)
        if before is not None:
            if open_.client != before.session.open.client:
                refusal = RefusalCode.BAD_REQUEST, "this session belongs to another client"
            elif open_.attempt <= before.session.open.attempt:
                refusal = RefusalCode.BAD_REQUEST, "this session is open already"
        refusal = refusal or self._refuse_dial(open_)
        if refusal is not None:
            return self._refused(open_, self._me, *refusal)
        if before is not None and kept:
            self._counters["taken_over"] += 1
            if open_.shares_prefix:  # from here on its rows may come from other peers
                self._kv.keep_no_more(before.session.kv_key)
            following = before.session.take_over(open_)
            self._rewind(following, following.next_position)
            self._table.take_over(before, following, upstream)
            return before
        if before is not None:  # its layers differ, or it has nothing left to take over
            self._table.forget(before)
        now_s = asyncio.get_running_loop().time()
        session = StageSession(open=open_)
        refused = self._let_in(session, now_s)
        for _ in self._make_room(session, now_s) if refused is not None else ():
            refused = self._let_in(session, now_s)
            if refused is None:
                break
        if refused is not None:
            return refused
        live = Live(
            session=session,
            upstream=upstream,
            touched_s=now_s,
            opened_s=now_s,
            moved_here=open_.answered > 0,
        )
        self._table.add(live)
        return live

    def _let_in(self, session: StageSession, now_s: float) -> SessionRefused | None:
        """Reserve KV for a session, or return why not."""
        open_ = session.open
        load = self._table.load(open_.client, now_s, claim_of(open_), self._pipeline.has_work)
        session.urgent = self._runs_first(open_, load)
        ask = self._kv.ask_of(open_, session.kv_key)
        urgent = self._is_urgent(open_, ask, load)
        refusal = self._refuse_for_load(load, urgent=urgent)
        if refusal is None:
            names = PageNames.of(open_)
            found = self._kv.admit(ask, now_s, may_be_urgent=urgent, names=names)
            if not isinstance(found, str):
                session.start_at(found)
                return None
            self.demand = Demand(tokens=self._kv.room.expected_tokens(ask), at_s=now_s)
            refusal = RefusalCode.NO_KV, found
        wait_s = self._retry_after_s(ask, load, now_s, urgent=urgent)
        return self._refused(open_, self._me, *refusal, wait_s)

    def _make_room(self, session: StageSession, now_s: float) -> Iterator[None]:
        """Free one session after the other for ``session``; none if all would not be enough.

        Those that rest give way first, then those of clients with much more KV here.
        """
        open_ = session.open
        ask = self._kv.ask_of(open_, session.kv_key)
        load = self._table.load(open_.client, now_s, busy=self._pipeline.has_work)
        room = self._kv.room
        resting = self._table.resting(now_s, self._pipeline.has_work, open_.client)
        free = room.free_tokens + sum(room.charged_of(live.session.kv_key) for live in resting)
        fits = room.expected_tokens(ask) <= free
        if resting and fits:
            left = self._table.load(
                open_.client, now_s, busy=self._pipeline.has_work, without=resting
            )
            if self._refuse_for_load(left, urgent=False) is None:
                for live in resting:
                    self._put_out(live)
                    yield
                return
        if self._refuse_for_load(load, urgent=False) is not None:
            return
        for key in room.who_makes_room(ask, now_s):
            if not self._make_way(key):
                return  # it moves to where there is room, for this session, too
            self._counters["crowd_gave_way"] += 1
            yield

    def _refuse_dial(self, open_: SessionOpen) -> tuple[RefusalCode, str] | None:
        if len(open_.route) == 1 or self._hops.admits(_next_peer(open_), open_.client):
            return None
        self._counters["dials_refused"] += 1
        return RefusalCode.TOO_MANY, DIALS_REFUSED

    def _refuse_for_load(self, load: StageLoad, *, urgent: bool) -> tuple[RefusalCode, str] | None:
        """Why the stage has too many sessions for one more, or None."""
        config = self._config
        places = config.sessions_max - load.sessions
        if places <= 0 or (not urgent and places <= headroom(config.sessions_max)):
            return RefusalCode.TOO_MANY, f"{load.sessions} sessions are open, that is the limit"
        if load.own >= config.sessions_per_client_max:
            return RefusalCode.TOO_MANY, f"you have {load.own} sessions here, that is the limit"
        waits_s = self._pipeline.decode_waits.p95_s
        if not urgent and queue_is_long(load, waits_s):
            full = f"{load.sessions} sessions, {load.own} of them yours"
            return RefusalCode.TOO_MANY, f"{full}, a token in {waits_s or 0.0:.1f} s"
        return None

    def _is_urgent(self, open_: SessionOpen, ask: KvAsk, load: StageLoad) -> bool:
        """Whether the open counts as urgent: it claims so, there is headroom left for its claim,
        and a client that claims high priority is below its limit of urgent sessions."""
        sessions_max = self._config.sessions_max
        if open_.answered == 0 and load.own_urgent >= self._config.urgent_per_client_max:
            return False
        return (
            self._kv.room.fits_urgent(ask)
            and claim_fits(1, sessions_max - load.sessions, load.sessions, load.claimed)
            and load.claimed < max(1, CLAIM_SHARE * headroom(sessions_max))
        )

    def _runs_first(self, open_: SessionOpen, load: StageLoad) -> bool:
        """Whether high priority is granted: the client has few such sessions, and so have all."""
        all_max = max(1, int(CLAIM_SHARE * headroom(self._config.sessions_max)))
        own_max = self._config.urgent_per_client_max
        high = open_.priority is Priority.HIGH
        return high and load.own_urgent < own_max and load.urgent < all_max

    def _retry_after_s(self, ask: KvAsk, load: StageLoad, now_s: float, *, urgent: bool) -> float:
        room = self._kv.room
        free, needed = room.free_tokens, room.expected_tokens(ask)
        kept = headroom(capacity := room.capacity_tokens)
        if not urgent and needed + kept <= capacity:
            free -= kept
            capacity -= kept
        turn = self._turned_away.turn(ask.client, now_s)
        crowd = needed * turn
        wanted = max(needed, min(crowd, capacity))
        # However much KV is free, the queue only shortens when sessions end.
        if not urgent and decodes_wait(load, self._pipeline.decode_waits.p95_s):
            wanted, free = min(QUEUE_PLACES * crowd, room.charged_tokens), 0
        holding = self._table.holdings(now_s, room.charged_of, ask.client)
        room_s = retry_after_s(wanted, free, holding)
        if urgent or not prompts_wait(load):
            return room_s
        return max(room_s, prompt_turn_s(load, turn))

    def room_after_s(self, session: StageSession, now_s: float) -> float:
        """Seconds until a session that gives way should find room here again."""
        room = self._kv.room
        needed = room.charged_of(session.kv_key)
        client, key = session.open.client, session.kv_key
        others = self._table.holdings(now_s, room.charged_of, client, besides=key)
        return max(RETURN_LEAST_S, retry_after_s(needed, 0, others))

    def replied(self, peer_id: str, message: HopReply) -> None:
        """Handle the next stage's answer: resume the session and pass the answer up.

        Raises MalformedError for another stage's word that this one did not sign: the owner could
        not tell who made it up.
        """
        words = SessionRefused | SessionFailed | SessionLeaving
        if isinstance(message, words) and not is_own_word(message):
            raise codec.MalformedError("passes on what the stage that it names did not say")
        live = self._table.get(message.session)
        warming = None if live is None else live.warming
        if live is not None and warming is not None and message.attempt == warming.open.attempt:
            if peer_id == warming.next_peer:
                self._move_replied(live, warming, message)
            return
        live = self._table.find(message.session, message.attempt)
        if live is None or live.session.next_peer != peer_id:
            self._counters["stale_replies"] += 1
            return
        match message:
            case SessionAccepted():
                if live.session.on(StageEvent.ACCEPTED):
                    self._resume(live, message.position)
            case SessionRefused():
                self._refused_below(live, message)
            case SessionFailed():
                live.session.on(StageEvent.NEIGHBOUR_LOST)
                live.upstream.send(message)
            case SessionLeaving() | MigrationReady():
                live.upstream.send(message)

    def unreachable(self, live: Live, peer_id: str, reason: str) -> None:
        """Refuse an open because the hop to its next stage was lost."""
        refused = self._refused(live.session.open, peer_id, RefusalCode.UNREACHABLE, reason)
        self._refused_below(live, refused)

    def move_failed(self, live: Live, peer_id: str, reason: str) -> None:
        """Cancel a move because the link to its new stage was lost; the session stays here."""
        if live.warming is not None:
            warming = live.warming
            code = RefusalCode.UNREACHABLE
            warming.upstream.send(self._refused(warming.open, peer_id, code, reason))
            self._table.warm(live, None)

    def _refused_below(self, live: Live, refused: SessionRefused) -> None:
        """Pass a refusal up. Forget a new session; a taken-over one waits for its next attempt."""
        live.upstream.send(refused)
        if live.session.state is not StageState.OPENING:
            return
        if live.session.taken_over:
            live.session.on(StageEvent.REFUSED_AGAIN)
            live.touch()
        else:
            self._table.forget(live)

    def _resume(self, live: Live, asked: int) -> None:
        """Send the next stage rows from ``asked`` on: from the log, or by running them again."""
        session, log = live.session, self._table.log
        own = session.next_position
        resume = resume_at(asked, own, logged=log.covers(session.key, asked, own))
        session.send_position = asked
        if resume.own_position < own:
            self._counters["rerun_rows"] += (own - resume.own_position) * session.taken_over
            self._rewind(session, resume.own_position)
            log.truncate(session.key, session.next_position)
        else:
            self._pipeline.resend(live, resume.resend_from, own)
        self._accept(live)
        self._pipeline.push(live)

    def _rewind(self, session: StageSession, position: int) -> None:
        """Run rows from ``position`` on again, or from the last one before it that the engine can
        go on from."""
        session.rewind(self._engine.resumable(session.kv_key, position))

    def _refused(
        self, open_: SessionOpen, peer_id: str, code: RefusalCode, reason: str, wait_s: float = 0.0
    ) -> SessionRefused:
        """A refusal that this peer signs: ``peer_id`` cannot take part."""
        refused = SessionRefused(
            session=open_.session,
            attempt=open_.attempt,
            peer_id=peer_id,
            by=self._me,
            code=code,
            reason=reason[:512],
            retry_after_s=wait_s,
        )
        return own_word(refused, self._sign)

    def _accept(self, live: Live) -> None:
        session, open_ = live.session, live.session.open
        if not (session.taken_over or session.is_warming):
            self._counters["prompt_tokens"] += open_.prompt_tokens
            self._counters["cached_tokens"] += session.next_position
        accepted = SessionAccepted(
            session=open_.session,
            attempt=open_.attempt,
            position=session.needs_from,
            rows=not session.importing,
        )
        live.upstream.send(accepted)


def _next_peer(open_: SessionOpen) -> str:
    """The peer that this stage sends to; the first stage, where this is the last."""
    return open_.route[(open_.hop + 1) % len(open_.route)].peer_id


def close_of(session: StageSession, tokens: int = 0) -> SessionClose:
    """A close message for the session's present attempt."""
    open_ = session.open
    return SessionClose(session=open_.session, attempt=open_.attempt, tokens=tokens)
