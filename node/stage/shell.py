"""Performs what :mod:`node.sessions.life` decides, with what all parts of a stage share: the table
of sessions, their KV, the engine's work, and the links to other stages."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from coordinator.policies.admission.rules import retry_after_s
from coordinator.policies.failure.detector import EnginePace, StepTimes
from coordinator.policies.links.chunk_sizer import RESENT_TOKENS, ChunkSizer
from coordinator.policies.routing.balance import Movable
from dht.identity.grant import own_word
from dht.messages.session import (
    SessionAccepted,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
)
from dht.transport.frame_sender import FrameSender
from dht.transport.interface import Transport
from node.device.tensors import DTYPES
from node.engine.work_item import WorkItem
from node.links.hops import HopTable
from node.sessions import life
from node.sessions.activation_log import ActivationLog
from node.sessions.session import StageSession
from node.sessions.session_table import Live, SessionTable
from node.stage.config import StageConfig, StageEngine
from node.stage.stage_kv import RETURN_LEAST_S, StageKv

MOVE_S = 3.0
"""A session that should give way has ``MOVE_S`` to move to a freer holder; then it is put out."""


class StageShell:
    """The sessions of one stage. ``counters`` counts drops and refusals by reason."""

    def __init__(
        self,
        transport: Transport,
        engine: StageEngine,
        config: StageConfig,
        hops: HopTable,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_idle`` is called when the last session has freed its KV."""
        self.me = transport.peer_id
        self.transport = transport
        self.engine = engine
        self.config = config
        self.hops = hops
        self.counters: Counter[str] = Counter()
        self.table = SessionTable(asyncio.get_running_loop().time)
        self.kv = StageKv(engine)
        self.log = ActivationLog(self.row_bytes, config.log_bytes_max)
        self.pace = EnginePace()
        self.decode_waits = StepTimes()
        """Times from a decode's arrival to its step's end: this stage's part of a token's time."""
        self.sizer = ChunkSizer()
        self.taker_of: Callable[[Movable], str | None] = lambda session: None
        """Finds a freer holder for a session that should give way."""
        self._on_idle = on_idle
        self._moving_s: dict[str, float] = {}
        """Until when sessions that should give way may take to move, by name in the engine."""
        self._without_kv: dict[str, deque[WorkItem]] = {}
        """Work of sessions that wait for KV, by their names in the engine."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""
        return self.engine.hidden * DTYPES[self.engine.wire_dtype].itemsize

    # A session's life

    def step(self, live: Live, event: life.Event) -> None:
        """Let an event happen to a session, and do what follows."""
        for effect in life.step(live.session, event):
            self._perform(live, effect)

    def _perform(self, live: Live, effect: life.Effect) -> None:
        session = live.session
        match effect:
            case life.Up(message=message, over=over):
                self.tell(message, over or live.upstream)
            case life.ToOwner(message=message):
                self.tell(message, live.upstream, live.attached)
            case life.Down(peer_id=peer_id, message=message, dials=dials):
                if dials or self.hops.find(peer_id) is not None:
                    self.hops.get(peer_id).send(message)
            case life.Rewind(position=position):
                self._rewind(session, position)
                self.log.truncate(session.key, session.next_position)
            case life.Resend(start=start, end=end):
                self.counters["resent_rows"] += end - start
                live.backlog.extend(self.logged(session.key, start, end))
            case life.End():
                self._end(live, effect)
            case life.Count(name=name, times=times):
                self.counters[name] += times
            case life.Do.ACCEPT:
                self._accept(live)
            case life.Do.MEET:
                self.hops.get(next_peer(session.open))
            case life.Do.TOUCH:
                live.touch()
            case life.Do.SEND_TOKENS:
                live.send_tokens()

    def tell(self, message: object, *ways: FrameSender | None) -> None:
        """Send a message on all ``ways`` that there are, signed if it is this peer's own word."""
        words = SessionRefused | SessionFailed | SessionLeaving
        if isinstance(message, words) and not message.signature:
            message = own_word(message, self.transport.sign)
        for way in ways:
            if way is not None:
                way.send(message)

    def logged(self, key: str, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Logged rows of positions ``[start, end)``, with the position of each part's first."""
        for at in range(start, end, RESENT_TOKENS):
            yield at, self.log.rows(key, at, min(at + RESENT_TOKENS, end))

    def _accept(self, live: Live) -> None:
        session, open_ = live.session, live.session.open
        live.accepted = True
        if not (session.taken_over or session.is_warming):
            self.counters["prompt_tokens"] += open_.prompt_tokens
            self.counters["cached_tokens"] += session.next_position
        accepted = SessionAccepted(
            session=open_.session,
            attempt=open_.attempt,
            position=session.needs_from,
            rows=not session.importing,
        )
        live.upstream.send(accepted)

    def _rewind(self, session: StageSession, position: int) -> None:
        """Run rows from ``position`` on again, or from the last one before it that the engine can
        go on from."""
        session.rewind(self.engine.resumable(session.kv_key, position))

    def take_over(self, live: Live, open_: SessionOpen, upstream: FrameSender) -> None:
        """Begin a session's next attempt, over the KV and the log of this one."""
        self.counters["taken_over"] += 1
        key = live.session.kv_key
        if open_.shares_prefix:  # from here on its rows may come from other peers
            self.engine.keep_no_more(key)
        following = live.session.take_over(open_)
        self._rewind(following, following.next_position)
        self._drop(live)
        self.engine.drop(key)
        self.table.take_over(live, following, upstream)
        self.log.truncate(following.key, following.next_position)

    def _drop(self, live: Live) -> None:
        """Forget what a session still had to run."""
        key = live.session.kv_key
        self.pace.dropped(key)
        if live.drafting is not None and live.drafting.model is not None:
            live.drafting.model.stop()
        self._without_kv.pop(key, None)
        self.kv.waits_no_more(key)

    def _end(self, live: Live, end: life.End) -> None:
        """Free a session's KV and log, if it has any still."""
        key = live.session.kv_key
        if end.tokens:
            self.engine.settle(key, end.tokens)
        if end.keeps:
            oldest = self.table.keep(live)
            if oldest is not None:
                self.step(oldest, life.Expired())
        elif not self.table.forget(live):
            return
        self._drop(live)
        self._moving_s.pop(key, None)
        self.kv.free(key)
        if self.kv.waiting:  # not at once: who frees may be in the midst of taking
            asyncio.get_running_loop().call_soon(self.resume_without_kv)
        self.log.forget(live.session.key)
        if not self.table.holding:
            self._on_idle()

    # Who gives way

    def movable(self) -> list[Movable]:
        """Sessions that could move elsewhere while they decode."""
        return self.table.movable(asyncio.get_running_loop().time(), self.kv.room.charged_of)

    def make_way(self, key: str) -> bool:
        """Have a session move to a freer holder, or put it out; False while it may still move."""
        live = self.table.of_key(key)
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
                self.step(live, life.Leaves(to=to))
        if now_s < self._moving_s.get(key, now_s):
            return False
        self.put_out(live, now_s)
        return True

    def put_out(self, live: Live, now_s: float) -> None:
        """Free a session here for others; its owner opens it again and replays it."""
        self.counters["gave_way"] += 1
        room, key, client = self.kv.room, live.session.kv_key, live.session.open.client
        others = self.table.holdings(now_s, room.charged_of, client, besides=key)
        after_s = max(RETURN_LEAST_S, retry_after_s(room.charged_of(key), 0, others))
        self.kv.give_way(key, now_s)
        reason = "its KV is needed for other sessions"
        self.step(live, life.GivenUp(reason=reason, retry_after_s=after_s))

    def fail(self, live: Live, reason: str) -> None:
        """Give a session up at this stage; other stages keep theirs for the next attempt."""
        self.counters["failed"] += 1
        self.step(live, life.GivenUp(reason=reason))

    # The engine's work

    def has_work(self, key: str) -> bool:
        """Whether the engine runs something for a session, or will once there is KV for it."""
        return self.pace.has_work(key) or key in self._without_kv

    def take_kv(self, key: str, tokens: int) -> bool:
        """Take KV for a session's first ``tokens`` tokens, for which others may have to give way;
        False if the session has to wait."""
        while not self.kv.take(key, tokens):
            now_s = asyncio.get_running_loop().time()
            victim = self.kv.who_gives_way(key, tokens)
            if victim is None or not self.make_way(victim):
                self.kv.waits(key, now_s)
                return False
        return True

    def submit(self, item: WorkItem) -> None:
        """Hand work to the engine once there is KV for it; drafts only where there is some now."""
        key, session = item.session, item.owner
        certain = item.position + item.tokens - len(item.drafts)
        if key in self._without_kv or not self.take_kv(key, certain):
            self.counters["waited_for_kv"] += key not in self._without_kv
            item = session.shortened(item, 0)
            self._without_kv.setdefault(key, deque()).append(item)
        else:
            room = self.kv.spare(key, certain, len(item.drafts))
            self._hand_over(session.shortened(item, room))

    def resume_without_kv(self) -> None:
        """Run what waits for KV, as far as there is some now; the oldest sessions first."""
        for key in self.kv.oldest_first(self._without_kv):
            items = self._without_kv.get(key)  # to take KV may have ended another that waits
            while items and self.take_kv(key, items[0].position + items[0].tokens):
                self._hand_over(items.popleft())
            if not items:
                self._without_kv.pop(key, None)

    def _hand_over(self, item: WorkItem) -> None:
        now_s = asyncio.get_running_loop().time()
        self.pace.submitted(item.session, now_s, decodes=item.decodes)
        self.engine.submit(replace(item, queued_s=now_s))


class StagePart:
    """A part of a stage, and what it takes of the shell."""

    def __init__(self, shell: StageShell) -> None:
        self._shell = shell
        self._engine = shell.engine
        self._config = shell.config
        self._table = shell.table
        self._hops = shell.hops
        self._counters = shell.counters


def next_peer(open_: SessionOpen) -> str:
    """The peer that this stage sends to; the first stage, where this is the last."""
    return open_.route[(open_.hop + 1) % len(open_.route)].peer_id
