"""One answer as data: the request that peers get, the log of what came, and the whole. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dht.messages.logprobs import TokenScore
from dht.messages.session import FinishReason, Priority, Sampling
from dht.messages.types import ModelSpec, RouteStage


class PrefixCache(StrEnum):
    """Who may use the KV that peers keep of a prompt."""

    OWN = "own"
    SHARED = "shared"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """One request to the swarm, from the caller's options to the message that opens its session."""

    model: ModelSpec
    """The model as the peers describe it."""
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    priority: Priority = Priority.NORMAL
    draft_tokens: int = 0
    """Maximum tokens that the first stage may draft at a time; 0: plain decoding."""
    prefix_cache: PrefixCache = PrefixCache.OWN
    cache_salt: str = ""

    @property
    def history_tokens_max(self) -> int:
        """Maximum token ids that an open of this answer carries, wherever it is replayed."""
        prompt = len(self.prompt_ids) if self.sampling.needs_prompt else 0
        return prompt + (self.max_new_tokens if self.sampling.needs_answer else 0)


@dataclass(slots=True, kw_only=True)
class AnswerLog:
    """The token log: an answer as its owner keeps it, from which everything can be rebuilt.

    Each token is accepted exactly once, whatever routes delivered it. ``attempt`` counts the routes
    that were tried.
    """

    request: AnswerRequest
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    """Scores of ``token_ids``, one each, where the request wants them."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Scores of the prompt's tokens from the second on, as far as they came."""
    finish_reason: FinishReason | None = None
    attempt: int = 0
    computed_s: float = 0.0
    """Seconds that stages' steps took for tokens that followed others, as the stages say."""
    waited_s: float = 0.0
    """Seconds for which those tokens' rows waited for the steps, as the stages say."""

    @property
    def replay_ids(self) -> tuple[int, ...]:
        """The prompt for a new route: everything that is known already."""
        return (*self.request.prompt_ids, *self.token_ids)

    @property
    def remaining_tokens(self) -> int:
        """New tokens still to come at most."""
        return self.request.max_new_tokens - len(self.token_ids)

    @property
    def next_position(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def history(self) -> tuple[int, ...]:
        """Token ids that the last stage of a new route has to know (``SessionOpen.history``)."""
        sampling = self.request.sampling
        if sampling.needs_prompt:
            return self.replay_ids
        return tuple(self.token_ids) if sampling.needs_answer else ()

    @property
    def prompt_is_scored(self) -> bool:
        """Whether all scores of the prompt that the request wants are here."""
        if self.request.sampling.prompt_logprobs is None:
            return True
        return len(self.prompt_scores) == len(self.request.prompt_ids) - 1

    def accept_prompt_scores(
        self, *, attempt: int, position: int, scores: tuple[TokenScore, ...]
    ) -> None:
        """Take scores of the prompt's tokens from ``position`` on; each counts once."""
        next_position = 1 + len(self.prompt_scores)
        if attempt == self.attempt and position <= next_position:
            self.prompt_scores.extend(scores[next_position - position :])

    def accept(
        self,
        *,
        attempt: int,
        position: int,
        token_ids: tuple[int, ...],
        scores: tuple[TokenScore, ...] = (),
    ) -> tuple[int, ...]:
        """Take delivered tokens, with a score each where any came; returns those that are new.

        Frames of an older attempt, repeated tokens and frames that would leave a gap give nothing.
        Tokens beyond ``max_new_tokens`` or behind a stop token are never accepted, whatever the
        peer says: the end of an answer is checked here, not believed.
        """
        if (
            self.finish_reason is not None
            or attempt != self.attempt
            or position > self.next_position
        ):
            return ()
        fresh: list[int] = []
        start = self.next_position - position
        for at in range(start, len(token_ids)):
            token_id = token_ids[at]
            fresh.append(token_id)
            self.token_ids.append(token_id)
            if scores:
                self.scores.append(scores[at])
            if token_id in self.request.sampling.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                break
            if self.remaining_tokens == 0:
                self.finish_reason = FinishReason.LENGTH
                break
        return tuple(fresh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer: text that became certain, and the tokens behind it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenScore, ...] = ()
    """Scores of ``token_ids``, one each, where they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer with its figures. ``text`` is None for a model without a tokenizer."""

    text: str | None
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_s: float
    """Time from the call to the first token."""
    tpot_s: float
    """Mean time per token after the first; 0 for a single token."""
    computed_s: float
    """Part of ``tpot_s`` in which the stages' steps ran, as the stages say."""
    waited_s: float
    """Part of ``tpot_s`` in which rows waited for those steps, as the stages say."""
    route: tuple[RouteStage, ...]
    """The route that finished the answer."""
    plan_version: str
    fingerprint: str
    """Fingerprint of the model that answered, as its peers announce it."""
    failovers: int
    """Routes that were lost after they had accepted the session."""
    stop: str | None = None
    """The stop string that ended it, if one did."""
    cached_tokens: int = 0
    """Number of leading tokens of the prompt whose KV the peers had kept."""
    drafted_tokens: int = 0
    """Number of ``token_ids`` that came together with the one before them, as drafts that were
    accepted do."""
    logprobs: tuple[TokenScore, ...] | None = None
    """Scores of ``token_ids``, one each, where they were asked for."""
    prompt_logprobs: tuple[TokenScore | None, ...] | None = None
    """Scores of the prompt's tokens, one each, where they were asked for; the first has none."""

    @property
    def way_s(self) -> float:
        """The rest of ``tpot_s``: on the way between peers, or drafting."""
        return self.tpot_s - self.computed_s - self.waited_s


def whole_answer(parts: Sequence[Answer]) -> Answer:
    """One answer of several, each of which went on from where the one before was cut."""
    first, last = parts[0], parts[-1]
    token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
    later = max(1, len(token_ids) - 1)

    def mean_s(of: Callable[[Answer], float]) -> float:
        return sum(of(part) * max(0, len(part.token_ids) - 1) for part in parts) / later

    scores = [part.logprobs for part in parts if part.logprobs is not None]
    return replace(
        last,
        text="".join(part.text or "" for part in parts),
        token_ids=token_ids,
        prompt_tokens=first.prompt_tokens,
        ttft_s=first.ttft_s,
        tpot_s=mean_s(lambda part: part.tpot_s) + sum(part.ttft_s for part in parts[1:]) / later,
        computed_s=mean_s(lambda part: part.computed_s),
        waited_s=mean_s(lambda part: part.waited_s),
        failovers=sum(part.failovers for part in parts),
        cached_tokens=first.cached_tokens,
        drafted_tokens=sum(part.drafted_tokens for part in parts),
        logprobs=tuple(score for some in scores for score in some) if scores else None,
        prompt_logprobs=first.prompt_logprobs,
    )
