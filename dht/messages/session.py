"""Messages of sessions: between a client and stages, and from stage to stage; and pings.

Every frame of a session carries the session, its route attempt and a position; frames of an older
attempt or an unexpected position are dropped and counted.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from dht.messages import codec
from dht.messages.types import (
    CONTEXT_TOKENS_MAX,
    Address,
    Count,
    LeaseRecord,
    LinksRecord,
    NodeRecord,
    PeerId,
    Plan,
    PlanHead,
    RouteStage,
    Seconds,
)

STAGES_MAX = 128
ITEMS_MAX = 1024
STOP_TOKENS_MAX = 64
BIASED_TOKENS_MAX = 1024
LOGPROBS_MAX = 20
"""Alternatives per token that a client may ask for, as with OpenAI."""

SessionId = Annotated[str, Meta(min_length=8, max_length=32)]
RouteAttempt = Annotated[int, Meta(ge=0, le=1 << 20)]
Position = Annotated[int, Meta(ge=0, le=CONTEXT_TOKENS_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=1 << 24)]
Reason = Annotated[str, Meta(max_length=512)]
Penalty = Annotated[float, Meta(ge=-100.0, le=100.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the last stage picks a token. Keyed by (seed, position), whichever peer draws."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    """0 means greedy."""
    top_k: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """0 means all."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOP_TOKENS_MAX)] = ()
    """Tokens that end the answer (end-of-text); the stop token itself is delivered last."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Tokens less likely than this share of the likeliest are left out; 0 keeps all."""
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    """Over prompt and answer: positive logits are divided by it, others multiplied (CTRL, §4.1)."""
    presence_penalty: Penalty = 0.0
    """Taken from the logit of every token of the answer so far."""
    frequency_penalty: Penalty = 0.0
    """Taken from a token's logit once for each time that it is in the answer so far."""
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Meta(ge=-1000.0, le=1000.0)]], ...],
        Meta(max_length=BIASED_TOKENS_MAX),
    ] = ()
    """Added to the logits of these tokens before anything else; each token once."""
    min_new_tokens: Annotated[int, Meta(ge=0, le=CONTEXT_TOKENS_MAX)] = 0
    """No stop token is drawn before the answer has so many tokens."""
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    """Send each token's log probability and so many alternatives; None sends nothing."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    """The same for the tokens of the prompt."""

    @property
    def needs_prompt(self) -> bool:
        """Whether the last stage has to know the prompt's token ids."""
        return self.repetition_penalty != 1.0 or self.prompt_logprobs is not None

    @property
    def needs_answer(self) -> bool:
        """Whether the last stage has to know the answer's token ids so far."""
        return self.needs_prompt or self.presence_penalty != 0 or self.frequency_penalty != 0


class RefusalCode(StrEnum):
    """Why a stage refused a session before any work was done."""

    NOT_HELD = "not_held"
    NO_KV = "no_kv"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    TOO_MANY = "too_many"
    BAD_REQUEST = "bad_request"
    UNREACHABLE = "unreachable"
    NO_COPY = "no_copy"
    """In a planned move: the KV cannot be copied, though the move may go on otherwise."""


NO_ROOM = frozenset({RefusalCode.NO_KV, RefusalCode.TOO_MANY})
"""Refusals for want of room, which pass by themselves. Nobody on the route holds anything of that
attempt then: the stages before pass them up, and forget it."""


class Priority(StrEnum):
    """How urgent a client says that a session is. A claim: stages bound what it is worth."""

    NORMAL = "normal"
    HIGH = "high"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpen:
    """Travels down the route; each stage reserves KV for the whole session or refuses.

    Under a later attempt it replaces the route of a session that is open: stages that hold its KV
    for the same layers keep it. ``prompt_tokens`` then counts the answer so far, too.
    """

    session: SessionId
    attempt: RouteAttempt
    client: PeerId
    """Only this peer may prompt, close and attach to the session."""
    fingerprint: Annotated[str, Meta(max_length=64)]
    """Of the model's weights; a stage that holds others refuses."""
    route: Annotated[tuple[RouteStage, ...], Meta(min_length=1, max_length=STAGES_MAX)]
    addresses: Annotated[tuple[tuple[Address, ...], ...], Meta(max_length=STAGES_MAX)]
    """Addresses of each stage, in the order of the route."""
    hop: Annotated[int, Meta(ge=0, lt=STAGES_MAX)]
    """Index of the receiver in the route."""
    prompt_tokens: Annotated[int, Meta(ge=1, le=CONTEXT_TOKENS_MAX)]
    max_new_tokens: Annotated[int, Meta(ge=1, le=CONTEXT_TOKENS_MAX)]
    sampling: Sampling
    answered: Position = 0
    """How many of the prompt's last tokens are the answer so far: above 0 in a replay."""
    history: Annotated[tuple[TokenId, ...], Meta(max_length=1 << 20)] = ()
    """For the last stage: the last :attr:`history_tokens` token ids of the prompt."""
    migrate_until: Annotated[int, Meta(ge=0, lt=STAGES_MAX)] | None = None
    """Set for a planned move: nothing is taken over yet. The stages of this route that are new, the
    last of them at this hop, reserve and run copies of its rows until the next attempt."""
    scores_from: Position = 1
    """Where ``sampling.prompt_logprobs`` is asked: the first position whose score is wanted."""
    priority: Priority = Priority.NORMAL
    copy_from: PeerId | None = None
    """In a planned move of one stage: who serves it now, and can send a copy of its KV."""
    rows_logged: bool = True
    """In a planned move: the stage before the new one has logged all rows so far."""
    expires_unix_s: Seconds = 0.0
    """End of the grant, in Unix seconds."""
    grant: Annotated[bytes, Meta(max_length=64)] = b""
    """Signature of the client over this open (:mod:`dht.identity.grant`)."""

    @property
    def history_tokens(self) -> int:
        """How many token ids ``history`` must have for what ``sampling`` asks."""
        if self.sampling.needs_prompt:
            return self.prompt_tokens
        return self.answered if self.sampling.needs_answer else 0

    @property
    def scores_end(self) -> int:
        """The position behind the last token of the prompt that is scored as such.

        The answer's tokens of a replay are not: they were delivered with their scores.
        """
        return 0 if self.sampling.prompt_logprobs is None else self.prompt_tokens - self.answered


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAccepted:
    """Travels back up the route from the last stage: every stage has reserved.

    Each stage puts in the position from which on it needs rows (the first one: token ids).
    """

    session: SessionId
    attempt: RouteAttempt
    position: Position = 0
    rows: bool = True
    """False at the new stage of a planned move that waits for a copy of the KV instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRefused:
    """Travels back up the route; each stage frees what it had reserved."""

    session: SessionId
    attempt: RouteAttempt
    peer_id: PeerId
    code: RefusalCode
    reason: Reason
    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """For want of room: when this stage expects to have some. 0: it cannot say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Client to first stage: token ids at ``position`` onwards."""

    session: SessionId
    attempt: RouteAttempt
    position: Position
    token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=1 << 20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClose:
    """Travels down the route: free everything. Unknown sessions are ignored."""

    session: SessionId
    attempt: RouteAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailed:
    """Travels up the route to the client (and down it as a close): ``peer_id`` was lost."""

    session: SessionId
    attempt: RouteAttempt
    peer_id: PeerId
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLeaving:
    """Travels up the route to the client: ``peer_id`` asks to have its stage moved elsewhere.

    It will leave; or, where it names a holder of the same layers that is freer, serves on and would
    have that one take over.
    """

    session: SessionId
    attempt: RouteAttempt
    peer_id: PeerId
    to: Annotated[str, Meta(max_length=64)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReady:
    """Travels up the route to the client: the new stages of a planned move have caught up."""

    session: SessionId
    attempt: RouteAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationItem:
    """Rows of one session in an :class:`Activations` frame, in the order of the body."""

    session: SessionId
    attempt: RouteAttempt
    position: Position
    tokens: Annotated[int, Meta(ge=1, le=1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Stage to stage: hidden states of several sessions, coalesced.

    The body holds ``sum(item.tokens) × hidden`` numbers of ``dtype``, row-major.
    """

    items: Annotated[tuple[ActivationItem, ...], Meta(min_length=1, max_length=ITEMS_MAX)]
    dtype: Annotated[str, Meta(max_length=16)]
    """``float32``, ``bfloat16`` or ``float16``."""
    hidden: Annotated[int, Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingToken:
    """One sampled token on its way from the last stage to the first."""

    session: SessionId
    attempt: RouteAttempt
    position: Position
    token_id: TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTokens:
    """Last stage to first stage: sampled tokens of several sessions, coalesced."""

    tokens: Annotated[tuple[RingToken, ...], Meta(min_length=1, max_length=ITEMS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensAttach:
    """Client to last stage: send sampled tokens from ``position`` onwards, past ones too."""

    session: SessionId
    attempt: RouteAttempt
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Last stage to client: ``token_ids`` at ``position`` onwards; empty ones keep alive.

    The body holds their scores (:mod:`dht.messages.logprobs`) where ``sampling.logprobs`` asks for
    them.
    """

    session: SessionId
    attempt: RouteAttempt
    position: Position
    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1 << 16)]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Last stage to client: scores of ``tokens`` prompt tokens at ``position`` onwards, in order.

    They are the frame's body (:mod:`dht.messages.logprobs`). All come before the first token of the
    answer.
    """

    session: SessionId
    attempt: RouteAttempt
    position: Position
    tokens: Annotated[int, Meta(ge=1, le=1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    nonce: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """The answer to a ping; a stage adds how its engine gets on."""

    nonce: Count
    stalled_s: Seconds = 0.0
    """How long the engine has been at its present step; 0 when it has nothing to do."""
    step_p95_s: Seconds | None = None
    """95th percentile of its recent steps; None while too few are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePart:
    """A slice of a frame that is too long to leave at once; other frames may come in between.

    The body holds bytes ``[offset, offset + len(body))`` of the ``total_bytes`` of a whole frame.
    Parts of one frame come in order and without gaps.
    """

    number: Count
    """Grows from frame to frame of one stream."""
    offset: Annotated[int, Meta(ge=0, lt=codec.FRAME_BYTES_MAX + 8)]
    total_bytes: Annotated[int, Meta(ge=1, le=codec.FRAME_BYTES_MAX + 8)]
    slow: bool
    """Counts as prefill or bulk: it needs credit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Receiver to sender: how much of the stream the application has read, and credit."""

    total_bytes: Count
    slow_bytes: Count
    """Of it: prefill and bulk that the receiver is done with."""


for _kind, _cls in {
    "node": NodeRecord,
    "links": LinksRecord,
    "lease": LeaseRecord,
    "plan-head": PlanHead,
    "plan": Plan,
    "open": SessionOpen,
    "accepted": SessionAccepted,
    "refused": SessionRefused,
    "prompt": Prompt,
    "close": SessionClose,
    "failed": SessionFailed,
    "leaving": SessionLeaving,
    "migration-ready": MigrationReady,
    "acts": Activations,
    "ring": RingTokens,
    "attach": TokensAttach,
    "tokens": Tokens,
    "prompt-scores": PromptScores,
    "ping": Ping,
    "pong": Pong,
    "part": FramePart,
    "delivered": Delivered,
}.items():
    codec.register_message(_kind, _cls)
