"""``python -m bench.packed_products``: products with packed weights on a CPU, by rows.

Processor time of one product, in bfloat16 on one thread: from the bits in torch's layout of 4-bit
codes (:mod:`node.packed.operand`), from tiles dequantised of that layout, from tiles dequantised of
the stored parts, and with a plain matrix. ``ROW_BITS_MAX`` is chosen by these figures.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.local_swarm import ROOT
from bench.report import provenance, write
from node.packed import operand
from node.packed.ggml import BlockPacking, by_name
from node.packed.packing import Meaning, Packing, random_bytes
from node.packed.tensor import PackedTensor

SEED, THREADS = 0, 1
SHAPES = ((2048, 2048),)
"""Outputs and inputs."""
ROWS = (1, 4, 32, 64, 128, 512)
REPEATS = 3
KINDS: dict[str, tuple[Meaning, int]] = {
    "Q4_K": (BlockPacking(kind="Q4_K"), 0),
    "Q4_0": (BlockPacking(kind="Q4_0"), 0),
    "Q5_K": (BlockPacking(kind="Q5_K"), 0),
    "Q6_K": (BlockPacking(kind="Q6_K"), 0),
    "Q8_0": (BlockPacking(kind="Q8_0"), 0),
    "int4, groups of 128": (Packing(code="offset4", columns=128), 128),
    "MXFP4": (Packing(code="e2m1", columns=32), 32),
}
"""Packing, and columns that share a scale where scales are a part."""


def packed(packing: Meaning, group: int, outs: int, ins: int) -> PackedTensor:
    """Made up weights ``[outs, ins]`` in bfloat16."""
    if isinstance(packing, BlockPacking):
        _, numbers, block_bytes = by_name()[packing.kind]
        parts = {"codes": torch.empty(outs, ins // numbers * block_bytes, dtype=torch.uint8)}
    else:
        codes = random_bytes(outs * ins // 2, 0xFF).view(outs, -1)
        parts = {"codes": codes, "scales": torch.ones(outs, ins // group, dtype=torch.float16)}
    return PackedTensor(packing, packing.made_up(parts), torch.bfloat16)


def milliseconds(product: Callable[[], Any]) -> float:
    """Median processor time of a product."""
    product()
    times = []
    for _ in range(REPEATS):
        started_s = time.process_time()
        product()
        times.append(time.process_time() - started_s)
    return round(1e3 * median(times), 3)


def measure(outs: int, ins: int) -> dict[str, dict[str, Any]]:
    """Milliseconds by kind, rows and way, and the operand's size."""
    found: dict[str, dict[str, Any]] = {}
    plain = torch.randn(outs, ins).bfloat16()
    for name, (packing, group) in KINDS.items():
        stored = packed(packing, group, outs, ins)
        made = operand.operand_of(stored, torch.device("cpu"))
        found[name] = {"bytes_of_stored": round(made.held_bytes / stored.held_bytes, 3)}
        for count in ROWS:
            rows = torch.randn(count, ins).bfloat16()
            with patch.object(operand, "ROW_BITS_MAX", 1 << 20):
                bits = milliseconds(lambda made=made, rows=rows: made.product(rows))
            with patch.object(operand, "ROW_BITS_MAX", 0):
                tiles = milliseconds(lambda made=made, rows=rows: made.product(rows))
            found[name][str(count)] = {
                "bits_ms": bits,
                "tiles_ms": tiles,
                "stored_ms": milliseconds(lambda s=stored, rows=rows: s.product(rows)),
                "plain_ms": milliseconds(lambda rows=rows: rows @ plain.t()),
            }
    return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.packed_products", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    results = ROOT / "bench" / "results" / "packed_products.json"
    parser.add_argument("--out", type=Path, default=results, metavar="FILE", help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    shapes = {f"{outs}x{ins}": measure(outs, ins) for outs, ins in SHAPES}
    write(arguments.out, {**provenance(SEED), "threads": THREADS, "shapes": shapes})
    for shape, kinds in shapes.items():
        for name, ways in kinds.items():
            print(shape, name, ways)
    return 0


if __name__ == "__main__":
    sys.exit(main())
