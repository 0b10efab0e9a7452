"""``python -m bench.gpu_kernels``: products of a mixture of experts by tiles, and torch's own.

Each is captured as a CUDA graph and its replay timed, for numbers of tokens from one to a prompt's.
``read_gb_per_s`` counts the matrices of experts that have rows; ``tflop_per_s`` the rows' products.
``--device cpu --tiny`` interprets the kernel, and only proves that the script runs.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.engine_gpu import SEED, device_facts
from bench.report import provenance, write

REPLAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """One product of a layer's mixture of experts."""

    experts: int
    each: int
    """Experts per token."""
    ins: int
    outs: int
    transposed: bool = False


MIXTURES = {
    "qwen3-30b-a3b gate and up": Mixture(experts=128, each=8, ins=2048, outs=1536),
    "qwen3-30b-a3b down": Mixture(experts=128, each=8, ins=768, outs=2048),
    "gpt-oss-20b gate and up": Mixture(experts=32, each=4, ins=2880, outs=5760, transposed=True),
}
TINY = {"tiny": Mixture(experts=4, each=2, ins=32, outs=32)}
TOKENS = (1, 8, 64, 256, 2048)
FEW = (
    (16, 32, 128, 4, 3), (16, 64, 128, 4, 3), (16, 128, 128, 4, 3), (16, 32, 256, 4, 3),
    (16, 64, 64, 4, 4), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (16, 64, 128, 8, 4),
    (16, 32, 128, 4, 5),
)  # fmt: skip
"""Rows, outs and ins of a tile, warps and stages."""
MANY = (
    (64, 128, 32, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3),
    (128, 256, 64, 8, 3), (64, 256, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 32, 8, 4),
)  # fmt: skip


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of ``run``, captured where there is a GPU."""
    run()
    if device.type != "cuda":
        started_s = time.perf_counter()
        run()
        return time.perf_counter() - started_s
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    took_ms = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        took_ms.append(begin.elapsed_time(end))
    return median(took_ms) / 1e3


def timed(mixture: Mixture, tokens: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every variant's times for one number of tokens."""
    from node.kernels import triton_grouped_gemm as ours

    size = (mixture.experts, mixture.outs, mixture.ins)
    numbers = torch.float32 if device.type == "cpu" else torch.bfloat16  # for the interpreter
    weights = torch.randn(size, device=device).to(numbers)
    if mixture.transposed:
        weights = weights.transpose(1, 2).contiguous()
    pairs = tokens * mixture.each
    rows = torch.randn(tokens, mixture.ins, device=device).to(numbers)
    chosen = torch.rand(tokens, mixture.experts, device=device).topk(mixture.each).indices
    read_bytes = len(chosen.unique()) * mixture.ins * mixture.outs * weights.element_size()
    flops = 2 * pairs * mixture.ins * mixture.outs

    def figures(took_s: float) -> dict[str, Any]:
        return {
            "microseconds": round(1e6 * took_s, 1),
            "read_gb_per_s": round(read_bytes / took_s / 1e9),
            "tflop_per_s": round(flops / took_s / 1e12, 1),
        }

    groups = ours.group(chosen, mixture.experts)
    yield {
        "variant": "grouping",
        **figures(seconds(lambda: ours.group(chosen, mixture.experts), device)),
    }
    for tiles in FEW if pairs <= ours.FEW_ROWS * mixture.experts else MANY:
        names = ("rows", "outs", "ins", "warps", "stages")
        made = ours.Tiles(**dict(zip(names, tiles, strict=True)))
        with patch.object(ours, "tiles_for", lambda *_, made=made: made):
            took_s = seconds(
                lambda: ours.grouped_product(
                    rows, weights, None, groups, spread=True, transposed=mixture.transposed
                ),
                device,
            )
        yield {"variant": list(tiles), **figures(took_s)}
    if device.type == "cuda":
        spread = rows[groups.order.long() // mixture.each]
        turned = weights if mixture.transposed else weights.transpose(1, 2)
        took_s = seconds(lambda: torch._grouped_mm(spread, turned, offs=groups.ends), device)
        yield {"variant": "torch", **figures(took_s)}


def main() -> int:
    """Time every variant, print, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_kernels", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="with its number (cuda:0)")
    parser.add_argument("--tiny", action="store_true", help="sizes that prove nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.manual_seed(SEED)
    result: dict[str, Any] = {**provenance(SEED), **device_facts(arguments.device), "rows": []}
    for name, mixture in (TINY if arguments.tiny else MIXTURES).items():
        for tokens in TOKENS[:2] if arguments.tiny else TOKENS:
            for row in timed(mixture, tokens, device):
                result["rows"].append({"product": name, "tokens": tokens, **row})
                print(f"{name}, {tokens} tokens: {row}", flush=True)
        if arguments.out is not None:
            write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
