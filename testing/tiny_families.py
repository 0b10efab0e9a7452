"""A tiny model with random weights of each family that the engine is held against."""

import tempfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from node.model.inspection.meta_model import auto_class

LAYERS, VOCAB, CONTEXT, WINDOW = 4, 101, 256, 24

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Rotary parameters of a kind of scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[1.0, 2.0, 4.0, 8.0],
    original_max_position_embeddings=64,
)
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
}

SPARSE = {
    **LATENT,
    "n_group": 1,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, many tokens have no score at all, and ties fall at random
}
"""Attention to the tokens that an indexer chooses."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, linear rope": ("llama", rope("linear", factor=4.0)),
    "llama, dynamic rope": ("llama", rope("dynamic", factor=2.0)),
    "llama, yarn": ("llama", YARN),
    "llama, llama3 rope": ("llama", LLAMA3),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 16,
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, longrope": (
        "phi3",
        # Phi-3's configuration goes by this one, and by 4096 where it is not named.
        {"sliding_window": None, "original_max_position_embeddings": 64, **LONGROPE},
    ),
    "olmo2": ("olmo2", {}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {}),
    "falcon, alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False}),
    "falcon, rotary": ("falcon", {"alibi": False, "new_decoder_architecture": True}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": CONTEXT}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "embedding_multiplier": 3.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"logit_scale": 0.25, "sliding_window": WINDOW}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v32": ("deepseek_v32", SPARSE),
    "glm_moe_dsa": ("glm_moe_dsa", SPARSE),
    "glm_moe_dsa, chosen before": (
        "glm_moe_dsa",
        {**SPARSE, "indexer_types": ["full", "shared", "shared", "full"]},
    ),
    "minimax_m3": (
        "minimax_m3_vl_text",
        {
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "index_head_dim": 16,
        },
    ),
    "gemma4, inputs and shared keys": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
        },
    ),
    "gpt2": ("gpt2", {"n_positions": CONTEXT}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bart": (
        "bart",  # counts positions from the length of its cache
        {
            "d_model": 32,
            "is_decoder": True,
            "forced_eos_token_id": None,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        },
    ),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "nemotron": ("nemotron", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "smollm3": ("smollm3", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("phi", {}),
    "gptj": ("gptj", {"n_positions": CONTEXT, "rotary_dim": 8}),
    "llama4_text": (
        "llama4_text",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "moe_layers": [1, 3],
            "attn_temperature_tuning": False,
        },
    ),
    "llama4_text, by position": (
        "llama4_text",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 512,  # beyond it transformers' cache differs from its own mask
            "no_rope_layers": [1, 0, 1, 0],
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
    ),
    "mamba": ("mamba", {"state_size": 8}),
    "falcon_h1": (
        "falcon_h1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
    "falcon_h1, longrope": (
        "falcon_h1",  # session by session, chunk by chunk
        {
            **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
            **LONGROPE,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **MIXTURE,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "gemma3, sees": (
        "gemma3",
        {"text_config": {"head_dim": 8, "sliding_window": WINDOW}, "vision_config": EYES},
    ),
    "mistral3, sees": (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 8},
            "vision_config": {**EYES, "model_type": "pixtral"},
        },
    ),
    "qwen2_vl, sees": (
        "qwen2_vl",
        {
            "text_config": {
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}
            },
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
        },
    ),
}
"""By name: the family as ``transformers`` calls it, and what its configuration has beyond
:data:`SHAPE`."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent_gemma": ("recurrent_gemma", {"lru_width": 32}),
    "rwkv": ("rwkv", {}),
}
"""Families that cannot be served, likewise."""


def make(directory: Path, name: str, *, dtype: torch.dtype = torch.float32, **shape: Any) -> Any:
    """Write the named model's files to ``directory``; returns it, in float32.

    ``shape`` goes before :data:`SHAPE` and what the family has.
    """
    family, extra = {**FAMILIES, **REFUSED}[name]
    torch.manual_seed(1)
    known = {key: value for key, value in shape.items() if key in {**SHAPE, **extra}}
    given = {**SHAPE, **extra, **known}
    if kinds := given.get("layer_types"):
        given["layer_types"] = list(islice(cycle(kinds), given["num_hidden_layers"]))
    if "text_config" in extra:  # one that also sees
        given = {**extra, "text_config": {**SHAPE, **extra["text_config"]}}
    config = AutoConfig.for_model(family, **given)
    model = auto_class(config).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.abs().max() == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases count, too
    model.to(dtype).save_pretrained(directory)
    return model.float()


HEADED = ("deepseek_v3", "glm4_moe", "qwen3_next")
"""Families whose published checkpoints have a head of their own that foretells tokens."""
BEHIND_LAYERS = {
    "block": "model.layers.{layers}.",
    "embedding_norm": "model.layers.{layers}.enorm.",
    "hidden_norm": "model.layers.{layers}.hnorm.",
    "projection": "model.layers.{layers}.eh_proj.",
    "norm": "model.layers.{layers}.shared_head.norm.",
}
BESIDE_MODEL = {
    "block": "mtp.layers.0.",
    "embedding_norm": "mtp.pre_fc_norm_embedding.",
    "hidden_norm": "mtp.pre_fc_norm_hidden.",
    "projection": "mtp.fc.",
    "norm": "mtp.norm.",
}


def _published(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors as they are published: experts one by one."""
    for key, tensor in tensors.items():
        stem, _, kind = key.rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            yield key, tensor
            continue
        for number, expert in enumerate(tensor):
            halves = expert.chunk(2) if kind == "gate_up_proj" else [expert]
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, half in zip(parts, halves, strict=True):
                yield f"{stem}.experts.{number}.{part}.weight", half.contiguous()


def add_own_head(
    directory: Path, name: str, *, copies_embedding: bool = False, **shape: Any
) -> None:
    """Add a head with random weights to the files of the named model in ``directory``, under the
    names that its family publishes; ``shape`` as in :func:`make`.

    ``copies_embedding``: one whose guess is what the output head says of the newest token's
    embedding.
    """
    family, extra = FAMILIES[name]
    kinds = {"layer_types": ["full_attention"]} if "layer_types" in extra else {}
    dense = {"first_k_dense_replace": 0} if "first_k_dense_replace" in extra else {}
    torch.manual_seed(2)
    given = {**SHAPE, **extra, **shape, **kinds, **dense, "num_hidden_layers": 1}
    config = AutoConfig.for_model(family, **given)
    if hasattr(config, "mlp_layer_types"):  # a head has experts, whatever the first layers have
        config.mlp_layer_types = ["sparse"]
    model = auto_class(config).from_config(config)
    width = int(config.hidden_size)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 or parameter.abs().max() == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if copies_embedding and any(each in key for each in ("o_proj", "down_proj")):
                parameter.zero_()  # the layer adds nothing
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        block = load_file(Path(made) / "model.safetensors")
    names = BESIDE_MODEL if family == "qwen3_next" else BEHIND_LAYERS
    layers = shape.get("num_hidden_layers", LAYERS)
    names = {part: begin.format(layers=layers) for part, begin in names.items()}
    path = directory / "model.safetensors"
    tensors = load_file(path)
    norm = block["model.norm.weight"]
    for key, tensor in _published(block):
        if key.startswith("model.layers.0."):
            tensors[names["block"] + key.removeprefix("model.layers.0.")] = tensor
    projection = torch.randn(width, 2 * width) * 0.2
    if copies_embedding:
        projection = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    for part, tensor in {
        "norm": norm,
        "embedding_norm": norm + torch.randn(width) * 0.1,
        "hidden_norm": norm + torch.randn(width) * 0.1,
        "projection": projection,
    }.items():
        tensors[names[part] + "weight"] = tensor.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
