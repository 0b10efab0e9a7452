"""What a caller may ask for with one answer, and the request that peers get of it. Pure."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from enum import Enum
from math import inf
from types import NoneType, UnionType
from typing import Annotated, Any, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from client.answer.answer import AnswerRequest, PrefixCache
from dht.errors import UserError
from dht.messages.logprobs import SCORED_VALUES_MAX, scored_values
from dht.messages.session import SESSION_BOUNDS, Bias, Priority, Sampling
from dht.messages.types import RECORD_BOUNDS, ModelSpec

NEW_TOKENS_DEFAULT = 128
PASSED_ON = tuple(
    name.name
    for name in fields(Sampling)
    if name.name not in {"seed", "stop_token_ids", "logit_bias", "grammar"}
)
"""Options that peers get as the caller gave them."""


def _bounds(hint: Any) -> Meta:
    """The bounds in a type of numbers, such as :data:`dht.messages.session.TopP`."""
    metas = (each for kind in (hint, *get_args(hint)) for each in get_args(kind))
    return next(each for each in metas if isinstance(each, Meta))


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a hint without bounds allows, one after the other."""
    return get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)


_BOUNDED = get_type_hints(Sampling, include_extras=True)
BOUNDS = {
    name: _bounds(_BOUNDED[name])
    for name, hint in get_type_hints(Sampling).items()
    if {int, float} & {*_kinds(hint)}
}
"""The bounds of each number that peers get, as the wire has them."""


AskedTopP = Annotated[float, Meta(ge=0.0, le=1.0)]
"""``top_p`` as most interfaces take it: 0 is greedy."""
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Flag:
    """How commands show an option of a number or a text: ``metavar`` stands for its value."""

    metavar: str
    help: str


class Theirs(Enum):
    """What an option is to ``transformers``, whose ``generate()`` takes it by the same name."""

    SAMPLER = "sampler"
    """It chooses among likely tokens, and does nothing without ``do_sample``."""
    PROCESSOR = "processor"
    """It changes logits, those of greedy answers, too."""


def _option(default: Given, metavar: str, help: str, theirs: Theirs | None = None) -> Given:
    """A field of :class:`GenerationOptions` that commands have as a flag of its name."""
    return field(default=default, metadata={Flag: Flag(metavar, help), Theirs: theirs})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Options of one answer, under the names that ``transformers`` uses."""

    max_new_tokens: int | None = _option(None, "N", "maximum length of the answer")
    """Maximum new tokens; None: 128, or the rest of the context if that is less."""
    temperature: float = _option(0.0, "T", "0 is greedy", Theirs.SAMPLER)
    """Temperature; 0: greedy."""
    top_p: float = _option(1.0, "P", "sample among the likeliest that make up P", Theirs.SAMPLER)
    """Share of the probability that the likeliest tokens make up, which are sampled; 0: greedy."""
    top_k: int = _option(0, "K", "sample among the K likeliest tokens", Theirs.SAMPLER)
    """0 keeps all tokens."""
    seed: int | None = _option(None, "N", "same seed, same answer (default: drawn)")
    """Same seed, same answer. None draws one."""
    stop: str | Sequence[str] = ()
    """The answer ends before the first of these strings; they are not part of it."""
    ignore_eos: bool = False
    """Go on after end-of-text."""
    min_new_tokens: int = _option(0, "N", "no end of the answer before N tokens", Theirs.PROCESSOR)
    """Minimum length of the answer: neither end-of-text nor ``stop_token_ids`` end it before."""
    min_p: float = _option(
        0.0, "P", "leave out what is less likely than P × the likeliest", Theirs.SAMPLER
    )
    """Leave out tokens less likely than this share of the likeliest; 0 keeps all."""
    repetition_penalty: float = _option(
        1.0, "R", "above 1: fewer tokens of prompt and answer again", Theirs.PROCESSOR
    )
    """Above 1 makes tokens of prompt and answer less likely, below 1 likelier."""
    presence_penalty: float = _option(0.0, "P", "taken from logits of tokens in the answer")
    """Penalty subtracted once from the logit of each token that the answer has, as with OpenAI."""
    frequency_penalty: float = _option(0.0, "P", "the same, for each time that they occur")
    """Penalty subtracted from a token's logit for each time that the answer has it, as with
    OpenAI."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Biases added to the logits of these token ids."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, besides end-of-text; the one that did is delivered last."""
    logprobs: int | None = _option(
        None, "N", "with --json: log probabilities, with N alternatives each"
    )
    """Number of alternatives to give with each token's log probability; None gives neither."""
    prompt_logprobs: int | None = _option(None, "N", "the same for the prompt's tokens")
    """Number of alternatives with each prompt token's log probability; None gives neither."""
    grammar: str = _option(
        "", "LARK", "the answer follows this grammar, such as 'start: %%json {}'"
    )
    """Lark grammar in llguidance's dialect that the answer's text follows; empty: none."""
    priority: Priority = Priority.NORMAL
    """``high`` may use the room that full peers keep free for urgent requests, and is run first;
    each peer grants that to a few sessions per client."""
    speculate: bool = True
    """Whether the first stage may draft tokens, which changes how soon tokens come, not which."""
    prefix_cache: PrefixCache = PrefixCache.OWN
    """Who may go on from the KV that peers keep of this prompt: ``own`` requests of this client,
    ``shared`` with all clients, whose timing then tells that somebody sent it, or ``off``."""
    cache_salt: str = _option("", "TEXT", "reuse only KV of your requests with this salt")
    """Own requests with different salts share no KV."""

    def __post_init__(self) -> None:
        self._convert_numbers()
        self._check_types()
        _check("max_new_tokens", self.max_new_tokens, 1, RECORD_BOUNDS.context_tokens_max)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, which is"
                f" {self.max_new_tokens}",
                field="min_new_tokens",
            )
        for name, bounds in BOUNDS.items():
            _check_within(name, getattr(self, name), bounds)
        _check(
            "the bytes of the grammar",
            len(self.grammar.encode()),
            0,
            SESSION_BOUNDS.grammar_bytes_max,
        )

    def but(self, **changes: object) -> "GenerationOptions":
        """These options with ``changes``, which must be right: nothing is checked again. A request
        of a gateway makes hundreds of options out of one, and each may have a thousand biases."""
        other = copy(self)
        for name, value in changes.items():
            object.__setattr__(other, name, value)
        return other

    def _convert_numbers(self) -> None:
        """Give numbers the types that travel; raises UserError for what is no number."""
        for name, kinds in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and NoneType in kinds:
                continue
            convert, wanted = _CONVERTED[kinds[0]]
            number = convert(value)
            if number is None:
                raise UserError(f"{name} is {value!r}; it must be {wanted}", field=name)
            object.__setattr__(self, name, number)
        if self.top_p == 0.0:  # peers know one name for greedy
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)

    def _check_types(self) -> None:
        for name in ("grammar", "cache_salt"):
            if not _is_text(getattr(self, name)):
                raise UserError(f"{name} is a text in UTF-8", field=name)
        for name, kind in (("priority", Priority), ("prefix_cache", PrefixCache)):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError:
                wanted = " or ".join(kind)
                said = f"{name} is {value!r}; it must be {wanted}"
                raise UserError(said, field=name) from None
        biases = _biases(self.logit_bias)
        if biases is None:
            said = "logit_bias takes numbers by token id, such as {17: -5.0}"
            raise UserError(said, field="logit_bias")
        object.__setattr__(self, "logit_bias", biases)
        token_ids = _token_ids(self.stop_token_ids)
        if token_ids is None:
            said = f"stop_token_ids is {self.stop_token_ids!r}; it takes token ids"
            raise UserError(said, field="stop_token_ids")
        object.__setattr__(self, "stop_token_ids", token_ids)
        stop: tuple[object, ...] = (self.stop,)
        if isinstance(self.stop, Iterable) and not isinstance(self.stop, str):
            stop = tuple(self.stop)
        if not all(isinstance(each, str) for each in stop):
            raise UserError(f"stop is {self.stop!r}; it takes strings", field="stop")
        object.__setattr__(self, "stop", stop)

    def request(
        self, prompt_ids: tuple[int, ...], model: ModelSpec, stop_token_ids: tuple[int, ...]
    ) -> AnswerRequest:
        """The request that peers get; ``stop_token_ids`` are the model's own (end-of-text). Those
        that its vocabulary does not have never come, and are left out.

        Raises UserError where the model does not have these token ids, or its context no room.
        """
        self.check_ids(prompt_ids, model.vocab)
        ends = tuple(token_id for token_id in stop_token_ids if token_id < model.vocab)
        request = AnswerRequest(
            model=model,
            prompt_ids=prompt_ids,
            max_new_tokens=self.new_tokens(len(prompt_ids), model.context_tokens),
            sampling=self.sampling(ends),
            priority=self.priority,
            draft_tokens=SESSION_BOUNDS.draft_tokens_max if self.speculate else 0,
            prefix_cache=self.prefix_cache,
            cache_salt=self.cache_salt,
        )
        if request.history_tokens_max > SESSION_BOUNDS.history_tokens_max:
            raise UserError(
                f"penalties and scores look at {request.history_tokens_max} tokens here;"
                f" {SESSION_BOUNDS.history_tokens_max} at most: shorten the prompt, or leave them"
                " out"
            )
        return request

    def sampling(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The part that the last stage needs; draws a seed where none was given.

        ``stop_token_ids`` are the model's own (end-of-text), which ``ignore_eos`` leaves out.
        """
        own = () if self.ignore_eos else stop_token_ids
        stops = tuple(dict.fromkeys((*own, *self.stop_token_ids)))
        if self.grammar and not stops:
            raise UserError("an answer under a grammar needs an end-of-text token to end with")
        return Sampling(
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop_token_ids=stops,
            grammar=self.grammar.encode(),
            logit_bias=tuple(self.logit_bias.items()),
            **{name: getattr(self, name) for name in PASSED_ON},
        )

    def check_ids(self, prompt_ids: Sequence[int], vocab: int) -> None:
        """Raise UserError for token ids that the model does not have, wherever they stand."""
        for where, token_ids in (
            ("the prompt", prompt_ids),
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
                if not 0 <= token_id < vocab:
                    raise UserError(
                        f"token id {token_id} in {where} is outside the vocabulary of {vocab}",
                        field=where.removeprefix("the "),
                    )
        for name in ("logprobs", "prompt_logprobs"):
            _check(name, getattr(self, name), 0, vocab)
        top = self.prompt_logprobs
        if top is not None and scored_values(len(prompt_ids), top) > SCORED_VALUES_MAX:
            raise UserError(
                f"prompt_logprobs is {top} for a prompt of {len(prompt_ids)} tokens;"
                f" {SCORED_VALUES_MAX // (1 + top)} tokens at most",
                field="prompt_logprobs",
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


def _plain(value: object) -> object:
    """``value``; a scalar of numpy or torch as a Python number."""
    item = getattr(value, "item", None)
    try:
        return item() if callable(item) else value
    except (TypeError, ValueError, RuntimeError):  # more than one number
        return value


def _is_text(value: object) -> bool:
    """Whether it is text that can travel."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _whole(value: object) -> int | None:
    """A whole number, given as any type of numbers; None for anything else."""
    value = _plain(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _real(value: object) -> float | None:
    """A number, given as any type of numbers, as a float; None for anything else."""
    value = _plain(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # far outside any bound
        return inf if value > 0 else -inf


def _flag(value: object) -> bool | None:
    """True or False, given as any type of them; None for anything else."""
    value = _plain(value)
    return value if isinstance(value, bool) else None


_CONVERTED: Mapping[Any, tuple[Callable[[object], float | None], str]] = {
    int: (_whole, "a whole number"),
    float: (_real, "a number"),
    bool: (_flag, "True or False"),
}
"""How each type of numbers is read, and what to say of what is none."""
_NUMBERS = {
    name: kinds
    for name, hint in get_type_hints(GenerationOptions).items()
    if (kinds := _kinds(hint))[0] in _CONVERTED
}
"""The options that are numbers or flags, with the types that they allow."""


FLAGS: Mapping[str, tuple[type, Flag]] = {
    each.name: (_kinds(get_type_hints(GenerationOptions)[each.name])[0], each.metadata[Flag])
    for each in fields(GenerationOptions)
    if Flag in each.metadata
}
"""The options that commands have as flags of one value, with its type."""
THEIRS: Mapping[str, Theirs] = {
    each.name: theirs
    for each in fields(GenerationOptions)
    if (theirs := each.metadata.get(Theirs)) is not None
}
"""The options that mean the same to ``transformers``."""
SAMPLERS = tuple(name for name, theirs in THEIRS.items() if theirs is Theirs.SAMPLER)


def _biases(given: object) -> dict[int, float] | None:
    """Biases by token id; None for what is not that. Their number is checked first: hashing many
    chosen keys takes long. Raises UserError for numbers out of bounds."""
    if not isinstance(given, Mapping):
        return None
    _check("the number of tokens in logit_bias", len(given), 0, SESSION_BOUNDS.biased_tokens_max)
    biases: dict[int, float] = {}
    bounds = _bounds(Bias)
    for key, value in given.items():
        token_id, bias = _whole(key), _real(value)
        if token_id is None or token_id < 0 or bias is None:
            return None
        _check_within(f"logit_bias of token {token_id}", bias, bounds)
        biases[token_id] = bias
    return biases


def _token_ids(given: object) -> tuple[int, ...] | None:
    """Token ids, given as a sequence or an array; None for what is not that."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return None
    _check("the number of stop_token_ids", len(given), 0, SESSION_BOUNDS.stop_tokens_max // 2)
    found = [_whole(each) for each in given]
    token_ids = tuple(each for each in found if each is not None and each >= 0)
    return token_ids if len(token_ids) == len(found) else None


def _check(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if not low <= value <= high:  # NaN is neither
        said = f"{value:g}" if isinstance(value, float) else value
        raise UserError(f"{name} is {said}; it must be between {low} and {high}", field=name)


def _check_within(name: str, value: float | None, bounds: Meta) -> None:
    if bounds.gt is not None and value == bounds.gt:
        raise UserError(f"{name} is {value:g}; it must be above {bounds.gt:g}", field=name)
    low = bounds.ge if bounds.ge is not None else bounds.gt
    _check(name, value, low if low is not None else -inf, inf if bounds.le is None else bounds.le)


class NamedOptions(TypedDict, total=False):
    """The fields of :class:`GenerationOptions` by name, so that editors and type checkers know what
    ``generate(prompt, max_new_tokens=64)`` takes."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    min_new_tokens: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop_token_ids: Sequence[int]
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: str
    priority: Priority
    speculate: bool
    prefix_cache: PrefixCache
    cache_salt: str
