"""One session as one stage sees it: what may come next, and what is fed to the engine.

No clocks, sockets or tensors: the stage server performs what these methods decide. A frame that
is not the next one of its session is dropped and counted by the caller.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from dht.messages import FinishReason, RefusalCode, SessionOpen
from dht.types import RouteStage


class StageState(StrEnum):
    OPENING = "opening"
    """Reserved here, waiting for the stages below."""
    ACTIVE = "active"
    FINISHED = "finished"
    """KV freed; the last stage keeps the token log for a client that attaches late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows to run now. ``sample`` asks for a token at ``position + tokens``."""

    position: int
    token_ids: tuple[int, ...] | None
    tokens: int
    sample: bool


@dataclass(slots=True, kw_only=True)
class StageSession:
    """State of ``(session, epoch)`` at hop ``open.hop`` of its route."""

    open: SessionOpen
    state: StageState = StageState.OPENING
    inputs: list[int] = field(default_factory=list)
    """First stage: all token ids so far, prompt and ring."""
    next_position: int = 0
    """The next position that this stage runs."""
    in_flight: bool = False
    """First stage: a chunk is in the engine; the next one waits for its result."""
    sampled: list[int] = field(default_factory=list)
    """Last stage: the answer so far."""
    finish_reason: FinishReason | None = None

    @property
    def key(self) -> str:
        """Identity within one peer: a replay under a new epoch is another session here."""
        return session_key(self.open.session, self.open.epoch)

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
        return self.open.route[0].peer_id if self.is_last and not self.is_first else None

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the whole session needs: the last sampled token is never run."""
        return self.open.prompt_tokens + self.open.max_new_tokens - 1

    def add_inputs(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """First stage: take prompt or ring tokens; False when they are not the next ones."""
        limit = self.kv_tokens
        if position != len(self.inputs) or position + len(token_ids) > limit:
            return False
        self.inputs.extend(token_ids)
        return True

    def next_chunk(self, chunk_tokens: int) -> Chunk | None:
        """First stage: the next rows to run, or None while there is nothing or one is running.

        A chunk never crosses the end of the prompt, so only a chunk's last row is ever sampled.
        """
        if self.in_flight or self.state is not StageState.ACTIVE:
            return None
        position = self.next_position
        end = min(len(self.inputs), position + chunk_tokens)
        if position < self.open.prompt_tokens:
            end = min(end, self.open.prompt_tokens)
        if end == position:
            return None
        self.in_flight = True
        return self._take(position, end - position, tuple(self.inputs[position:end]))

    def take_rows(self, position: int, tokens: int) -> Chunk | None:
        """Later stages: rows from upstream; None when they are not the next ones."""
        end = position + tokens
        crosses = position < self.open.prompt_tokens < end
        if (
            self.state is not StageState.ACTIVE
            or position != self.next_position
            or end > self.kv_tokens
            or crosses
        ):
            return None
        return self._take(position, tokens, None)

    def _take(self, position: int, tokens: int, token_ids: tuple[int, ...] | None) -> Chunk:
        self.next_position = position + tokens
        sample = self.is_last and self.next_position >= self.open.prompt_tokens
        return Chunk(position=position, token_ids=token_ids, tokens=tokens, sample=sample)

    def add_sampled(self, token_id: int) -> int:
        """Last stage: log a token; returns its position. Sets ``finish_reason`` at the end."""
        position = self.open.prompt_tokens + len(self.sampled)
        self.sampled.append(token_id)
        if token_id in self.open.sampling.stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.sampled) >= self.open.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        return position

    def sampled_from(self, position: int) -> tuple[int, ...]:
        """The logged tokens from ``position`` on, for a client that attaches."""
        return tuple(self.sampled[max(0, position - self.open.prompt_tokens) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """What a stage checks an open against."""

    peer_id: str
    fingerprint: str
    layers: int
    context_tokens: int
    start: int
    end: int
    serving: bool


def session_key(session: str, epoch: int) -> str:
    """Name of one epoch of a session within a peer and its engine."""
    return f"{session}/{epoch}"


def refusal_of(open_: SessionOpen, view: StageView) -> tuple[RefusalCode, str] | None:
    """Why this stage cannot take ``open_``, or None; checks everything but KV room.

    The sender is not trusted: a route that is malformed is refused as a bad request.
    """
    route = open_.route
    if open_.hop >= len(route) or len(open_.addresses) != len(route):
        return RefusalCode.BAD_REQUEST, f"hop {open_.hop} of a route of {len(route)} stages"
    starts = [stage.start for stage in route]
    ends = [stage.end for stage in route]
    if starts[0] != 0 or ends[-1] != view.layers or starts[1:] != ends[:-1]:
        return RefusalCode.BAD_REQUEST, f"the route does not cover layers 0 to {view.layers} once"
    if any(stage.start >= stage.end for stage in route):
        return RefusalCode.BAD_REQUEST, "the route has an empty stage"
    if len({stage.peer_id for stage in route}) != len(route):
        return RefusalCode.BAD_REQUEST, "the route visits a peer twice"
    mine = route[open_.hop]
    if mine.peer_id != view.peer_id:
        return RefusalCode.BAD_REQUEST, "this stage belongs to another peer"
    if open_.fingerprint != view.fingerprint:
        return RefusalCode.NOT_HELD, "this peer serves other weights under that name"
    if not view.serving:
        return RefusalCode.DRAINING, "this peer is not serving now"
    if not view.start <= mine.start < mine.end <= view.end:
        held = f"[{view.start}, {view.end})"
        return RefusalCode.NOT_HELD, f"layers [{mine.start}, {mine.end}) asked, {held} held"
    tokens = open_.prompt_tokens + open_.max_new_tokens
    if tokens > view.context_tokens:
        return (
            RefusalCode.TOO_LONG,
            f"{tokens} tokens asked, the model's context is {view.context_tokens}",
        )
    return None
