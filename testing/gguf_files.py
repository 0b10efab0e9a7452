"""GGUF files from plain checkpoints, written by the ``gguf`` package.

The numbers are those of the checkpoint, changed as llama.cpp's own converter changes them, so that
whoever reads a file in plain numbers is compared with the checkpoint that it was made from.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from dht.checkpoints.model_files import library_config
from node.model.inspection.meta_model import auto_class

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""What llama.cpp calls families that transformers calls otherwise."""
OFFSET_NORMS = ("gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")
"""Architectures whose files hold the weights of norms with one added."""
STATED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of Qwen3.5, and what transformers calls them."""
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q5_K": (0, 2), "IQ4_XS": (0,), "IQ3_S": (0,),
    "IQ2_XS": (0,),
}  # fmt: skip
"""Places of the float16 numbers in blocks that neither the package nor this module can make."""
SCALE, TINY = 2e-4, 1e-6
Packed = Callable[[str, np.ndarray], str]
"""Type of a tensor in a file, by its name there and its numbers."""


def of_kind(*kinds: str) -> Packed:
    """These types in turn for matrices whose rows are whole blocks, float32 for all else."""

    def kind_of(name: str, array: np.ndarray) -> str:
        kind = kinds[sum(map(ord, name.partition("_")[2])) % len(kinds)]
        block = gguf.GGML_QUANT_SIZES[Kind[kind]][0]
        is_matrix = array.ndim > 1 and min(array.shape) > 1
        return kind if is_matrix and array.shape[-1] % block == 0 else "F32"

    return kind_of


def q4_k(blocks: np.ndarray) -> np.ndarray:
    """Blocks of 256 numbers, ``[blocks, 256]``, as Q4_K: eight scales and minima of 6 bits."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(-1), 0)
    sizes = (groups.max(-1) + least) / 15
    factors = [np.float16(np.maximum(each.max(-1), TINY) / 63) for each in (sizes, least)]
    d, dmin = (each.astype(np.float32)[:, None] for each in factors)
    scales = np.clip(np.round(sizes / d), 0, 63).astype(np.uint8)
    minima = np.clip(np.round(least / dmin), 0, 63).astype(np.uint8)
    step = np.maximum(d * scales, TINY)[..., None]
    codes = np.clip(np.round((groups + (dmin * minima)[..., None]) / step), 0, 15).astype(np.uint8)
    six = [
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | minima[:, 4:] << 4,
    ]
    halves = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(len(blocks), -1)
    return np.concatenate([*(f.view(np.uint8).reshape(-1, 2) for f in factors), *six, halves], -1)


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """Blocks of 256 numbers, ``[blocks, 256]``, as Q6_K: sixteen scales of 8 bits."""
    groups = blocks.reshape(-1, 16, 16)
    sizes = np.abs(groups).max(-1) / 31
    factor = np.float16(np.maximum(sizes.max(-1), TINY) / 127)
    d = factor.astype(np.float32)[:, None]
    scales = np.clip(np.round(sizes / d), 1, 127).astype(np.int8)
    codes = np.clip(np.round(groups / (d * scales)[..., None]), -32, 31) + 32
    whole = codes.astype(np.uint8).reshape(-1, 2, 128)
    low = (whole & 15).reshape(-1, 2, 2, 64)
    high = (whole >> 4).reshape(-1, 2, 4, 32)
    parts = [
        low[:, :, 0] | low[:, :, 1] << 4,
        high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6,
        scales.view(np.uint8),
        factor.view(np.uint8).reshape(-1, 2),
    ]
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], -1)


QUANTISED = {"Q4_K": q4_k, "Q6_K": q6_k}


def packed(array: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Numbers as the bytes of a type; made up bytes where nothing here can make its blocks."""
    if kind in QUANTISED:
        return QUANTISED[kind](array.reshape(-1, 256)).reshape(*array.shape[:-1], -1)
    if kind not in SCALES:
        return gguf.quants.quantize(array, Kind[kind])
    numbers, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    count = array.size // numbers
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for place in SCALES[kind]:
        scales = (SCALE * rng.uniform(0.5, 1.5, (count, 1))).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def tokens_of(directory: Path) -> dict[str, Any]:
    """The byte-level tokenizer in ``directory`` as a GGUF file has it, by keys."""
    said = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "config.json").read_text())
    special = {token["id"] for token in said["added_tokens"]}
    ids = {token["content"]: token["id"] for token in said["added_tokens"]} | said["model"]["vocab"]
    names = sorted(ids, key=ids.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in said["model"]["merges"]]
    return {
        "ggml.model": "gpt2",
        "ggml.tokens": names,
        "ggml.token_type": [3 if ids[name] in special else 1 for name in names],
        "ggml.merges": merges,
        "ggml.bos_token_id": config["bos_token_id"],
        "ggml.eos_token_id": config["eos_token_id"],
        "ggml.add_bos_token": True,
    }


def write_gguf(
    plain: Path,
    file: Path,
    kind_of: Packed,
    *,
    tokens: Mapping[str, Any] | None = None,
    stated: Mapping[str, Any] = MappingProxyType({}),
    beside: Mapping[str, Sequence[float]] = MappingProxyType({}),
    splits: int = 0,
) -> None:
    """Write the checkpoint in the directory ``plain`` as a GGUF file.

    ``tokens`` are values of its tokenizer by their keys behind ``tokenizer.``; without them it has
    a vocabulary of nameless tokens. ``stated``: further settings of the model; those that are
    None are left out. ``beside``: vectors that are no parameters. ``splits``: how many
    tensors go into one file; 0: all.
    """
    config = library_config(plain)
    model = auto_class(config).from_pretrained(plain, dtype=torch.float32)
    family = config.model_type
    architecture = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=splits)
    for key, value in {**_settings(architecture, model), **stated}.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    nameless = {"ggml.tokens": [f"<{n}>" for n in range(config.vocab_size)]}
    for key, value in (tokens or nameless).items():
        _add(writer, f"tokenizer.{key}", value)
    rng = np.random.default_rng(0)
    for name, array in _tensors(model, architecture, config.num_hidden_layers):
        kind = kind_of(name, array)
        writer.add_tensor(name, packed(array, kind, rng), raw_dtype=Kind[kind])
    for name, numbers in beside.items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _settings(architecture: str, model: Any) -> dict[str, Any]:
    config = model.config
    keys = GGUF_CONFIG_MAPPING.get(architecture) or GGUF_CONFIG_MAPPING.get(config.model_type)
    keys = keys or STATED
    rotary = getattr(config, "rope_parameters", None) or {}
    # Where each kind of layer has its own, the file names that of full attention.
    theta = (rotary.get("full_attention") or rotary).get("rope_theta", 1e4)
    found = {key: getattr(config, name, None) for key, name in keys.items() if name}
    found |= {"rope.freq_base": theta if rotary else None, "vocab_size": None}
    width, heads = getattr(config, "head_dim", None), getattr(config, "num_attention_heads", None)
    if width and heads and width != config.hidden_size // heads:
        found.setdefault("attention.key_length", width)  # as llama.cpp's converter states it
    if architecture == "lfm2":
        heads = config.num_key_value_heads
        found["attention.head_count_kv"] = [
            heads if kind == "full_attention" else 0 for kind in config.layer_types
        ]
        found["attention.layer_norm_rms_epsilon"] = config.norm_eps
        found["feed_forward_length"] = model.model.layers[0].feed_forward.w1.out_features
    kinds = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in kinds:
        found["attention.sliding_window_pattern"] = [k == "sliding_attention" for k in kinds]
    if (part := (rotary.get("full_attention") or rotary).get("partial_rotary_factor")) is not None:
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        found["rope.dimension_count"] = int(width * part)
    if (scalar := getattr(config, "query_pre_attn_scalar", None)) is not None:
        found["attention.scale"] = float(scalar) ** -0.5
    if keys is STATED:
        found["full_attention_interval"] = config.layer_types.index("full_attention") + 1
        found["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        found["rope.dimension_sections"] = [*rotary.get("mrope_section", (1, 1, 0)), 0]
    return {key: value for key, value in found.items() if value is not None}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _tensors(
    model: torch.nn.Module, architecture: str, layers: int
) -> Sequence[tuple[str, np.ndarray]]:
    """Names in GGUF files and numbers of a model's weights."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    tied = model.config.tie_word_embeddings  # type: ignore[union-attr]
    found = []
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        array = weight.numpy()
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = np.split(array, 2, axis=1)
            found += [(f"blk.{layer}.ffn_gate_exps.weight", gate)]
            found += [(f"blk.{layer}.ffn_up_exps.weight", up)]
            continue
        told = name.replace("dt_bias", "dt_proj.bias")
        inner = told.removeprefix("transformer.")
        known = next(
            filter(
                None,
                # llama.cpp's converter takes the outermost name of some families away first.
                (names.get_name(each, (".weight", ".bias")) for each in (told, inner)),
            ),
            None,
        )
        if known is None:
            raise ValueError(f"{name} has no name in a GGUF file of {architecture}")
        if name.endswith("experts.down_proj"):
            known += ".weight"
        found.append((known, _as_stored(architecture, name, array, model.config)))
    return found


def _as_stored(architecture: str, name: str, array: np.ndarray, config: Any) -> np.ndarray:
    if architecture == "llama" and ".q_proj." in name:
        return _paired(array, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in name:
        return _paired(array, config.num_key_value_heads)
    if architecture in OFFSET_NORMS and name.endswith("norm.weight"):
        return array if name.endswith("linear_attn.norm.weight") else array + 1
    if name.endswith((".conv.weight", ".conv1d.weight")):
        return array[:, 0]
    if name.endswith("A_log"):
        return -np.exp(array)
    if ".query_key_value." in name:  # all queries first, then all keys and all values
        heads = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(array.shape)
    if architecture == "gpt2" and ".h." in name and array.ndim > 1:  # its matrices are turned
        return np.ascontiguousarray(array.T)
    return array


def _paired(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys with the channels that are turned together side by side."""
    rows = array.reshape(heads, 2, -1, *array.shape[1:])
    turned: np.ndarray = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)
    return turned
