"""A request to the engine and its result, from a stage's session to the model runner and back."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dht.messages.session import SESSION_BOUNDS, Sampling
from node.sampling.token_history import PromptTargets, TokenHistory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Hidden states of an item's last rows in front of some layers, for a head at the last
    stage."""

    layers: tuple[int, ...]
    """Those of the layers that the item runs itself, ascending."""
    rows: int
    """Number of rows, the item's last ones."""
    came: "Tensor | None" = None
    """The hidden states in front of layers of stages before, ``[rows, width × layers]``; None where
    there are no such layers."""

    def without_last(self, rows: int) -> "Features | None":
        """The features without the last ``rows`` rows; None if nothing is left."""
        if rows >= self.rows:
            return None
        came = None if self.came is None else self.came[: self.rows - rows]
        return replace(self, rows=self.rows - rows, came=came)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """Rows of one session from ``position`` on, to run through layers ``[start, end)``.

    The first stage sets ``token_ids``, later stages ``hidden`` of shape ``[tokens, hidden]``. The
    last stage samples the token after the last row if ``sampling`` is set; where rows were drafted,
    the tokens after the row before them and after each of them that was drafted right.
    """

    session: str
    """Key of the session's KV."""
    start: int
    end: int
    position: int
    token_ids: tuple[int, ...] | None = None
    hidden: "Tensor | None" = None
    drafts: tuple[int, ...] = ()
    """Token ids that the last rows were drafted with, one for each."""
    sampling: Sampling | None = None
    history: TokenHistory | None = None
    """Tokens that the sampling's penalties count."""
    targets: PromptTargets | None = None
    """At the last stage: tokens of the prompt against which rows are scored."""
    returns_rows: bool = False
    """Whether the hidden states behind the last layer are returned, too."""
    features: Features | None = None
    """What a head at the last stage takes from within the stack."""
    foretells: bool = False
    """At the last stage: whether a head drafts what may come next, where one is held."""
    following: tuple[int, ...] = ()
    """At the last stage, if ``foretells``: ids of the tokens behind the first rows, one for each,
    as far as they are known before anything is drawn."""
    drawn_later: int = 0
    """Number of positions by which tokens are drawn behind those that follow from ``position``."""
    background: bool = False
    """Whether nobody waits for the item, as in a replay for a planned move."""
    urgent: bool = False
    """Whether the item runs before others that came earlier."""
    queued_s: float = 0.0
    """Time at which the item was queued, on the event loop's clock."""
    computed_s: float = 0.0
    """Seconds that the steps took in which the stages before computed the rows."""
    waited_s: float = 0.0
    """Seconds for which the rows waited for those steps."""
    owner: Any = None
    """Returned with the result; the engine does not look at ``owner``."""
    tokens: int = field(init=False, repr=False, compare=False)
    """Number of rows."""

    def __post_init__(self) -> None:
        hidden_rows = 0 if self.hidden is None else int(self.hidden.shape[0])
        rows = hidden_rows if self.token_ids is None else len(self.token_ids)
        object.__setattr__(self, "tokens", rows)  # asked for a dozen times in a step

    @property
    def decodes(self) -> bool:
        """Whether the item is one new token, with or without drafts behind it."""
        return self.tokens == 1 + len(self.drafts)

    @property
    def ring_s(self) -> tuple[float, float] | None:
        """At the last stage of several: ``computed_s`` and ``waited_s`` of rows that make a token;
        None elsewhere."""
        if self.sampling is None or self.hidden is None:
            return None
        return self.computed_s, self.waited_s

    def spent_s(self, took_s: float, now_s: float) -> tuple[float, float]:
        """For how long the rows were computed and waited by now, in seconds, behind a step that
        took ``took_s`` and ended at ``now_s``."""
        here_s = max(0.0, now_s - self.queued_s)
        computed_s = min(took_s, here_s)
        return (
            min(SESSION_BOUNDS.step_s_max, self.computed_s + computed_s),
            min(SESSION_BOUNDS.step_s_max, self.waited_s + here_s - computed_s),
        )

    def with_drafts(self, count: int) -> "WorkItem":
        """The item with its first ``count`` drafts alone."""
        dropped = len(self.drafts) - count
        if dropped <= 0:
            return self
        return replace(
            self,
            drafts=self.drafts[:count],
            token_ids=None if self.token_ids is None else self.token_ids[:-dropped],
            hidden=None if self.hidden is None else self.hidden[:-dropped],
            features=None if self.features is None else self.features.without_last(dropped),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """Result of an item: hidden states for the next stage, tokens, or an error."""

    item: WorkItem
    hidden: "Tensor | None" = None
    token_ids: tuple[int, ...] = ()
    """Sampled tokens: the accepted drafts and one more."""
    scores: tuple[bytes, ...] = ()
    """Packed score of each token (:mod:`dht.messages.logprobs`), if ``sampling`` asks for it."""
    prompt_scores: bytes = b""
    """Packed scores of the item's ``targets``."""
    features: "Tensor | None" = None
    """The item's features so far, ``[rows, width × layers]``, for the next stage."""
    behind: "Tensor | None" = None
    """What a head joins with the tokens behind the last rows, ``[rows, width]``, on the device,
    where the item foretells."""
    foretold: tuple[int, ...] = ()
    """Tokens that a head drafts behind ``token_ids``."""
    error: str | None = None
    unsound_input: bool = False
    """Whether the rows that came in caused the error, or may have: they, or what was computed from
    them, are not finite."""

    @property
    def token_id(self) -> int | None:
        """The first sampled token."""
        return self.token_ids[0] if self.token_ids else None
