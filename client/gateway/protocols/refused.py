"""Fields of requests that are refused, each with its reason. Pure.

A field that is neither built nor named here is let through: nothing is known of it that could
change an answer. In Ollama's ``options`` these are:

- ``num_ctx``, ``num_batch``, ``num_gpu``, ``main_gpu``, ``num_thread``, ``numa``, ``use_mmap``:
  how a server loads a model.
- ``num_keep``: what is kept of a prompt that is too long, which is refused here.
- ``mirostat_eta``, ``mirostat_tau``: nothing without ``mirostat``.
- ``repeat_last_n``, ``penalize_newline``: programs send their defaults; penalties count every token
  of prompt and answer.
"""

from collections.abc import Mapping
from dataclasses import fields

import msgspec

from client.answer.generation import SAMPLERS
from client.gateway.errors import bad_request
from dht.messages.session import Sampling

ABSENT = frozenset({b"", b"null"})
NOTHING = ABSENT | {b"false", b"0", b"0.0", b"[]", b"{}", b'""'}
"""Values that ask for nothing."""
ASKING = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "enable_thinking",
        "include_reasoning",
        "parallel_tool_calls",
        "random_seed",
        "seed",
        "skip_special_tokens",
        "temperature",
        "think",
    }
)
"""Fields that ask for something with ``false`` or 0, too."""
NEUTRAL: Mapping[str, frozenset[bytes]] = {
    **dict.fromkeys(
        (
            "encoder_repetition_penalty", "guidance_scale", "length_penalty", "repeat_penalty",
            "tfs", "tfs_z", "typical", "typical_p",
        ),
        frozenset({b"1", b"1.0"}),
    ),
    **dict.fromkeys(("best_of", "n", "num_beams"), frozenset({b"1"})),
    **dict.fromkeys(
        (
            "add_generation_prompt", "include_reasoning", "parallel_tool_calls",
            "skip_special_tokens",
        ),
        frozenset({b"true"}),
    ),
    **dict.fromkeys(("adaptive_target", "top_n_sigma"), frozenset({b"-1", b"-1.0"})),
    **dict.fromkeys(
        ("n_predict", "num_predict", "max_tokens", "top_k", "truncate_prompt_tokens"),
        frozenset({b"-1"}),
    ),
    "reasoning_format": frozenset({b'"auto"', b'"deepseek"', b'"parsed"'}),
    "response_format": frozenset({b'{"type":"text"}', b'{"type": "text"}'}),
    "tool_choice": frozenset({b'"auto"'}),
    "top_p": frozenset({b"1", b"1.0"}),
}  # fmt: skip
"""Values of fields that programs send for "as without"."""
BUILT = frozenset(field.name for field in fields(Sampling))
"""What the swarm can do: no name of these is refused as a way to sample."""
_OTHER_SAMPLER = (
    f"this way to sample is not built; use {', '.join(SAMPLERS[:-1])} or {SAMPLERS[-1]}"
)
_OTHER_SAMPLERS = {
    name: _OTHER_SAMPLER
    for name in (
        "adaptive_target", "dry_multiplier", "dynatemp_range", "encoder_repetition_penalty",
        "epsilon_cutoff", "eta_cutoff", "guidance_scale", "logits_processors", "min_p_decay",
        "mirostat", "mirostat_mode", "no_repeat_ngram_size", "penalty_alpha", "smoothing_factor",
        "tfs", "tfs_z", "top_a", "top_n_sigma", "typical", "typical_p", "xtc_probability",
    )
    if name not in BUILT
}  # fmt: skip
_STORED = "nothing is stored; send the whole conversation"
_OWN_TEMPLATE = "the model's own chat template is used"
SAMPLING: Mapping[str, str] = {
    **_OTHER_SAMPLERS,
    "allowed_token_ids": "use logit_bias, or a format",
    "bad_words": "use logit_bias",
    "ebnf": "use guided_grammar, in llguidance's dialect",
    "enable_search": "nothing is searched for here; offer a function",
    "grammar": "use guided_grammar, in llguidance's dialect",
    "guided_whitespace_pattern": "a schema may say it, as x-guidance.whitespace_pattern",
    "include_stop_str_in_output": "an answer ends before the text that stops it",
    "json_schema": "use response_format",
    "length_penalty": "beams are not built",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "num_beams": "beams are not built",
    "prompt_logprobs": "use echo with logprobs at /v1/completions",
    "random_seed": "use seed",
    "reasoning_format": "thoughts are reasoning_content; include_reasoning: false omits them",
    "regex": "use guided_regex",
    "repeat_penalty": "use repetition_penalty",
    "return_tokens_as_token_ids": "tokens of log probabilities are texts",
    "skip_special_tokens": "tokens that end an answer are no part of it",
    "stop_regex": "use stop",
    "thinking_budget": "thoughts have no bound of their own",
    "thinking_token_budget": "thoughts have no bound of their own",
    "truncate_prompt_tokens": "what is too long is refused, and nothing is left out of it",
    "use_beam_search": "beams are not built",
}
_SCORED = {
    "logprobs": "log probabilities come from /v1/chat/completions",
    "top_logprobs": "log probabilities come from /v1/chat/completions",
}
ELSEWHERE = "it is no field of this endpoint; see /openapi.json for those that are"
CHANGING = BUILT | {
    "add_generation_prompt", "add_special_tokens", "best_of", "chat_template_kwargs",
    "continue_final_message", "echo", "enable_thinking", "format", "guided_choice",
    "guided_grammar", "guided_json", "guided_regex", "ignore_eos", "images", "include_reasoning",
    "input", "instructions", "max_completion_tokens", "max_output_tokens", "max_tokens",
    "messages", "min_tokens", "modalities", "n", "num_predict", "options", "output_config",
    "output_format", "parallel_tool_calls", "prompt", "raw", "reasoning", "reasoning_effort",
    "repeat_penalty", "response_format", "stop", "stop_sequences", "structured_outputs", "suffix",
    "system", "text", "think", "thinking", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip
"""Fields that change an answer at one endpoint or another, refused where they do not."""
OPTIONS: Mapping[str, str] = {
    **_OTHER_SAMPLERS,
    "dynatemp_exponent": _OTHER_SAMPLER,
    "logit_bias": "use /v1/chat/completions",
}
"""What is refused in Ollama's ``options``."""
REFUSED: Mapping[str, Mapping[str, str]] = {
    "ChatRequest": {
        **SAMPLING,
        "audio": "the model writes text",
        "chat_template": _OWN_TEMPLATE,
        "documents": "put them into a message",
        "echo": "it is for /v1/completions",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "mm_processor_kwargs": "the model reads text",
        "suffix": "use /v1/completions",
        "web_search_options": "nothing is searched for here; offer a function",
    },
    "CompletionRequest": {
        **SAMPLING,
        "tools": "use /v1/chat/completions",
    },
    "OllamaChat": _SCORED,
    "OllamaGenerate": {
        **_SCORED,
        "context": _STORED + " to /api/chat",
        "suffix": "the model writes what follows on a text",
        "template": _OWN_TEMPLATE,
    },
    "MessagesRequest": {
        "container": "nothing is run here",
        "mcp_servers": "nothing is called from here; offer functions",
    },
    "ResponsesRequest": {
        "background": "an answer is made while its request is open",
        "context_management": "what is too long is refused, and nothing is left out of it",
        "conversation": _STORED + " as input",
        "max_tool_calls": "only the program that asks runs tools",
        "previous_response_id": _STORED + " as input",
        "prompt": "no prompts are stored; send instructions and input",
        "top_logprobs": "log probabilities come from /v1/chat/completions",
    },
}
"""By the kind of request that asks for an answer."""


def refused_by(kind: type[msgspec.Struct]) -> Mapping[str, str]:
    """The fields that this kind of request refuses, each with its reason: its own first,
    and none that it has."""
    if (own := REFUSED.get(kind.__name__)) is None:
        return {}
    elsewhere = {**dict.fromkeys(CHANGING, ELSEWHERE), **_OTHER_SAMPLERS}
    named = {**own, **{name: why for name, why in elsewhere.items() if name not in own}}
    return {name: why for name, why in named.items() if name not in kind.__struct_fields__}


def check_fields(given: msgspec.Struct, refused: Mapping[str, str]) -> None:
    """Raises ApiError (400) for the first field that is refused and asks for something; ``given``
    has the fields of a request as they were sent."""
    options = bytes(getattr(given, "options", b""))
    if options.startswith(b"{") and "options" not in refused:
        asked = msgspec.json.decode(options, type=dict[str, msgspec.Raw])
        for name in asked.keys() & OPTIONS.keys():
            _check(name, bytes(asked[name]), OPTIONS[name], f"options.{name}")
    for name, reason in refused.items():
        _check(name, bytes(getattr(given, name)), reason, name)


def _check(name: str, value: bytes, reason: str, at: str) -> None:
    if value not in (ABSENT if name in ASKING else NOTHING) | NEUTRAL.get(name, ABSENT):
        raise bad_request(f"{at} is not supported here: {reason}", at)
