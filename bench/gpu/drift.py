"""How far a GPU's answers are from float32, and from themselves.

Layers with random weights run the same rows, a prompt's chunk and then single rows, in float32 and
in other dtypes and quantisations, alone and beside other sessions, in one chunk, and without our
kernels. An error is the norm of the difference of a row's output over that of the float32 row.
``same_bits`` says whether a second run of the same steps gave the same numbers to the last bit.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.engine_gpu import FULL, SEED, TINY, device_facts, fast_directory, make_layers
from bench.report import parser_of, provenance, write
from dht.errors import UserError
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.weights.store import WeightStore

PROMPT, ROWS = 33, 41
"""Rows of the chunk, and of the whole session."""
OTHERS = 63
"""Sessions beside it in a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How the rows are run."""

    dtype: str = "bfloat16"
    quantize: str | None = None
    kernels: bool = True
    others: int = 0
    prompt: int = PROMPT


VARIANTS = {
    "bfloat16": Variant(),
    "bfloat16, beside 63 sessions": Variant(others=OTHERS),
    "bfloat16, all rows at once": Variant(prompt=ROWS),
    "bfloat16, without our kernels": Variant(kernels=False),
    "float16": Variant(dtype="float16"),
    "int8": Variant(quantize="int8"),
    "int4": Variant(quantize="int4"),
}


def outputs(engine: Engine, variant: Variant, rows: torch.Tensor, layers: int) -> torch.Tensor:
    """Output of the last layer for each row, ``[rows, width]``, on the CPU in float32."""
    names = [str(n) for n in range(1 + variant.others)]
    for name in names:
        refused = engine.kv.reserve(name, ROWS)
        assert refused is None, refused
    made = []
    spans = [(0, variant.prompt), *((at, at + 1) for at in range(variant.prompt, ROWS))]
    for first, last in spans:
        items = [
            WorkItem(
                session=name,
                start=0,
                end=layers,
                position=first,
                hidden=rows[first:last].roll(n, dims=1),  # others' rows are others
                returns_rows=True,
            )
            for n, name in enumerate(names)
        ]
        results = engine.step(items)
        assert all(result.error is None for result in results), results[0].error
        assert results[0].hidden is not None
        made.append(results[0].hidden.float())
    for name in names:
        engine.kv.free(name)
    return torch.cat(made)


def engine_of(directory: Path, device: str, variant: Variant, layers: int) -> Engine:
    """An engine that holds all layers."""
    store = WeightStore.open(str(directory))
    sizes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    engine = Engine(
        EngineConfig(
            store=store,
            name="drift",
            device=device,
            dtype=variant.dtype,
            quantize=variant.quantize,
            kernels=variant.kernels,
            memory_bytes=2 * sizes + (2 << 30),
        )
    )
    engine.load(0, layers)
    return engine


def drift(directory: Path, device: str, layers: int) -> dict[str, Any]:
    """Errors of every variant."""
    exact_by = engine_of(directory, device, Variant(dtype="float32"), layers)
    width = exact_by.layout.structure.row_width
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(SEED))
    rows = rows.to(torch.bfloat16)
    exact = outputs(exact_by, Variant(dtype="float32"), rows, layers)
    del exact_by
    norm = torch.linalg.vector_norm
    found: dict[str, Any] = {}
    for name, variant in VARIANTS.items():
        try:
            engine = engine_of(directory, device, variant, layers)
        except UserError as error:  # a library for packed weights is lacking, say
            found[name] = {"refused": str(error)}
            continue
        made = outputs(engine, variant, rows, layers)
        again = outputs(engine, variant, rows, layers)
        apart = norm(made - exact, dim=1) / norm(exact, dim=1)
        found[name] = {
            "error_median": float(f"{apart.median():.3g}"),
            "error_max": float(f"{apart.max():.3g}"),
            "same_bits": bool(torch.equal(made, again)),
        }
        if name == "bfloat16":
            alone = made
        elif variant.dtype == "bfloat16" and variant.quantize is None:
            own = norm(made - alone, dim=1) / norm(exact, dim=1)
            found[name]["from_bfloat16_max"] = float(f"{own.max():.3g}")
        del engine
    return found


def main() -> int:
    """Run every variant over every shape, print, and write the result."""
    parser = parser_of("bench.gpu.drift", __doc__)
    parser.add_argument("--device", default="cuda:0", help="with its number (cuda:0)")
    parser.add_argument("--tiny", action="store_true", help="shapes that prove nothing")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help=f"of {', '.join(FULL.shapes)}")
    arguments = parser.parse_args()
    plan = TINY if arguments.tiny else FULL
    result = {**provenance(SEED), **device_facts(arguments.device), "layers": plan.layers}
    result["shapes"] = {}
    for name, shape in plan.shapes.items():
        if name not in (arguments.shapes or plan.shapes):
            continue
        with tempfile.TemporaryDirectory(dir=fast_directory()) as made:
            draws = plan.drawn_on(arguments.device)
            directory = make_layers(Path(made), shape, plan.layers, 4096, draws)
            result["shapes"][name] = drift(directory, arguments.device, plan.layers)
        for what, figures in result["shapes"][name].items():
            print(f"{name} {what}: {figures}", flush=True)
        if arguments.out is not None:
            write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
