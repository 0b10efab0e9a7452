"""What dtypes and quantised weights cost in exactness and bring.

Exactness on the bundled model: an engine in float32 answers prompts greedily, and every other
precision is given the same tokens one by one; compared are the logits behind each of them and the
token that would have been chosen. Speed and size on a wider random model as well, where all
precisions take turns in one process and the medians count, because the machine is shared.

``--packed``: packed checkpoints and quantised experts on a small mixture of experts with random
weights, and GGUF files of a dense model, written in each published format: bytes of a layer and the
peak while all are read, beside the bytes of the files; errors beside the numbers that the format
means, and beside those packed.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from bench.report import parser_of, provenance, write
from bench.speed.real_sizes import decode_s
from dht.messages.session import Sampling
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.weights.store import WeightStore
from testing.gguf_files import of_kind, write_gguf
from testing.packed_checkpoints import formats
from testing.packed_checkpoints import write as write_packed
from testing.paths import ROOT
from testing.random_model import make_llama
from testing.tiny_families import make

SEED = 0
BROOK = ROOT / "models" / "brook"
PRECISIONS: tuple[tuple[str, str | None], ...] = (
    ("float32", None),
    ("bfloat16", None),
    ("float16", None),
    ("float32", "int8"),
    ("float32", "int4"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
)
PROMPTS = (
    "One morning a small fox",
    "Long ago, by the river, there lived",
    "The old clock in the tower",
    "Mia wanted to build a boat, but",
    "It was raining when the baker",
    "Tom had a red kite that",
    "Deep in the forest a lantern",
    "When winter came, the geese",
)
NEW_TOKENS = 64
WIDE = (1024, 4)
"""Hidden width and layers of the random model."""
MIXTURE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size",), 1536),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), 768),
    **dict.fromkeys(("num_experts", "num_local_experts"), 8),
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 6,
    "initializer_range": 0.03,
}
"""Configuration of the random mixtures of experts."""
FAMILY, EXPERTS_FAMILY, DENSE_FAMILY = "qwen3_moe", "gpt_oss", "qwen2"
"""A mixture whose experts are stored one by one, one of stacked experts, and a dense model, whose
GGUF files llama.cpp writes without moving rows."""
DENSE = {**MIXTURE, "intermediate_size": 3072, "head_dim": None}
GGUF_KINDS = ("Q8_0", "Q6_K", "Q4_K", "Q4_0", "Q5_0")
"""Types of blocks, the last one without code on tensors."""
GROUP, BLOCK = 128, (128, 128)
"""Columns in a group and sizes of a block of most published checkpoints."""
RARE = ("fp8, ragged blocks", "modelopt, nvfp4", "compressed-tensors, int4 with zeros")
"""Formats that differ from another one in names or edges alone; tests have them."""
FORCED_TOKENS = 4
STREAMS = (1, 8)
DECODE, ROUNDS = 8, 3
THREADS = 1
MEMORY_BYTES = 1 << 30


def engine_of(directory: Path, dtype: str, quantize: str | None) -> Engine:
    """An engine with the whole model."""
    store = WeightStore.open(str(directory))
    engine = Engine(
        EngineConfig(
            store=store,
            name=directory.name,
            memory_bytes=MEMORY_BYTES,
            dtype=dtype,
            quantize=quantize,
        )
    )
    engine.load(0, engine.spec.layers)
    return engine


def peak_bytes(directory: Path, quantize: str | None) -> int:
    """Most memory that loading the whole model took beyond what the process had, in its own."""
    code = (
        "import sys; from pathlib import Path;"
        " from bench.families.quantization import load_peak_bytes;"
        "print(load_peak_bytes(Path(sys.argv[1]), sys.argv[2] or None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory), quantize or ""],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


def load_peak_bytes(directory: Path, quantize: str | None) -> int:
    """:func:`peak_bytes` of this process; on Linux, where memory that a peak took is told."""
    torch.set_num_threads(THREADS)
    store = WeightStore.open(str(directory))
    config = EngineConfig(
        store=store, name="peak", memory_bytes=MEMORY_BYTES, dtype="bfloat16", quantize=quantize
    )
    engine = Engine(config)
    engine.load(0, 1)  # libraries whose code is loaded on use
    engine.unload()
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    engine.loaded.set(0, engine.spec.layers)
    return _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def published_bytes(directory: Path) -> tuple[int, int]:
    """Bytes of the largest layer in the files, and of all tensors."""
    layers: Counter[str] = Counter()
    entries = WeightStore.open(str(directory)).tensors.items()
    for name, entry in entries:
        if (found := re.search(r"(?:\.layers|^blk)\.(\d+)\.", name)) is not None:
            layers[found[1]] += entry.size_bytes
    return max(layers.values()), sum(entry.size_bytes for _, entry in entries)


def packed_rows(directory: Path) -> dict[str, Any]:
    """Sizes, errors and tokens/s of each published format, and of experts that a peer packs."""
    rows: dict[str, Any] = {}
    for family in (FAMILY, EXPERTS_FAMILY, DENSE_FAMILY):
        plain = directory / family
        shape = DENSE if family == DENSE_FAMILY else MIXTURE
        make(plain, family, dtype=torch.bfloat16, **shape)
        prompts = [[(7 * n + at) % 101 for at in range(16)] for n in range(len(PROMPTS))]
        source = engine_of(plain, "float32", None)
        right = answers(source, prompts, None, FORCED_TOKENS)
        kinds: dict[str, tuple[Path, Path | None, str | None]] = {
            f"{family} in bfloat16": (plain, None, None),
            **{f"{family}, --quantize {k}": (plain, None, k) for k in ("int8", "int4")},
        }
        for name, published in formats(GROUP, BLOCK).items():
            if name in RARE or family == DENSE_FAMILY:
                continue
            if published.of_experts == (family == EXPERTS_FAMILY):
                packed, meant = directory / f"packed, {name}", directory / f"meant, {name}"
                write_packed(plain, published, packed, meant)
                kinds[name] = (packed, meant, None)
        for kind in GGUF_KINDS if family == DENSE_FAMILY else ():
            file, meant = directory / f"{kind}.gguf", directory / f"meant, {kind}"
            write_gguf(plain, file, of_kind(kind))
            model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=file.name)
            meant.mkdir()
            shutil.copy(plain / "config.json", meant)
            save_file(model.state_dict(), meant / "model.safetensors")
            kinds[f"gguf, {kind}"] = (file, meant, None)
        engines: dict[str, Engine] = {}
        for name, (place, meant, quantize) in kinds.items():
            layer_bytes, all_bytes = published_bytes(place)
            exact = engine_of(place, "float32", quantize)
            reference = right
            if meant is not None:
                reference = answers(
                    engine_of(meant, "float32", None), prompts, right.token_ids, FORCED_TOKENS
                )
            given = answers(exact, prompts, right.token_ids, FORCED_TOKENS)
            engines[name] = engine_of(place, "bfloat16", quantize)
            rows[name] = {
                "published_layer_bytes": layer_bytes,
                "layer_bytes_of_published": round(engines[name].spec.layer_bytes / layer_bytes, 3),
                "peak_bytes_of_published": round(peak_bytes(place, quantize) / all_bytes, 3),
                "error_of_reference": compare(reference, given)["logit_error_max"],
                "error_of_packed": compare(right, given)["logit_error_mean"],
                "logit_spread": compare(right, given)["logit_spread"],
            }
            print(f"  {name}: {rows[name]}", flush=True)
        for name, rate in speeds(engines).items():
            rows[name]["tokens_per_s"] = rate
    return rows


def named(dtype: str, quantize: str | None) -> str:
    return dtype if quantize is None else f"{quantize} in {dtype}"


@dataclass
class Answers:
    """What one precision says behind each token of each prompt's answer."""

    token_ids: torch.Tensor
    """``[prompts, tokens]``, the token that it would choose."""
    logits: torch.Tensor
    """``[prompts, tokens, vocab]`` in float32."""


def answers(
    engine: Engine,
    prompts: list[list[int]],
    forced: torch.Tensor | None,
    new_tokens: int = NEW_TOKENS,
) -> Answers:
    """Greedy answers; ``forced`` are the tokens to go on with instead of one's own."""
    seen: list[torch.Tensor] = []
    head = engine.loaded.head
    assert head is not None
    hook = head.register_forward_hook(lambda *call: seen.append(call[-1].float().clone()))
    ids = [list(prompt) for prompt in prompts]
    chosen: list[list[int]] = []
    at = [0] * len(prompts)
    for n, prompt in enumerate(prompts):
        assert engine.kv.reserve(str(n), len(prompt) + new_tokens) is None
    for step in range(new_tokens):
        items = [
            WorkItem(
                session=str(n),
                start=0,
                end=engine.spec.layers,
                position=at[n],
                token_ids=tuple(ids[n][at[n] :]),
                sampling=Sampling(),
            )
            for n in range(len(prompts))
        ]
        results = engine.step(items)
        chosen.append([result.token_id or 0 for result in results])
        for n, token_id in enumerate(chosen[-1]):
            at[n] = len(ids[n])
            ids[n].append(token_id if forced is None else int(forced[n, step]))
    for n in range(len(prompts)):
        engine.kv.free(str(n))
    hook.remove()
    return Answers(token_ids=torch.tensor(chosen).T, logits=torch.stack(seen, dim=1))


def compare(right: Answers, got: Answers) -> dict[str, Any]:
    """Errors against float32. Logits are compared as they are, and relative to their spread."""
    error = (got.logits - right.logits).abs()
    agree = got.token_ids == right.token_ids
    gap = right.logits.topk(2, dim=-1).values
    clear = (gap[..., 0] - gap[..., 1]) > 1.0
    return {
        "logit_error_max": round(float(error.max()), 5),
        "logit_error_mean": round(float(error.mean()), 6),
        "logit_spread": round(float(right.logits.std()), 3),
        "greedy_agreement": round(float(agree.float().mean()), 4),
        "greedy_agreement_where_clear": round(float(agree[clear].float().mean()), 4),
    }


def speeds(engines: dict[str, Engine]) -> dict[str, dict[str, float]]:
    """Tokens/s by precision and streams."""
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for precision, engine in engines.items():
            for streams in STREAMS:
                times.setdefault((precision, streams), []).append(
                    decode_s(engine, streams, DECODE, 0)
                )
    return {
        precision: {
            str(streams): round(streams / median(times[precision, streams]), 1)
            for streams in STREAMS
        }
        for precision in engines
    }


def measure() -> dict[str, Any]:
    """Everything, by model."""
    tokenizer = Tokenizer.from_file(str(BROOK / "tokenizer.json"))
    prompts = [list(tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    result: dict[str, Any] = {"brook": {"prompts": len(PROMPTS), "new_tokens": NEW_TOKENS}}
    engines = {named(*each): engine_of(BROOK, *each) for each in PRECISIONS}
    right = answers(engines["float32"], prompts, None)
    rates = speeds(engines)
    result["brook"]["precisions"] = {
        precision: {
            "layer_bytes": engine.spec.layer_bytes,
            **compare(right, answers(engine, prompts, right.token_ids)),
            "tokens_per_s": rates[precision],
        }
        for precision, engine in engines.items()
    }
    with tempfile.TemporaryDirectory(prefix="anabranch-") as name:
        directory = Path(name) / f"{WIDE[0]}x{WIDE[1]}"
        make_llama(directory, hidden=WIDE[0], layers=WIDE[1], seed=SEED)
        wide = {named(*each): engine_of(directory, *each) for each in PRECISIONS}
        rates = speeds(wide)
        result[directory.name] = {
            "precisions": {
                precision: {
                    "layer_bytes": engine.spec.layer_bytes,
                    "tokens_per_s": rates[precision],
                }
                for precision, engine in wide.items()
            }
        }
    return result


def main() -> int:
    """Measure, print, write."""
    parser = parser_of("bench.families.quantization", __doc__.split("\n\n", maxsplit=1)[0])
    results = ROOT / "bench" / "results"
    packed = "packed checkpoints and experts instead"
    parser.add_argument("--packed", action="store_true", help=packed)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    logging.disable_progress_bar()
    stamp = {**provenance(SEED), "threads": THREADS}
    if arguments.packed:
        with tempfile.TemporaryDirectory(prefix="anabranch-") as name:
            rows = packed_rows(Path(name))
        write(arguments.out or results / "quantization_packed.json", {**stamp, "rows": rows})
        return 0
    result = {**stamp, **measure()}
    write(arguments.out or results / "quantization.json", result)
    for model in ("brook", f"{WIDE[0]}x{WIDE[1]}"):
        print(model)
        for precision, row in result[model]["precisions"].items():
            print(f"  {precision}: {row}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
