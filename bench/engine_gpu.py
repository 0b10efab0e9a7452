"""``python -m bench.engine_gpu``: layers of large models' shapes against what the hardware allows.

Eight layers with random weights in bfloat16 are decoded at several batches and contexts; what a
step costs beside its layers (bringing rows, fetching results) is counted and divided by them. The
floor of a step is the bytes that it must read (KV, and weights: of experts, those that rows drawn
evenly would choose) over the measured bandwidth. A prefill's floor is its multiplications over the
measured rate of one large matrix product. ``transformers`` eager runs the same layers beside it.
``--device cpu --tiny`` only proves that the script runs.
"""

import argparse
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bench.report import provenance, write
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.profiling.profile_cache import driver
from node.weights.store import WeightStore

SEED = 0
ENGINE_SHARE_MAX = 0.6
"""Share of a GPU's free memory for the engine's weights and pages: the rest is for both sides'
intermediate results and the other side's weights and cache."""


Shape = Mapping[str, Any]
"""Fields of a model's configuration: its type, and the sizes of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    shapes: dict[str, Shape]
    layers: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill: int
    rounds: int
    copied_bytes: int
    """Bytes of the tensor whose reading measures the bandwidth."""
    matrix: int
    """Rows and columns of the product that measures the rate of multiplication."""


def _llama(hidden: int, intermediate: int, heads: int, kv_heads: int = 8) -> Shape:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rope_theta": 500_000.0,
    }


FULL = Plan(
    shapes={
        "llama-3-8b": _llama(4096, 14336, 32),
        "llama-3-70b": _llama(8192, 28672, 64),
        "qwen3-30b-a3b": {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        "gpt-oss-20b": {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    },
    layers=8,
    batches=(1, 8, 64, 256),
    contexts=(128, 2048, 8192),
    prefill=2048,
    rounds=20,
    copied_bytes=1 << 30,
    matrix=8192,
)
TINY = Plan(
    shapes={
        "tiny": _llama(64, 96, 4, 2),
        "tiny-experts": {
            "model_type": "qwen3_moe",
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    },
    layers=1,
    batches=(1, 2),
    contexts=(16,),
    prefill=32,
    rounds=2,
    copied_bytes=1 << 20,
    matrix=64,
)


def make_layers(directory: Path, shape: Shape, layers: int, context_tokens: int) -> Path:
    """Write a model of that shape in bfloat16, with a small vocabulary."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        **shape,
        num_hidden_layers=layers,
        vocab_size=256,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=False,
        pad_token_id=None,
        eos_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def seconds_of(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median seconds of ``run``, behind a synchronisation; the first two runs warm up."""
    took = []
    for turn in range(rounds + 2):
        started_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 2:
            took.append(time.perf_counter() - started_s)
    return median(took)


def expert_bytes(directory: Path) -> int:
    """Bytes of all experts' weights in a directory."""
    found = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if ".experts." in name:
                    part = file.get_slice(name)
                    found += 2 * math.prod(part.get_shape())
    return found


class StepError(Exception):
    """A step of the engine gave an error."""


class EngineSide:
    """The engine over all layers, fed with hidden states, so that neither embedding nor head
    counts."""

    def __init__(
        self, directory: Path, device: str, kv_tokens: int, plan: Plan, *, kernels: bool
    ) -> None:
        store = WeightStore.open(str(directory))
        shape_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        probe = AutoConfig.from_pretrained(directory)
        kv_bytes = 4 * probe.num_key_value_heads * probe.head_dim * plan.layers * kv_tokens
        memory_bytes = shape_bytes + kv_bytes + (64 << 20)
        if torch.device(device).type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(device)
            memory_bytes = min(memory_bytes, int(free_bytes * ENGINE_SHARE_MAX))
        self._engine = Engine(
            EngineConfig(
                store=store,
                name="shape",
                device=device,
                dtype="bfloat16",
                memory_bytes=memory_bytes,
                kernels=kernels,
            )
        )
        self._layers = plan.layers
        self._engine.load(0, plan.layers)
        self._at: dict[str, int] = {}
        self.device = self._engine.device
        self.reads_in_place = self._engine.reads_in_place
        self.hidden = probe.hidden_size
        self.layer_bytes = self._engine.spec.layer_bytes
        self.kv_bytes = self._engine.spec.kv_bytes_per_token_layer
        self._expert_bytes = expert_bytes(directory) / plan.layers
        experts = getattr(probe, "num_experts", None) or getattr(probe, "num_local_experts", None)
        self._chosen_share = probe.num_experts_per_tok / experts if experts else 1.0
        kinds = getattr(probe, "layer_types", None) or []
        self._windows = [
            probe.sliding_window if kind == "sliding_attention" else None
            for kind in kinds or [None] * plan.layers
        ]

    def step_bytes(self, batch: int, context: int) -> float:
        """Bytes that a step of ``batch`` decodes must read per layer, on average."""
        touched = 1 - (1 - self._chosen_share) ** batch
        weights = self.layer_bytes - self._expert_bytes * (1 - touched)
        seen = [min(window or context, context) for window in self._windows]
        return weights + batch * self.kv_bytes * sum(seen) / len(seen)

    @property
    def row_bytes(self) -> float:
        """Bytes of the weights that one row is multiplied with in a layer."""
        return self.layer_bytes - self._expert_bytes * (1 - self._chosen_share)

    def open(self, batch: int, context: int, steps: int) -> bool:
        """Sessions with ``context`` tokens of random KV; False where there is no room."""
        for n in range(batch):
            if self._engine.kv.reserve(str(n), context + steps) is not None:
                self.close()
                return False
            self._at[str(n)] = 0
        for name in self._at:
            rows = torch.randn(context, self.hidden, dtype=torch.bfloat16)
            for at in range(0, context, 1024):
                self._run({name: rows[at : at + 1024]})
        return True

    def _run(self, rows: dict[str, torch.Tensor]) -> None:
        items = [
            WorkItem(session=name, start=0, end=self._layers, position=self._at[name], hidden=part)
            for name, part in rows.items()
        ]
        for result in self._engine.step(items):
            if result.error is not None:
                raise StepError(result.error)
            self._at[result.item.session] += result.item.tokens

    def decode(self) -> None:
        """One token of each session."""
        row = torch.zeros(1, self.hidden, dtype=torch.bfloat16)
        self._run(dict.fromkeys(self._at, row))

    def prefill(self, tokens: int) -> None:
        """One prompt, which is forgotten again."""
        if (refused := self._engine.kv.reserve("prompt", tokens)) is not None:
            raise StepError(refused)
        self._at["prompt"] = 0
        self._run({"prompt": torch.zeros(tokens, self.hidden, dtype=torch.bfloat16)})
        self._engine.kv.free("prompt")
        del self._at["prompt"]

    def close(self) -> None:
        """End all sessions."""
        for name in self._at:
            self._engine.kv.free(name)
        self._at.clear()


class EagerSide:
    """The same layers in ``transformers`` with eager attention."""

    def __init__(self, directory: Path, device: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="eager"
        )
        self._model: Any = model.to(device).eval().model
        self._device = device

    def _forward(self, ids: torch.Tensor, cache: DynamicCache) -> None:
        with torch.inference_mode():
            self._model(input_ids=ids, past_key_values=cache, use_cache=True)

    def decoder(self, batch: int, context: int) -> Callable[[], None]:
        """A function that decodes one token of each of ``batch`` sequences."""
        config = self._model.config
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            shape = (batch, config.num_key_value_heads, context, config.head_dim)
            keys, values = (
                torch.randn(shape, dtype=torch.bfloat16, device=self._device) for _ in range(2)
            )
            cache.update(keys, values, layer)
        ids = torch.ones(batch, 1, dtype=torch.long, device=self._device)
        return lambda: self._forward(ids, cache)

    def prefill(self, tokens: int) -> None:
        """One prompt."""
        ids = torch.ones(1, tokens, dtype=torch.long, device=self._device)
        self._forward(ids, DynamicCache())


def machine_rates(device: torch.device, plan: Plan) -> tuple[float, float]:
    """Bytes/s that a sum reads, and multiply-adds/s (counted as two) of one bfloat16 product."""
    read = torch.zeros(plan.copied_bytes // 4, dtype=torch.float32, device=device)
    read_s = seconds_of(read.sum, device, plan.rounds)
    square = torch.zeros(plan.matrix, plan.matrix, dtype=torch.bfloat16, device=device)
    product_s = seconds_of(lambda: square @ square, device, plan.rounds)
    return plan.copied_bytes / read_s, 2 * plan.matrix**3 / product_s


def measure(directory: Path, device: str, plan: Plan, *, kernels: bool) -> dict[str, Any]:
    """All batches and contexts of one shape, both sides in turn."""
    at = torch.device(device)
    gc.collect()  # the shape before
    if at.type == "cuda":
        torch.cuda.empty_cache()
    bytes_per_s, flops_per_s = machine_rates(at, plan)
    steps = plan.rounds + 2
    most = max(plan.batches) * (max(plan.contexts) + steps + 16) + plan.prefill
    engine = EngineSide(directory, device, most, plan, kernels=kernels)
    eager = EagerSide(directory, device)
    found: dict[str, Any] = {
        "layers": plan.layers,
        "bytes_per_s": round(bytes_per_s),
        "flops_per_s": round(flops_per_s),
        "attention": "in place" if engine.reads_in_place else "over copies",
    }
    for batch in plan.batches:
        for context in plan.contexts:
            name = f"decode_{batch}_{context}"
            try:
                if not engine.open(batch, context, steps):
                    found[name] = "no room for its KV"
                    continue
                engine_s = seconds_of(engine.decode, at, plan.rounds) / plan.layers
            except StepError as error:  # one point less, not all of them
                found[name] = str(error)
                continue
            finally:
                engine.close()
            read_bytes = engine.step_bytes(batch, context)
            figures = {
                "layer_tokens_per_s": round(batch / engine_s, 1),
                "times_floor": round(engine_s / (read_bytes / bytes_per_s), 2),
            }
            try:
                eager_s = seconds_of(eager.decoder(batch, context), at, plan.rounds) / plan.layers
                figures["eager_layer_tokens_per_s"] = round(batch / eager_s, 1)
            except torch.OutOfMemoryError:
                pass  # left out: its scores take more than the device has
            found[name] = figures
    found[f"prefill_{plan.prefill}"] = prefill_figures(engine, eager, plan, flops_per_s)
    return found


def prefill_figures(
    engine: EngineSide, eager: EagerSide, plan: Plan, flops_per_s: float
) -> dict[str, float] | str:
    """One prompt on both sides; why not, where the engine cannot."""
    flops = plan.prefill * engine.row_bytes  # two per weight of two bytes
    at = engine.device
    try:
        engine_s = seconds_of(lambda: engine.prefill(plan.prefill), at, plan.rounds) / plan.layers
    except StepError as error:
        return str(error)
    eager_s = seconds_of(lambda: eager.prefill(plan.prefill), at, plan.rounds) / plan.layers
    return {
        "share_of_matrix_rate": round(flops / flops_per_s / engine_s, 3),
        "layer_tokens_per_s": round(plan.prefill / engine_s, 1),
        "eager_layer_tokens_per_s": round(plan.prefill / eager_s, 1),
    }


def device_facts(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    if not device.startswith("cuda"):
        return {"device": device}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "memory_bytes": torch.cuda.mem_get_info(device)[1],
        "driver": driver(),
        "cuda": torch.version.cuda or torch.version.hip,
    }


def main() -> int:
    """Measure every shape, print, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_gpu", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="with its number (cuda:0)")
    parser.add_argument("--tiny", action="store_true", help="a shape that proves nothing")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help=f"of {', '.join(FULL.shapes)}")
    parser.add_argument("--no-kernels", action="store_true", help="torch's own kernels alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here")
    arguments = parser.parse_args()
    plan = TINY if arguments.tiny else FULL
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny proves that this runs")
    result: dict[str, Any] = {**provenance(SEED), **device_facts(arguments.device), "shapes": {}}
    if unknown := set(arguments.shapes or ()) - plan.shapes.keys():
        parser.error(
            f"no such shape: {', '.join(sorted(unknown))}; known: {', '.join(plan.shapes)}"
        )
    for name, shape in plan.shapes.items():
        if name not in (arguments.shapes or plan.shapes):
            continue
        with tempfile.TemporaryDirectory() as made:
            longest = max(plan.contexts) + plan.rounds + 64 + plan.prefill
            directory = make_layers(Path(made), shape, plan.layers, longest)
            result["shapes"][name] = measure(
                directory, arguments.device, plan, kernels=not arguments.no_kernels
            )
        for what, figures in result["shapes"][name].items():
            print(f"{name} {what}: {figures}", flush=True)
        if arguments.out is not None:  # after each shape: what was measured is not lost
            write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
