"""Carries rows and tokens through one stage: from the stage before, into the engine, to the next.

Rows are logged before they are sent, so that the next stage can be rebuilt from here if it is lost.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.failure.detector import EnginePace, StepTimes
from coordinator.links.chunk_sizer import RESENT_TOKENS, ChunkSizer
from coordinator.links.scheduler import LinkScheduler, TrafficClass
from dht.messages import codec
from dht.messages.session import (
    ActivationItem,
    Activations,
    MigrationReady,
    PromptScores,
    RingToken,
    RingTokens,
    Tokens,
)
from node.device.tensors import DTYPES
from node.engine.work_item import WorkItem, WorkResult
from node.links.hops import HopTable
from node.links.wire_rows import INT8, RowsError, quantized, split_int8_rows, split_rows
from node.sessions.session import StageSession, StageState
from node.sessions.session_table import Live, SessionTable
from node.stage.config import StageConfig, StageEngine
from node.stage.kv_copy import REST_ROWS
from node.stage.outbox import Outbox, rows_bytes
from node.stage.stage_kv import StageKv


def row_bytes_of(engine: StageEngine) -> int:
    """Bytes of one row on the wire."""
    return engine.hidden * DTYPES[engine.wire_dtype].itemsize


class StagePipeline:
    """Moves rows and tokens of the sessions in a table."""

    def __init__(
        self,
        engine: StageEngine,
        kv: StageKv,
        config: StageConfig,
        table: SessionTable,
        hops: HopTable,
        counters: Counter[str],
        *,
        fail: Callable[[Live, str], None],
        refuse: Callable[[Live, str, str], None],
        finish: Callable[[Live], None],
    ) -> None:
        """``fail`` ends a session at this stage with a reason; ``refuse`` pauses it, for the peer
        whose rows are unsound and a reason; ``finish`` completes its answer."""
        self._engine = engine
        self._kv = kv
        self._config = config
        self._table = table
        self._hops = hops
        self._counters = counters
        self._fail = fail
        self._refuse = refuse
        self._finish = finish
        self._stalled: dict[str, None] = {}
        self._without_kv: dict[str, deque[WorkItem]] = {}
        """Work of sessions that wait for KV, by their names in the engine."""
        self.pace = EnginePace()
        self.decode_waits = StepTimes()
        """Times from a decode's arrival to its step's end: this stage's part of a token's time."""
        self.sizer = ChunkSizer()
        self.serialisation_s = 0.0
        """Seconds spent converting tensors to frames and frames to tensors, writing included."""

    @property
    def stalled(self) -> bool:
        """Whether a session waits for a slow link; if so, call :meth:`resume_stalled` soon."""
        return bool(self._stalled)

    @property
    def behind(self) -> bool:
        """Whether prefill comes in faster than it goes out, so that stages before should wait."""
        if self._engine.backlog_tokens > self._config.backlog_tokens_max:
            return True
        limit_bytes = self._config.queued_bytes_max
        return any(link.queued_bytes > limit_bytes for link in self._hops.links().values())

    def links(self) -> dict[str, LinkScheduler]:
        """Schedulers of the links to next peers, with their measurements."""
        return self._hops.links()

    def resume_stalled(self) -> None:
        """Push again the sessions whose next link was behind."""
        stalled, self._stalled = self._stalled, {}
        for key in stalled:
            if (live := self._table.get(key)) is not None:
                self.push(live)

    # Input

    def take_inputs(self, session: str, attempt: int, position: int, ids: tuple[int, ...]) -> None:
        """At the first stage: add prompt or ring tokens to a session."""
        live = self._table.find(session, attempt)
        if live is None or not live.session.is_first or not live.session.add_inputs(position, ids):
            self._counters["stale_inputs"] += 1
            return
        if live.session.misnamed:
            self._counters["misnamed"] += 1
            self._fail(live, "the prompt is not the one that its shared blocks are named after")
            return
        live.touch()
        self.push(live)

    def take_ring(self, peer_id: str, tokens: Sequence[RingToken]) -> None:
        """At the first stage: take tokens from ``peer_id`` if it is the route's last stage."""
        for token in tokens:
            live = self._table.find(token.session, token.attempt)
            if live is None or not live.session.is_first:
                self._counters["stale_inputs"] += 1
            elif live.session.open.route[-1].peer_id != peer_id:
                self._counters["foreign_frames"] += 1
            else:
                self.take_inputs(token.session, token.attempt, token.position, (token.token_id,))

    def take_activations(
        self, peer_id: str, activations: Activations, body: bytes | memoryview
    ) -> None:
        """Take rows of several sessions from the stage before. Raises MalformedError."""
        if activations.dtype not in {self._engine.wire_dtype, INT8}:
            raise codec.MalformedError(
                f"activations in {activations.dtype}; this peer takes {self._engine.wire_dtype}"
            )
        if activations.hidden != self._engine.hidden:
            raise codec.MalformedError(
                f"activations of width {activations.hidden}; the model's is {self._engine.hidden}"
            )
        started_s = time.perf_counter()
        counts = [item.tokens for item in activations.items]
        try:
            split = split_int8_rows if activations.dtype == INT8 else split_rows
            parts = split(body, self._engine.wire_dtype, activations.hidden, counts)
        except RowsError as error:
            raise codec.MalformedError(str(error)) from error
        self.serialisation_s += time.perf_counter() - started_s
        for item, rows in zip(activations.items, parts, strict=True):
            live = self._table.find(item.session, item.attempt)
            if live is None:
                self._counters["stale_activations"] += 1
                continue
            if live.session.is_first or live.session.previous_peer != peer_id:
                self._counters["foreign_frames"] += 1
                continue
            work = live.session.take_rows(item.position, rows)
            if work is None:
                self._counters["stale_activations"] += 1
                continue
            live.touch()
            if live.session.is_warming:
                live.copied.add(work)
                self._run_copies(live)
            else:
                self._submit(work)

    def drop(self, key: str) -> None:
        """Forget what a session still had to run."""
        self.pace.dropped(key)
        self._without_kv.pop(key, None)
        self._kv.waits_no_more(key)

    def resume_without_kv(self) -> None:
        """Run what waits for KV, as far as there is some now; the oldest sessions first."""
        for key in self._kv.oldest_first(self._without_kv):
            items = self._without_kv.get(key)  # to take KV may have ended another that waits
            while items and self._kv.take(key, items[0].position + items[0].tokens):
                self._hand_over(items.popleft())
            if not items:
                self._without_kv.pop(key, None)

    def _submit(self, item: WorkItem) -> None:
        """Hand work to the engine once there is KV for it."""
        key = item.session
        if key in self._without_kv or not self._kv.take(key, item.position + item.tokens):
            self._counters["waited_for_kv"] += key not in self._without_kv
            self._without_kv.setdefault(key, deque()).append(item)
        else:
            self._hand_over(item)

    def _hand_over(self, item: WorkItem) -> None:
        now_s = asyncio.get_running_loop().time()
        self.pace.submitted(item.session, now_s)
        self._engine.submit(replace(item, queued_s=now_s))

    def _run_copies(self, live: Live) -> None:
        """Run rows of a planned move, few at a time, so that decodes are hardly slower."""
        alone = self._table.holding == 1
        if item := live.copied.take(RESENT_TOKENS if alone else self.sizer.beside()):
            self._submit(item)

    def push(self, live: Live) -> None:
        """Send rows that wait for the link, then submit the first stage's next chunk."""
        session = live.session
        if session.state is not StageState.ACTIVE:
            return
        self._push_copies(live)
        if session.next_peer is not None:
            hop = self._hops.find(session.next_peer)
            while live.backlog and hop is not None:
                if hop.queued_bytes > self._config.queued_bytes_max:
                    break
                position, body = live.backlog.popleft()
                item = self._item(live, position, len(body) // row_bytes_of(self._engine))
                message = Activations(
                    items=(item,), dtype=self._engine.wire_dtype, hidden=self._engine.hidden
                )
                self._send(session.next_peer, message, body, TrafficClass.PREFILL)
            behind = hop is not None and hop.queued_bytes > self._config.queued_bytes_max
            # A decode overtakes the link's queue: others' rows and copies must not hold it back.
            if live.backlog or (behind and not session.decodes):
                self._stalled[session.key] = None
                return
        if session.is_first:
            work = session.next_chunk(self._chunk_tokens(live))
            if work is not None:
                self._submit(work)

    def _chunk_tokens(self, live: Live) -> int:
        """Rows of the session's next chunk, from measured times of steps and the next link."""
        session = live.session
        if self._config.chunk_tokens is not None:
            return self._config.chunk_tokens
        if session.is_warming and self._table.holding > 1:
            return self.sizer.beside()
        hop = None if session.next_peer is None else self._hops.find(session.next_peer)
        link = None if hop is None else hop.link
        known = link is not None and link.delivery.known
        return self.sizer.choose(
            max(1, len(session.inputs) - session.next_position),
            len(session.open.route),
            link_row_s=row_bytes_of(self._engine) / link.delivery.bandwidth_bytes_per_s
            if link is not None and known
            else None,
            others_decode=self._table.holding > 1,
        )

    # Output

    def resend(self, live: Live, start: int, end: int) -> None:
        """Send logged rows of positions ``[start, end)`` to the next stage, at the link's pace."""
        for at in range(start, end, RESENT_TOKENS):
            rows = self._table.log.rows(live.session.key, at, min(at + RESENT_TOKENS, end))
            live.backlog.append((at, rows))
        self._counters["resent_rows"] += max(0, end - start)

    def copy_rows(self, live: Live, start: int) -> None:
        """Send rows from ``start`` on, and all later ones, to the new stage of a planned move.

        No frame crosses the end of the prompt of the move's attempt.
        """
        warming, session = live.warming, live.session
        if warming is None:
            return
        warming.ready = True
        known, end, at = warming.open.prompt_tokens, session.done_position, start
        while at < end:
            to = min(at + RESENT_TOKENS, end)
            to = known if at < known < to else to
            warming.backlog.append((at, self._table.log.rows(session.key, at, to)))
            at = to
        self._counters["copied_rows"] += max(0, end - start)
        self._push_copies(live)

    def _push_copies(self, live: Live) -> None:
        warming = live.warming
        if warming is None or (hop := self._hops.find(warming.next_peer)) is None:
            return
        open_ = warming.open
        while warming.backlog:
            if hop.queued_bytes > self._config.queued_bytes_max:
                self._stalled[live.session.key] = None
                return
            position, body = warming.backlog.popleft()
            item = ActivationItem(
                session=open_.session,
                attempt=open_.attempt,
                position=position,
                tokens=len(body) // row_bytes_of(self._engine),
            )
            message = Activations(
                items=(item,), dtype=self._engine.wire_dtype, hidden=self._engine.hidden
            )
            self._send(warming.next_peer, message, body, TrafficClass.PREFILL)

    def _tell_warm(self, live: Live) -> None:
        """At the last new stage of a planned move: say once that it has caught up."""
        session, open_ = live.session, live.session.open
        if live.told_warm or open_.hop != open_.migrate_until:
            return
        behind = session.next_position - session.done_position
        if session.done_position >= open_.prompt_tokens and behind <= REST_ROWS:
            live.told_warm = True
            live.upstream.send(MigrationReady(session=open_.session, attempt=open_.attempt))

    def on_results(self, results: Sequence[WorkResult]) -> None:
        """Handle one engine step's results: log rows, and send rows and tokens on by next peer."""
        items = [result.item for result in results]
        now_s = asyncio.get_running_loop().time()
        took_s = self.pace.finished([item.session for item in items], now_s)
        for item in items:
            if item.tokens == 1 and not item.background:
                self.decode_waits.add(now_s - item.queued_s)
        if not any(item.background for item in items):  # background rows wait on purpose
            self.sizer.ran(
                sum(item.tokens for item in items),
                took_s,
                decodes_only=all(item.tokens == 1 for item in items),
            )
        outbox, started_s = Outbox(), time.perf_counter()
        bodies = rows_bytes(results)
        self.serialisation_s += time.perf_counter() - started_s
        for index, result in enumerate(results):
            item = result.item
            session: StageSession = item.owner
            live = self._table.get(session.key)
            if live is None or not self._table.is_current(session):
                self._counters["dropped_results"] += 1
                continue
            live.touch()
            session.in_flight = False
            if result.error is not None:
                self._counters["engine_errors"] += 1
                if result.unsound_input and not session.is_first:
                    self._refuse(live, session.previous_peer, result.error)
                elif session.state is not StageState.PAUSED:  # rows after those that were refused
                    self._fail(live, result.error)
                continue
            session.done_position = item.position + item.tokens
            if index in bodies and session.next_peer is not None:
                self._send_rows(live, item, bodies[index], outbox)
            if result.prompt_scores:
                session.add_prompt_scores(result)
                self.send_tokens(live)
            if result.token_id is not None:
                self._take_sampled(live, result.token_id, result.score, outbox)
            live.copied.running = False
            self._run_copies(live)
            self._tell_warm(live)
            self.push(live)
        started_s = time.perf_counter()
        for peer_id, message, body, traffic in outbox.frames(
            self._engine.wire_dtype, self._engine.hidden
        ):
            self._send(peer_id, message, body, traffic)
        self.serialisation_s += time.perf_counter() - started_s

    def _send_rows(self, live: Live, ran: WorkItem, body: memoryview, outbox: Outbox) -> None:
        session = live.session
        self._table.log.append(session.key, ran.position, body)
        skip = min(max(0, session.send_position - ran.position), ran.tokens)
        if (warming := live.warming) is not None and warming.ready:
            warming.backlog.append((ran.position, bytes(body)))
            self._push_copies(live)
        if not session.sends_rows or session.state is not StageState.ACTIVE:
            return
        if session.next_peer is None or skip == ran.tokens:
            return
        position = ran.position + skip
        rest = body[skip * row_bytes_of(self._engine) :]
        if live.backlog:
            live.backlog.append((position, bytes(rest)))
        else:
            item = self._item(live, position, ran.tokens - skip)
            prefill = item.tokens > 1 or position < session.open.prompt_tokens
            outbox.add_rows(session.next_peer, item, rest, prefill=prefill)

    def _item(self, live: Live, position: int, tokens: int) -> ActivationItem:
        open_ = live.session.open
        return ActivationItem(
            session=open_.session, attempt=open_.attempt, position=position, tokens=tokens
        )

    def _send(
        self,
        peer_id: str,
        message: Activations | RingTokens,
        body: bytes | memoryview,
        traffic: TrafficClass,
    ) -> None:
        """Hand one frame to the link, as int8 if so configured."""
        quantize = traffic is TrafficClass.PREFILL or self._config.int8 == "all"
        if self._config.int8 != "off" and quantize and isinstance(message, Activations):
            body = quantized(body, message.dtype, message.hidden)
            message = replace(message, dtype=INT8)
        self._hops.get(peer_id).send(message, body, traffic=traffic)

    def _take_sampled(self, live: Live, token_id: int, score: bytes, outbox: Outbox) -> None:
        session = live.session
        position = session.add_sampled(token_id, score)
        self._counters["sampled"] += 1
        if session.finish_reason is None:
            open_ = session.open
            if session.ring_peer is None:
                self.take_inputs(open_.session, open_.attempt, position, (token_id,))
            else:
                token = RingToken(
                    session=open_.session,
                    attempt=open_.attempt,
                    position=position,
                    token_id=token_id,
                )
                outbox.add_token(session.ring_peer, token)
        self.send_tokens(live)
        if session.finish_reason is not None:
            self._finish(live)

    def send_tokens(self, live: Live) -> None:
        """At the last stage: send the client its missing prompt scores, then its tokens."""
        if live.attached is None:
            return
        session = live.session
        for position, tokens, packed in session.prompt_scores[live.attached_scores :]:
            scores = PromptScores(
                session=session.open.session,
                attempt=session.open.attempt,
                position=position,
                tokens=tokens,
            )
            live.attached.send(scores, packed)
        live.attached_scores = len(session.prompt_scores)
        token_ids = session.sampled_from(live.attached_position)
        if not token_ids and session.finish_reason is None:
            return
        live.attached.send(
            Tokens(
                session=session.open.session,
                attempt=session.open.attempt,
                position=live.attached_position,
                token_ids=token_ids,
                finish_reason=session.finish_reason,
            ),
            session.scores_since(live.attached_position),
        )
        live.attached_position += len(token_ids)
