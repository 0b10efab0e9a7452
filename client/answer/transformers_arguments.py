"""What callers of ``transformers``' ``generate()`` pass, as options of this client. Pure.

Arguments that would change the answer and that a swarm cannot honour are refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

from client.answer.defaults import FOLLOWED
from client.answer.generation import THEIRS, GenerationOptions, Theirs
from dht.errors import UserError

NEW_TOKENS_DEFAULT = 20
"""Fixed by ``transformers``: ``max_new_tokens`` where neither it nor ``max_length`` is given."""
SAMPLED_DEFAULTS = {"temperature": 1.0, "top_k": 50}
"""Fixed by ``transformers``: options where it samples and none are given."""
BATCH_MAX = 64

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "return_dict_in_generate": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "synced_gpus": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "diversity_penalty": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "is_assistant": (False,),
    "guidance_scale": (1.0,),
    "token_healing": (False,),
    **dict.fromkeys(
        (
            "bad_words_ids", "begin_suppress_tokens", "constraints", "dola_layers",
            "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
            "forced_eos_token_id", "max_time", "penalty_alpha", "sequence_bias", "stop_strings",
            "suppress_tokens", "top_h", "watermarking_config",
        ),
        (),
    ),
}  # fmt: skip
"""Arguments of which only these values, None and empty lists ask for what is done anyway. Those
that are options, too, may have any value."""
_NO_MATTER = frozenset(
    {"transformers_version", "_from_model_config", "bos_token_id", "decoder_start_token_id",
     "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size",
     "compile_config", "disable_compile", "low_memory", "continuous_batching_config",
     "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
     "assistant_lookbehind", "target_lookbehind", "num_assistant_tokens",
     "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "max_matching_ngram_size",
     "speculation_type", "use_mtp"}
)  # fmt: skip
"""Arguments that change how transformers computes, not what."""
_READ = frozenset(
    {
        "max_new_tokens",
        "max_length",
        "do_sample",
        "eos_token_id",
        "pad_token_id",
        "seed",
        *THEIRS,
    }
)
KNOWN = _READ | _NO_MATTER | _NEUTRAL.keys()
"""Arguments that mean something to transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One call of ``generate()``, understood."""

    options: GenerationOptions
    """The options of each row; a seed is the first row's."""
    pad_token_id: int | None


def understood(
    arguments: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    prompt_tokens: int,
    context_tokens: int,
    vocab: int,
) -> GenerateCall:
    """``arguments`` over ``defaults`` (the model's generation configuration).

    ``prompt_tokens`` is the width of the padded prompts, from which ``max_length`` counts. Tokens
    that end answers and that the vocabulary, of ``vocab`` tokens, does not have never come, and are
    left out, as transformers leaves them.

    Raises UserError, with the argument's name, for what is unknown, not supported or out of range.
    Unknown names in ``defaults`` mean nothing to transformers, and nothing here.
    """
    given = {**defaults, **arguments}
    for name, value in given.items():
        is_noise = name not in KNOWN and name not in arguments
        if name in _READ or name in _NO_MATTER or _is_empty(value) or is_noise:
            continue
        if name not in _NEUTRAL:
            raise UserError(f"generate() does not support {name} in a swarm")
        if value not in _NEUTRAL[name]:
            neutral = _NEUTRAL[name][0] if _NEUTRAL[name] else None
            raise UserError(
                f"generate() does not support {name}={value!r} in a swarm; leave it out or give"
                f" {neutral!r}"
            )
    samples = bool(given.get("do_sample"))
    options: dict[str, Any] = {**SAMPLED_DEFAULTS, "seed": given.get("seed")} if samples else {}
    for name, theirs in THEIRS.items():
        if given.get(name) is not None and (samples or theirs is not Theirs.SAMPLER):
            options[name] = given[name]
    if samples and options["temperature"] == 0:
        raise UserError("temperature is 0 with do_sample; leave do_sample out for greedy")
    options["max_new_tokens"] = _new_tokens(given, prompt_tokens, context_tokens)
    ends = _ids("eos_token_id", given.get("eos_token_id"))
    known = tuple(token_id for token_id in ends if 0 <= token_id < vocab)
    options.update(stop_token_ids=known, ignore_eos=True)
    pad = given.get("pad_token_id")
    return GenerateCall(
        options=GenerationOptions(**options),
        pad_token_id=pad if pad is not None else (ends[0] if ends else None),
    )


def unheeded(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's generation configuration asks for that only ``generate()`` does or refuses,
    and that other answers do not follow."""
    return {
        name: value
        for name, value in defaults.items()
        if name in _NEUTRAL.keys() - FOLLOWED
        and not _is_empty(value)
        and value not in _NEUTRAL[name]
    }


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, list) and not value)


def _new_tokens(given: Mapping[str, Any], prompt_tokens: int, context_tokens: int) -> Any:
    """``max_new_tokens`` goes before ``max_length``, the model's own too, as in transformers."""
    new_tokens = given.get("max_new_tokens")
    length = given.get("max_length")
    if new_tokens is not None:
        return new_tokens  # GenerationOptions checks it
    if length is None:
        return max(1, min(NEW_TOKENS_DEFAULT, context_tokens - prompt_tokens))
    if not isinstance(length, SupportsIndex):
        raise UserError(f"max_length is {length!r}; it must be a whole number")
    length = index(length)
    if length <= prompt_tokens:
        raise UserError(
            f"max_length is {length}, but the prompt has {prompt_tokens} tokens; raise it or give"
            " max_new_tokens"
        )
    return length - prompt_tokens


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if hasattr(value, "tolist"):
        return _ids(name, value.tolist())
    if isinstance(value, Sequence) and all(isinstance(each, int) for each in value):
        return tuple(value)
    raise UserError(f"{name} is {value!r}; it takes a token id or a list of them")


def unpadded(
    rows: Sequence[Sequence[int]], mask: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], ...]:
    """The prompts without the padding that ``mask`` (1: a token, 0: padding) marks on the left.

    Raises UserError for shapes that do not match, padding elsewhere and prompts of padding alone.
    """
    if not 1 <= len(rows) <= BATCH_MAX:
        raise UserError(f"input_ids has {len(rows)} rows; it must have 1 to {BATCH_MAX}")
    if mask is None:
        return tuple(tuple(row) for row in rows)
    if [len(row) for row in rows] != [len(row) for row in mask]:
        raise UserError("attention_mask must have the shape of input_ids")
    prompts = []
    for at, (row, marks) in enumerate(zip(rows, mask, strict=True)):
        start = next((i for i, mark in enumerate(marks) if mark), len(marks))
        if not all(marks[start:]) or start == len(marks):
            raise UserError(
                f"attention_mask of row {at} has padding behind a token, or nothing else;"
                " pad on the left (tokenizer.padding_side = 'left')"
            )
        prompts.append(tuple(row[start:]))
    return tuple(prompts)


def padded(rows: Sequence[Sequence[int]], pad_token_id: int | None) -> list[list[int]]:
    """Rows of one length, filled on the right; UserError without a token to fill with."""
    width = max(len(row) for row in rows)
    if pad_token_id is None and any(len(row) < width for row in rows):
        raise UserError("answers differ in length: give pad_token_id")
    return [[*row, *[pad_token_id or 0] * (width - len(row))] for row in rows]
