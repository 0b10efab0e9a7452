"""How many GPUs of a kind hold a model together, and how fast.

Nothing is measured here: it is what ``anabranch plan --gpus`` says, with speeds from data sheets.
The models' files have the published names and shapes and no content (sparse files), since only
their headers are read. For each model, precision and kind of GPU: the fewest that hold it, and the
tokens/s of one answer that is alone and of a full swarm.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench import report
from coordinator.plan import plan_offline, plans_json
from coordinator.problem.service import announced_service
from dht.checkpoints.model_files import MANIFEST, Manifest, ShardHashes
from dht.command_line import EXIT_DONE
from dht.messages.types import weight_bytes
from node.plan import fewest_more, named_problem, studied
from node.profiling.data_sheets import GPUS
from testing.local_swarm import ROOT

KINDS = ("3060", "3090", "5090")
PRECISIONS = (None, "int4")
"""16 bits, as published, and 4 bits (``--quantize int4``)."""
MBIT, MS = 100.0, 30.0
LIMIT_S = 5.0
NO_HASH = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's published configuration."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    experts: int = 0
    chosen: int = 0


MODELS = {
    "Llama-3.1-8B": Shape(
        kind="llama",
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        vocab=128256,
    ),
    "Qwen3-30B-A3B": Shape(
        kind="qwen3_moe",
        hidden=2048,
        intermediate=768,
        layers=48,
        heads=32,
        kv_heads=4,
        vocab=151936,
        experts=128,
        chosen=8,
    ),
    "Qwen3-32B": Shape(
        kind="qwen3",
        hidden=5120,
        intermediate=25600,
        layers=64,
        heads=64,
        kv_heads=8,
        vocab=151936,
    ),
    "Llama-3.3-70B": Shape(
        kind="llama",
        hidden=8192,
        intermediate=28672,
        layers=80,
        heads=64,
        kv_heads=8,
        vocab=128256,
    ),
    "Qwen3-235B-A22B": Shape(
        kind="qwen3_moe",
        hidden=4096,
        intermediate=1536,
        layers=94,
        heads=64,
        kv_heads=4,
        vocab=151936,
        experts=128,
        chosen=8,
    ),
}


def _configuration(shape: Shape) -> dict[str, Any]:
    classes = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
    config: dict[str, Any] = {
        "architectures": [f"{classes[shape.kind]}ForCausalLM"],
        "model_type": shape.kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if shape.experts:
        config |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.chosen,
            "moe_intermediate_size": shape.intermediate,
        }
    return config


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors."""
    hidden, wide = shape.hidden, shape.heads * shape.head_dim
    narrow = shape.kv_heads * shape.head_dim
    mlp = {
        "gate_proj": (shape.intermediate, hidden),
        "up_proj": (shape.intermediate, hidden),
        "down_proj": (hidden, shape.intermediate),
    }
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (wide, hidden)
        yield f"{at}.self_attn.k_proj.weight", (narrow, hidden)
        yield f"{at}.self_attn.v_proj.weight", (narrow, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, wide)
        if shape.kind != "llama":
            yield f"{at}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{at}.self_attn.k_norm.weight", (shape.head_dim,)
        if shape.experts:
            yield f"{at}.mlp.gate.weight", (shape.experts, hidden)
        for expert in range(shape.experts) if shape.experts else (None,):
            where = f"{at}.mlp" if expert is None else f"{at}.mlp.experts.{expert}"
            yield from ((f"{where}.{name}.weight", each) for name, each in mlp.items())
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab, hidden)


def write_empty(shape: Shape, directory: Path) -> None:
    """Write the model's files: all of them, but for the weights' bytes."""
    (directory / "config.json").write_text(json.dumps(_configuration(shape)))
    header: dict[str, Any] = {}
    end = 0
    for name, size in _tensors(shape):
        begin, end = end, end + 2 * (size[0] * size[1] if len(size) > 1 else size[0])
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    shard = directory / "model.safetensors"
    shard.write_bytes(head)
    os.truncate(shard, len(head) + end)
    hashes = ShardHashes(
        size_bytes=len(head) + end,
        sha256=NO_HASH,
        header_sha256=hashlib.sha256(head).hexdigest(),
        tensors=dict.fromkeys(header, NO_HASH),
    )
    manifest = Manifest(shards={shard.name: hashes})
    (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def fits(name: str, precision: str | None) -> dict[str, Any]:
    """A row: what a model needs in a precision, of each kind of GPU."""
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text) / name
        directory.mkdir()
        write_empty(MODELS[name], directory)
        spec, work = studied(str(directory), precision)
    weights = weight_bytes(spec, 0, spec.layers) + spec.embed_bytes + spec.head_bytes
    row: dict[str, Any] = {
        "model": name,
        "precision": precision or "bfloat16",
        "weights_gib": round(weights / 2**30, 1),
        "gpus": {},
    }
    problem_of = partial(named_problem, spec=spec, work=work, mbit=MBIT, ms=MS)
    for kind in KINDS:
        count = fewest_more((), kind, problem_of)
        if count is None:
            row["gpus"][kind] = None
            continue
        problem = problem_of((kind,) * count)
        found = plans_json(
            plan_offline(problem, announced_service(problem), time_limit_s=LIMIT_S, seed=0)
        )
        row["gpus"][kind] = {
            "count": count,
            "alone_tokens_per_s": found["one_answer_tokens_per_s"],
            "full_tokens_per_s": found["estimate_tokens_per_s"],
        }
    return row


def main() -> int:
    """Run the benchmark."""
    parser = report.parser_of(
        "bench.planner.gpu_fit", __doc__, out=ROOT / "bench" / "results" / "gpu_fit.json"
    )
    arguments = parser.parse_args()
    result = report.provenance(seed=0)
    result |= {
        "mbit": MBIT,
        "ms": MS,
        "kinds": {kind: asdict(GPUS[kind]) for kind in KINDS},
        "rows": [],
    }
    for name in MODELS:
        for precision in PRECISIONS:
            result["rows"].append(fits(name, precision))
            print(result["rows"][-1], flush=True)
            report.write(arguments.out, result)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
