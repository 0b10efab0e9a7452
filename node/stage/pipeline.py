"""Carries rows and tokens through one stage: from the stage before, into the engine, to the next.

Rows are logged before they are sent, so that the next stage can be rebuilt from here if it is lost.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from coordinator.policies.links.chunk_sizer import RESENT_TOKENS
from coordinator.policies.links.scheduler import LinkScheduler, TrafficClass
from dht.budget import Budget
from dht.messages import codec
from dht.messages.session import (
    SESSION_BOUNDS,
    ActivationItem,
    Activations,
    FeaturedActivations,
    MigrationReady,
    RefusalCode,
    RingToken,
    RingTokens,
    SessionOpen,
)
from node.engine.work_item import WorkItem, WorkResult
from node.links.hops import Hop
from node.links.wire_rows import (
    INT8,
    RowsError,
    feature_bytes,
    join_rows,
    packed_features,
    quantized,
    split_features,
    split_rows,
)
from node.sessions.life import Completed, Lost, MoveReplied, refused_of
from node.sessions.session import StageSession, StageState, UnsoundTokensError
from node.sessions.session_table import Live
from node.stage.drafting import StageDrafting
from node.stage.moving import MOVING
from node.stage.shell import StagePart, StageShell
from node.stage.waiting_rows import WaitingRows


def _rows_bytes(results: Sequence[WorkResult]) -> dict[int, memoryview]:
    """Bytes of each result's rows by the result's index, copied off the device in one transfer."""
    hidden = {index: r.hidden for index, r in enumerate(results) if r.hidden is not None}
    if not hidden:
        return {}
    whole = join_rows(list(hidden.values()))
    row_bytes = len(whole) // sum(rows.shape[0] for rows in hidden.values())
    parts, at = {}, 0
    for index, rows in hidden.items():
        size = rows.shape[0] * row_bytes
        parts[index] = whole[at : at + size]
        at += size
    return parts


@dataclass(frozen=True, slots=True)
class _Rows:
    item: ActivationItem
    body: bytes | memoryview
    features: bytes
    """What a head at the last stage takes of the last rows, packed; empty if nothing."""


class _Outbox:
    """Frames that one step produces.

    Ring tokens and decode rows for one peer share a frame each. Every prefill chunk has its own
    frame, behind them, so that a long prompt does not delay a decode.
    """

    def __init__(self) -> None:
        self._ring: dict[str, list[RingToken]] = {}
        self._decodes: dict[str, list[_Rows]] = {}
        self._prefills: list[tuple[str, _Rows]] = []

    def add_token(self, peer_id: str, token: RingToken) -> None:
        """Add a sampled token for the first stage of its session."""
        self._ring.setdefault(peer_id, []).append(token)

    def add_rows(
        self,
        peer_id: str,
        item: ActivationItem,
        body: bytes | memoryview,
        *,
        prefill: bool,
        features: bytes = b"",
    ) -> None:
        """Add hidden states for the next stage of their session; ``features``: packed, those in
        front of earlier layers."""
        rows = _Rows(item, body, features)
        if not prefill:
            self._decodes.setdefault(peer_id, []).append(rows)
        else:
            self._prefills.append((peer_id, rows))

    def frames(
        self, dtype: str, hidden: int
    ) -> Iterator[tuple[str, RingTokens | Activations, bytes | memoryview, TrafficClass]]:
        """Yield ``(peer, message, body, class)`` in sending order."""
        for peer_id, tokens in self._ring.items():
            for start in range(0, len(tokens), SESSION_BOUNDS.items_max):
                message = RingTokens(tokens=tuple(tokens[start : start + SESSION_BOUNDS.items_max]))
                yield peer_id, message, b"", TrafficClass.CONTROL
        for peer_id, group in self._decodes.items():
            for part in _parts(group):
                yield peer_id, *_frame(part, dtype, hidden), TrafficClass.DECODE
        for peer_id, rows in self._prefills:
            yield peer_id, *_frame([rows], dtype, hidden), TrafficClass.PREFILL


def _parts(group: Sequence[_Rows]) -> Iterator[list[_Rows]]:
    """``group`` in parts that a frame holds: by their number, and by the bytes of wide rows."""
    part: list[_Rows] = []
    size = 0
    for rows in group:
        added = len(rows.body) + len(rows.features)
        is_full = size + added > codec.FRAME_BOUNDS.chunk_bytes
        if part and (is_full or len(part) == SESSION_BOUNDS.items_max):
            yield part
            part, size = [], 0
        part.append(rows)
        size += added
    if part:
        yield part


def _frame(
    rows: Sequence[_Rows], dtype: str, hidden: int
) -> tuple[Activations, bytes | memoryview]:
    """Message and body of rows for one peer."""
    items = tuple(each.item for each in rows)
    bodies = [each.body for each in rows]
    features = [each.features for each in rows]
    if not any(features):
        body = bodies[0] if len(bodies) == 1 else b"".join(bodies)
        return Activations(items=items, dtype=dtype, hidden=hidden), body
    counts = tuple(len(each) // feature_bytes(hidden) for each in features)
    message = FeaturedActivations(items=items, dtype=dtype, hidden=hidden, features=counts)
    return message, b"".join([*bodies, *features])


class StagePipeline(StagePart):
    """Moves rows and tokens of a stage's sessions."""

    def __init__(self, shell: StageShell, budget: Budget | None = None) -> None:
        """``budget`` bounds the rows that wait here."""
        super().__init__(shell)
        self._waiting = WaitingRows(shell.table, shell.row_bytes, budget or Budget())
        self._stalled: dict[str, None] = {}
        self._drafting = StageDrafting(shell, self.push)
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
            reason = "the prompt is not the one that its shared blocks are named after"
            self._shell.fail(live, reason)
            return
        live.touch()
        self.push(live)

    def take_ring(self, peer_id: str, tokens: Sequence[RingToken]) -> None:
        """At the first stage: take tokens from ``peer_id`` if it is the route's last stage."""
        with self._engine.together():
            for token in tokens:
                live = self._table.find(token.session, token.attempt)
                if live is None or not live.session.is_first:
                    self._counters["stale_inputs"] += 1
                    continue
                session = live.session
                if session.open.route[-1].peer_id != peer_id:
                    self._counters["foreign_frames"] += 1
                    continue
                try:
                    taken = session.add_accepted(token.position, token.token_ids)
                except UnsoundTokensError as error:
                    self._counters["unsound_drafts"] += 1
                    self._shell.step(live, Lost(peer_id=peer_id, reason=str(error)))
                    continue
                if not taken:
                    self._counters["stale_inputs"] += 1
                    continue
                if live.drafting is not None:
                    known = len(session.inputs)
                    self._drafting.came(live.drafting, token.token_ids, known, token.foretold)
                live.touch()
                self.push(live)

    def take_activations(
        self, peer_id: str, activations: Activations, body: bytes | memoryview
    ) -> None:
        """Take rows of several sessions from the stage before. Raises MalformedError."""
        if activations.hidden != self._engine.hidden:
            raise codec.MalformedError(
                f"activations of width {activations.hidden}; the model's is {self._engine.hidden}"
            )
        if not self._waiting.may_come(peer_id, len(body)):
            self._refuse_rows(peer_id, activations.items)
            return
        started_s = time.perf_counter()
        parts, features = _rows_of(activations, body, self._engine.wire_dtype)
        self.serialisation_s += time.perf_counter() - started_s
        with self._engine.together():
            for item, rows, vectors in zip(activations.items, parts, features, strict=True):
                live = self._table.find(item.session, item.attempt)
                if live is None:
                    self._counters["stale_activations"] += 1
                    continue
                if live.session.is_first or live.session.previous_peer != peer_id:
                    self._counters["foreign_frames"] += 1
                    continue
                certain = live.session.done_position
                came = None if vectors is None else live.session.came(vectors, item.tokens)
                # They may be a stranger's: answers go on without what is not that.
                if vectors is not None and came is None:
                    self._counters["strange_features"] += 1
                try:
                    work = live.session.take_rows(item.position, rows, item.drafts, came)
                except UnsoundTokensError as error:
                    self._counters["unsound_drafts"] += 1
                    self._shell.step(live, Lost(peer_id=peer_id, reason=str(error)))
                    continue
                if work is None:
                    self._counters["stale_activations"] += 1
                    continue
                work = replace(work, computed_s=item.computed_s, waited_s=item.waited_s)
                live.touch()
                self._counters["accepted_drafts"] += live.session.done_position - certain
                if live.session.move is not None:
                    self.copy_certain(live)
                if live.session.is_warming:
                    live.copied.add(work)
                    self._run_copies(live)
                else:
                    self._shell.submit(work)

    def _refuse_rows(self, peer_id: str, items: Sequence[ActivationItem]) -> None:
        """Pause the sessions whose rows come from a stage that heeds no credit."""
        self._counters["too_many_rows"] += len(items)
        lost = Lost(peer_id=peer_id, reason="it sends more rows than it may have waiting here")
        for item in items:
            live = self._table.find(item.session, item.attempt)
            if live is not None and live.session.previous_peer == peer_id:
                self._shell.step(live, lost)

    def _run_copies(self, live: Live) -> None:
        """Run rows of a planned move, few at a time, so that decodes are hardly slower."""
        alone = self._table.holding == 1
        if item := live.copied.take(RESENT_TOKENS if alone else self._shell.sizer.beside()):
            self._shell.submit(item)

    def push(self, live: Live) -> None:
        """Send rows that wait for the link, then submit the first stage's next chunk."""
        session = live.session
        if session.state is not StageState.ACTIVE:
            return
        if session.move is not None:
            self.copy_certain(live)
        if session.next_peer is not None:
            hop = self._send_backlog(live.backlog, session.next_peer, session.open)
            behind = hop is not None and hop.queued_bytes > self._config.queued_bytes_max
            # A decode overtakes the link's queue: others' rows and copies must not hold it back.
            if live.backlog or (behind and not session.decodes):
                self._stalled[session.key] = None
                return
        if session.is_first:
            drafts = self._drafting.drafts(live) if session.open.draft_tokens else ()
            if drafts is None:
                return
            work = session.next_chunk(self._chunk_tokens(live), drafts)
            if work is not None:
                self._shell.submit(work)
                if live.drafting is not None and session.decodes:
                    self._drafting.sent(live.drafting, len(session.drafts))

    def _chunk_tokens(self, live: Live) -> int:
        """Rows of the session's next chunk, at most as many as a frame holds at every stage."""
        return min(
            self._quick_chunk_tokens(live), codec.FRAME_BOUNDS.chunk_bytes // self._shell.row_bytes
        )

    def _quick_chunk_tokens(self, live: Live) -> int:
        """Rows of the session's next chunk, from measured times of steps and the next link."""
        session = live.session
        if self._config.chunk_tokens is not None:
            return self._config.chunk_tokens
        if session.is_warming and self._table.holding > 1:
            return self._shell.sizer.beside()
        hop = None if session.next_peer is None else self._hops.find(session.next_peer)
        link = None if hop is None else hop.link
        known = link is not None and link.delivery.known
        return self._shell.sizer.choose(
            max(1, len(session.inputs) - session.next_position),
            len(session.open.route),
            link_row_s=self._shell.row_bytes / link.delivery.bandwidth_bytes_per_s
            if link is not None and known
            else None,
            others_decode=self._table.holding > 1,
        )

    # Output

    def copy_certain(self, live: Live) -> None:
        """Queue the rows that are certain by now for the new stage of a planned move, once it has
        accepted. No frame crosses the end of the prompt of the move's attempt."""
        session, move = live.session, live.session.move
        if move is None or not move.ready:
            return
        known, end, at = move.open.prompt_tokens, session.done_position, move.copied_position
        if not self._shell.log.covers(session.key, at, end):
            me, reason = self._shell.me, "the rows so far are not logged here any more"
            refused = refused_of(move.open, me, RefusalCode.NOT_HELD, reason)
            self._shell.step(live, MoveReplied(message=refused, logged=False))
            return
        for start, stop in ((at, min(end, known)), (max(at, known), end)):
            move.backlog.extend(self._shell.logged(session.key, start, stop))
        move.copied_position = max(at, end)
        hop = self._send_backlog(move.backlog, move.next_peer, move.open)
        if hop is not None and move.backlog:
            self._stalled[session.key] = None

    def _send_backlog(
        self, backlog: deque[tuple[int, bytes]], peer_id: str, open_: SessionOpen
    ) -> Hop | None:
        """Send rows that wait for the link to ``peer_id`` while its queue is short."""
        hop = self._hops.find(peer_id)
        while backlog and hop is not None and hop.queued_bytes <= self._config.queued_bytes_max:
            position, body = backlog.popleft()
            item = _item(open_, position, len(body) // self._shell.row_bytes)
            message = Activations(
                items=(item,), dtype=self._engine.wire_dtype, hidden=self._engine.hidden
            )
            self._send(peer_id, message, body, TrafficClass.PREFILL)
        return hop

    def _tell_warm(self, live: Live) -> None:
        """At the last new stage of a planned move: say once that it has caught up."""
        session, open_ = live.session, live.session.open
        if session.told_warm or open_.hop != open_.migrate_until:
            return
        behind = session.next_position - session.done_position
        if session.done_position >= open_.prompt_tokens and behind <= MOVING.rest_rows:
            session.told_warm = True
            live.upstream.send(MigrationReady(session=open_.session, attempt=open_.attempt))

    def on_results(self, results: Sequence[WorkResult]) -> None:
        """Handle one engine step's results: log rows, and send rows and tokens on by next peer."""
        took_s, now_s = self._time_step([result.item for result in results])
        outbox, started_s = _Outbox(), time.perf_counter()
        bodies = _rows_bytes(results)
        features = {
            index: packed_features(result.features.reshape(-1, self._engine.hidden))
            for index, result in enumerate(results)
            if result.features is not None
        }
        self.serialisation_s += time.perf_counter() - started_s
        with self._engine.together():
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
                        lost = Lost(peer_id=session.previous_peer, reason=result.error)
                        self._shell.step(live, lost)
                    elif session.state is not StageState.PAUSED:  # rows after refused ones
                        self._shell.fail(live, result.error)
                    continue
                in_prompt = not session.decodes
                session.ran(item, len(result.token_ids))
                if in_prompt and session.decodes:
                    self._table.prompt_ended(live, now_s)
                spent_s = item.spent_s(took_s, now_s)
                if index in bodies and session.next_peer is not None:
                    vectors = features.get(index, b"")
                    self._send_rows(live, item, spent_s, bodies[index], vectors, outbox)
                if result.prompt_scores:
                    session.add_prompt_scores(result)
                    live.send_tokens()
                if result.token_ids:
                    self._take_sampled(live, result, spent_s, outbox)
                if session.is_warming:
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

    def _time_step(self, items: Sequence[WorkItem]) -> tuple[float, float]:
        """Learn from a step that has just ended; returns its duration and the time now."""
        now_s = asyncio.get_running_loop().time()
        decodes_only = all(item.decodes for item in items)
        sessions = [item.session for item in items if self._table.is_current(item.owner)]
        took_s = self._shell.pace.finished(sessions, now_s, decodes=decodes_only)
        for item in items:
            if item.decodes and not item.background:
                self._shell.decode_waits.add(now_s - item.queued_s)
        if not any(item.background for item in items):  # background rows wait on purpose
            if decodes_only:
                self._drafting.ran(items, took_s)
            if not any(item.drafts for item in items):
                rows = sum(item.tokens for item in items)
                self._shell.sizer.ran(rows, took_s, decodes_only=decodes_only)
        return took_s, now_s

    def _send_rows(
        self,
        live: Live,
        ran: WorkItem,
        spent_s: tuple[float, float],
        body: memoryview,
        features: bytes,
        outbox: _Outbox,
    ) -> None:
        session = live.session
        self._shell.log.append(session.key, ran.position, body)
        skip = min(max(0, session.send_position - ran.position), ran.tokens)
        if session.move is not None:
            self.copy_certain(live)
        if not session.sends_rows or session.state is not StageState.ACTIVE:
            return
        if session.next_peer is None or skip == ran.tokens:
            return
        position = ran.position + skip
        rest = body[skip * self._shell.row_bytes :]
        if live.backlog:
            live.backlog.append((position, bytes(rest)))
        else:
            item = _item(session.open, position, ran.tokens - skip, ran.drafts, spent_s)
            prefill = not ran.decodes or position < session.open.prompt_tokens
            if ran.features is not None and ran.features.rows > item.tokens:
                features = b""  # of rows that the next stage has
            outbox.add_rows(session.next_peer, item, rest, prefill=prefill, features=features)

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
            rows = sum(item.tokens for item in message.items) * self._shell.row_bytes
            made = quantized(body[:rows], message.dtype, message.hidden)
            body, message = b"".join((made, body[rows:])), replace(message, dtype=INT8)
        self._hops.get(peer_id).send(message, body, traffic=traffic)

    def _take_sampled(
        self, live: Live, result: WorkResult, spent_s: tuple[float, float], outbox: _Outbox
    ) -> None:
        """At the last stage: log the new tokens up to the answer's end, and send them on."""
        session, open_ = live.session, live.session.open
        position = open_.prompt_tokens + len(session.sampled)
        scores = result.scores or (b"",) * len(result.token_ids)
        for token_id, score in zip(result.token_ids, scores, strict=True):
            session.add_sampled(token_id, score)
            if session.finish_reason is not None:
                break
        token_ids = session.sampled_from(position)
        if result.item.position >= open_.prompt_tokens:
            live.computed_s += spent_s[0]
            live.waited_s += spent_s[1]
        self._counters["sampled"] += len(token_ids)
        if session.finish_reason is None:
            if session.ring_peer is None:
                if live.drafting is not None:
                    known = position + len(token_ids)
                    self._drafting.came(live.drafting, token_ids, known, result.foretold)
                self.take_inputs(open_.session, open_.attempt, position, token_ids)
            else:
                token = RingToken(
                    session=open_.session,
                    attempt=open_.attempt,
                    position=position,
                    token_ids=token_ids,
                    foretold=result.foretold,
                )
                outbox.add_token(session.ring_peer, token)
        if not session.is_first or session.finish_reason is not None:
            self._counters["accepted_drafts"] += len(token_ids) - 1
        live.send_tokens()
        if session.finish_reason is not None:
            self._shell.step(live, Completed())


def _rows_of(
    activations: Activations, body: bytes | memoryview, dtype: str
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Each item's rows of a body and its vectors, or None where it has none, in ``dtype``.

    Raises MalformedError where they are others than announced.
    """
    counts = [item.tokens for item in activations.items]
    features: Sequence[Tensor | None] = [None] * len(counts)
    try:
        if isinstance(activations, FeaturedActivations):
            body, features = _parted(activations, body, dtype)
        return split_rows(body, activations.dtype, activations.hidden, counts, dtype), features
    except RowsError as error:
        raise codec.MalformedError(str(error)) from error


def _parted(
    activations: FeaturedActivations, body: bytes | memoryview, dtype: str
) -> tuple[memoryview, Sequence[Tensor | None]]:
    """The rows of a body, and in ``dtype`` each item's vectors behind them, ``[vectors, hidden]``,
    or None where it has none.

    Raises RowsError where they are others than announced.
    """
    hidden, counts = activations.hidden, activations.features
    if len(counts) != len(activations.items):
        raise RowsError(f"features of {len(counts)} items of {len(activations.items)}")
    whole, size = memoryview(body), sum(counts) * feature_bytes(hidden)
    rows = max(0, len(whole) - size)
    parts = split_features(whole[rows:], hidden, counts, dtype)
    return whole[:rows], [
        part if count else None for part, count in zip(parts, counts, strict=True)
    ]


def _item(
    open_: SessionOpen,
    position: int,
    tokens: int,
    drafts: tuple[int, ...] = (),
    spent_s: tuple[float, float] = (0.0, 0.0),
) -> ActivationItem:
    return ActivationItem(
        session=open_.session,
        attempt=open_.attempt,
        position=position,
        tokens=tokens,
        drafts=drafts,
        computed_s=spent_s[0],
        waited_s=spent_s[1],
    )
