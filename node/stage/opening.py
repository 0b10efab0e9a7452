"""Opens a session's attempt at one stage: take over or reserve, then pass the open on or accept.

An open travels down the route and its answer travels back up. On the way up, every stage learns the
position from which the next stage needs rows, and tells the stage before the position from which it
needs rows itself. A replaced stage asks for all rows and gets them from the log of the stage before
(docs/protocol.md, "A lost stage"). What an answer brings about is in :mod:`node.sessions.life`.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.room import KvAsk
from coordinator.policies.admission.rules import (
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
from dht.identity.grant import grant_refusal
from dht.messages.session import Priority, RefusalCode, SessionOpen, SessionRefused
from dht.transport.frame_sender import FrameSender
from node.kv.page_names import PageNames
from node.links.hops import DIALS_REFUSED
from node.sampling.grammar import GrammarError, GrammarState
from node.sessions.life import Accepted, Expired, GivenUp, MoveAsked, kind_of, refused_of
from node.sessions.session import StageSession
from node.sessions.session_table import Live
from node.stage.moving import Rebuild, Way
from node.stage.shell import StagePart, StageShell, next_peer
from node.stage.stage_kv import RETURN_LEAST_S, claim_of

TOKEN_BYTES = 4
"""Approximate size of a token id on the wire."""


class Opening(StagePart):
    """Handles opens from clients and from the stage before."""

    def __init__(self, shell: StageShell, bandwidth_from: Callable[[str], float | None]) -> None:
        """``bandwidth_from`` returns the measured bandwidth of the link from a peer to this one, in
        bytes/s, or None if unknown."""
        super().__init__(shell)
        self._kv = shell.kv
        self._turned_away = TurnedAway()
        self.demand = Demand()
        """The latest refusal for lack of KV."""
        self._bandwidth_from = bandwidth_from

    def open(self, open_: SessionOpen, upstream: FrameSender) -> None:
        """Take the session over or reserve KV, then pass the open on; or answer with a refusal.

        A refusal that is signed is this peer's word, which the stage before may show to the client.
        So what is not the client's, or not for this stage, is refused without a signature. Who
        sends an attempt again is told that the link to it fails: it is the one that does wrong.
        """
        shell, before = self._shell, self._table.get(open_.session)
        ungranted = grant_refusal(open_, shell.transport.now())
        if ungranted is None and open_.route[open_.hop].peer_id != shell.me:
            ungranted = RefusalCode.BAD_REQUEST, "this stage belongs to another peer"
        if ungranted is not None:
            self._counters["ungranted"] += 1
            refused = refused_of(open_, shell.me, *ungranted)
            if refused.code is RefusalCode.BAD_REQUEST:
                upstream.send(refused)
            else:
                shell.tell(refused, upstream)
            return
        if open_.hop and before is not None and before.session.has_come_to(open_):
            self._counters["repeated_opens"] += 1
            sender, reason = open_.route[open_.hop - 1].peer_id, "this session is open already"
            told = refused_of(open_, shell.me, RefusalCode.UNREACHABLE, reason, peer_id=sender)
            shell.tell(told, upstream)
            return
        session = None if before is None else before.session
        kind = kind_of(open_, session, shell.me, self._engine.view)
        alone = len(open_.route) == 1
        if isinstance(kind, str) and not (
            alone or self._hops.admits(next_peer(open_), open_.client)
        ):
            self._counters["dials_refused"] += 1
            kind = RefusalCode.TOO_MANY, DIALS_REFUSED
        if not isinstance(kind, str):
            self._counters[f"refused_{kind[0]}"] += 1
            shell.tell(refused_of(open_, shell.me, *kind), upstream)
        elif before is None or kind == "new":
            if before is not None:  # its layers differ, or it has nothing left to take over
                shell.step(before, Expired())
            self._admit(open_, upstream)
        elif kind == "take over":
            shell.take_over(before, open_, upstream)
            self._pass_on(before)
        else:
            logged = shell.log.covers(open_.session, 0, before.session.done_position)
            shell.step(before, MoveAsked(open=open_, upstream=upstream, logged=logged))

    def _pass_on(self, live: Live) -> None:
        """Pass an open on, or accept as the last stage that it is for."""
        session, open_ = live.session, live.session.open
        if not session.is_last and open_.hop != open_.migrate_until:
            self._hops.get(next_peer(open_)).send(replace(open_, hop=open_.hop + 1))
        elif session.is_last and open_.sampling.grammar:
            live.reading = asyncio.create_task(self._accept_with_grammar(live))
        else:
            self._accept_as_last(live)

    def _accept_as_last(self, live: Live) -> None:
        importing = live.session.is_warming and self._way(live.session.open) is Way.COPY
        self._shell.step(live, Accepted(importing=importing))

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
            refused = refused_of(open_, self._shell.me, found.code, str(found))
            self._shell.step(live, refused)
        elif session.history is not None:
            session.history.grammar = found
            self._accept_as_last(live)

    def _way(self, open_: SessionOpen) -> Way:
        """The cheapest way for this new stage of a move to get the session's KV."""
        stage, first = open_.route[open_.hop], open_.hop == 0
        upstream = open_.client if first else open_.route[open_.hop - 1].peer_id
        source, stateful = open_.copy_from, self._engine.state_tokens > 0
        sizer = self._shell.sizer
        way = Rebuild(
            tokens=open_.prompt_tokens,
            kv_row_bytes=self._engine.kv_row_bytes(stage.start, stage.end),
            row_bytes=TOKEN_BYTES if first else self._shell.row_bytes,
            kv_bytes_per_s=0.0 if source is None or stateful else self._bandwidth_from(source),
            rows_bytes_per_s=self._bandwidth_from(upstream),
            row_s=sizer.row_s,
            beside_rows=sizer.beside() if self._table.holding > 1 else None,
            logged=open_.rows_logged,
            stages_above=open_.hop,
        ).cheapest()
        self._counters[f"move_by_{way}"] += 1
        return way

    # Admission

    def _admit(self, open_: SessionOpen, upstream: FrameSender) -> None:
        """Reserve KV for a new session, for which others may have to go, or refuse it."""
        now_s = asyncio.get_running_loop().time()
        session = StageSession(open=open_)
        refused = self._let_in(session, now_s)
        for _ in self._make_room(session, now_s) if refused is not None else ():
            refused = self._let_in(session, now_s)
            if refused is None:
                break
        if refused is not None:
            self._counters[f"refused_{refused.code}"] += 1
            self._shell.tell(refused, upstream)
            return
        live = Live(
            session=session,
            upstream=upstream,
            touched_s=now_s,
            opened_s=now_s,
            moved_here=open_.answered > 0,
        )
        self._table.add(live)
        self._pass_on(live)

    def _let_in(self, session: StageSession, now_s: float) -> SessionRefused | None:
        """Reserve KV for a session, or return why not."""
        open_ = session.open
        load = self._table.load(open_.client, now_s, claim_of(open_), self._shell.has_work)
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
        return refused_of(open_, self._shell.me, *refusal, wait_s)

    def _make_room(self, session: StageSession, now_s: float) -> Iterator[None]:
        """Free one session after the other for ``session``; none if all would not be enough.

        Those that rest give way first, then those of clients with much more KV here.
        """
        open_ = session.open
        ask = self._kv.ask_of(open_, session.kv_key)
        load = self._table.load(open_.client, now_s, busy=self._shell.has_work)
        room = self._kv.room
        resting = self._table.resting(now_s, self._shell.has_work, open_.client)
        free = room.free_tokens + sum(room.charged_of(live.session.kv_key) for live in resting)
        fits = room.expected_tokens(ask) <= free
        if resting and fits:
            left = self._table.load(open_.client, now_s, busy=self._shell.has_work, without=resting)
            if self._refuse_for_load(left, urgent=False) is None:
                for live in resting:
                    self._counters["rested"] += 1
                    reason = "it made no progress, and others need its place"
                    self._shell.step(live, GivenUp(reason=reason, retry_after_s=RETURN_LEAST_S))
                    yield
                return
        if self._refuse_for_load(load, urgent=False) is not None:
            return
        for key in room.who_makes_room(ask, now_s):
            if not self._shell.make_way(key):
                return  # it moves to where there is room, for this session, too
            self._counters["crowd_gave_way"] += 1
            yield

    def _refuse_for_load(self, load: StageLoad, *, urgent: bool) -> tuple[RefusalCode, str] | None:
        """Why the stage has too many sessions for one more, or None."""
        config = self._config
        places = config.sessions_max - load.sessions
        if places <= 0 or (not urgent and places <= headroom(config.sessions_max)):
            return RefusalCode.TOO_MANY, f"{load.sessions} sessions are open, that is the limit"
        if load.own >= config.sessions_per_client_max:
            return RefusalCode.TOO_MANY, f"you have {load.own} sessions here, that is the limit"
        waits_s = self._shell.decode_waits.p95_s
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
            and load.claimed < max(1, ADMISSION.claim_share * headroom(sessions_max))
        )

    def _runs_first(self, open_: SessionOpen, load: StageLoad) -> bool:
        """Whether high priority is granted: the client has few such sessions, and so have all."""
        all_max = max(1, int(ADMISSION.claim_share * headroom(self._config.sessions_max)))
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
        if not urgent and decodes_wait(load, self._shell.decode_waits.p95_s):
            wanted, free = min(ADMISSION.queue_places * crowd, room.charged_tokens), 0
        holding = self._table.holdings(now_s, room.charged_of, ask.client)
        room_s = retry_after_s(wanted, free, holding)
        if urgent or not prompts_wait(load):
            return room_s
        return max(room_s, prompt_turn_s(load, turn))
