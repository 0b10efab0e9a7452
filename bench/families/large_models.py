"""Large open models by name, made tiny, in the format and with the files as they are published.

Each has the configuration class, the composition (parts that see or hear), the ``auto_map`` and the
packed weights of what its authors published; widths and numbers of layers, experts and heads are
small, and the weights random. What the engine answers for it is compared with what ``transformers``
answers for the same numbers.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.families.every_family import (
    greedy,
    outcome_of,
    small_config,
    write_random,
)
from testing.packed_checkpoints import FORMATS, write

SPARSE = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 16}
REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How a model is published."""

    family: str
    """The class of ``transformers`` that writes it."""
    packed: str = ""
    """Name of its format in :data:`testing.packed_checkpoints.FORMATS`; 16 bits if it is empty."""
    text: dict[str, Any] = field(default_factory=dict)
    """Settings of its language model beyond the small ones."""
    text_type: str = ""
    """Its language model's class, where that is not the composite's default."""
    files: dict[str, Any] = field(default_factory=dict)
    """What ``config.json`` says beyond what ``transformers`` writes."""


FP8, INT4 = "fp8", "compressed-tensors, int4"
LARGE: dict[str, Published] = {
    "gpt-oss": Published(family="gpt_oss", packed="mxfp4"),
    "DeepSeek V3, R1, V3.1": Published(family="deepseek_v3", packed=FP8, files=REMOTE),
    "DeepSeek V3.2": Published(family="deepseek_v32", packed=FP8, text=SPARSE),
    "DeepSeek V4": Published(family="deepseek_v4", packed=FP8, text=SPARSE),
    "Kimi K2": Published(
        family="deepseek_v3", packed=FP8, files={**REMOTE, "model_type": "kimi_k2"}
    ),
    "Kimi K2 Thinking": Published(
        family="deepseek_v3", packed=INT4, files={**REMOTE, "model_type": "kimi_k2"}
    ),
    "Kimi K2.5": Published(family="kimi_k25", packed=INT4),
    "Qwen3-235B-A22B": Published(family="qwen3_moe", packed=FP8),
    "Qwen3-Next": Published(family="qwen3_next", packed=FP8),
    "Qwen3.5": Published(family="qwen3_5_moe", packed=FP8),
    "GLM-4.5, 4.6, 4.7": Published(family="glm4_moe", packed="compressed-tensors, fp8"),
    "GLM-5": Published(
        family="glm_moe_dsa",
        packed=FP8,
        text={**SPARSE, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "MiniMax M2": Published(family="minimax_m2", packed=FP8),
    "MiniMax M3": Published(
        family="minimax_m3_vl",
        text={
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
            "index_block_size": 8,
            "index_topk_blocks": 2,
            "index_head_dim": 16,
        },
    ),
    "Llama 3.3": Published(family="llama"),
    "Llama 4": Published(family="llama4", packed="compressed-tensors, fp8"),
    "Mistral Small 3.1": Published(family="mistral3", text_type="mistral"),
    "Ministral 3": Published(family="mistral3", packed=FP8, text_type="ministral3"),
    "Mistral Large 3": Published(
        family="mistral3",
        packed="compressed-tensors, nvfp4",
        text={"head_dim": 24},  # a third of it is rotated
        text_type="mistral4",
    ),
    "Gemma 3": Published(family="gemma3"),
    "Gemma 4": Published(
        family="gemma4",
        text={
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
    ),
    "Nemotron 3": Published(
        family="nemotron_h",
        packed="modelopt, nvfp4",
        text={
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "moe_shared_expert_intermediate_size": 96,
        },
    ),
    "Seed-OSS": Published(family="seed_oss"),
    "OLMo 3": Published(family="olmo3"),
}


def outcome(name: str) -> tuple[str, str]:
    """What came of a model, and why."""
    return outcome_of(lambda directory: published(LARGE[name], directory))


def published(model: Published, directory: Path) -> tuple[Path, list[int]]:
    """Write the model; returns its files, and what ``transformers`` answers for their numbers."""
    plain, packed, meant = (directory / name for name in ("plain", "packed", "meant"))
    shape = {"q_lora_rank": 32, **model.text}  # blocks divide it
    write_random(small_config(model.family, shape, model.text_type), plain)
    known = plain
    files = plain
    if model.packed:
        write(plain, FORMATS[model.packed], packed, meant)
        files, known = packed, meant
    expected = greedy(known)
    if model.files:
        config = json.loads((files / "config.json").read_text())
        (files / "config.json").write_text(json.dumps({**config, **model.files}))
    return files, expected
