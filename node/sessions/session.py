"""Progress of one session at one stage: which rows may come next, and what the engine runs.

It has no clocks, sockets or tensors. A frame that is not the next one of its session is dropped and
counted by the caller. How a session begins, pauses and ends is in :mod:`node.sessions.life`.

A session outlives its routes. When the owner opens it again under the next attempt, a stage that
still holds its layers' KV *takes over*: it keeps what it has run and says from which position on it
needs rows (:meth:`StageSession.take_over`).
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from dht.messages.prefix import BLOCK_TOKENS, NAME_BYTES, ROOT, SHARED_KEY, block_name, block_names
from dht.messages.session import FinishReason, SessionOpen
from dht.messages.types import RouteStage
from dht.transport.frame_sender import FrameSender
from node.engine.work_item import Features, WorkItem, WorkResult
from node.sampling.token_history import PromptTargets, TokenHistory

if TYPE_CHECKING:
    from torch import Tensor


class StageState(StrEnum):
    OPENING = "opening"
    """KV is reserved here; the answer of the stages after is awaited."""
    REOPENING = "reopening"
    """The same for a next attempt, over KV of the one before."""
    ACTIVE = "active"
    PAUSED = "paused"
    """A neighbour was lost. KV and log are kept for the next attempt, for a bounded time."""
    FINISHED = "finished"
    """KV is freed; the last stage keeps the token log for a client that attaches late."""
    CLOSED = "closed"
    """Everything is freed and forgotten."""


HOLDING = frozenset(
    {StageState.OPENING, StageState.REOPENING, StageState.ACTIVE, StageState.PAUSED}
)
"""States in which a session has a reservation."""


@dataclass(slots=True, kw_only=True)
class Migration:
    """A serving stage's part in a planned move of later ones: whom it tells, who gets copies."""

    open: SessionOpen
    upstream: FrameSender
    copies: bool = False
    """Whether the next stage is new and gets copies of this stage's rows."""
    ready: bool = False
    """Whether the next stage has accepted."""
    copied_position: int = 0
    """Position before which all rows were queued for the next stage."""
    backlog: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Rows (position, bytes) that wait for the link to it, oldest first."""

    @property
    def next_peer(self) -> str:
        """The peer that this stage is to send to."""
        return self.open.route[self.open.hop + 1].peer_id


FEATURED_PROMPT_TOKENS = 128
"""Number of a prompt's last tokens whose hidden states go to a head at the last stage, beside those
of all tokens of the answer. Those of a whole prompt would make it take half as long again and more,
and with a small head for the bundled model more than 64 of them made no draft better."""


class UnsoundTokensError(Exception):
    """A stage sent what cannot follow from the drafts; the message says what, in one line."""


@dataclass(slots=True, kw_only=True)
class StageSession:
    """State of ``(session, attempt)`` at hop ``open.hop`` of its route."""

    open: SessionOpen
    state: StageState = StageState.OPENING
    kv_key: str = ""
    """Name of the reservation in the engine; a take-over keeps that of the earlier attempt."""
    taken_over: bool = False
    """Whether KV of an earlier attempt is in use."""
    urgent: bool = False
    """Whether the session's claim of high priority was granted here: its work runs first."""
    importing: bool = False
    """At the new stage of a planned move: whether it gets copies of the KV instead of rows."""
    inputs: list[int] = field(default_factory=list)
    """At the first stage: all token ids so far, of prompt and ring."""
    unknown: int = 0
    """At the first stage: number of leading ``inputs`` that are placeholders. Their KV was kept
    from an earlier session; their ids come last of all, in order."""
    told: int = 0
    """At the first stage: number of the unknown ids that have come."""
    checked: int = 0
    """At the first stage, for a prefix that others share: number of leading tokens whose ids are
    those that the open names. While names are left, no other tokens run."""
    misnamed: bool = False
    """At the first stage: whether ids came that are not those that the open names."""
    early: tuple[int, int] | None = None
    """At the first stage: a ring token ``(position, id)`` that came before the prompt.

    A last stage that took over samples at once, while a new first stage hears later from a client
    that is far away.
    """
    next_position: int = 0
    """Next position that this stage runs."""
    drafts: tuple[int, ...] = ()
    """Token ids that the last rows which this stage ran were drafted with, while it is not known
    which of them are accepted. The next chunk begins behind the accepted ones."""
    kept_tokens: int = 0
    """Number of leading tokens whose KV was kept from an earlier session."""
    done_position: int = 0
    """Positions before it have left the engine, and none was drafted in vain: their KV is written,
    their rows are logged, their tokens are the answer's."""
    send_position: int = 0
    """Position before which the next stage has everything: earlier rows are logged, not sent."""
    in_flight: bool = False
    """At the first stage: whether a chunk is in the engine; the next one waits for its result."""
    sampled: list[int] = field(default_factory=list)
    """At the last stage: the answer's tokens of this attempt so far."""
    scores: list[bytes] = field(default_factory=list)
    """At the last stage: the packed score of each sampled token, if the client wants scores."""
    prompt_scores: list[tuple[int, int, bytes]] = field(default_factory=list)
    """At the last stage: ``(position, tokens, packed)`` of the prompt's scores so far."""
    history: TokenHistory | None = field(init=False, default=None)
    """At the last stage: tokens for penalties and the minimum length, if either is asked for."""
    finish_reason: FinishReason | None = None
    move: Migration | None = None
    """A planned move of a later stage, if one is under way."""
    told_warm: bool = False
    """At the last new stage of a planned move: whether it has said that it has caught up."""

    def __post_init__(self) -> None:
        self.kv_key = self.kv_key or f"{self.open.session}/{self.open.attempt}"
        sampling = self.open.sampling
        if self.is_last and (sampling.needs_answer or sampling.min_new_tokens > 0):
            self.history = TokenHistory(self.open.history, answered=self.open.answered)

    @property
    def key(self) -> str:
        """The session's id, which is the same for all attempts."""
        return self.open.session

    @property
    def is_warming(self) -> bool:
        """Whether a planned move is building this session here: it sends nothing to clients, nor to
        stages that serve the session."""
        return self.open.migrate_until is not None

    @property
    def decodes(self) -> bool:
        """Whether the session serves and is past its prompt."""
        past = self.done_position >= self.open.prompt_tokens
        return self.state is StageState.ACTIVE and not self.is_warming and past

    @property
    def answers(self) -> bool:
        """Whether the session has its first token, as far as this stage knows."""
        needed = self.open.prompt_tokens + (not self.is_last)
        return self.done_position >= min(needed, self.kv_tokens)

    @property
    def has_prompt_rows(self) -> bool:
        """At the first stage: whether rows of the prompt have come that the engine has not got."""
        here = min(len(self.inputs), self.open.prompt_tokens)
        return self.state is StageState.ACTIVE and self.next_position < here

    @property
    def sends_rows(self) -> bool:
        until = self.open.migrate_until
        return self.next_peer is not None and (until is None or self.open.hop < until)

    @property
    def holds_kv(self) -> bool:
        """Whether the session has a reservation."""
        return self.state in HOLDING

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
        """The peer that sends this stage its input: the client, or the stage before."""
        return self.open.client if self.is_first else self.open.route[self.open.hop - 1].peer_id

    @property
    def next_peer(self) -> str | None:
        """The peer of the next stage; None at the end of the route."""
        return None if self.is_last else self.open.route[self.open.hop + 1].peer_id

    @property
    def ring_peer(self) -> str | None:
        """At the last of several stages: the first stage's peer, which gets the tokens."""
        if self.is_warming:
            return None
        return self.open.route[0].peer_id if self.is_last and not self.is_first else None

    @property
    def hop_peers(self) -> tuple[str, ...]:
        """Peers that this stage sends to for the session."""
        moves_to = None if self.move is None else self.move.next_peer
        peers = (self.next_peer, self.ring_peer, moves_to)
        return tuple(peer for peer in peers if peer is not None)

    @property
    def closing_peer(self) -> str | None:
        """At the first stage: the peer that ends the answer, which closes the session."""
        return self.open.route[-1].peer_id if self.is_first else None

    @property
    def neighbours(self) -> frozenset[str]:
        """Peers of the stages before and after this one in the ring."""
        route, hop = self.open.route, self.open.hop
        around = {route[hop - 1].peer_id, route[(hop + 1) % len(route)].peer_id}
        return frozenset(around - {self.stage.peer_id})

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the whole session needs; the last sampled token is never run."""
        return self.open.prompt_tokens + self.open.max_new_tokens - 1

    def can_take_over(self, open_: SessionOpen) -> bool:
        """Whether ``open_`` is a later attempt of this session over the KV held here."""
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

    def has_come_to(self, open_: SessionOpen) -> bool:
        """Whether ``open_`` is of this attempt of its client's session, or of one before."""
        ours = self.open
        same = (open_.session, open_.client) == (ours.session, ours.client)
        return same and open_.attempt <= ours.attempt

    def start_at(self, position: int) -> None:
        """Begin at ``position``: the KV of the tokens before it is here."""
        if self._checks_names:  # whole blocks alone can be checked
            self.checked = position = position - position % BLOCK_TOKENS
        self.kept_tokens = self.next_position = self.done_position = position
        if self.is_first:
            self.inputs, self.unknown = [0] * position, position

    @property
    def _checks_names(self) -> bool:
        return self.open.shares_prefix and self.is_first and not self.taken_over

    def _check_names(self) -> None:
        """Check the ids that have come against the names of shared blocks."""
        if not self._checks_names:
            return
        blocks, first = self.open.blocks, self.checked // BLOCK_TOKENS
        end = min(len(self.inputs) // BLOCK_TOKENS, len(blocks) // NAME_BYTES)
        parent = block_name(blocks, first - 1) if first else ROOT
        ids = self.inputs[self.checked : end * BLOCK_TOKENS]
        for at, name in enumerate(block_names(SHARED_KEY, ids, parent), start=first):
            if name != block_name(blocks, at):
                self.misnamed = True
                return
            self.checked += BLOCK_TOKENS

    def take_over(self, open_: SessionOpen) -> "StageSession":
        """This session under the attempt of ``open_``, with everything that was run so far.

        Rows still in the engine are run again, and rows that were drafted and are not known here to
        be accepted. So is the last prompt row at a last stage: the new attempt's first token is
        sampled from its output.
        """
        known = open_.prompt_tokens
        following = StageSession(
            open=open_,
            state=StageState.REOPENING,
            kv_key=self.kv_key,
            taken_over=True,
            urgent=self.urgent,
            inputs=self.inputs[:known],
            unknown=self.unknown,
            told=self.told,
            prompt_scores=self.prompt_scores,
        )
        position = min(self.done_position, known - 1 if following.is_last else known)
        following.next_position = following.done_position = position
        return following

    def take_kv(self, position: int, tokens: int) -> bool:
        """Expect the KV of ``tokens`` tokens at ``position``; False if it is not the next."""
        end = position + tokens
        fits = position == self.next_position and tokens >= 1 and end <= self.kv_tokens
        if not (self.importing and self.state is StageState.ACTIVE and fits):
            return False
        self.next_position = end
        return True

    def rewind(self, position: int) -> None:
        """Run rows from ``position`` on again: the next stage needs them and no log has them."""
        if self._checks_names:
            position -= position % BLOCK_TOKENS
        self.next_position = self.done_position = min(self.next_position, position)
        if position < self.unknown:
            del self.inputs[position:]
            self.unknown, self.told = position, min(position, self.told)
        self.checked = min(self.checked, position)
        self._check_names()

    @property
    def needs_from(self) -> int:
        """Position from which this stage needs input; its answer to an open."""
        return len(self.inputs) if self.is_first else self.next_position

    def add_inputs(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """At the first stage: take prompt or ring tokens; False if they are not the next ones."""
        known = len(self.inputs)
        if position + len(token_ids) > self.kv_tokens:
            return False
        if len(token_ids) == 1 and position == self.open.prompt_tokens > known:
            self.early = (position, token_ids[0])
            return True
        if position == self.told < self.unknown:
            self.told = min(position + len(token_ids), self.unknown)
            self.inputs[position : self.told] = token_ids[: self.told - position]
            self.unknown = 0 if self.told == self.unknown else self.unknown
            return True
        if position != known:
            return False
        self.inputs.extend(token_ids)
        if self.early is not None and self.early[0] == len(self.inputs):
            self.inputs.append(self.early[1])
            self.early = None
        self._check_names()
        return True

    def add_accepted(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """At the first stage: take the last stage's newest tokens; False if they are not the next.

        All but the last of them were drafted. Rows behind them are taken back. Raises
        UnsoundTokensError for tokens that do not follow from the drafts.
        """
        known, right = len(self.inputs), len(token_ids) - 1
        if position != known and right == 0:
            return self.add_inputs(position, token_ids)
        if position != known:
            return False
        if right > len(self.drafts) or token_ids[:right] != self.drafts[:right]:
            raise UnsoundTokensError(
                f"{len(token_ids)} tokens came at once, of {len(self.drafts)} drafted"
            )
        if not self.add_inputs(position, token_ids):
            return False
        if self.drafts:
            self.next_position = self.done_position = known + right
            self.drafts = ()
        return True

    @property
    def drafts_most(self) -> int:
        """At the first stage: how many tokens may be drafted behind the newest one now."""
        newest = len(self.inputs) - 1
        if (
            self.in_flight
            or self.importing
            or self.is_warming
            or self.state is not StageState.ACTIVE
            or not self.open.prompt_tokens <= newest == self.next_position
        ):
            return 0
        return min(self.open.draft_tokens, self.kv_tokens - len(self.inputs))

    def next_chunk(self, chunk_tokens: int, drafts: tuple[int, ...] = ()) -> WorkItem | None:
        """At the first stage: the next rows to run; None if there are none or a chunk is running.

        A chunk never crosses the end of the prompt, so a chunk of several rows is of the prompt, or
        the newest token with ``drafts`` behind it, :attr:`drafts_most` at most.
        """
        if self.in_flight or self.importing or self.state is not StageState.ACTIVE:
            return None
        position = self.next_position
        end = min(len(self.inputs), position + chunk_tokens)
        if position < self.open.prompt_tokens:
            end = min(end, self.open.prompt_tokens)
        if self._checks_names and self.checked < len(self.open.blocks) // NAME_BYTES * BLOCK_TOKENS:
            end = min(end, self.checked)
        if end <= position:  # with copied KV the engine may be ahead of the token ids
            return None
        self.in_flight = True
        token_ids = (*self.inputs[position:end], *drafts)
        return self._work(position, end + len(drafts), token_ids=token_ids, drafts=drafts)

    def take_rows(
        self,
        position: int,
        hidden: "Tensor",
        drafts: tuple[int, ...] = (),
        features: "Tensor | None" = None,
    ) -> WorkItem | None:
        """At later stages: take rows ``[tokens, hidden]``, the last of which were drafted as
        ``drafts``; None if they are not the next ones. ``features``: what came of the last rows for
        a head at the last stage (:meth:`came`).

        The next ones after drafted rows begin behind those that were accepted. Raises
        UnsoundTokensError for more rows behind the prompt than one and its drafts.
        """
        rows = int(hidden.shape[0])
        end = position + rows
        crosses = position < self.open.prompt_tokens < end
        earliest = self.next_position - len(self.drafts)
        if (
            self.state is not StageState.ACTIVE
            or self.importing
            or not earliest <= position <= self.next_position
            or (self.drafts and self.done_position != earliest)
            or end > self.kv_tokens
            or crosses
        ):
            return None
        decodes = position >= self.open.prompt_tokens and not self.is_warming
        if decodes or drafts:
            most = self.open.draft_tokens if decodes else 0
            if rows != 1 + len(drafts) or len(drafts) > most:
                raise UnsoundTokensError(f"{rows} rows came as {len(drafts)} drafts of {most}")
        if self.drafts:
            self.done_position = position
        return self._work(position, end, hidden=hidden, drafts=drafts, came=features)

    def came(self, features: "Tensor", rows: int) -> "Tensor | None":
        """Vectors ``[vectors, hidden]`` that came with ``rows`` rows as what a head takes of the
        last of these, ``[their number, layers × hidden]``; None where they are not that."""
        layers = sum(layer < self.stage.start for layer in self.open.featured)
        count, rest = divmod(len(features), layers) if layers else (0, 0)
        return None if rest or not 0 < count <= rows else features.reshape(count, -1)

    def shortened(self, work: WorkItem, drafts: int) -> WorkItem:
        """The chunk taken last with its first ``drafts`` drafts alone."""
        self.next_position -= max(0, len(work.drafts) - drafts)
        self.drafts = self.drafts[:drafts]
        return work.with_drafts(drafts)

    def ran(self, work: WorkItem, sampled: int) -> None:
        """Record that ``work`` has left the engine, with ``sampled`` tokens at a last stage."""
        right = max(0, sampled - 1)
        self.done_position = work.position + work.tokens - len(work.drafts) + right
        if self.is_last and work.drafts:
            self.next_position, self.drafts = self.done_position, ()

    def _work(
        self,
        position: int,
        end: int,
        *,
        token_ids: tuple[int, ...] | None = None,
        hidden: "Tensor | None" = None,
        drafts: tuple[int, ...] = (),
        came: "Tensor | None" = None,
    ) -> WorkItem:
        self.next_position, self.drafts = end, drafts
        samples = self.is_last and end >= self.open.prompt_tokens and not self.is_warming
        foretells = self.is_last and self.open.draft_tokens > 0
        return WorkItem(
            session=self.kv_key,
            start=self.stage.start,
            end=self.stage.end,
            position=position,
            token_ids=token_ids,
            hidden=hidden,
            drafts=drafts,
            sampling=self.open.sampling if samples else None,
            history=self.history,
            targets=self._targets(position) if self.is_last else None,
            features=self._features(position, end, came),
            foretells=foretells,
            following=self._following(position, end) if foretells else (),
            background=self.is_warming,
            urgent=self.urgent,
            owner=self,
        )

    def _features(self, position: int, end: int, came: "Tensor | None") -> Features | None:
        """What a head at the last stage takes of the rows ``[position, end)``; None if nothing, or
        if what stages before saw of it did not come."""
        layers, stage = self.open.featured, self.stage
        if not layers or self.is_warming or not self.open.draft_tokens:
            return None
        here = tuple(layer for layer in layers if stage.start <= layer < stage.end)
        rows = end - position
        if layers[0] < stage.start:
            rows = 0 if came is None else len(came)
        elif not self.is_last:
            rows = end - max(position, self.open.prompt_tokens - FEATURED_PROMPT_TOKENS)
        if rows < 1 or not (here or layers[0] < stage.start):
            return None
        return Features(layers=here, rows=rows, came=came)

    def _following(self, position: int, end: int) -> tuple[int, ...]:
        """Ids of the prompt's tokens behind the rows ``[position, end)``, for a head that drafts;
        none where not all of them are known."""
        known = self.inputs if self.is_first else self.open.prompt_ids or self.open.history
        first = 0 if self.is_first else self.open.prompt_tokens - len(known)
        begin, end = position + 1, min(end + 1, self.open.prompt_tokens)
        if not max(first, self.unknown) <= begin < end <= first + len(known):
            return ()
        return tuple(known[begin - first : end - first])

    def _targets(self, position: int) -> PromptTargets | None:
        """Prompt tokens to score the rows from ``position`` on against, or None."""
        top = self.open.sampling.prompt_logprobs
        first = max(position + 1, self.open.scores_from)
        end = min(self.next_position + 1, self.open.scores_end)
        if top is None or first >= end:
            return None
        wanted = self.open.history[first:end]
        return PromptTargets(first_row=first - 1 - position, token_ids=wanted, top=top)

    def add_prompt_scores(self, result: WorkResult) -> None:
        """At the last stage: keep the scores of the item's targets, if it has any."""
        if (targets := result.item.targets) is not None:
            position = result.item.position + targets.first_row + 1
            self.prompt_scores.append((position, len(targets.token_ids), result.prompt_scores))

    def add_sampled(self, token_id: int, score: bytes = b"") -> int:
        """At the last stage: log a token; returns its position. Sets ``finish_reason``."""
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
        """Logged tokens from ``position`` on, for a client that attaches."""
        return tuple(self.sampled[max(0, position - self.open.prompt_tokens) :])

    def scores_since(self, position: int) -> bytes:
        """Packed scores of the tokens of :meth:`sampled_from`; empty if the client wants none."""
        return b"".join(self.scores[max(0, position - self.open.prompt_tokens) :])
