"""``python -m bench.quantization``: what dtypes and quantised weights cost in exactness and bring.

Exactness on the bundled model: an engine in float32 answers prompts greedily, and every other
precision is given the same tokens one by one; compared are the logits behind each of them and the
token that would have been chosen. Speed and size on a wider random model as well, where all
precisions take turns in one process and the medians count, because the machine is shared.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.local_swarm import ROOT
from bench.random_model import make_llama
from bench.report import provenance, write
from dht.messages.session import Sampling
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.weights.store import WeightStore

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


def named(dtype: str, quantize: str | None) -> str:
    return dtype if quantize is None else f"{quantize} in {dtype}"


@dataclass
class Answers:
    """What one precision says behind each token of each prompt's answer."""

    token_ids: torch.Tensor
    """``[prompts, tokens]``, the token that it would choose."""
    logits: torch.Tensor
    """``[prompts, tokens, vocab]`` in float32."""


def answers(engine: Engine, prompts: list[list[int]], forced: torch.Tensor | None) -> Answers:
    """Greedy answers; ``forced`` are the tokens to go on with instead of one's own."""
    seen: list[torch.Tensor] = []
    head = engine._range.head
    assert head is not None
    hook = head.register_forward_hook(lambda *call: seen.append(call[-1].float().clone()))
    ids = [list(prompt) for prompt in prompts]
    chosen: list[list[int]] = []
    at = [0] * len(prompts)
    for n, prompt in enumerate(prompts):
        assert engine.reserve(str(n), len(prompt) + NEW_TOKENS) is None
    for step in range(NEW_TOKENS):
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
        engine.free(str(n))
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


def decode_s(engine: Engine, streams: int) -> float:
    """Seconds of one decode step over all layers, the median of DECODE steps."""
    for n in range(streams):
        assert engine.reserve(str(n), DECODE + 1) is None
    seconds = []
    for at in range(DECODE):
        items = [
            WorkItem(
                session=str(n),
                start=0,
                end=engine.spec.layers,
                position=at,
                token_ids=(n + 1,),
                sampling=Sampling(),
            )
            for n in range(streams)
        ]
        started_s = time.perf_counter()
        engine.step(items)
        seconds.append(time.perf_counter() - started_s)
    for n in range(streams):
        engine.free(str(n))
    return median(seconds)


def speeds(engines: dict[str, Engine]) -> dict[str, dict[str, float]]:
    """Tokens/s by precision and streams."""
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for precision, engine in engines.items():
            for streams in STREAMS:
                times.setdefault((precision, streams), []).append(decode_s(engine, streams))
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
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantization", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    default = ROOT / "bench" / "results" / "quantization.json"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    result = {**provenance(SEED), "threads": THREADS, **measure()}
    write(arguments.out, result)
    for model in ("brook", f"{WIDE[0]}x{WIDE[1]}"):
        print(model)
        for precision, row in result[model]["precisions"].items():
            print(f"  {precision}: {row}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
