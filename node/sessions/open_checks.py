"""Checks of a ``SessionOpen`` before anything is reserved for it. Pure."""

from dataclasses import dataclass

from dht.messages.logprobs import SCORED_VALUES_MAX, scored_values
from dht.messages.prefix import BLOCK_TOKENS, NAME_BYTES
from dht.messages.session import SESSION_BOUNDS, RefusalCode, SessionOpen
from dht.messages.types import looks_within


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """What this peer serves now; opens are checked against it."""

    fingerprint: str
    layers: int
    context_tokens: int
    vocab: int
    """Number of the model's tokens."""
    start: int
    end: int
    serving: bool


def refusal_of(
    open_: SessionOpen, me: str, view: StageView, *, taken_over: bool = False
) -> tuple[RefusalCode, str] | None:
    """Why this stage cannot take ``open_``, or None; checks everything but KV room.

    The sender is not trusted: a malformed route is refused as a bad request. A stage that leaves
    still takes over its own sessions (``taken_over``), so that losing another stage meanwhile costs
    no more than usual.
    """
    route = open_.route
    if open_.hop >= len(route):
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
    if mine.peer_id != me:
        return RefusalCode.BAD_REQUEST, "this stage belongs to another peer"
    if open_.fingerprint != view.fingerprint:
        return RefusalCode.NOT_HELD, "this peer serves other weights under that name"
    if (unsound := _unsound_of(open_, view)) is not None:
        return RefusalCode.BAD_REQUEST, unsound
    if taken_over:
        return None
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


def _unsound_of(open_: SessionOpen, view: StageView) -> str | None:
    """Why no stage could do what the open says of its prompt, its sampling and its drafts, or
    None."""
    if len(open_.blocks) % NAME_BYTES:
        return f"blocks of {len(open_.blocks)} bytes, {NAME_BYTES} each expected"
    if len(open_.blocks) > open_.prompt_tokens // BLOCK_TOKENS * NAME_BYTES:
        return f"{len(open_.blocks) // NAME_BYTES} blocks in {open_.prompt_tokens} tokens of prompt"
    if open_.answered >= open_.prompt_tokens:
        return f"{open_.answered} tokens of answer in {open_.prompt_tokens} of prompt"
    if len(open_.history) != open_.history_tokens:
        return f"{len(open_.history)} token ids of history, {open_.history_tokens} expected"
    if len(open_.prompt_ids) not in (0, open_.prompt_tokens):
        return f"{len(open_.prompt_ids)} token ids of a prompt of {open_.prompt_tokens}"
    if (ids := len(open_.prompt_ids) + len(open_.history)) > SESSION_BOUNDS.history_tokens_max:
        return f"{ids} token ids in an open, {SESSION_BOUNDS.history_tokens_max} at most"
    if open_.sampling.grammar and not open_.sampling.stop_token_ids:
        return "an answer under a grammar needs a stop token"
    top = open_.sampling.prompt_logprobs
    if top is not None and scored_values(open_.prompt_tokens, top) > SCORED_VALUES_MAX:
        return (
            f"log probabilities of {open_.prompt_tokens} prompt tokens with {top} alternatives"
            f" asked; {SCORED_VALUES_MAX // (1 + top)} tokens at most"
        )
    if not looks_within(open_.featured, view.layers):
        return f"hidden states in front of layers {list(open_.featured)} of {view.layers} asked"
    return None
