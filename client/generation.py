"""What a caller may ask for, checked in plain words, and what it gets back."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from dht.errors import UserError
from dht.messages import FinishReason, Sampling
from dht.types import RouteStage

TEMPERATURE_MAX = 10.0
TOP_K_MAX = 1 << 24
SEED_MAX = (1 << 63) - 1
NEW_TOKENS_DEFAULT = 128


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

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise UserError(f"{name} is {value!r}; it must be a whole number")
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), int | float):
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be a number")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(each, str) for each in stop):
            raise UserError(f"stop is {self.stop!r}; it takes strings")
        object.__setattr__(self, "stop", stop)
        _check("max_new_tokens", self.max_new_tokens, 1, 1 << 22)
        _check("temperature", self.temperature, 0.0, TEMPERATURE_MAX)
        _check("top_k", self.top_k, 0, TOP_K_MAX)
        _check("seed", self.seed, 0, SEED_MAX)
        _check("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise UserError("top_p is 0; it must be above 0 and at most 1")

    def sampling(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The part that the last stage needs; draws a seed where none was given."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=secrets.randbelow(SEED_MAX) if self.seed is None else self.seed,
            stop_token_ids=() if self.ignore_eos else stop_token_ids,
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
    plan_epoch: str
    failovers: int
    """Routes that were lost after they had accepted the session."""
