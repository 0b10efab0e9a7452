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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench import report
from bench.gpu.engine_gpu import LLAMA_8B, QWEN3_30B_A3B, Shape, llama
from coordinator.plan import plan_offline, plans_json
from coordinator.problem.service import announced_service
from dht.checkpoints.model_files import MANIFEST, Manifest, ShardHashes
from dht.command_line import EXIT_DONE
from dht.messages.types import weight_bytes
from node.plan import fewest_more, named_problem, studied
from node.profiling.data_sheets import GPUS
from testing.paths import ROOT

KINDS = ("3060", "3090", "5090")
PRECISIONS = (None, "int4")
"""16 bits, as published, and 4 bits (``--quantize int4``)."""
MBIT, MS = 100.0, 30.0
LIMIT_S = 5.0
NO_HASH = "0" * 64


MODELS: dict[str, tuple[Shape, int, int]] = {
    "Llama-3.1-8B": (LLAMA_8B, 32, 128256),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 48, 151936),
    "Qwen3-32B": (llama(5120, 25600, 64) | {"model_type": "qwen3", "head_dim": 128}, 64, 151936),
    "Llama-3.3-70B": (llama(8192, 28672, 64), 80, 128256),
    "Qwen3-235B-A22B": (
        {
            **QWEN3_30B_A3B,
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
        },
        94,
        151936,
    ),
}
"""Shapes of published models, their layers, and tokens of their vocabularies."""


def write_empty(name: str, directory: Path) -> None:
    """Write a model's files: all of them, but for the weights' bytes."""
    shape, layers, vocab = MODELS[name]
    config = AutoConfig.for_model(
        **shape,
        num_hidden_layers=layers,
        vocab_size=vocab,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    header: dict[str, Any] = {}
    end = 0
    for key, part in model.state_dict().items():
        begin, end = end, end + part.nbytes
        size = list(part.shape)
        header[key] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
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
        write_empty(name, directory)
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
