"""Numbers of drafting, each with its reason. Pure."""

from dataclasses import dataclass

from dht.messages.types import ModelSpec, stage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingConfig:
    """How much is drafted, and how it is measured whether that pays."""

    observed_weight: float = 0.15
    """Weight of the newest draft in the share of accepted ones."""
    round_weight: float = 0.1
    """Weight of the newest round in measured times."""
    dearer_weight: float = 0.3
    """Weight of a row that cost more than before: drafting too much costs more than drafting too
    little."""
    late_round_factor: float = 3.0
    """A round counts as at most ``late_round_factor`` times what is usual: a stall is not a round's
    time."""
    row_share_least: float = 0.005
    """Minimum cost of a drafted row, as a share of a round: no row is quite free."""
    gain_least: float = 1.03
    """Minimum gain over plain decoding for which anything is drafted."""
    plain_every: int = 64
    """At least one round in ``plain_every`` is plain, so that a plain round's time stays known."""
    row_forgotten: float = 0.998
    """Share of the measured cost of a row that a plain round leaves: a high one is tried again."""
    head_drafts_max: int = 4
    """Maximum drafts of a round: each is a step of a layer and of the output head."""
    chance_least: float = 0.25
    """Minimum chance of the last draft to be right together with all before it."""
    right_at_first: float = 0.7
    """Assumed share of right drafts until it is measured."""
    followed_tokens_max: int = 2048
    """Maximum tokens that a drafter follows at once, in about a millisecond. A long prompt takes
    several turns."""
    ahead_at_first: int = 4
    """Tokens that a draft model draws ahead while nothing is measured."""
    watched_every: int = 8
    """Where a draft model does not pay, one round in ``watched_every`` shows whether it would
    now."""
    late_drafts_factor: float = 2.0
    """Drafts that take ``late_round_factor`` times what was expected are not waited for any
    longer."""
    window_tokens: int = 1 << 15
    """Maximum tokens that a drafter remembers; beyond, it forgets the older half."""
    match_least: int = 2
    """Tokens that must occur earlier before anything is proposed: one alone says too little."""
    chain_rows_max: int = 256
    """Maximum rows of a step: a long history takes several, and is stopped in between."""
    timed_rows_max: int = 64
    """Maximum rows at the beginning of a chain that is timed: more say nothing of the time of a
    token."""
    time_weight: float = 0.2
    """Weight of the newest chain in the measured time of a token."""
    kv_tokens_max: int = 16_384
    """KV tokens of a draft model, or of a head, for all sessions together; or four whole contexts,
    if that is less."""


DRAFTING = DraftingConfig()


def drafter_bytes(spec: ModelSpec) -> int:
    """Bytes that a draft model, or a head as a model of its own, takes, with KV for sessions."""
    kv_tokens = min(DRAFTING.kv_tokens_max, 4 * spec.context_tokens)
    return stage_bytes(spec, 0, spec.layers, kv_tokens)
