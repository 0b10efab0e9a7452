"""Products of a mixture of experts by tiles, and torch's own.

Each is captured as a CUDA graph and its replay timed, for numbers of tokens from one to a prompt's.
``read_gb_per_s`` counts the matrices of experts that have rows; ``tflop_per_s`` the rows' products.
``--packed``: products by one packed matrix or a mixture's, beside those by numbers in bfloat16; a
graph goes through several copies, more than a cache holds. ``--device cpu --tiny`` interprets the
kernels, and only proves that the script runs.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from bench.gpu.engine_gpu import SEED, device_facts
from bench.report import parser_of, provenance, write

if TYPE_CHECKING:
    from node.packed.tensor import PackedTensor

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
    from node.kernels.triton import grouped_gemm as ours

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One packed matrix, or those of a mixture's experts."""

    code: str
    outs: int
    ins: int
    columns: int
    rows: int = 1
    """Rows that share a scale."""
    experts: int = 0
    each: int = 1

    def drawn(self, device: torch.device) -> "PackedTensor":
        """One with random codes; scales are exponents for 32 columns of E2M1, and codes of 4 bits
        have zero points."""
        from node.packed.packing import EXPONENT_BIAS, Packing
        from node.packed.tensor import PackedTensor

        packing = Packing(code=self.code, columns=self.columns, rows=self.rows)
        leading = (self.experts,) if self.experts else ()
        size = (*leading, self.outs, self.ins * packing.bits // 8)
        codes = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
        grid = (*leading, -(-self.outs // self.rows), -(-self.ins // self.columns))
        parts = {"codes": codes, "scales": torch.rand(grid, device=device) / 64}
        if self.code == "float8_e4m3":  # no NaN
            parts["codes"] = (codes & 0xBF).view(torch.float8_e4m3fn)
        elif self.code == "e2m1":
            parts["scales"] = torch.full_like(parts["scales"], EXPONENT_BIAS - 6, dtype=torch.uint8)
        else:
            parts["zeros"] = torch.randint(0, 15, grid, dtype=torch.uint8, device=device)
            parts["scales"] = parts["scales"].bfloat16()
        return PackedTensor(packing, parts, torch.bfloat16)


INT4, MXFP4 = ("uint4", 64), ("e2m1", 32)
PACKED = {
    **{
        f"{name}, {outs} x {ins}": Matrix(code=code, outs=outs, ins=ins, columns=columns, rows=rows)
        for outs, ins in ((6144, 4096), (4096, 14336), (28672, 4096))
        for name, code, columns, rows in (
            ("int4", *INT4, 1), ("mxfp4", *MXFP4, 1), ("fp8", "float8_e4m3", 128, 128),
        )
    },
    "fp8, qwen3-30b-a3b gate and up": Matrix(
        code="float8_e4m3", outs=1536, ins=2048, columns=128, rows=128, experts=128, each=8
    ),
    "mxfp4, gpt-oss-20b gate and up": Matrix(
        code="e2m1", outs=5760, ins=2880, columns=32, experts=32, each=4
    ),
}  # fmt: skip
PACKED_TINY = {"tiny": Matrix(code="e2m1", outs=32, ins=64, columns=32, experts=2)}
PACKED_TOKENS = (1, 64, 256, 2048)
PACKED_BYTES = 200 << 20
"""Bytes of all copies of a matrix."""
PACKED_TILES = (
    (1, 8, 1024, 4, 1), (1, 16, 1024, 4, 1), (1, 16, 512, 4, 1), (1, 8, 512, 1, 1),
    (16, 64, 128, 4, 3), (16, 64, 64, 4, 5), (16, 32, 256, 2, 3), (16, 32, 128, 2, 4),
    (64, 64, 128, 4, 3), (64, 64, 64, 4, 4), (64, 128, 64, 4, 3), (64, 128, 128, 8, 3),
    (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (256, 128, 64, 8, 3),
)  # fmt: skip
"""Rows, outs and ins of a tile, warps and stages; those of as many rows as a product has, or of
fewer, are timed."""


def packed_timed(
    matrix: Matrix, tokens: int, device: torch.device, most_bytes: int
) -> Iterator[dict[str, Any]]:
    """Every variant's times for one number of tokens, and the error of the one that is chosen."""
    from node.kernels.triton.groups import group
    from node.kernels.triton.packed import Tiles, dequantised, packed_product

    first = matrix.drawn(device)
    copies = max(1, most_bytes // first.held_bytes)
    weights: list[Any] = [first, *(matrix.drawn(device) for _ in range(copies - 1))]
    numbers = torch.float32 if device.type == "cpu" else torch.bfloat16  # for the interpreter
    rows = torch.randn(tokens, matrix.ins, device=device).to(numbers)
    groups = None
    if matrix.experts:
        drawn = torch.rand(tokens, matrix.experts, device=device)
        groups = group(drawn.topk(matrix.each).indices, matrix.experts)
    names = ("rows", "outs", "ins", "warps", "stages")
    mean = tokens * matrix.each / max(1, matrix.experts)
    size = next((known for known in (16, 64) if mean <= known), 128)
    sizes = [1] if tokens == 1 else [size, 2 * size]
    tried = [None, *(each for each in PACKED_TILES if each[0] in sizes)]

    def through(run: Callable[[Any], object]) -> Callable[[], object]:
        return lambda: [run(weight) for weight in weights]

    def ours(weight: Any, tiles: Tiles | None) -> torch.Tensor:
        return packed_product(
            rows, weight.packing, weight.parts, groups, spread=groups is not None, tiles=tiles
        )

    for values in tried:
        tiles = None if values is None else Tiles(**dict(zip(names, values, strict=True)))
        took_s = seconds(through(lambda weight, t=tiles: ours(weight, t)), device) / copies  # type: ignore[misc]
        told: dict[str, Any] = {"variant": "chosen" if values is None else list(values)}
        yield told | {"microseconds": round(1e6 * took_s, 1)}
    if groups is None:
        whole = [weight.dequantised() for weight in weights]
        made, right = ours(first, None).float(), rows.float() @ whole[0].float().t()
        yield {"variant": "error", "of_norm": float((made - right).norm() / right.norm())}
        took_s = seconds(lambda: [rows @ each.t() for each in whole], device) / copies
        yield {"variant": "bfloat16", "microseconds": round(1e6 * took_s, 1)}
        took_s = seconds(
            through(lambda weight: dequantised(weight.packing, weight.parts, numbers)), device
        )
        yield {"variant": "dequantise", "microseconds": round(1e6 * took_s / copies, 1)}


def main() -> int:
    """Time every variant, print, and write the result."""
    parser = parser_of("bench.gpu.kernels", __doc__)
    parser.add_argument("--device", default="cuda:0", help="with its number (cuda:0)")
    parser.add_argument("--tiny", action="store_true", help="sizes that prove nothing")
    parser.add_argument("--packed", action="store_true", help="products by packed matrices")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.manual_seed(SEED)
    result: dict[str, Any] = {**provenance(SEED), **device_facts(arguments.device), "rows": []}
    if arguments.packed:
        most_bytes = 1 if arguments.tiny else PACKED_BYTES
        for name, matrix in (PACKED_TINY if arguments.tiny else PACKED).items():
            for tokens in PACKED_TOKENS[:2] if arguments.tiny else PACKED_TOKENS:
                for row in packed_timed(matrix, tokens, device, most_bytes):
                    result["rows"].append({"product": name, "tokens": tokens, **row})
                    print(f"{name}, {tokens} rows: {row}", flush=True)
            if arguments.out is not None:
                write(arguments.out, result)
        return 0
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
