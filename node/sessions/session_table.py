"""The table of sessions that one stage serves, with their connections."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import torch

from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.rules import (
    Claim,
    Holding,
    PromptRate,
    StageLoad,
    first_to_give_way,
    may_wait_s,
    seen_by,
)
from coordinator.policies.routing.balance import Movable
from dht.messages.session import SESSION_BOUNDS, Priority, PromptScores, Tokens
from dht.process.newest import Newest
from dht.transport.frame_sender import FrameSender
from node.drafting.session_drafts import SessionDrafts
from node.engine.work_item import WorkItem
from node.sessions.session import StageSession

FINISHED_PER_CLIENT_MAX = 64
"""Finished answers of one client that are kept for it to attach late."""
KNOWN_S = 60.0
"""Time for which peers of an ended session are known: their last rows may still be on their way."""
KNOWN_MAX = 4096
"""Maximum peers of ended sessions that are known; the one unused for longest is forgotten first."""


@dataclass(slots=True)
class CopiedRows:
    """The rows that a moving session brings along, until the engine has time for them: items in
    order, taken one at a time, in other sizes than they came in."""

    running: bool = False
    """Whether the item taken last is still in the engine."""
    _waiting: deque[WorkItem] = field(default_factory=deque)

    def add(self, item: WorkItem) -> None:
        self._waiting.append(item)

    def take(self, tokens: int) -> WorkItem | None:
        """The next rows, at most ``tokens``; None while some run or none wait."""
        if self.running or not self._waiting:
            return None
        first = self._waiting[0]
        parts: list[torch.Tensor] = []
        left = tokens
        while left > 0 and self._waiting:
            item = self._waiting.popleft()
            if item.hidden is None:
                raise ValueError("an item without rows")
            parts.append(item.hidden[:left])
            if item.tokens > left:
                rest = replace(item, position=item.position + left, hidden=item.hidden[left:])
                self._waiting.appendleft(rest)
            left -= min(left, item.tokens)
        self.running = True
        return replace(first, hidden=parts[0] if len(parts) == 1 else torch.cat(parts))


@dataclass(slots=True, kw_only=True)
class Live:
    """A session with its connections."""

    session: StageSession
    upstream: FrameSender
    touched_s: float
    """Time of the last progress, the open, or the loss of a neighbour."""
    opened_s: float = 0.0
    """Time at which the KV was reserved."""
    moved_here: bool = False
    """Whether the session came with an answer begun elsewhere."""
    accepted: bool = False
    """Whether this stage has accepted the present attempt, which the stages behind did before."""
    backlog: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Rows (position, bytes) that wait for the next link, oldest first."""
    reading: asyncio.Task[None] | None = None
    """At the last stage: what reads the attempt's grammar and then accepts; it ends with the
    attempt."""
    drafting: SessionDrafts | None = None
    """At the first stage: what drafts the session's tokens, if any are to be drafted."""
    copied: CopiedRows = field(default_factory=CopiedRows)
    """At the new stage of a planned move: rows that wait for the engine."""
    attached: FrameSender | None = None
    attaches: int = 0
    """Number of times that the client has attached to this attempt."""
    attached_position: int = 0
    attached_scores: int = 0
    """Number of the session's prompt scores sent to ``attached``."""
    computed_s: float = 0.0
    """At the last stage: seconds of all stages' steps for tokens that ``attached`` is not told of
    yet."""
    waited_s: float = 0.0
    """Seconds for which those tokens' rows waited for the steps."""

    @property
    def claim(self) -> Claim | None:
        """Why the session called itself urgent when it came, if it did."""
        if self.moved_here:
            return Claim.BEGUN
        return Claim.HIGH if self.session.open.priority is Priority.HIGH else None

    @property
    def peers(self) -> set[str]:
        """Those that have shown to have a part in the session: the client and the stage before, and
        once the others accepted, the stages next to this one in the ring and who copies KV here.

        An open names up to 128 peers, at its client's word alone.
        """
        session = self.session
        found = {session.open.client, session.previous_peer}
        if self.accepted:
            copies = {session.open.copy_from} if session.importing else set()
            found |= {*session.neighbours, *filter(None, copies)}
        return found

    @property
    def prompt_rows(self) -> int:
        """Rows of the prompt that run here; the others were kept."""
        return max(0, self.session.open.prompt_tokens - self.session.kept_tokens)

    def waits(self, now_s: float, busy: Callable[[str], bool] = lambda _: False) -> bool:
        """Whether the session has no token yet, and has just come or has rows that wait here, for
        the engine or a link, or, as far as those that ran tell, behind it.

        ``busy`` tells whether the engine has work of a session, by its name there.
        """
        session = self.session
        if session.answers:
            return False
        ran = session.done_position - session.kept_tokens
        recent = now_s - self.opened_s < may_wait_s(ran)
        return recent or bool(self.backlog) or session.has_prompt_rows or busy(session.kv_key)

    def stop_reading(self) -> None:
        """Read the attempt's grammar no further."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel()

    def touch(self) -> None:
        self.touched_s = asyncio.get_running_loop().time()

    def send_tokens(self) -> None:
        """At the last stage: send the client its missing prompt scores, then its tokens."""
        if self.attached is None:
            return
        session, id_, attempt = self.session, self.session.key, self.session.open.attempt
        for position, tokens, packed in session.prompt_scores[self.attached_scores :]:
            scores = PromptScores(session=id_, attempt=attempt, position=position, tokens=tokens)
            self.attached.send(scores, packed)
        self.attached_scores = len(session.prompt_scores)
        token_ids = session.sampled_from(self.attached_position)
        if not token_ids and session.finish_reason is None:
            return
        self.attached.send(
            Tokens(
                session=id_,
                attempt=attempt,
                position=self.attached_position,
                token_ids=token_ids,
                finish_reason=session.finish_reason,
                computed_s=min(SESSION_BOUNDS.step_s_max, self.computed_s),
                waited_s=min(SESSION_BOUNDS.step_s_max, self.waited_s),
            ),
            session.scores_since(self.attached_position),
        )
        self.attached_position += len(token_ids)
        self.computed_s = self.waited_s = 0.0


class SessionTable:
    """Sessions by id, each with one attempt: opening the next attempt replaces the one before."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """``now_s``: the event loop's time, which other threads cannot ask for."""
        self._now_s = now_s
        self.account: Callable[[str], str] = lambda client: client
        """The name under which a client's fair share counts: identities are free
        (:meth:`dht.budget.Parties.account`)."""
        self._live: dict[str, Live] = {}
        self._holders: dict[str, Live] = {}
        """Sessions that hold KV here; the others have finished."""
        self._finished: dict[str, dict[str, Live]] = {}
        """Finished sessions by client, the oldest first."""
        self._known: Newest[str, float] = Newest(KNOWN_MAX)
        """When an ended attempt of these peers last made progress; the newest at the end."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._any = asyncio.Event()
        self._prompts = PromptRate()

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._live.values()))

    @property
    def holding(self) -> int:
        """Number of sessions that hold KV here."""
        return len(self._holders)

    def prompt_ended(self, live: Live, now_s: float) -> None:
        """Count a prompt whose last rows ran here."""
        self._prompts.add(live.prompt_rows, live.opened_s, now_s)

    def load(
        self,
        client: str,
        now_s: float,
        claim: Claim | None = None,
        busy: Callable[[str], bool] = lambda _: False,
        without: Collection[Live] = (),
    ) -> StageLoad:
        """The stage's load as seen by ``client``, whose session comes with ``claim``.

        ``busy`` tells whether the engine has work of a session, by its name there; sessions
        ``without`` which the stage is seen do not count.
        """
        mine, account = self.account(client), self._account_of
        gone = {live.session.key for live in without}
        holders = [live for key, live in self._holders.items() if key not in gone]
        own = own_urgent = urgent = claimed = 0
        untried: list[str] = []
        rows = 0
        for live in holders:
            open_ = live.session.open
            urgent += live.session.urgent
            claimed += claim is not None and live.claim is claim
            if account(live) == mine:
                own += 1
                own_urgent += open_.priority is Priority.HIGH
            if live.waits(now_s, busy):
                untried.append(account(live))
                rows += live.prompt_rows
        return StageLoad(
            sessions=len(holders),
            seen=seen_by(mine, map(account, holders)),
            own=own,
            own_urgent=own_urgent,
            urgent=urgent,
            claimed=claimed,
            untried=seen_by(mine, untried),
            prompts_per_s=self._prompts.per_s(rows / max(1, len(untried)), now_s),
        )

    def waiting_rows(self) -> Counter[str]:
        """Rows that came from each stage before this one and have not left the engine."""
        rows: Counter[str] = Counter()
        for live in self._holders.values():
            session = live.session
            if not (session.is_first or session.importing):
                rows[session.previous_peer] += max(0, session.next_position - session.done_position)
        return rows

    @property
    def serves_urgent(self) -> bool:
        """Whether a session whose high priority was granted holds KV here."""
        return any(live.session.urgent for live in self._holders.values())

    def movable(self, now_s: float, charged: Callable[[str], int]) -> list[Movable]:
        """Sessions that decode here and none of whose stages is moving; ``charged`` tells the KV
        tokens that a session's name in the engine is charged with."""
        return [
            Movable(
                session=live.session.key,
                start=live.session.stage.start,
                end=live.session.stage.end,
                route=frozenset(stage.peer_id for stage in live.session.open.route),
                neighbours=live.session.neighbours,
                kv_tokens=charged(live.session.kv_key),
                left_tokens=live.session.kv_tokens - live.session.done_position,
                ran_tokens=live.session.done_position,
                moved_s=now_s - live.opened_s if live.moved_here else float("inf"),
                urgent=live.session.urgent,
            )
            for live in self._holders.values()
            if live.session.decodes and live.session.move is None
        ]

    def get(self, session: str) -> Live | None:
        """The session under any attempt."""
        return self._live.get(session)

    def find(self, session: str, attempt: int) -> Live | None:
        """The session if this is its present attempt."""
        live = self._live.get(session)
        return live if live is not None and live.session.open.attempt == attempt else None

    def is_current(self, session: StageSession) -> bool:
        """Whether results for ``session`` count: it is the present attempt and has not ended."""
        live = self._live.get(session.key)
        return live is not None and live.session is session and session.holds_kv

    def of_key(self, kv_key: str) -> Live | None:
        """The session that holds KV under this name in the engine."""
        holders = self._holders.values()
        return next((live for live in holders if live.session.kv_key == kv_key), None)

    def holdings(
        self, now_s: float, charged: Callable[[str], int], client: str, besides: str = ""
    ) -> list[Holding]:
        """KV charged to each session, and its progress, from which ``client`` is told how long to
        wait.

        The session ``besides`` is left out. ``charged`` is as in :meth:`movable`.
        """
        rests_s = self._rests_s(client)
        return [
            Holding(
                kv_tokens=charged(live.session.kv_key),
                ran_tokens=live.session.done_position,
                prompt_tokens=live.session.open.prompt_tokens,
                age_s=now_s - live.opened_s,
                rest_s=rests_s(live),
            )
            for live in self._holders.values()
            if live.session.kv_key != besides
        ]

    def _rests_s(self, client: str) -> Callable[[Live], float]:
        """Time without progress after which a session rests and gives way to ``client``.

        It is shorter for a session that has run nothing, if its client has more such sessions than
        ``client`` would have.
        """
        mine, account = self.account(client), self._account_of
        holders = self._holders.values()
        idle = Counter(account(live) for live in holders if not live.session.done_position)

        def rests_s(live: Live) -> float:
            crowds = idle[account(live)] > idle[mine] + 1
            return (
                ADMISSION.crowd_rest_s
                if crowds and not live.session.done_position
                else ADMISSION.rest_s
            )

        return rests_s

    def resting(self, now_s: float, busy: Callable[[str], bool], client: str) -> list[Live]:
        """Sessions that hold KV and make no progress, in the order in which they give way to one of
        ``client``.

        ``busy`` tells whether the engine has work of a session, by its name there.
        """
        rests_s = self._rests_s(client)
        rest = {
            live.session.key: live
            for live in sorted(self._holders.values(), key=lambda live: live.touched_s)
            if now_s - live.touched_s >= rests_s(live) and not busy(live.session.kv_key)
        }
        order = first_to_give_way((key, self._account_of(live)) for key, live in rest.items())
        return [rest[key] for key in order]

    def _account_of(self, live: Live) -> str:
        return self.account(live.session.open.client)

    def knows(self, peer_id: str) -> bool:
        """Whether ``peer_id`` has a part in a session that holds KV here, or had one lately.

        May be asked in any thread: a light peer's connections live in one of their own.
        """
        ended_s = self._known.get(peer_id, -math.inf)
        return self._now_s() - ended_s < KNOWN_S or any(
            peer_id in live.peers for live in list(self._holders.values())
        )

    def hop_in_use(self, peer_id: str) -> bool:
        return any(peer_id in live.session.hop_peers for live in self._holders.values())

    async def wait_any(self) -> None:
        """Wait until a session is here; a finished one counts."""
        await self._any.wait()

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no session holds KV here; False after ``limit_s``."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def add(self, live: Live) -> None:
        """Add a session whose KV was just reserved."""
        self._live[live.session.key] = self._holders[live.session.key] = live
        self._idle.clear()
        self._any.set()

    def take_over(self, live: Live, session: StageSession, upstream: FrameSender) -> None:
        """Replace the present attempt by ``session``, the next one."""
        live.stop_reading()
        self._part_from(live)
        live.session, live.upstream, live.attached = session, upstream, None
        live.accepted = False
        live.attaches = 0
        live.drafting = None
        live.backlog.clear()
        live.copied = CopiedRows()
        live.touch()

    def keep(self, live: Live) -> Live | None:
        """Keep the log of a finished answer alone.

        A client keeps ``FINISHED_PER_CLIENT_MAX`` of them; returns its oldest where that is one too
        many.
        """
        self._release(live)
        kept = self._finished.setdefault(live.session.open.client, {})
        kept[live.session.key] = live
        return next(iter(kept.values())) if len(kept) > FINISHED_PER_CLIENT_MAX else None

    def forget(self, live: Live) -> bool:
        """Forget a session that has ended; returns whether it held KV until now."""
        key, client = live.session.key, live.session.open.client
        del self._live[key]
        if not self._live:
            self._any.clear()
        kept = self._finished.get(client, {})
        if kept.pop(key, None) is not None and not kept:
            del self._finished[client]
        held = key in self._holders
        if held:
            self._release(live)
        return held

    def _part_from(self, live: Live) -> None:
        """Remember when the peers of an attempt that is over were here."""
        for peer_id in live.peers:
            self._known[peer_id] = live.touched_s

    def _release(self, live: Live) -> None:
        live.stop_reading()
        del self._holders[live.session.key]
        self._part_from(live)
        live.backlog.clear()
        if not self._holders:
            self._idle.set()
