"""What a caller may ask for, checked in plain words, and what it gets back."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dht.errors import UserError
from dht.messages.logprobs import SCORED_VALUES_MAX, TokenScore, scored_values
from dht.messages.session import (
    BIASED_TOKENS_MAX,
    LOGPROBS_MAX,
    STOP_TOKENS_MAX,
    FinishReason,
    Priority,
    Sampling,
)
from dht.messages.types import RouteStage

TEMPERATURE_MAX = 10.0
TOP_K_MAX = 1 << 24
SEED_MAX = (1 << 63) - 1
NEW_TOKENS_DEFAULT = 128
REPETITION_PENALTY_MAX = 100.0
PENALTY_MAX = 2.0
BIAS_MAX = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Options of one answer, under the names that ``transformers`` uses."""

    max_new_tokens: int | None = None
    """None: 128, or as many as the context still takes."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int | None = None
    """Same seed, same answer. None draws one."""
    stop: str | Sequence[str] = ()
    """The answer ends before the first of these strings; they are not part of it."""
    ignore_eos: bool = False
    """Go on after end-of-text."""
    min_new_tokens: int = 0
    """Neither end-of-text nor ``stop_token_ids`` before so many tokens."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and answer less likely, below 1 likelier."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token that the answer has, as with OpenAI."""
    frequency_penalty: float = 0.0
    """Taken as often as the answer has the token, as with OpenAI."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, besides end-of-text; the one that did is delivered last."""
    logprobs: int | None = None
    """Also give each token's log probability and so many alternatives."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    priority: Priority = Priority.NORMAL
    """``high`` may use the room that full peers keep free for urgent requests; each peer grants
    that to a few sessions per client."""

    def __post_init__(self) -> None:
        self._check_types()
        _check("max_new_tokens", self.max_new_tokens, 1, 1 << 22)
        _check("min_new_tokens", self.min_new_tokens, 0, 1 << 22)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, which is"
                f" {self.max_new_tokens}"
            )
        _check("temperature", self.temperature, 0.0, TEMPERATURE_MAX)
        _check("top_k", self.top_k, 0, TOP_K_MAX)
        _check("seed", self.seed, 0, SEED_MAX)
        _check("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise UserError("top_p is 0; it must be above 0 and at most 1")
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, REPETITION_PENALTY_MAX)
        if self.repetition_penalty == 0:
            raise UserError("repetition_penalty is 0; it must be above 0, and 1 changes nothing")
        _check("presence_penalty", self.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
        _check("frequency_penalty", self.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
        _check("logprobs", self.logprobs, 0, LOGPROBS_MAX)
        _check("prompt_logprobs", self.prompt_logprobs, 0, LOGPROBS_MAX)
        for token_id, bias in self.logit_bias.items():
            _check(f"logit_bias of token {token_id}", bias, -BIAS_MAX, BIAS_MAX)
        _check("the number of tokens in logit_bias", len(self.logit_bias), 0, BIASED_TOKENS_MAX)
        _check("the number of stop_token_ids", len(self.stop_token_ids), 0, STOP_TOKENS_MAX // 2)

    def _check_types(self) -> None:
        for name in (
            "max_new_tokens",
            "min_new_tokens",
            "top_k",
            "seed",
            "logprobs",
            "prompt_logprobs",
        ):
            value = getattr(self, name)
            optional = name not in {"top_k", "min_new_tokens"}
            if not (_is_whole(value) or (optional and value is None)):
                raise UserError(f"{name} is {value!r}; it must be a whole number")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            if not _is_number(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be a number")
        try:
            object.__setattr__(self, "priority", Priority(self.priority))
        except ValueError:
            known = " or ".join(Priority)
            raise UserError(f"priority is {self.priority!r}; it must be {known}") from None
        if not isinstance(self.logit_bias, Mapping) or not all(
            _is_whole(token_id) and token_id >= 0 and _is_number(bias)
            for token_id, bias in self.logit_bias.items()
        ):
            raise UserError("logit_bias takes numbers by token id, such as {17: -5.0}")
        if not isinstance(self.stop_token_ids, Sequence) or not all(
            _is_whole(token_id) and token_id >= 0 for token_id in self.stop_token_ids
        ):
            raise UserError(f"stop_token_ids is {self.stop_token_ids!r}; it takes token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(each, str) for each in stop):
            raise UserError(f"stop is {self.stop!r}; it takes strings")
        object.__setattr__(self, "stop", stop)

    def sampling(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The part that the last stage needs; draws a seed where none was given.

        ``stop_token_ids`` are the model's own (end-of-text), which ``ignore_eos`` leaves out.
        """
        own = () if self.ignore_eos else stop_token_ids
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=secrets.randbelow(SEED_MAX) if self.seed is None else self.seed,
            stop_token_ids=tuple(dict.fromkeys((*own, *self.stop_token_ids))),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            min_new_tokens=self.min_new_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def check_ids(self, prompt_ids: Sequence[int], vocab: int) -> None:
        """Raises UserError for token ids that the model does not have, wherever they stand."""
        for where, token_ids in (
            ("the prompt", prompt_ids),
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
                if not 0 <= token_id < vocab:
                    raise UserError(
                        f"token id {token_id} in {where} is outside the vocabulary of {vocab}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            _check(name, getattr(self, name), 0, vocab)
        top = self.prompt_logprobs
        if top is not None and scored_values(len(prompt_ids), top) > SCORED_VALUES_MAX:
            raise UserError(
                f"prompt_logprobs is {top} for a prompt of {len(prompt_ids)} tokens;"
                f" {SCORED_VALUES_MAX // (1 + top)} tokens at most"
            )

    def new_tokens(self, prompt_tokens: int, context_tokens: int) -> int:
        """How many new tokens to reserve; UserError when the context cannot take them."""
        if prompt_tokens == 0:
            raise UserError("the prompt is empty; give at least one token")
        room = context_tokens - prompt_tokens
        if room < 1:
            raise UserError(
                f"the prompt has {prompt_tokens} tokens; this model's context is {context_tokens},"
                " answer included: shorten the prompt"
            )
        if self.max_new_tokens is None:
            return min(NEW_TOKENS_DEFAULT, room)
        if self.max_new_tokens > room:
            raise UserError(
                f"max_new_tokens is {self.max_new_tokens}, but after a prompt of {prompt_tokens}"
                f" tokens the context of {context_tokens} has room for {room}"
            )
        return self.max_new_tokens


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high:
        raise UserError(f"{name} is {value}; it must be between {low} and {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer: text that became certain, and the tokens behind it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenScore, ...] = ()
    """One for each of ``token_ids``, where they were asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer with its figures. ``text`` is None for a model without a tokenizer."""

    text: str | None
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_s: float
    """From the call to the first token."""
    tpot_s: float
    """Mean time per token after the first; 0 for a single token."""
    route: tuple[RouteStage, ...]
    """The route that finished the answer."""
    plan_version: str
    failovers: int
    """Routes that were lost after they had accepted the session."""
    logprobs: tuple[TokenScore, ...] | None = None
    """One for each of ``token_ids``, where they were asked."""
    prompt_logprobs: tuple[TokenScore | None, ...] | None = None
    """One for each token of the prompt, where they were asked; the first has none."""
