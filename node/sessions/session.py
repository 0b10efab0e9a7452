"""One session as one stage sees it: what may come next, and what is fed to the engine.

No clocks, sockets or tensors: the stage server performs what these methods decide. A frame that
is not the next one of its session is dropped and counted by the caller.

A session outlives its routes. When the owner opens it again under the next attempt, a stage that
still holds its layers' KV *takes over*: it keeps what it has run and says from which position on it
needs rows (:meth:`StageSession.take_over`, :func:`resume_at`).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from dht.messages.session import FinishReason, SessionOpen
from dht.messages.types import RouteStage
from node.engine.work_item import WorkItem, WorkResult
from node.sampling.token_history import PromptTargets, TokenHistory

if TYPE_CHECKING:
    from torch import Tensor


class StageState(StrEnum):
    OPENING = "opening"
    """Reserved here, waiting for the stages below."""
    ACTIVE = "active"
    PAUSED = "paused"
    """A neighbour was lost. KV and log are kept for the next attempt, for a bounded time."""
    FINISHED = "finished"
    """KV freed; the last stage keeps the token log for a client that attaches late."""
    CLOSED = "closed"
    """Everything is freed and forgotten."""


class StageEvent(StrEnum):
    ACCEPTED = "accepted"
    """Every stage below has reserved."""
    REFUSED = "refused"
    """A stage below refused or cannot be reached, under an attempt that began here."""
    REFUSED_AGAIN = "refused_again"
    """The same for a session that was taken over from an earlier attempt."""
    NEIGHBOUR_LOST = "neighbour_lost"
    """A stage that this one sends to or gets from is gone, or says that it gave up."""
    COMPLETED = "completed"
    """Last stage: the answer's last token was sampled."""
    ENDED = "ended"
    """A close, an expiry, or an error of this stage's own."""


TRANSITIONS: dict[StageState, dict[StageEvent, StageState]] = {
    StageState.OPENING: {
        StageEvent.ACCEPTED: StageState.ACTIVE,
        StageEvent.REFUSED: StageState.CLOSED,
        StageEvent.REFUSED_AGAIN: StageState.PAUSED,
        StageEvent.NEIGHBOUR_LOST: StageState.PAUSED,
        StageEvent.ENDED: StageState.CLOSED,
    },
    StageState.ACTIVE: {
        StageEvent.REFUSED: StageState.PAUSED,
        StageEvent.REFUSED_AGAIN: StageState.PAUSED,
        StageEvent.NEIGHBOUR_LOST: StageState.PAUSED,
        StageEvent.COMPLETED: StageState.FINISHED,
        StageEvent.ENDED: StageState.CLOSED,
    },
    StageState.PAUSED: {
        StageEvent.NEIGHBOUR_LOST: StageState.PAUSED,
        StageEvent.COMPLETED: StageState.FINISHED,
        StageEvent.ENDED: StageState.CLOSED,
    },
    StageState.FINISHED: {StageEvent.ENDED: StageState.CLOSED},
    StageState.CLOSED: {},
}
"""What may happen in which state; anything else is ignored by :meth:`StageSession.on`."""


@dataclass(slots=True, kw_only=True)
class StageSession:
    """State of ``(session, attempt)`` at hop ``open.hop`` of its route."""

    open: SessionOpen
    state: StageState = StageState.OPENING
    kv_key: str = ""
    """Under which the engine reserved: a take-over keeps the name of the attempt that reserved."""
    taken_over: bool = False
    """Whether KV of an earlier attempt is in use."""
    importing: bool = False
    """The new stage of a planned move: it gets copies of the KV, and no rows."""
    inputs: list[int] = field(default_factory=list)
    """First stage: all token ids so far, prompt and ring."""
    early: tuple[int, int] | None = None
    """First stage: a ring token ``(position, id)`` that came before the prompt did. A last stage
    that took over samples at once, a new first stage hears from a client that is far away later."""
    next_position: int = 0
    """The next position that this stage runs."""
    done_position: int = 0
    """Positions before it have left the engine: their KV is there, and their rows are logged."""
    send_position: int = 0
    """The next stage has everything before it; rows before it are logged but not sent."""
    in_flight: bool = False
    """First stage: a chunk is in the engine; the next one waits for its result."""
    sampled: list[int] = field(default_factory=list)
    """Last stage: the answer so far, of this attempt."""
    scores: list[bytes] = field(default_factory=list)
    """Last stage: the packed score of each sampled token, where the client wants them."""
    prompt_scores: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Last stage: ``(position, tokens, packed)`` of the prompt's scores so far."""
    history: TokenHistory | None = field(init=False, default=None)
    """Last stage: what penalties and the least length look at, where any is asked."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.kv_key = self.kv_key or session_key(self.open.session, self.open.attempt)
        sampling = self.open.sampling
        if self.is_last and (sampling.needs_answer or sampling.min_new_tokens > 0):
            self.history = TokenHistory(self.open.history, answered=self.open.answered)

    @property
    def key(self) -> str:
        """Identity within one peer, whatever the attempt."""
        return self.open.session

    def on(self, event: StageEvent) -> bool:
        """Take the transition for ``event``; False, and nothing happens, where there is none."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            return False
        self.state = following
        return True

    @property
    def is_warming(self) -> bool:
        """Whether this is a copy in the making, for a planned move: it sends nothing to clients or
        to stages that serve the session."""
        return self.open.migrate_until is not None

    @property
    def decodes(self) -> bool:
        """Whether it serves, and is past its prompt."""
        past = self.done_position >= self.open.prompt_tokens
        return self.state is StageState.ACTIVE and not self.is_warming and past

    @property
    def sends_rows(self) -> bool:
        """Whether the next stage gets this one's rows."""
        until = self.open.migrate_until
        return self.next_peer is not None and (until is None or self.open.hop < until)

    @property
    def holds_kv(self) -> bool:
        """Whether a reservation belongs to it."""
        return self.state in {StageState.OPENING, StageState.ACTIVE, StageState.PAUSED}

    @property
    def stage(self) -> RouteStage:
        return self.open.route[self.open.hop]

    @property
    def is_first(self) -> bool:
        return self.open.hop == 0

    @property
    def is_last(self) -> bool:
        return self.open.hop == len(self.open.route) - 1

    @property
    def previous_peer(self) -> str:
        """Who sends this stage its input: a client, or the stage before."""
        return self.open.client if self.is_first else self.open.route[self.open.hop - 1].peer_id

    @property
    def next_peer(self) -> str | None:
        """The stage after, None at the end of the route."""
        return None if self.is_last else self.open.route[self.open.hop + 1].peer_id

    @property
    def ring_peer(self) -> str | None:
        """At the last stage of a route of several: the first stage, which gets the tokens."""
        if self.is_warming:
            return None
        return self.open.route[0].peer_id if self.is_last and not self.is_first else None

    @property
    def neighbours(self) -> frozenset[str]:
        """Stages before and after this one in the ring."""
        route, hop = self.open.route, self.open.hop
        around = {route[hop - 1].peer_id, route[(hop + 1) % len(route)].peer_id}
        return frozenset(around - {self.stage.peer_id})

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the whole session needs: the last sampled token is never run."""
        return self.open.prompt_tokens + self.open.max_new_tokens - 1

    def can_take_over(self, open_: SessionOpen) -> bool:
        """Whether ``open_`` is a later attempt of this session over the KV that is held here."""
        return (
            self.holds_kv
            and open_.session == self.open.session
            and open_.client == self.open.client
            and open_.attempt > self.open.attempt
            and open_.hop < len(open_.route)
            and open_.route[open_.hop] == self.stage
            and open_.prompt_tokens >= self.open.prompt_tokens
            and open_.prompt_tokens + open_.max_new_tokens - 1 == self.kv_tokens
        )

    def take_over(self, open_: SessionOpen) -> "StageSession":
        """This session under the attempt of ``open_``, with all that was run so far.

        What is still in the engine is run again, and so is the last prompt row of a last stage:
        its output is what the first token of the new attempt is sampled from.
        """
        known = open_.prompt_tokens
        following = StageSession(
            open=open_,
            kv_key=self.kv_key,
            taken_over=True,
            inputs=self.inputs[:known],
            prompt_scores=self.prompt_scores,
        )
        position = min(self.done_position, known - 1 if following.is_last else known)
        following.next_position = following.done_position = position
        return following

    def take_kv(self, position: int, tokens: int) -> bool:
        """Expect the KV of ``tokens`` tokens at ``position``; False when it is not the next."""
        end = position + tokens
        fits = position == self.next_position and tokens >= 1 and end <= self.kv_tokens
        if not (self.importing and self.state is StageState.ACTIVE and fits):
            return False
        self.next_position = end
        return True

    def rewind(self, position: int) -> None:
        """Run rows from ``position`` on again: the next stage needs them and no log has them."""
        self.next_position = self.done_position = min(self.next_position, position)

    @property
    def needs_from(self) -> int:
        """The position from which this stage needs its input; the answer to an open."""
        return len(self.inputs) if self.is_first else self.next_position

    def add_inputs(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """First stage: take prompt or ring tokens; False when they are not the next ones."""
        known = len(self.inputs)
        if position + len(token_ids) > self.kv_tokens:
            return False
        if len(token_ids) == 1 and position == self.open.prompt_tokens > known:
            self.early = (position, token_ids[0])
            return True
        if position != known:
            return False
        self.inputs.extend(token_ids)
        if self.early is not None and self.early[0] == len(self.inputs):
            self.inputs.append(self.early[1])
            self.early = None
        return True

    def next_chunk(self, chunk_tokens: int) -> WorkItem | None:
        """First stage: the next rows to run, or None while there is nothing or one is running.

        A chunk never crosses the end of the prompt, so only a chunk's last row is ever sampled.
        """
        if self.in_flight or self.importing or self.state is not StageState.ACTIVE:
            return None
        position = self.next_position
        end = min(len(self.inputs), position + chunk_tokens)
        if position < self.open.prompt_tokens:
            end = min(end, self.open.prompt_tokens)
        if end <= position:  # with copied KV the engine may be ahead of the token ids
            return None
        self.in_flight = True
        return self._work(position, end, token_ids=tuple(self.inputs[position:end]))

    def take_rows(self, position: int, hidden: "Tensor") -> WorkItem | None:
        """Later stages: rows ``[tokens, hidden]`` from upstream; None if they are not the next."""
        end = position + int(hidden.shape[0])
        crosses = position < self.open.prompt_tokens < end
        if (
            self.state is not StageState.ACTIVE
            or self.importing
            or position != self.next_position
            or end > self.kv_tokens
            or crosses
        ):
            return None
        return self._work(position, end, hidden=hidden)

    def _work(
        self,
        position: int,
        end: int,
        *,
        token_ids: tuple[int, ...] | None = None,
        hidden: "Tensor | None" = None,
    ) -> WorkItem:
        self.next_position = end
        samples = self.is_last and end >= self.open.prompt_tokens and not self.is_warming
        return WorkItem(
            session=self.kv_key,
            start=self.stage.start,
            end=self.stage.end,
            position=position,
            token_ids=token_ids,
            hidden=hidden,
            sampling=self.open.sampling if samples else None,
            history=self.history,
            targets=self._targets(position) if self.is_last else None,
            background=self.is_warming,
            owner=self,
        )

    def _targets(self, position: int) -> PromptTargets | None:
        """What the rows from ``position`` to ``next_position`` are scored against, if anything."""
        top = self.open.sampling.prompt_logprobs
        first = max(position + 1, self.open.scores_from)
        end = min(self.next_position + 1, self.open.scores_end)
        if top is None or first >= end:
            return None
        wanted = self.open.history[first:end]
        return PromptTargets(first_row=first - 1 - position, token_ids=wanted, top=top)

    def add_prompt_scores(self, result: WorkResult) -> None:
        """Last stage: keep the scores of the item's targets, where it has any."""
        if (targets := result.item.targets) is not None:
            position = result.item.position + targets.first_row + 1
            self.prompt_scores.append((position, len(targets.token_ids), result.prompt_scores))

    def add_sampled(self, token_id: int, score: bytes = b"") -> int:
        """Last stage: log a token; returns its position. Sets ``finish_reason`` at the end."""
        position = self.open.prompt_tokens + len(self.sampled)
        self.sampled.append(token_id)
        self.scores.append(score)
        if self.history is not None:
            self.history.add(token_id)
        if token_id in self.open.sampling.stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.sampled) >= self.open.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        return position

    def sampled_from(self, position: int) -> tuple[int, ...]:
        """The logged tokens from ``position`` on, for a client that attaches."""
        return tuple(self.sampled[max(0, position - self.open.prompt_tokens) :])

    def scores_since(self, position: int) -> bytes:
        """The packed scores of :meth:`sampled_from`, empty where the client wants none."""
        return b"".join(self.scores[max(0, position - self.open.prompt_tokens) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """How a stage serves the next one from the position it asked for."""

    resend_from: int
    """Logged rows from here to ``own_position`` are sent at once."""
    own_position: int
    """Where this stage itself goes on; smaller than before when it must run rows again."""


def resume_at(asked: int, own: int, *, logged: bool) -> Resume:
    """What a stage at position ``own`` does when the next stage asks for rows from ``asked`` on.

    ``logged`` says whether the log has all rows of ``[asked, own)``. A next stage that is ahead
    gets nothing until this one has caught up; one that is behind gets the log, or, where that does
    not reach back so far, rows that are run again.
    """
    if asked >= own:
        return Resume(resend_from=own, own_position=own)
    return Resume(resend_from=asked, own_position=own if logged else asked)


def session_key(session: str, attempt: int) -> str:
    """Name of one attempt of a session within a peer and its engine."""
    return f"{session}/{attempt}"
