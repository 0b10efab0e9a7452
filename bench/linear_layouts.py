"""``python -m bench.linear_layouts``: what a product of few rows costs by how the matrix lies.

The matrices of some layers in turn, as a decode step reads them: as ``torch`` keeps them, and as
the engine packs them (:mod:`node.model.linear.packed_linear`). Processor time of one thread, the
least of several, so that others on the machine do not count; beside it what merely reading the
bytes takes. No engine can be faster than the products it consists of.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.report import provenance, write
from node.model.linear.packed_linear import PackedLinear, favour_few_rows

SEED = 0
HIDDEN = (512, 1024)
DTYPES = (torch.float32, torch.bfloat16)
LAYERS = 4
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
ROUNDS = 7


def layer_of(hidden: int, dtype: torch.dtype) -> list[nn.Module]:
    """The linear parts of a Llama layer with a quarter of the heads for keys and values."""
    inner, narrow = (hidden * 8 // 3 + 63) // 64 * 64, hidden // 4
    shapes = [(hidden, hidden), (hidden, narrow), (hidden, narrow), (hidden, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return [nn.Linear(i, o, bias=False, dtype=dtype).requires_grad_(False) for i, o in shapes]


def least_s(run: Callable[[], object]) -> float:
    """Processor seconds of this thread, the first time apart."""
    run()
    took = []
    for _ in range(ROUNDS):
        started_s = time.thread_time()
        run()
        took.append(time.thread_time() - started_s)
    return min(took)


def measure(hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Milliseconds for all the products, by layout and rows."""
    torch.manual_seed(SEED)
    plain = [part for _ in range(LAYERS) for part in layer_of(hidden, dtype)]
    sizes = [part.in_features for part in plain if isinstance(part, nn.Linear)]
    numbers = sum(part.weight.numel() for part in plain if isinstance(part, nn.Linear))
    packed = [favour_few_rows(part) for part in plain]
    assert all(isinstance(part, PackedLinear) for part in packed), "oneDNN is not here"
    flat = torch.ones(numbers * dtype.itemsize // 4)
    result: dict[str, Any] = {"unit": "ms", "weights_bytes": dtype.itemsize * numbers}
    result["reading"] = round(least_s(flat.sum) * 1e3, 2)
    for rows in ROWS:
        given = {size: torch.randn(rows, size).to(dtype) for size in set(sizes)}

        def through(parts: list[nn.Module], given: dict[int, torch.Tensor] = given) -> None:
            for part, size in zip(parts, sizes, strict=True):
                part(given[size])

        kept_s, packed_s = (least_s(lambda p=p: through(p)) for p in (plain, packed))
        result[f"rows_{rows}"] = {
            "kept": round(kept_s * 1e3, 2),
            "packed": round(packed_s * 1e3, 2),
            "ratio": round(kept_s / packed_s, 2),
        }
    return result


def main() -> int:
    """Measure and print or write."""
    parser = argparse.ArgumentParser(prog="python -m bench.linear_layouts", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {**provenance(SEED), "threads": 1, "layers": LAYERS, "hidden": {}}
    with torch.inference_mode():
        for dtype, hidden in itertools.product(DTYPES, HIDDEN):
            name = f"{hidden} in {str(dtype).removeprefix('torch.')}"
            result["hidden"][name] = measure(hidden, dtype)
            print(name, result["hidden"][name], flush=True)
    write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
