"""Copies sessions' KV between stages: sends where a stage leaves, takes where a session moves to.

Decisions are in :mod:`node.stage.moving` and :mod:`node.sessions.session`. KV travels as bulk:
after decodes and prefill on a link, under credit, a bounded number of bytes ahead of what the other
side has written, one piece at a time between steps.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.policies.links.scheduler import TrafficClass
from dht.messages.kv import KvCopy, KvPages, KvTaken
from dht.messages.session import RefusalCode
from node.links.hops import DIALS_REFUSED
from node.sessions.life import REASON_CHARACTERS_MAX, Expired, refused_of
from node.sessions.session import StageSession, StageState
from node.sessions.session_table import Live
from node.stage.moving import KvCopyOut
from node.stage.shell import StagePart, StageShell

COPY_S_MAX = 120.0
"""Time limit of a copy that has not caught up with its session, even if it still advances."""


@dataclass(slots=True, kw_only=True)
class _Outgoing:
    """State of a copy that is being sent."""

    to: str
    plan: KvCopyOut
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    refused: str | None = None


class KvMover(StagePart):
    """Sends and takes copies of KV for all sessions of one stage server."""

    def __init__(self, shell: StageShell) -> None:
        super().__init__(shell)
        self._outgoing: dict[tuple[str, int], _Outgoing] = {}
        self._imports: set[asyncio.Task[None]] = set()

    # At the stage that leaves

    def uses(self, peer_id: str) -> bool:
        """Whether KV is being sent to ``peer_id``."""
        return any(each.to == peer_id for each in self._outgoing.values())

    async def send(self, order: KvCopy, client: str) -> str | None:
        """Copy a session's KV until few rows are missing; returns why if it cannot.

        The session goes on meanwhile, and stays here whether the copy succeeds or not. A session
        has one copy at a time: a later order ends the one before.
        """
        live = self._table.get(order.session)
        if live is None or live.session.open.client != client:
            return "this peer has no such session"
        session = live.session
        if session.state is not StageState.ACTIVE or session.is_warming:
            return "the session does not run here now"
        if order.attempt <= session.open.attempt or order.to == self._shell.me:
            return "copies are for a later attempt, at another peer"
        for (other, attempt), each in self._outgoing.items():
            if other == order.session:
                each.refused = f"attempt {order.attempt} came after {attempt}"
                each.changed.set()
        if not self._hops.admits(order.to, client):
            self._counters["dials_refused"] += 1
            return DIALS_REFUSED
        config, stage = self._config, session.stage
        outgoing = _Outgoing(
            to=order.to,
            plan=KvCopyOut(
                row_bytes=self._engine.kv_row_bytes(stage.start, stage.end),
                piece_bytes=config.copy_piece_bytes,
                ahead_bytes=config.copy_bytes_max,
            ),
        )
        key = order.session, order.attempt
        self._outgoing[key] = outgoing
        self._hops.get(order.to)
        try:
            return await self._send_all(order, session, outgoing)
        finally:
            if self._outgoing.get(key) is outgoing:
                del self._outgoing[key]

    async def _send_all(
        self, order: KvCopy, session: StageSession, outgoing: _Outgoing
    ) -> str | None:
        plan = outgoing.plan
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + COPY_S_MAX
        while outgoing.refused is None:
            if not self._table.is_current(session) or session.state is not StageState.ACTIVE:
                return "the session does not run here any more"
            if plan.is_warm(session.done_position):
                self._counters["kv_copied"] += plan.taken
                return None
            if loop.time() >= ends_s:
                return f"the copy has not caught up within {COPY_S_MAX:.0f} s"
            piece = plan.next(session.done_position)
            if piece is None:
                outgoing.changed.clear()
                try:
                    async with asyncio.timeout(self._config.copy_stalled_s):
                        await outgoing.changed.wait()
                except TimeoutError:
                    return f"no KV was taken for {self._config.copy_stalled_s:.0f} s"
                continue
            try:
                body = await self._engine.export_kv(session.kv_key, piece.position, piece.tokens)
            except (KeyError, ValueError, RuntimeError) as error:
                return f"the KV cannot be read: {error}"
            pages = KvPages(
                session=order.session,
                attempt=order.attempt,
                position=piece.position,
                tokens=piece.tokens,
                dtype=self._engine.wire_dtype,
            )
            self._hops.get(outgoing.to).send(pages, body, traffic=TrafficClass.BULK)
        return outgoing.refused

    def told(self, peer_id: str, told: KvTaken) -> None:
        """Record how far the new stage has got; an unchanged position is no progress."""
        outgoing = self._outgoing.get((told.session, told.attempt))
        before = 0 if outgoing is None else outgoing.plan.taken
        if outgoing is None or outgoing.to != peer_id or not outgoing.plan.took(told.position):
            self._counters["stale_replies"] += 1
            return
        if told.refused:
            outgoing.refused = told.refused
        if told.refused or outgoing.plan.taken > before:
            outgoing.changed.set()

    def lost(self, peer_id: str, reason: str) -> None:
        """End the copies to a new stage that was lost."""
        for outgoing in self._outgoing.values():
            if outgoing.to == peer_id:
                outgoing.refused = f"the new stage was lost: {reason}"
                outgoing.changed.set()

    # At the new stage

    def take(
        self,
        peer_id: str,
        pages: KvPages,
        body: bytes | memoryview,
        reply: Callable[[object], None],
    ) -> None:
        """Take a piece of KV from the stage that leaves; drop it if it is not the next one.

        Pieces wait for the engine's steps, so sizes are checked before any piece is kept.
        """
        live = self._table.find(pages.session, pages.attempt)
        if live is None or live.session.open.copy_from != peer_id:
            self._counters["stale_kv"] += 1
            return
        session = live.session
        if pages.dtype != self._engine.wire_dtype:
            self._refuse(
                live, f"KV in {pages.dtype}, {self._engine.wire_dtype} is held here", reply
            )
            return
        row_bytes = self._engine.kv_row_bytes(session.stage.start, session.stage.end)
        # row_bytes assumes the largest layer; KV of smaller layers fills less.
        if len(body) > pages.tokens * row_bytes:
            self._refuse(
                live, f"{len(body)} bytes came as KV of {pages.tokens} tokens, too many", reply
            )
            return
        ahead = session.next_position - session.done_position
        if not session.take_kv(pages.position, pages.tokens):
            self._counters["stale_kv"] += 1
            return
        ahead_bytes = (ahead + pages.tokens) * row_bytes
        most = max(self._config.copy_bytes_max, self._config.copy_piece_bytes, row_bytes)
        if ahead_bytes > most:
            self._refuse(
                live, f"KV came {ahead_bytes} bytes ahead of what is written, over {most}", reply
            )
            return
        if not self._shell.take_kv(session.kv_key, pages.position + pages.tokens):
            self._refuse(live, "there is no room for more KV now", reply)
            return
        live.touch()
        task = asyncio.create_task(self._import(live, pages, bytes(body), reply))
        self._imports.add(task)
        task.add_done_callback(self._imports.discard)

    async def _import(
        self, live: Live, pages: KvPages, body: bytes, reply: Callable[[object], None]
    ) -> None:
        """Write one piece; pieces are written in order of arrival."""
        session = live.session
        stage = session.stage
        try:
            refused = await self._engine.import_kv(
                session.kv_key, (stage.start, stage.end), pages.position, pages.tokens, body
            )
        except RuntimeError as error:  # the engine's worker has stopped
            refused = str(error)
        if not self._table.is_current(session):
            return
        if refused is not None:
            self._refuse(live, refused, reply)
            return
        session.done_position = pages.position + pages.tokens
        live.touch()
        reply(KvTaken(session=pages.session, attempt=pages.attempt, position=session.done_position))

    def _refuse(self, live: Live, reason: str, reply: Callable[[object], None]) -> None:
        """End this copy with a refusal: tell both sides, and free the reservation."""
        self._counters["kv_refused"] += 1
        open_ = live.session.open
        at = live.session.done_position
        reason = reason[:REASON_CHARACTERS_MAX]
        reply(KvTaken(session=open_.session, attempt=open_.attempt, position=at, refused=reason))
        refused = refused_of(open_, self._shell.me, RefusalCode.NO_COPY, reason)
        self._shell.tell(refused, live.upstream)
        self._shell.step(live, Expired())
