"""What a GGUF file says of its model's numbers, made the settings of transformers' configuration.

transformers maps a part of the keys and leaves out the rest without a word. Here every key of the
file's architecture, as llama.cpp's converter writes them (``gguf-py/gguf/constants.py``), is one
that transformers maps, one that is set here, or one that has no effect on numbers. The model is
refused, and the key named, where one says anything else.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dht.errors import UserError

SETTINGS_VERSION = 3
"""Grows when other text files are made of the same file, so that those made before are not used."""
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
READ_TENSORS = (FREQUENCIES, LONG, SHORT)
"""Tensors that become settings: divisors of rotary frequencies, by pairs of channels."""
Values = Mapping[str, Any]
Factors = Callable[[str], list[float]]
"""Numbers of one of READ_TENSORS."""

SAME = {
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.layer_norm_epsilon": (
        "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps",
    ),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "context_length": ("max_position_embeddings", "n_positions"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
    "residual_scale": ("residual_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
}  # fmt: skip
"""Keys whose value is that of an attribute: the first of these that the configuration has."""
UNNAMED = {"context_length", "feed_forward_length"}
"""Keys that some configurations have no attribute for: models without positions, and those whose
width goes by another one. Tensors show their shapes anyway."""
WITHOUT_EFFECT = {
    "vocab_size", "block_count", "embedding_length", "attention.head_count",
    "attention.head_count_kv", "rope.scaling.finetuned", "tensor_data_layout",
    "pooling_type",
}  # fmt: skip
"""Keys that transformers maps for all architectures, and those that say nothing of numbers."""
ALLOWED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0, 8.0),
    "attention.scale": (0.0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "ssm.dt_b_c_rms": (False,),
}
"""Values that change nothing, of keys that may have others."""
GATES = {"minimax_m2": (1, 2), "gpt_oss": (3,)}
"""Kinds of ``expert_gating_func`` that a model type's code has; others have a softmax, 1."""
LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the sizes whose attention's scale goes by the mean width of heads; that of all others
goes by a head's own. No file says so: llama.cpp tells them by this number (``llama-model.cpp``)."""
MAPPED = {
    "mamba": {"ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank", "ssm.inner_size"},
    "qwen3_5_text": {
        "full_attention_interval", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
        "ssm.time_step_rank", "ssm.inner_size", "rope.dimension_sections", "rope.dimension_count",
        "nextn_predict_layers",
    },
    "lfm2": {"shortconv.l_cache"},
    "minimax_m2": {"rope.dimension_count"},
}  # fmt: skip
"""Further keys that transformers maps, by model type."""
MAPPED["qwen3_5_moe_text"] = MAPPED["qwen3_5_text"]


def settings_of(
    where: str, config: Values, said: Values, names: Sequence[str], factors: Factors
) -> dict[str, Any]:
    """``config``, which transformers made of a file, with all else that the file says.

    ``said``: the file's values by key behind its architecture's name. ``names``: of its tensors.
    Raises UserError for what cannot be said in a configuration of transformers, and for values
    that are missing or of no use, such as a text where a number belongs.
    """
    try:
        return _settings(where, config, said, names, factors)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{where} cannot be served: its file does not say {error}") from error
    except Exception as error:  # whatever strange values make of sums and of transformers
        told = " ".join(str(error).split())[:200]
        raise UserError(f"{where} cannot be served: its settings are not sound: {told}") from error


def _settings(
    where: str, config: Values, said: Values, names: Sequence[str], factors: Factors
) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    kind = config["model_type"]
    known = CONFIG_MAPPING[kind](**config).to_dict()
    found: dict[str, Any] = {}
    handled = MAPPED.get(kind, frozenset()) | WITHOUT_EFFECT
    for key, value in said.items():
        if key in handled or key.startswith("rope.") or _takes(found, known, key, value, kind):
            continue
        if value not in ALLOWED.get(key, ()):
            raise _refused(where, key, value)
    if not EPSILONS & said.keys():
        raise KeyError(min(EPSILONS))  # transformers has one of its own
    found |= _scale(where, kind, known, said)
    for flag, ending in BIASES.items():
        if isinstance(known.get(flag), bool):
            found[flag] = any(name.endswith(ending) for name in names)
    width = _head_width(said)
    if width is not None and known.get("head_dim") is not None:
        found["head_dim"] = width  # by llama.cpp's rule, not by how many of its channels turn
    if width is not None and said.get("attention.value_length", width) != width:
        raise _refused(where, "attention.value_length", said["attention.value_length"])
    turns = None if "rope.dimension_count" in handled else width
    rotary = _rotary(where, known, {k: v for k, v in said.items() if k not in handled}, turns)
    if rotary is None:
        return {**config, **found}
    scaling = _Scaling(where, said, names, factors)
    key = "full_attention" if "full_attention" in rotary else ""
    base = scaling.of(rotary[key] if key else rotary)
    found["rope_parameters"] = {**rotary, key: base} if key else base
    if base["rope_type"] == "longrope" and "original_max_position_embeddings" in known:
        found["original_max_position_embeddings"] = base["original_max_position_embeddings"]
    plain = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    return {**plain, **found}


def _head_width(said: Values) -> int | None:
    """Channels of a head; None where layers have heads of several numbers, or none."""
    heads = said.get("attention.head_count")
    if type(heads) is not int or not heads:
        return None
    return int(said.get("attention.key_length") or said["embedding_length"] // heads)


def _refused(where: str, key: str, value: Any) -> UserError:
    return UserError(
        f"{where} cannot be served: its file says {key[:60]} {str(value)[:60]}, which cannot be"
        " said in transformers' configuration of its architecture"
    )


def _takes(found: dict[str, Any], known: Values, key: str, value: Any, kind: str) -> bool:
    """Whether a key is one whose value the configuration has, which is put into ``found``."""
    if key == "attention.value_length" or (key == "attention.scale" and value):
        return True  # looked at with others
    if key == "expert_gating_func":
        return value in GATES.get(kind, (1,))
    if key == "attention.sliding_window_pattern":
        if isinstance(value, Sequence) and len(value) == known["num_hidden_layers"]:
            names = ("full_attention", "sliding_attention")
            found["layer_types"] = [names[bool(each)] for each in value]
            return "layer_types" in known
        return False
    if isinstance(value, Sequence):
        return len(set(value)) == 1 and _takes(found, known, key, value[0], kind)
    attribute = next((name for name in SAME.get(key, ()) if name in known), None)
    if attribute is None:
        return key in UNNAMED
    if key == "attention.sliding_window":
        value = value or None
        if value and known.get("use_sliding_window") is False:
            return False
    found[attribute] = value
    return True


def _scale(where: str, kind: str, known: Values, said: Values) -> dict[str, Any]:
    """Scale of attention, where it is not that of a head's width."""
    stated, key = said.get("attention.scale"), "query_pre_attn_scalar"
    if key in known:
        heads, hidden = int(said["attention.head_count"]), int(said["embedding_length"])
        own = int(said.get("attention.key_length", hidden // heads))
        if stated:
            return {key: _whole(stated**-2)}
        if known["num_hidden_layers"] == LAYERS_OF_27B.get(kind):
            return {key: hidden // heads}
        if own != known[key]:
            raise UserError(
                f"{where} cannot be served: its file does not say attention.scale, and a model of"
                f" {known['num_hidden_layers']} layers with heads of {own} is none that is known"
            )
        return {}
    if stated:
        raise _refused(where, "attention.scale", stated)
    return {}


def _rotary(where: str, known: Values, said: Values, width: int | None) -> dict[str, Any] | None:
    """Rotary parameters of what ``said`` has of them but their scaling; None where the model's code
    has none. ``width``: channels of a head, all of which turn unless the file says how many; None
    where transformers maps that."""
    own = known.get("rope_parameters")
    if not isinstance(own, Mapping):
        for key, value in said.items():
            if key.startswith("rope.") and key not in ROTARY:
                raise _refused(where, key, value)
        return None
    made = {k: dict(v) if isinstance(v, Mapping) else v for k, v in own.items()}
    full = made.get("full_attention", made)
    full["rope_theta"] = {**UNSAID, **said}["rope.freq_base"]
    if (slow := said.get("rope.freq_base_swa")) is not None:
        if "sliding_attention" not in made:
            raise _refused(where, "rope.freq_base_swa", slow)
        made["sliding_attention"]["rope_theta"] = slow
    turned = said.get("rope.dimension_count")
    if width and "partial_rotary_factor" in full:
        full["partial_rotary_factor"] = (turned or width) / width
    elif turned not in (None, width):
        raise _refused(where, "rope.dimension_count", turned)
    for key, value in said.items():
        if key.startswith("rope.") and key not in ROTARY and ".scaling." not in key:
            raise _refused(where, key, value)
    return made


class _Scaling:
    """What a file says of the scaling of rotary frequencies."""

    def __init__(self, where: str, said: Values, names: Sequence[str], factors: Factors) -> None:
        self._where, self._names, self._factors = where, frozenset(names), factors
        self._context = int(said["context_length"])
        begin = "rope.scaling."
        self._left = {
            key.removeprefix(begin): value
            for key, value in said.items()
            if key.startswith(begin) and key not in WITHOUT_EFFECT
        }
        """Settings by key; those that are understood are taken out."""
        linear = float(said.get("rope.scale_linear", 0.0))
        if linear not in (0.0, 1.0):
            self._left = {"type": "linear", "factor": linear, **self._left}

    def of(self, base: Values) -> dict[str, Any]:
        """Rotary parameters, those of ``base`` scaled. Raises UserError."""
        kind = "longrope" if LONG in self._names or SHORT in self._names else None
        # A factor without a type is a linear one (``llama-model.cpp``).
        unsaid = "none" if self._left.get("factor", 0.0) in (0.0, 1.0) else "linear"
        said = self._left.pop("type", unsaid)
        kind = kind or said
        if FREQUENCIES in self._names:
            if kind != "none":
                raise _refused(self._where, FREQUENCIES, f"beside rope.scaling.type {kind}")
            kind = FREQUENCIES
        kinds = {
            "none": self._plain, "linear": self._linear, "yarn": self._yarn,
            "longrope": self._longrope, FREQUENCIES: self._divided,
        }  # fmt: skip
        if kind not in kinds:
            raise _refused(self._where, "rope.scaling.type", kind)
        plain = {key: base[key] for key in KEPT if key in base}
        made = {**plain, **kinds[kind](base)}
        for key, value in self._left.items():
            if value not in WITHOUT_SCALING.get(key, ()):
                raise _refused(self._where, f"rope.scaling.{key}", value)
        return made

    def _plain(self, _: Values) -> dict[str, Any]:
        return {"rope_type": "default"}

    def _linear(self, _: Values) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": float(self._left.pop("factor"))}

    def _yarn(self, base: Values) -> dict[str, Any]:
        factor = float(self._left.pop("factor"))
        made = {
            **(base if base.get("rope_type") == "yarn" else {}),
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._original(),
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if key in self._left:
                made[name] = float(self._left.pop(key))
        gain = self._gain() * float(self._left.pop("yarn_attn_factor", 1.0))
        if gain != 1.0:  # llama.cpp multiplies what the paper has by it
            made["attention_factor"] = gain * (0.1 * math.log(factor) + 1.0)
        return made

    def _longrope(self, _: Values) -> dict[str, Any]:
        if not {LONG, SHORT} <= self._names:
            raise _refused(self._where, "rope.scaling.type", "longrope, without its factors")
        original, gain = self._original(), self._gain()
        self._left.pop("factor", None)
        return {
            "rope_type": "longrope",
            "factor": self._context / original,
            "short_factor": self._numbers(SHORT),
            "long_factor": self._numbers(LONG),
            "original_max_position_embeddings": original,
            **({} if gain == 1.0 else {"attention_factor": gain}),
        }

    def _divided(self, _: Values) -> dict[str, Any]:
        """Divisors that are the same at all lengths, as Llama 3.1's: by transformers' only kind
        that takes any."""
        divisors = self._numbers(FREQUENCIES)
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": self._context,
        }

    def _original(self) -> int:
        return int(self._left.pop("original_context_length", 0) or self._context)

    def _gain(self) -> float:
        return float(self._left.pop("attn_factor", 0.0) or 1.0)

    def _numbers(self, name: str) -> list[float]:
        found = self._factors(name)
        if not all(math.isfinite(each) and each > 0 for each in found):
            raise _refused(self._where, name, found)
        return found


EPSILONS = frozenset({"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"})
UNSAID = {"rope.freq_base": 10_000.0}
"""What holds where a file does not say it (``llama-hparams.h``)."""
KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rotary parameters that scaling does not change."""

ROTARY = frozenset(
    {"rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear"}
)
WITHOUT_SCALING: dict[str, tuple[Any, ...]] = {
    "factor": (0.0, 1.0),
    "attn_factor": (0.0, 1.0),
    "yarn_ext_factor": (-1.0, 1.0),
    "yarn_log_multiplier": (0.0,),
}
"""Values of further settings of scaling that change nothing."""
BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"}
"""Attributes that say whether a model has biases, and the tensors that show it."""


def _whole(value: float) -> float:
    """A number that was stored rounded: a whole one where it is near."""
    return round(value) if abs(value - round(value)) < 1e-3 * value else value
