"""Models of real sizes on the processors of one machine.

The weights are random, with as many layers as are asked for and the whole vocabulary. What is
measured of one engine with all layers, alone: a step that decodes one, four and eight rows. Of
three peers that hold the model together, and share this machine's cores and memory: seconds until
all serve, from the first one's command; the time to the first token of a prompt of 512; tokens/s of
one, four and eight answers at once; and memory. A step's floor is the bytes of weights that it must
read (of experts, those that rows drawn evenly would choose) over the measured bandwidth; a prompt's
is its multiplications over the measured rate of one large product in bfloat16. Drafts and kept
prefixes are off: what random weights answer repeats itself. Rows of other models in ``--out`` stay.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from bench import report
from bench.gpu.engine_gpu import FULL, Shape, chosen_share, llama, make_layers
from bench.speed.local import prompt_ids
from client import Answer, Swarm
from client.answer.answer import PrefixCache
from client.errors import UnavailableError
from dht.messages.session import Sampling
from dht.messages.types import ModelSpec, kv_tokens_least, stage_bytes
from node.engine.engine import Engine, EngineConfig
from node.engine.work_item import WorkItem
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore
from testing.local_swarm import LocalPeer, LocalSwarm
from testing.packed_checkpoints import formats, write

SEED = 0
PROMPT, LONG_PROMPT, NEW = 16, 512, 24
STREAMS = (1, 4, 8)
SHARES = (0.42, 0.4, 0.38)
"""Parts of the whole model's memory that the peers lend."""
READ_BYTES = 1 << 29
"""Bytes of the tensor whose reading measures the bandwidth."""
MATRIX = 2048
"""Rows and columns of the product that measures the rate of multiplication."""
CONTEXT_TOKENS = 4096
TRIES = 7
LOAD_S_MAX = 600.0
STEPS, WARM_STEPS = 13, 4
"""Steps of the engine alone, and how many of them are not timed."""
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model as it is published, with fewer layers where they do not fit."""

    shape: Shape
    vocab: int
    layers: int
    whole: int
    """Number of layers of the published model."""
    tied: bool = False
    packed: str = ""
    """Format of the published experts; bfloat16 if it is empty."""

    @property
    def weights(self) -> tuple[str, ...]:
        """Weights that peers compute with: as they are published, or quantised at join."""
        return (self.packed,) if self.packed else ("bfloat16", "int8", "int4")


SIZES = {
    "Llama-3.2-1B": Size(shape=llama(2048, 8192, 32), vocab=128256, layers=16, whole=16, tied=True),
    "Llama-3.2-3B": Size(shape=llama(3072, 8192, 24), vocab=128256, layers=28, whole=28, tied=True),
    "Qwen3-30B-A3B": Size(shape=FULL.shapes["qwen3-30b-a3b"], vocab=151936, layers=4, whole=48),
    "gpt-oss-20b": Size(
        shape=FULL.shapes["gpt-oss-20b"], vocab=201088, layers=8, whole=24, packed="mxfp4"
    ),
    "tiny": Size(shape=llama(64, 96, 4, 2), vocab=512, layers=3, whole=3),
}
NAMED = tuple(name for name in SIZES if name != "tiny")


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.speed.real_sizes", __doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=NAMED, metavar="NAME")
    every = sorted({weights for size in SIZES.values() for weights in size.weights})
    parser.add_argument("--weights", nargs="+", choices=every, default=every, metavar="KIND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=NEW, help="new tokens per answer")
    return parser.parse_args()


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A model's files, and what is in a layer."""

    directory: Path
    numbers: float
    """Weights that one row is multiplied with in all layers, as numbers."""
    experts: float
    """Share of the experts in a layer's bytes."""
    chosen: float
    """Share of the experts that a row chooses; 1 without experts."""


def written(size: Size, directory: Path, device: str = "cpu") -> Written:
    """Write the model: one random layer, drawn by ``device``, under every layer's name."""
    one = make_layers(
        directory / "one", size.shape, 1, CONTEXT_TOKENS, device, vocab=size.vocab, tied=size.tied
    )
    dense, routed = _layer(one, torch.Tensor.numel)
    if size.packed:
        made = formats(128, (128, 128))[size.packed]
        write(one, made, directory / "packed", device=device)
        one = directory / "packed"
    dense_bytes, routed_bytes = _layer(one, lambda part: part.numel() * part.itemsize)
    whole = _repeated(one, size.layers, directory / "whole")
    chosen = chosen_share(AutoConfig.from_pretrained(whole))
    return Written(
        directory=whole,
        numbers=size.layers * (dense + chosen * routed),
        experts=routed_bytes / (dense_bytes + routed_bytes),
        chosen=chosen,
    )


def _layer(one: Path, measure: Callable[[torch.Tensor], int]) -> tuple[int, int]:
    """Sums of ``measure`` over a model's first layer: beside its experts, and of its experts."""
    sums = {False: 0, True: 0}
    with safe_open(one / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if ".layers.0." in name:
                sums[".experts." in name] += measure(file.get_tensor(name))
    return sums[False], sums[True]


def _repeated(one: Path, layers: int, whole: Path) -> Path:
    """A model of ``layers`` from one with a single layer; its other files stay as they are."""
    whole.mkdir()
    settings = json.loads((one / "config.json").read_text())
    settings["num_hidden_layers"] = layers
    settings.pop("layer_types", None)  # as the family has them
    (whole / "config.json").write_text(json.dumps(settings))
    tensors = load_file(one / "model.safetensors")
    layer = {key: part for key, part in tensors.items() if ".layers.0." in key}
    files = {"model-rest": {key: part for key, part in tensors.items() if key not in layer}}
    for number in range(layers):
        name = f".layers.{number}."
        files[f"model-{number}"] = {
            key.replace(".layers.0.", name): part for key, part in layer.items()
        }
    index: dict[str, str] = {}
    for file, content in files.items():
        save_file(content, whole / f"{file}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(content, f"{file}.safetensors")
    told = json.dumps({"metadata": {}, "weight_map": index})
    (whole / "model.safetensors.index.json").write_text(told)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine can do at most, when it is idle."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measured(cls) -> "Rates":
        """Read a large tensor, and multiply two matrices in bfloat16; the best of several."""
        read = torch.zeros(READ_BYTES // 4)
        square = torch.randn(MATRIX, MATRIX).bfloat16()
        with torch.inference_mode():
            return cls(
                bytes_per_s=READ_BYTES / _least_s(read.sum),
                flops_per_s=2 * MATRIX**3 / _least_s(lambda: square @ square),
            )


def _least_s(run: Callable[[], object]) -> float:
    took = []
    for _ in range(TRIES):
        started_s = time.perf_counter()
        run()
        took.append(time.perf_counter() - started_s)
    return min(took)


def precision(weights: str) -> tuple[str, str | None]:
    """dtype and quantisation of a peer with these weights."""
    return "bfloat16", weights if weights in ("int8", "int4") else None


def floors(spec: ModelSpec, model: Written, rates: Rates) -> dict[str, Any]:
    """Least seconds of a step by streams, whose rows it runs together, and of a prompt."""
    read = {}
    for streams in STREAMS:
        touched = 1 - (1 - model.chosen) ** streams
        layer_bytes = spec.layer_bytes * (1 - model.experts * (1 - touched))
        read[streams] = (spec.layers * layer_bytes + spec.head_bytes) / rates.bytes_per_s
    return {
        "step_s": read,
        "ttft_512_s": 2 * LONG_PROMPT * model.numbers / rates.flops_per_s,
    }


def engine_steps_s(model: Written, weights: str, memory_bytes: int) -> dict[int, float]:
    """Median seconds of a step of one engine with all layers, by the rows that it decodes."""
    dtype, quantize = precision(weights)
    engine = Engine(
        EngineConfig(
            store=WeightStore.open(str(model.directory)),
            name="size",
            device="cpu",
            dtype=dtype,
            quantize=quantize,
            memory_bytes=memory_bytes,
        )
    )
    engine.load(0, engine.spec.layers)
    return {streams: decode_s(engine, streams) for streams in STREAMS}


def decode_s(
    engine: Engine, streams: int, steps: int = STEPS, warm_steps: int = WARM_STEPS
) -> float:
    """Median seconds of a step of all layers that decodes a row of each of ``streams`` sessions,
    behind ``warm_steps`` of the ``steps``.

    Each session has a token of its own: equal rows would choose the same experts.
    """
    with sessions(engine, streams, steps):
        took_s = [
            step_s(engine, [(name + 1,) for name in range(streams)], position)
            for position in range(steps)
        ]
    return median(took_s[warm_steps:])


@contextmanager
def sessions(engine: Engine, count: int, tokens: int) -> Iterator[None]:
    """Room for ``tokens`` of each session, whose names are their numbers."""
    for name in range(count):
        if (refused := engine.kv.reserve(str(name), tokens)) is not None:
            raise RuntimeError(refused)
    try:
        yield
    finally:
        for name in range(count):
            engine.kv.free(str(name))


def step_s(engine: Engine, token_ids: Sequence[tuple[int, ...]], position: int) -> float:
    """Seconds of one step of all layers with each session's tokens at ``position``."""
    items = [
        WorkItem(
            session=str(name),
            start=0,
            end=engine.spec.layers,
            position=position,
            token_ids=given,
            sampling=Sampling(),
        )
        for name, given in enumerate(token_ids)
    ]
    started_s = time.perf_counter()
    errors = {result.error for result in engine.step(items)}
    took_s = time.perf_counter() - started_s
    if errors != {None}:
        raise RuntimeError(f"the engine's step failed: {errors}")
    return took_s


async def rounds_of(swarm: Swarm, vocab: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds of TTFT, and of tokens/s of all streams together behind the first
    tokens."""

    async def answer(seed: int, prompt: int, new: int) -> Answer:
        return await swarm.generate(
            prompt_ids(prompt, vocab, seed),
            max_new_tokens=new,
            ignore_eos=True,
            speculate=False,
            prefix_cache=PrefixCache.OFF,
        )

    await answer(SEED, PROMPT, 2)
    ttft_s: list[float] = []
    rates: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    for turn in range(1, arguments.rounds + 1):
        ttft_s.append((await answer(100 * turn, LONG_PROMPT, 1)).ttft_s)
        for streams, rated in rates.items():
            answers = await asyncio.gather(
                *(answer(100 * turn + n, PROMPT, arguments.new) for n in range(streams))
            )
            rated.append(sum(1 / each.tpot_s for each in answers))
    return {
        "ttft_512_s": median(ttft_s),
        "tokens_per_s": {streams: median(rated) for streams, rated in rates.items()},
    }


def memory_bytes(peers: list[LocalPeer]) -> int:
    """Proportional set size of all peers and their children."""
    families = [psutil.Process(peer.process.pid) for peer in peers]
    each = [process for first in families for process in (first, *first.children(recursive=True))]
    return sum(process.memory_full_info().pss for process in each)


def measure(model: Written, weights: str, rates: Rates, arguments: argparse.Namespace) -> Figures:
    """One model with one kind of weights, by three peers."""
    dtype, quantize = precision(weights)
    store = WeightStore.open(str(model.directory))
    spec = ModelLayout.of(store, dtype, quantize).spec("size")
    whole_bytes = stage_bytes(spec, 0, spec.layers, kv_tokens_least(spec))
    apart = engine_steps_s(model, weights, 2 * whole_bytes)
    gc.collect()
    least = floors(spec, model, rates)
    alone = {
        "weights_gib": round((spec.layers * spec.layer_bytes + spec.head_bytes) / 2**30, 2),
        "engine_step_ms": {str(n): round(1e3 * step_s, 1) for n, step_s in apart.items()},
        "engine_times_floor": {
            str(n): round(step_s / least["step_s"][n], 2) for n, step_s in apart.items()
        },
    }
    extra = ["--dtype", dtype, *(("--quantize", quantize) if quantize else ())]
    with LocalSwarm(model.directory, extra=extra) as local:
        started_s = time.monotonic()
        for share in SHARES:
            local.start_peer(memory_gib=share * whole_bytes / 2**30)
        local.wait_serving(LOAD_S_MAX)
        serving_s = time.monotonic() - started_s

        async def ask() -> dict[str, Any]:
            async with Swarm.connect(local.addresses, model=str(model.directory)) as swarm:
                return await rounds_of(swarm, spec.vocab, arguments)

        try:
            figures = asyncio.run(ask())
        except UnavailableError as error:
            return {**alone, "serving_s": round(serving_s, 1), "unavailable": str(error)}
        held_bytes = memory_bytes(local.peers)
    return {
        **alone,
        "serving_s": round(serving_s, 1),
        "memory_gib": round(held_bytes / 2**30, 2),
        "ttft_512_s": round(figures["ttft_512_s"], 2),
        "ttft_512_times_floor": round(figures["ttft_512_s"] / least["ttft_512_s"], 2),
        "tokens_per_s": {str(n): round(rate, 2) for n, rate in figures["tokens_per_s"].items()},
        "times_floor": {
            str(n): round(n / rate / least["step_s"][n], 2)
            for n, rate in figures["tokens_per_s"].items()
        },
    }


def main() -> int:
    arguments = parse()
    result: Figures = {
        **report.provenance(SEED),
        "models": report.earlier(arguments.out).get("models", {}),
    }
    for name in arguments.models:
        size = SIZES[name]
        with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as made:
            model = written(size, Path(made))
            kinds: Figures = result["models"].get(name, {}).get("weights", {})
            result["models"][name] = {
                "layers": size.layers,
                "of_layers": size.whole,
                "rounds": arguments.rounds,
                "new_tokens": arguments.new,
                "weights": kinds,
            }
            for weights in size.weights:
                if weights not in arguments.weights:
                    continue
                rates = Rates.measured()
                kinds[weights] = figures = {
                    "commit": result["commit"],
                    "bytes_per_s": round(rates.bytes_per_s),
                    "flops_per_s": round(rates.flops_per_s),
                    **measure(model, weights, rates, arguments),
                }
                print(name, weights, json.dumps(figures), flush=True)
                report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
