"""Messages of sessions, between a client and stages and from stage to stage; and pings.

Every frame of a session carries the session id, its route attempt and a position; frames of an
older attempt or at an unexpected position are dropped and counted.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from dht.messages import codec
from dht.messages.prefix import BLOCKS_MAX, NAME_BYTES
from dht.messages.types import (
    RECORD_BOUNDS,
    Count,
    LayerIndex,
    LeaseRecord,
    LinksRecord,
    ModelRecord,
    NodeRecord,
    PeerId,
    Plan,
    PlanHead,
    RouteStage,
    Seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBounds:
    """Bounds of what messages of a session may say."""

    stages_max: int = 128
    items_max: int = 1024
    stop_tokens_max: int = 64
    biased_tokens_max: int = 1024
    grammar_bytes_max: int = 64 << 10
    draft_tokens_max: int = 31
    """Maximum drafted tokens of one chunk: a decode has one row more at most."""
    message_tokens_max: int = 1 << 16
    """Maximum token ids, or rows, of one message: a million ids take longer to decode than a ring's
    token may."""
    history_tokens_max: int = 1 << 18
    """Maximum token ids of an open: what sampling that looks back may look at."""
    step_s_max: float = 3600.0


SESSION_BOUNDS = SessionBounds()

LOGPROBS_MAX = 20
"""Fixed by OpenAI's interface: maximum alternatives per token that a client may ask for."""

SessionId = Annotated[str, Meta(min_length=8, max_length=32)]
RouteAttempt = Annotated[int, Meta(ge=0, le=1 << 20)]
Position = Annotated[int, Meta(ge=0, le=RECORD_BOUNDS.context_tokens_max)]
TokenId = Annotated[int, Meta(ge=0, le=1 << 24)]
Reason = Annotated[str, Meta(max_length=512)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopK = Annotated[int, Meta(ge=0, le=1 << 24)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Alternatives = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
StepSeconds = Annotated[float, Meta(ge=0.0, le=SESSION_BOUNDS.step_s_max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options for the draw of a token. Draws are keyed by (seed, position), equal at any peer."""

    temperature: Temperature = 0.0
    """Temperature; 0: greedy."""
    top_k: TopK = 0
    """Number of likeliest tokens to draw from; 0: all."""
    top_p: TopP = 1.0
    seed: Seed = 0
    stop_token_ids: Annotated[
        tuple[TokenId, ...], Meta(max_length=SESSION_BOUNDS.stop_tokens_max)
    ] = ()
    """Tokens that end the answer (end-of-text); the stop token itself is delivered last."""
    min_p: MinP = 0.0
    """Minimum probability of a token, as a share of the likeliest one's; 0 keeps all."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divisor of positive logits, factor of others, for all tokens so far (CTRL, §4.1)."""
    presence_penalty: Penalty = 0.0
    """Penalty subtracted from the logit of every token that is in the answer so far."""
    frequency_penalty: Penalty = 0.0
    """Penalty subtracted from a token's logit for each of its occurrences in the answer so far."""
    logit_bias: Annotated[
        tuple[tuple[TokenId, Bias], ...], Meta(max_length=SESSION_BOUNDS.biased_tokens_max)
    ] = ()
    """Pairs of a token and the bias added to its logit before anything else; each token once."""
    min_new_tokens: Annotated[int, Meta(ge=0, le=RECORD_BOUNDS.context_tokens_max)] = 0
    """Minimum tokens of the answer before a stop token may be drawn."""
    logprobs: Alternatives | None = None
    """Number of alternatives sent with each token's log probability; None: send neither."""
    prompt_logprobs: Alternatives | None = None
    """Number of alternatives sent with each prompt token's log probability; None: send neither."""
    grammar: Annotated[bytes, Meta(max_length=SESSION_BOUNDS.grammar_bytes_max)] = b""
    """Grammar that the answer's text follows, as llguidance's Lark in UTF-8; empty: none. The
    answer then ends by a stop token, and only where the grammar lets it end."""

    @property
    def needs_prompt(self) -> bool:
        """Whether the last stage needs the prompt's token ids."""
        return self.repetition_penalty != 1.0 or self.prompt_logprobs is not None

    @property
    def needs_answer(self) -> bool:
        """Whether the last stage needs the token ids of the answer so far."""
        penalised = self.presence_penalty != 0 or self.frequency_penalty != 0
        return self.needs_prompt or penalised or bool(self.grammar)


class RefusalCode(StrEnum):
    """Why a stage refuses a session before any work is done."""

    NOT_HELD = "not_held"
    NO_KV = "no_kv"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    TOO_MANY = "too_many"
    BAD_REQUEST = "bad_request"
    UNREACHABLE = "unreachable"
    NO_COPY = "no_copy"
    """In a planned move: the KV cannot be copied, but the move may go on by a replay."""


NO_ROOM = frozenset({RefusalCode.NO_KV, RefusalCode.TOO_MANY})
"""Refusals for lack of room, which is temporary. No stage holds anything of the attempt after one:
earlier stages pass it up the route and forget the attempt."""

OVERFLOWS = "overflow in float16"
"""What a stage says of its layers, in its reason, where sound rows became numbers beyond float16:
the same rows do so again, there and wherever these layers run in float16."""


class Priority(StrEnum):
    """A session's priority as its client claims it; stages bound its effect."""

    NORMAL = "normal"
    HIGH = "high"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAttempt:
    """What belongs to one attempt at a session's route."""

    session: SessionId
    attempt: RouteAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpen(OfAttempt):
    """Travels down the route; each stage reserves KV for the whole session or refuses.

    Under a later attempt it replaces the route of an open session: stages that hold its KV for the
    same layers keep it. ``prompt_tokens`` then counts the answer so far, too.
    """

    client: PeerId
    """The only peer that may prompt, close and attach to the session."""
    fingerprint: Annotated[str, Meta(max_length=64)]
    """Fingerprint of the model's weights; a stage that holds others refuses."""
    route: Annotated[
        tuple[RouteStage, ...], Meta(min_length=1, max_length=SESSION_BOUNDS.stages_max)
    ]
    hop: Annotated[int, Meta(ge=0, lt=SESSION_BOUNDS.stages_max)]
    """Index of the receiver in the route."""
    prompt_tokens: Annotated[int, Meta(ge=1, le=RECORD_BOUNDS.context_tokens_max)]
    max_new_tokens: Annotated[int, Meta(ge=1, le=RECORD_BOUNDS.context_tokens_max)]
    sampling: Sampling
    answered: Position = 0
    """Number of the prompt's last tokens that are the answer so far; above 0 in a replay."""
    history: Annotated[tuple[TokenId, ...], Meta(max_length=SESSION_BOUNDS.history_tokens_max)] = ()
    """The last :attr:`history_tokens` token ids of the prompt, for the last stage."""
    migrate_until: Annotated[int, Meta(ge=0, lt=SESSION_BOUNDS.stages_max)] | None = None
    """In a planned move: the hop of the last new stage. New stages reserve and run copies of the
    session's rows; they take over only with the next attempt. None: no planned move."""
    scores_from: Position = 1
    """First position whose score ``sampling.prompt_logprobs`` asks for."""
    priority: Priority = Priority.NORMAL
    copy_from: PeerId | None = None
    """In a planned move of one stage: the peer that serves it now and can copy its KV."""
    rows_logged: bool = True
    """In a planned move: whether the stage before the new one has logged all rows so far."""
    draft_tokens: Annotated[int, Meta(ge=0, le=SESSION_BOUNDS.draft_tokens_max)] = 0
    """Maximum tokens that the first stage may draft beyond the newest one; 0: plain decoding."""
    prompt_ids: Annotated[
        tuple[TokenId, ...], Meta(max_length=SESSION_BOUNDS.history_tokens_max)
    ] = ()
    """Token ids of the whole prompt, for a last stage that foretells with a head and has them from
    nowhere else; empty: it is not told them. With ``history`` they are
    ``SESSION_BOUNDS.history_tokens_max`` at most."""
    blocks: Annotated[bytes, Meta(max_length=BLOCKS_MAX * NAME_BYTES)] = b""
    """Names of the prompt's leading blocks (:mod:`dht.messages.prefix`), packed: a stage keeps
    their KV under these names, and finds what it kept. Empty: it does neither."""
    shares_prefix: bool = False
    """Whether the blocks' KV may be used by other clients' sessions, whose names are the same."""
    feature_layers: (
        Annotated[
            tuple[LayerIndex, ...], Meta(min_length=1, max_length=RECORD_BOUNDS.feature_layers_max)
        ]
        | UnsetType
    ) = UNSET
    """Layers in front of which the hidden states of the newest tokens go to the last stage, whose
    head takes them, ascending. Unset: none do, and nothing of it travels."""
    expires_unix_s: Seconds = 0.0
    """End of the grant, in Unix seconds."""
    grant: Annotated[bytes, Meta(max_length=64)] = b""
    """Signature of the client over this open (:mod:`dht.identity.grant`)."""

    @property
    def featured(self) -> tuple[int, ...]:
        """The :attr:`feature_layers`; () where none are set."""
        return () if isinstance(self.feature_layers, UnsetType) else self.feature_layers

    @property
    def history_tokens(self) -> int:
        """The number of token ids that ``history`` must have for ``sampling``."""
        if self.sampling.needs_prompt:
            return self.prompt_tokens
        return self.answered if self.sampling.needs_answer else 0

    @property
    def scores_end(self) -> int:
        """The position after the last token that is scored as part of the prompt.

        The answer's tokens of a replay are not scored: they were delivered with their scores.
        """
        return 0 if self.sampling.prompt_logprobs is None else self.prompt_tokens - self.answered


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAccepted(OfAttempt):
    """Travels back up the route from the last stage: every stage has reserved.

    Each stage sets ``position`` to the first position for which it needs rows (the first stage:
    token ids).
    """

    position: Position = 0
    rows: bool = True
    """Whether the stage needs rows; False in a planned move with a copy of the KV instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRefused(OfAttempt):
    """Travels back up the route; each stage frees what it reserved."""

    peer_id: PeerId
    """The stage that cannot take part."""
    by: PeerId
    """The stage that says so: that one, or a neighbour that cannot reach it."""
    code: RefusalCode
    reason: Reason
    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """Seconds until this stage, which lacks room, expects to have some; 0: unknown."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """Signature of ``by`` (:mod:`dht.identity.grant`): other stages pass this message on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(OfAttempt):
    """Client to first stage: token ids from ``position`` on; a long prompt comes in several."""

    position: Position
    token_ids: Annotated[
        tuple[TokenId, ...], Meta(min_length=1, max_length=SESSION_BOUNDS.message_tokens_max)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClose(OfAttempt):
    """Travels down the route: free everything. Unknown sessions are ignored."""

    tokens: Position = 0
    """At an answer's end: number of leading rows that are right, accepted drafts among them. A
    stage whose last rows were drafted does not know yet. 0: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailed(OfAttempt):
    """Travels up the route to the client (and down it as a close): ``peer_id`` was lost."""

    peer_id: PeerId
    by: PeerId
    """The stage that says so: ``peer_id`` itself, or a neighbour of it on the route."""
    reason: Reason
    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """Seconds until ``peer_id``, which gave its KV to other sessions, expects to have some again;
    0: it was lost."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """Signature of ``by`` (:mod:`dht.identity.grant`): other stages pass this message on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLeaving(OfAttempt):
    """Travels up the route to the client: ``peer_id`` asks to have its stage moved elsewhere.

    Without ``to``, the peer will leave. With ``to``, a freer holder of the same layers, the peer
    serves on and asks that ``to`` take over.
    """

    peer_id: PeerId
    to: Annotated[str, Meta(max_length=64)] = ""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """Signature of ``peer_id`` (:mod:`dht.identity.grant`): other stages pass this message on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReady(OfAttempt):
    """Travels up the route to the client: the new stages of a planned move have caught up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationItem(OfAttempt):
    """Rows of one session in an :class:`Activations` frame, in the order of the body."""

    position: Position
    tokens: Annotated[int, Meta(ge=1, le=SESSION_BOUNDS.message_tokens_max)]
    drafts: Annotated[tuple[TokenId, ...], Meta(max_length=SESSION_BOUNDS.draft_tokens_max)] = ()
    """Token ids that the rows after the first were drafted with; the last stage accepts those that
    it draws itself."""
    computed_s: StepSeconds = 0.0
    """Seconds that the steps took in which the stages so far computed these rows."""
    waited_s: StepSeconds = 0.0
    """Seconds for which these rows waited for those steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Stage to stage: hidden states of several sessions, coalesced.

    The body holds ``sum(item.tokens) × hidden`` numbers of ``dtype``, row-major.
    """

    items: Annotated[
        tuple[ActivationItem, ...], Meta(min_length=1, max_length=SESSION_BOUNDS.items_max)
    ]
    dtype: Annotated[str, Meta(max_length=16)]
    """``float32``, ``bfloat16`` or ``float16``."""
    hidden: Annotated[int, Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturedActivations(Activations):
    """Activations with hidden states in front of earlier layers, for a head at the last stage.

    They are behind the rows in the body, in the order of the items, as
    :mod:`node.links.wire_rows` packs them: of each of an item's last rows, one vector of ``hidden``
    numbers for each layer of the session's :attr:`SessionOpen.feature_layers` in front of which
    stages so far looked.
    """

    features: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=RECORD_BOUNDS.feature_layers_max << 16)], ...],
        Meta(min_length=1, max_length=SESSION_BOUNDS.items_max),
    ]
    """Number of vectors of each item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingToken(OfAttempt):
    """A session's newest tokens, from ``position`` on, on their way from the last stage to the
    first: the drafts that were accepted, and one more."""

    position: Position
    token_ids: Annotated[
        tuple[TokenId, ...], Meta(min_length=1, max_length=1 + SESSION_BOUNDS.draft_tokens_max)
    ]
    foretold: Annotated[tuple[TokenId, ...], Meta(max_length=SESSION_BOUNDS.draft_tokens_max)] = ()
    """Tokens that a head at the last stage drafts behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTokens:
    """Last stage to first stage: sampled tokens of several sessions, coalesced."""

    tokens: Annotated[
        tuple[RingToken, ...], Meta(min_length=1, max_length=SESSION_BOUNDS.items_max)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensAttach(OfAttempt):
    """Client to last stage: send sampled tokens from ``position`` on, past ones too."""

    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(OfAttempt):
    """Last stage to client: ``token_ids`` from ``position`` on; empty ones are a keepalive.

    The body holds their scores (:mod:`dht.messages.logprobs`) where ``sampling.logprobs`` asks for
    them.
    """

    position: Position
    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=SESSION_BOUNDS.message_tokens_max)]
    finish_reason: FinishReason | None = None
    computed_s: StepSeconds = 0.0
    """Seconds that all stages' steps took, since such a message before, for tokens that follow a
    token of the answer."""
    waited_s: StepSeconds = 0.0
    """Seconds for which those tokens' rows waited for the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores(OfAttempt):
    """Last stage to client: scores of ``tokens`` prompt tokens from ``position`` on, in order.

    The frame's body holds the scores (:mod:`dht.messages.logprobs`). All come before the first
    token of the answer.
    """

    position: Position
    tokens: Annotated[int, Meta(ge=1, le=SESSION_BOUNDS.message_tokens_max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    nonce: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """The answer to a ping; a stage adds the pace of its engine."""

    nonce: Count
    stalled_s: Seconds = 0.0
    """Seconds since the engine began its present step; 0 when it is idle."""
    step_p95_s: Seconds | None = None
    """95th percentile of the engine's recent steps; None while too few are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePart:
    """A part of a frame that is too long to leave at once; other frames may come in between.

    The body holds bytes ``[offset, offset + len(body))`` of the ``total_bytes`` of a whole frame.
    Parts of one frame come in order and without gaps.
    """

    number: Count
    """Number of the frame; grows from frame to frame of one stream."""
    offset: Annotated[int, Meta(ge=0, lt=codec.FRAME_BOUNDS.bytes_max + 8)]
    total_bytes: Annotated[int, Meta(ge=1, le=codec.FRAME_BOUNDS.bytes_max + 8)]
    slow: bool
    """Whether the frame counts as prefill or bulk, which need credit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Receiver to sender: the bytes of the stream that the application has read, and credit."""

    total_bytes: Count
    slow_bytes: Count
    """Bytes of prefill and bulk that the receiver is done with."""


for _kind, _cls in {
    "node": NodeRecord,
    "model": ModelRecord,
    "links": LinksRecord,
    "lease": LeaseRecord,
    "plan-head": PlanHead,
    "plan": Plan,
}.items():
    codec.register_message(_kind, _cls, framed=False)
for _kind, _cls in {
    "open": SessionOpen,
    "accepted": SessionAccepted,
    "refused": SessionRefused,
    "prompt": Prompt,
    "close": SessionClose,
    "failed": SessionFailed,
    "leaving": SessionLeaving,
    "migration-ready": MigrationReady,
    "acts": Activations,
    "acts-features": FeaturedActivations,
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
