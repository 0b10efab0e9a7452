"""Layers of large models' shapes against what the hardware allows.

Layers with random weights in bfloat16 are decoded at several batches and contexts over random KV.
What runs within a step between bringing rows to the device and fetching results is timed over one
layer and over all, so that the difference is what layers take; the rest of a step, which a peer
pays once for all layers that it holds, is told apart. The floor of a layer is the bytes that it
must read (KV, and weights: of experts, those that rows drawn evenly would choose) over the measured
bandwidth. A prefill's floor is the longer of that and its multiplications over the measured rate of
one large matrix product. ``transformers`` runs the same layers beside it: eagerly, and in its
continuous batching. Shapes in packed formats are read as they are published, without another side.
``--device cpu --tiny`` only proves that the script runs.
"""

import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bench.gpu.floors import impossible
from bench.report import parser_of, provenance, write
from node.device.tensors import wait_for
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.profiling import layer_profile
from node.profiling.layer_fit import Timing
from node.profiling.profile_cache import driver
from node.weights.store import WeightStore
from testing import packed_checkpoints

SEED = 0
PROFILED = 4
"""Steps whose kernels are timed."""
ENGINE_SHARE_MAX = 0.6
"""Share of a GPU's free memory for the engine's weights and pages: the rest is for both sides'
intermediate results and the other side's weights and cache."""
PACKED_ROUNDS = 10
"""Maximum steps of a point of a packed shape."""
LISTED = 24
"""Kernels that are listed by name, those that take the most time."""
NAME_CHARACTERS = 80
"""Characters kept of a kernel's name."""
BATCHING_WARMING, BATCHING_STEPS = 4, 16
"""Steps of continuous batching before those that are timed, and those."""
BATCHING_POINT_S = 5.0
"""Maximum seconds of one point of continuous batching; the step at work ends."""
BATCHING_PAGE_TOKENS = 256
"""Tokens on a page of continuous batching, as it has it."""
RATE_ROUNDS = 20
"""Rounds of what the machine's rates are measured by, once for all shapes."""
COMPILE_S = 100.0
"""Maximum seconds for which a shape is run to compile its kernels."""
REASON_CHARACTERS = 300
"""Characters kept of why a side did not run."""

Shape = Mapping[str, Any]
"""Fields of a model's configuration: its type, and the sizes of one layer."""


Point = tuple[int, int]
"""Sequences of a step of decoding, and tokens before each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShape:
    """A shape whose weights are packed as they are published."""

    shape: Shape
    format: packed_checkpoints.Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    shapes: dict[str, Shape]
    packed: dict[str, PackedShape]
    layers: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    packed_points: tuple[Point, ...]
    """Decodes of packed shapes."""
    batching_points: tuple[Point, ...]
    """Decodes of continuous batching, as many as there is time for."""
    batching_s: float
    """Seconds for all of them, for one shape."""
    listed: frozenset[Point] = field(default_factory=frozenset)
    """Decodes whose kernels are listed."""
    prefills: tuple[int, ...]
    """Tokens of prompts; a peer's steps have at most the first."""
    rounds: int
    copied_bytes: int
    """Bytes of the tensor whose reading measures the bandwidth."""
    matrix: int
    """Rows and columns of the product that measures the rate of multiplication."""

    def drawn_on(self, device: str) -> str:
        """The device that draws weights: the one that is measured, where they are many."""
        return device if self.layers > 2 else "cpu"

    def once(self) -> "Plan":
        """Few steps of each kind, and nobody beside: what compiles all kernels."""
        few = tuple(batch for batch in self.batches if batch in {1, 64}) or self.batches[:1]
        return replace(
            self,
            batches=few,
            contexts=self.contexts[:2],
            packed_points=tuple((batch, self.contexts[0]) for batch in few),
            batching_s=0.0,
            rounds=1,
            copied_bytes=1 << 20,
            matrix=64,
        )

    @property
    def points(self) -> tuple[Point, ...]:
        """Decodes of plain shapes."""
        return tuple((batch, context) for batch in self.batches for context in self.contexts)


def llama(hidden: int, intermediate: int, heads: int, kv_heads: int = 8) -> Shape:
    """Fields of a Llama."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rope_theta": 500_000.0,
    }


def oss(hidden: int, experts: int, heads: int, head: int) -> Shape:
    """Fields of a gpt-oss."""
    return {
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_local_experts": experts,
        "num_experts_per_tok": experts // 8 or 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 8 or 1,
        "head_dim": head,
    }


LLAMA_8B, GPT_OSS_20B = llama(4096, 14336, 32), oss(2880, 32, 64, 64)
QWEN3_30B_A3B: Shape = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
TINY_EXPERTS: Shape = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PUBLISHED = packed_checkpoints.formats(128, (128, 128))
INT4, FP8, MXFP4 = "compressed-tensors, int4", "fp8", "mxfp4"

FULL = Plan(
    shapes={
        "llama-3-8b": LLAMA_8B,
        "llama-3-70b": llama(8192, 28672, 64),
        "qwen3-30b-a3b": QWEN3_30B_A3B,
        "gpt-oss-20b": GPT_OSS_20B,
    },
    packed={
        "llama-3-8b-int4": PackedShape(shape=LLAMA_8B, format=PUBLISHED[INT4]),
        "llama-3-8b-fp8": PackedShape(shape=LLAMA_8B, format=PUBLISHED[FP8]),
        "qwen3-30b-a3b-fp8": PackedShape(shape=QWEN3_30B_A3B, format=PUBLISHED[FP8]),
        "gpt-oss-20b-mxfp4": PackedShape(shape=GPT_OSS_20B, format=PUBLISHED[MXFP4]),
    },
    layers=3,
    batches=(1, 8, 64, 256),
    contexts=(128, 2048, 8192),
    packed_points=((1, 128), (8, 128), (64, 128), (256, 128), (1, 2048), (64, 2048)),
    batching_points=(
        *((1, 2048), (64, 2048), (64, 128), (1, 128), (8, 2048), (256, 128), (8, 128)),
        *((1, 8192), (8, 8192), (256, 2048)),
    ),
    batching_s=8.0,
    listed=frozenset({(1, 128), (1, 2048), (64, 128), (64, 2048)}),
    prefills=(512, 2048),
    rounds=20,
    copied_bytes=1 << 30,
    matrix=8192,
)
TINY = Plan(
    shapes={"tiny": llama(64, 96, 4, 2), "tiny-experts": TINY_EXPERTS},
    packed={
        "tiny-int4": PackedShape(
            shape=llama(64, 96, 4, 2), format=packed_checkpoints.FORMATS[INT4]
        ),
        "tiny-fp8": PackedShape(shape=llama(64, 96, 4, 2), format=packed_checkpoints.FORMATS[FP8]),
        "tiny-experts-fp8": PackedShape(shape=TINY_EXPERTS, format=packed_checkpoints.FORMATS[FP8]),
        "tiny-experts-mxfp4": PackedShape(
            shape=oss(64, 8, 4, 16), format=packed_checkpoints.FORMATS[MXFP4]
        ),
    },
    layers=2,
    batches=(1, 2),
    contexts=(16,),
    packed_points=((1, 16), (2, 16)),
    batching_points=((2, 16), (1, 16)),
    batching_s=15.0,
    listed=frozenset({(1, 16)}),
    prefills=(32,),
    rounds=2,
    copied_bytes=1 << 20,
    matrix=64,
)


def make_layers(
    directory: Path,
    shape: Shape,
    layers: int,
    context_tokens: int,
    device: str = "cpu",
    *,
    vocab: int = 256,
    tied: bool = False,
) -> Path:
    """Write a model of that shape in bfloat16, ``tied`` with one matrix for embedding and head;
    ``device`` draws it."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        **shape,
        num_hidden_layers=layers,
        vocab_size=vocab,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=tied,
        pad_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def make_packed(directory: Path, packed: PackedShape, plan: Plan, device: str) -> Path:
    """Write a model of a packed shape as it is published."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as made:
        plain = make_layers(Path(made), packed.shape, plan.layers, _longest(plan), device)
        packed_checkpoints.write(plain, packed.format, directory, device=device)
    return directory


def _longest(plan: Plan) -> int:
    """Tokens that a model must allow."""
    return max(plan.contexts) + plan.rounds + 64 + max(plan.prefills)


def fast_directory() -> str | None:
    """Where there are files in memory: large models are only written to be read once."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


def seconds_of(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median seconds of ``run``, behind a synchronisation; the first two runs warm up."""
    took = []
    for turn in range(rounds + 2):
        started_s = time.perf_counter()
        run()
        wait_for(device)
        if turn >= 2:
            took.append(time.perf_counter() - started_s)
    return median(took)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What runs on the device within a layer, with what a step takes beside its layers."""

    seconds: float
    """Of all kernels, without gaps and copies."""
    launches: float
    listed: list[tuple[str, float, float]]
    """Name, launches and microseconds of the kernels that take the most."""

    def figures(self, floor_s: float, *, listed: bool) -> dict[str, Any]:
        """As results have them."""
        found: dict[str, Any] = {
            "kernels_us": round(1e6 * self.seconds, 1),
            "kernels_times_floor": round(self.seconds / floor_s, 2),
            "launches": round(self.launches, 1),
        }
        return found | ({"kernels": self.listed} if listed else {})


def kernels_of(run: Callable[[], object], layers: int) -> Kernels | None:
    """All kernels that ``run`` launches, by layer; None without CUDA, where it runs as often."""
    if torch.version.cuda is None:
        for _ in range(1 + PROFILED):
            run()
        return None
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    kernels = [
        (
            event.key,
            event.count / PROFILED / layers,
            event.self_device_time_total / PROFILED / layers,
        )
        for event in seen.key_averages()
        if event.self_device_time_total > 0 and not event.key.startswith("Mem")
    ]
    longest = sorted(kernels, key=lambda kernel: kernel[2], reverse=True)[:LISTED]
    return Kernels(
        seconds=sum(us for _, _, us in kernels) / 1e6,
        launches=sum(count for _, count, _ in kernels),
        listed=[
            (name[:NAME_CHARACTERS], round(count, 2), round(us, 2)) for name, count, us in longest
        ],
    )


def parts_of(run: Callable[[], object], engine: "EngineSide", rounds: int) -> tuple[float, float]:
    """Median seconds within layers, and beside them, of ``run``; the first two runs warm up."""
    inside, beside = [], []
    for turn in range(rounds + 2):
        engine.inside_s()
        started_s = time.perf_counter()
        run()
        wait_for(engine.device)
        whole_s, inside_s = time.perf_counter() - started_s, engine.inside_s()
        if turn >= 2:
            inside.append(inside_s)
            beside.append(whole_s - inside_s)
    return median(inside), median(beside)


def expert_share(directory: Path) -> float:
    """Share of experts' weights in what is stored of the layers, in bytes."""
    experts = layers = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if ".layers." in name:
                start, end = entry["data_offsets"]
                layers += end - start
                experts += (end - start) * (".experts." in name)
    return experts / layers


def chosen_share(config: Any) -> float:
    """Share of the experts that a row chooses; 1 without experts."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return config.num_experts_per_tok / experts if experts else 1.0


LAYER_TRIES = 3
"""Times that a layer is timed at most: one that cannot be right is timed again."""
LAYER_SHARE_LEAST = 0.02
"""Minimum share of a layer in what runs with one layer: less is noise."""


class StepError(Exception):
    """A step of the engine gave an error."""


class EngineSide:
    """The engine, fed with hidden states, so that neither embedding nor head counts."""

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
        flow = self._engine.loaded.forward
        vars(flow)["run"] = partial(self._timed, flow.run)
        self._inside_s = 0.0
        for pool in self._engine._pools.values():  # numbers to read: memory as it was may be zeros
            pool.keys.normal_()
            pool.values.normal_()
        self._at: dict[str, int] = {}
        widest = max(*plan.prefills, *plan.batches)
        self._rows = torch.randn(widest, probe.hidden_size, dtype=torch.bfloat16)
        self.device = self._engine.device
        self.reads_in_place = self._engine.reads_in_place
        self.layer_bytes = self._engine.spec.layer_bytes
        self.kv_bytes = self._engine.spec.kv_bytes_per_token_layer
        self._expert_bytes = expert_share(directory) * self.layer_bytes
        self._chosen_share = chosen_share(probe)
        kinds = getattr(probe, "layer_types", None) or []
        self._windows = [
            probe.sliding_window if kind == "sliding_attention" else None
            for kind in kinds or [None] * plan.layers
        ]

    def step_bytes(self, batch: int, context: int) -> float:
        """Bytes that a step of ``batch`` decodes must read per layer, on average."""
        weights = self.read_bytes(batch)
        seen = [min(window or context, context) for window in self._windows]
        return weights + batch * self.kv_bytes * sum(seen) / len(seen)

    def read_bytes(self, rows: int) -> float:
        """Bytes of a layer's weights that ``rows`` rows need, which choose evenly among experts."""
        touched = 1 - (1 - self._chosen_share) ** rows
        return self.layer_bytes - self._expert_bytes * (1 - touched)

    @property
    def row_numbers(self) -> float:
        """Numbers of the weights that one row is multiplied with in a layer, however they are
        stored."""
        layout = self._engine.layout
        found = 0.0
        for name, weight in layout.model.get_submodule(layout.layers_name).named_parameters():
            found += weight.numel() * (self._chosen_share if ".experts." in name else 1.0)
        return found / len(layout.layers)

    def open(self, batch: int, context: int, steps: int, layers: int) -> bool:
        """Sessions over the first ``layers`` with ``context`` tokens of random KV; False where
        there is no room."""
        self._layers = layers
        for n in range(batch):
            name = str(n)
            if self._engine.kv.reserve(name, context + steps) is not None:
                self.close()
                return False
            self._at[name] = context
            reservation = self._engine.kv.get(name)
            assert reservation is not None
            self._engine.kv.grow(name, reservation, context)
            self._engine.kv.ran(name, reservation, 0, context)
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

    def _timed(self, run: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """Run layers within a step, and add what they take."""
        wait_for(self.device)
        started_s = time.perf_counter()
        made = run(*given)
        wait_for(self.device)
        self._inside_s += time.perf_counter() - started_s
        return made

    def inside_s(self) -> float:
        """Seconds within layers since the last call."""
        taken_s, self._inside_s = self._inside_s, 0.0
        return taken_s

    def decode(self) -> None:
        """One token of each session."""
        rows = torch.split(self._rows[: len(self._at)], 1)
        self._run(dict(zip(self._at, rows, strict=True)))

    def prefill(self, tokens: int, layers: int) -> None:
        """One prompt through the first ``layers``, which is forgotten again."""
        self._layers = layers
        if (refused := self._engine.kv.reserve("prompt", tokens)) is not None:
            raise StepError(refused)
        self._at["prompt"] = 0
        self._run({"prompt": self._rows[:tokens]})
        self._engine.kv.free("prompt")
        del self._at["prompt"]

    def announced(self) -> dict[str, Any]:
        """What a peer with these layers would announce before it serves, in microseconds of a
        layer, and its T_j in tokens/s. The layers are gone afterwards."""
        del vars(self._engine.loaded.forward)["run"]
        profile = layer_profile.measure(self._engine)
        return {
            "decode_us": _microseconds(profile.points),
            "prompt_us": _microseconds(profile.prefills),
            "fit_error": profile.fit_error,
            "tokens_per_s": [
                round(rate, 1) for rate in layer_profile.tokens_per_s(self._engine, profile)
            ],
        }

    def close(self) -> None:
        """End all sessions."""
        for name in self._at:
            self._engine.kv.free(name)
        self._at.clear()


def _microseconds(timed: Iterable[Timing]) -> dict[str, float]:
    """By batch and context."""
    return {f"{t.batch}/{t.context_tokens}": round(1e6 * t.seconds, 1) for t in timed}


def hold(model: Any, layers: Any, count: int) -> None:
    """Let ``model`` run the first ``count`` of all its ``layers`` from now on."""
    model.config.num_hidden_layers, model.layers = count, layers[:count]


class EagerSide:
    """The same layers in ``transformers`` with eager attention."""

    def __init__(self, directory: Path, device: str, plan: Plan) -> None:
        with torch.device(plan.drawn_on(device)):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(directory),
                dtype=torch.bfloat16,
                attn_implementation="eager",
            )
        self._model: Any = model.to(device).eval().model
        self._layers = self._model.layers
        self.device = device

    def hold(self, layers: int) -> None:
        """Run the first ``layers`` from now on."""
        hold(self._model, self._layers, layers)

    def _forward(self, ids: torch.Tensor, cache: DynamicCache) -> None:
        with torch.inference_mode():
            self._model(input_ids=ids, past_key_values=cache, use_cache=True)

    def decoder(self, batch: int, context: int) -> Callable[[], None]:
        """A function that decodes one token of each of ``batch`` sequences."""
        config = self._model.config
        cache = DynamicCache(config=config)  # windows bound some layers' caches
        for layer in range(config.num_hidden_layers):
            shape = (batch, config.num_key_value_heads, context, config.head_dim)
            keys, values = (
                torch.randn(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2)
            )
            cache.update(keys, values, layer)
        ids = torch.ones(batch, 1, dtype=torch.long, device=self.device)
        return lambda: self._forward(ids, cache)

    def prefill(self, tokens: int) -> None:
        """One prompt."""
        ids = torch.ones(1, tokens, dtype=torch.long, device=self.device)
        self._forward(ids, DynamicCache(config=self._model.config))


class BatchingSide:
    """The same layers in ``transformers``' continuous batching, with a tiny embedding and head.

    Its own loop runs, on this thread. Sequences begin with random KV, as the engine's do. The
    attention is the fastest that it finds: that of flash-attn, else torch's, else its own.
    """

    def __init__(self, directory: Path, device: str, plan: Plan) -> None:
        with torch.device(plan.drawn_on(device)):
            model: Any = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(directory),
                dtype=torch.bfloat16,
                attn_implementation="eager",
            )
        self._model = model.to(device).eval()
        if self._model._supports_sdpa:
            self._model.set_attn_implementation("sdpa")
        self._layers = self._model.model.layers
        self.device = torch.device(device)
        self.settings: dict[str, Any] = {}
        """What it chose for the last steps."""

    def _manager(self, batch: int, context: int, *, graphs: bool) -> Any:
        """Its manager for steps of ``batch`` decodes; ``graphs``: of CUDA, for exactly these."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        longest = context + BATCHING_WARMING + BATCHING_STEPS + 1
        held = self._model.config.num_hidden_layers
        pages = 2 * batch * math.ceil(longest / BATCHING_PAGE_TOKENS) + 8
        padding = {"q_padding_interval_size": batch, "kv_padding_interval_size": batch * longest}
        return self._model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1),
            ContinuousBatchingConfig(
                page_size=BATCHING_PAGE_TOKENS,
                num_blocks=pages * len(self._layers) // held,
                max_batch_tokens=batch,
                allow_block_sharing=False,
                **({"use_cuda_graph": True, **padding} if graphs else {}),
            ),
            WorkloadHints(max_prompt_length=context, max_generated_length=64, num_requests=batch),
        )

    def step_s(
        self, layers: int, batch: int, context: int, until_s: float, *, graphs: bool
    ) -> float:
        """Median seconds of a step of decodes through the first ``layers``.

        Raises TimeoutError where it is not through at ``until_s``, StepError where it ends its
        sequences, and what its code raises.
        """
        from transformers.generation.continuous_batching.requests import (
            RequestState,
            RequestStatus,
        )

        hold(self._model.model, self._layers, layers)
        manager = self._manager(batch, context, graphs=graphs)
        processor = manager.batch_processor = manager._create_batch_processor()
        manager.current_batch = 0
        processor.cache.cache_tensor.view(torch.bfloat16).normal_()
        wait_for(self.device)
        states = []
        for n in range(batch):
            state = RequestState(
                request_id=str(n), initial_tokens=[n % 256] * context, max_new_tokens=None
            )
            state.status, state.remaining_prefill_tokens = RequestStatus.DECODING, []
            state.tokens_to_process, state.generated_tokens = [1], [1]
            state.position_offset = context
            if not processor.cache.can_store_request_tokens(state, 1):
                raise StepError("no room for its KV")
            processor.scheduler.active_requests[state.request_id] = state
            states.append(state)
        chosen = manager.continuous_batching_config
        self.settings = {
            "attention": self._model.config._attn_implementation,
            "graphs": any(chosen.cuda_graph_booleans),
            "async": chosen.use_async_batching,
        }
        if processor.use_async_batching:
            manager._generation_loop_body(processor, bootstrapping=True)
        taken = []
        for _ in range(BATCHING_WARMING + BATCHING_STEPS):
            started_s = time.perf_counter()
            manager._generation_loop_body(processor, bootstrapping=False)
            taken.append(time.perf_counter() - started_s)
            if time.monotonic() > until_s:
                raise TimeoutError(f"{len(taken)} steps within the time for all")
        wait_for(self.device)
        made = {state.generated_len() for state in states}
        if made != {len(taken) + 1}:
            raise StepError(f"sequences of {sorted(made)} tokens after {len(taken)} steps")
        return median(taken[BATCHING_WARMING:])


def batching_figures(
    directory: Path, device: str, plan: Plan, found: dict[str, Any]
) -> Iterator[None]:
    """Put continuous batching beside the decodes in ``found``, or why it does not run. Yields after
    each point."""
    ends_s = time.monotonic() + plan.batching_s
    try:
        clean(device)
        side = BatchingSide(directory, device, plan)
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine's figures stay
        found["batching"] = reason(error)
        return
    gc.freeze()  # it collects garbage at the end of each point
    try:
        yield from _batching_points(side, plan, found, ends_s)
    finally:
        gc.unfreeze()


def _batching_points(
    side: BatchingSide, plan: Plan, found: dict[str, Any], ends_s: float
) -> Iterator[None]:
    """All points: first as it chooses to, then with graphs of CUDA where these are faster."""
    rate = "batching_layer_tokens_per_s"
    for graphs in (False, True) if side.device.type == "cuda" else (False,):
        for batch, context in plan.batching_points:
            told = found.get(f"decode_{batch}_{context}")
            until_s = min(ends_s, time.monotonic() + BATCHING_POINT_S)
            if not isinstance(told, dict) or until_s <= time.monotonic():
                continue
            key = "batching_with_graphs" if graphs else "batching"
            try:
                clean(str(side.device))
                floor_s = told["floor_us"] / 1e6
                point = batch, context
                figures = batching_point(side, point, plan, until_s, floor_s, graphs=graphs)
            except Exception as error:  # noqa: BLE001 - as above
                told[key] = reason(error)
            else:
                if figures[rate] > told.get(rate, 0):
                    told |= figures
                told[key] = {rate: figures[rate], **side.settings}
            yield


def batching_point(
    side: BatchingSide,
    point: Point,
    plan: Plan,
    until_s: float,
    floor_s: float,
    *,
    graphs: bool,
) -> dict[str, float]:
    """One point of decoding in continuous batching."""
    batch, context = point

    def decode_s(layers: int) -> tuple[float, float]:
        return side.step_s(layers, batch, context, until_s, graphs=graphs), 0.0

    layer_s, beside_s = layer_and_beside(decode_s, plan.layers, floor_s)
    return {
        "batching_layer_tokens_per_s": round(batch / layer_s, 1),
        "batching_beside_layers_ms": round(1e3 * beside_s, 3),
    }


def reason(error: Exception) -> str:
    """Why a side did not run."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]


def clean(device: str) -> None:
    """Free what nobody holds any more."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


@cache
def machine_rates(device: torch.device, copied_bytes: int, matrix: int) -> tuple[float, float]:
    """Bytes/s of the quicker of a sum that reads and a copy that reads and writes, and
    multiply-adds/s (counted as two) of one bfloat16 product."""
    read = torch.randn(copied_bytes // 4, dtype=torch.float32, device=device)
    read_s = seconds_of(read.sum, device, RATE_ROUNDS)
    copied_s = seconds_of(partial(torch.empty_like(read).copy_, read), device, RATE_ROUNDS)
    del read
    square = torch.randn(matrix, matrix, dtype=torch.bfloat16, device=device)
    product_s = seconds_of(lambda: square @ square, device, RATE_ROUNDS)
    return copied_bytes / min(read_s, copied_s / 2), 2 * matrix**3 / product_s


def measure(
    directory: Path,
    device: str,
    plan: Plan,
    *,
    kernels: bool,
    rival: bool = True,
    points: tuple[Point, ...] | None = None,
) -> Iterator[dict[str, Any]]:
    """All ``points`` of one shape (those of the plan), both sides in turn; ``rival``: the other
    side, too. Yields what is found after each."""
    at = torch.device(device)
    bytes_per_s, flops_per_s = machine_rates(at, plan.copied_bytes, plan.matrix)
    clean(device)  # the shape before
    steps = plan.rounds + 2 + 1 + PROFILED
    points = points or plan.points
    most = max(batch * (context + steps + 16) for batch, context in points) + max(plan.prefills)
    engine = EngineSide(directory, device, most, plan, kernels=kernels)
    eager = EagerSide(directory, device, plan) if rival else None
    found: dict[str, Any] = {
        "layers": plan.layers,
        "bytes_per_s": round(bytes_per_s),
        "flops_per_s": round(flops_per_s),
        "attention": "in place" if engine.reads_in_place else "over copies",
    }
    for batch, context in points:
        seen: list[Kernels | None] = []

        def decode_s(
            layers: int,
            batch: int = batch,
            context: int = context,
            seen: list[Kernels | None] = seen,
        ) -> tuple[float, float]:
            if not engine.open(batch, context, steps, layers):
                raise StepError("no room for its KV")
            try:
                took = parts_of(engine.decode, engine, plan.rounds)
                if layers == plan.layers:
                    seen.append(kernels_of(engine.decode, layers))
            finally:
                engine.close()
            return took

        name = f"decode_{batch}_{context}"
        floor_s = engine.step_bytes(batch, context) / bytes_per_s
        try:
            layer_s, beside_s = layer_and_beside(
                decode_s, plan.layers, floor_s, lambda seen=seen: seconds_in(seen[-1])
            )
        except StepError as error:  # one point less, not all of them
            found[name] = str(error)
            yield found
            continue
        found[name] = {
            "layer_tokens_per_s": round(batch / layer_s, 1),
            "floor_us": round(1e6 * floor_s, 1),
            "times_floor": round(layer_s / floor_s, 2),
            "beside_layers_ms": round(1e3 * beside_s, 3),
        }
        if (each := seen[-1]) is not None:
            found[name] |= each.figures(floor_s, listed=(batch, context) in plan.listed)
        if eager is not None:
            found[name] |= eager_figures(eager, (batch, context), plan, floor_s)
        yield found
    for tokens in plan.prefills:
        rates = bytes_per_s, flops_per_s
        found[f"prefill_{tokens}"] = prefill_figures(engine, eager, tokens, plan, rates)
        yield found
    if kernels and rival:
        del eager
        found["announced"] = engine.announced()
        yield found


def seconds_in(kernels: Kernels | None) -> float:
    """Seconds of a layer's kernels; 0 where they are unknown."""
    return 0.0 if kernels is None else kernels.seconds


def layer_and_beside(
    took_s: Callable[[int], tuple[float, float]],
    layers: int,
    floor_s: float,
    kernels_s: Callable[[], float] = lambda: 0.0,
) -> tuple[float, float]:
    """Seconds of a layer, and of what a step takes beside its layers, from steps over one layer and
    over all. ``took_s`` takes the number of layers and tells seconds within and beside them.
    ``kernels_s`` is asked afterwards for the seconds of a layer's kernels.

    Raises StepError where, time after time, the difference is no more than what the times vary by,
    or less than a layer can take.
    """
    why = ""
    for _ in range(LAYER_TRIES):
        (one_s, beside_s), (all_s, _) = took_s(1), took_s(layers)
        layer_s = (all_s - one_s) / (layers - 1)
        if layer_s < LAYER_SHARE_LEAST * one_s:
            why = "it varies by more than a layer takes"
        elif not (why := impossible(layer_s, floor_s, kernels_s())):
            return layer_s, one_s - layer_s + beside_s
    raise StepError(why)


def eager_figures(eager: EagerSide, point: Point, plan: Plan, floor_s: float) -> dict[str, float]:
    """One point of decoding on the other side; nothing where its scores do not fit the device."""
    batch, context = point
    at = torch.device(eager.device)

    def decode_s(layers: int) -> tuple[float, float]:
        eager.hold(layers)
        return seconds_of(eager.decoder(batch, context), at, plan.rounds), 0.0

    try:
        layer_s, beside_s = layer_and_beside(decode_s, plan.layers, floor_s)
    except (torch.OutOfMemoryError, StepError):
        return {}
    return {
        "eager_layer_tokens_per_s": round(batch / layer_s, 1),
        "eager_beside_layers_ms": round(1e3 * beside_s, 3),
    }


def prefill_figures(
    engine: EngineSide, eager: EagerSide | None, tokens: int, plan: Plan, rates: tuple[float, float]
) -> dict[str, Any] | str:
    """One prompt on both sides; why not, where the engine cannot."""
    bytes_per_s, flops_per_s = rates
    products_s = 2 * tokens * engine.row_numbers / flops_per_s
    floor_s = max(products_s, engine.read_bytes(tokens) / bytes_per_s)

    def prefill_s(layers: int) -> tuple[float, float]:
        return parts_of(lambda: engine.prefill(tokens, layers), engine, plan.rounds)

    try:
        seen = kernels_of(lambda: engine.prefill(tokens, plan.layers), plan.layers)
        layer_s, beside_s = layer_and_beside(
            prefill_s, plan.layers, floor_s, lambda: seconds_in(seen)
        )
    except StepError as error:
        return str(error)
    figures: dict[str, Any] = {
        "floor_us": round(1e6 * floor_s, 1),
        "share_of_matrix_rate": round(products_s / layer_s, 3),
        "times_floor": round(layer_s / floor_s, 2),
        "layer_tokens_per_s": round(tokens / layer_s, 1),
        "beside_layers_ms": round(1e3 * beside_s, 3),
    }
    if seen is not None:
        figures |= seen.figures(floor_s, listed=True)
    if eager is None:
        return figures

    def eager_s(layers: int) -> tuple[float, float]:
        eager.hold(layers)
        return seconds_of(lambda: eager.prefill(tokens), engine.device, plan.rounds), 0.0

    try:
        layer_s, _ = layer_and_beside(eager_s, plan.layers, floor_s)
    except StepError:
        return figures
    return figures | {"eager_layer_tokens_per_s": round(tokens / layer_s, 1)}


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


def _names(plan: Plan) -> list[str]:
    return [*plan.shapes, *plan.packed]


def shape_figures(plan: Plan, name: str, device: str, *, kernels: bool) -> Iterator[dict[str, Any]]:
    """What is found of one shape, plain or packed, as it grows."""
    draws = plan.drawn_on(device)
    with tempfile.TemporaryDirectory(dir=fast_directory()) as made:
        directory = Path(made) / "shape"
        if (packed := plan.packed.get(name)) is not None:
            plan = replace(plan, rounds=min(plan.rounds, PACKED_ROUNDS))
            make_packed(directory, packed, plan, draws)
            points = plan.packed_points
            yield from measure(directory, device, plan, kernels=kernels, rival=False, points=points)
            return
        make_layers(directory, plan.shapes[name], plan.layers, _longest(plan), draws)
        found: dict[str, Any] = {}
        rival = kernels and plan.batching_s > 0
        for found in measure(directory, device, plan, kernels=kernels, rival=rival):
            yield found
        if rival:
            for _ in batching_figures(directory, device, plan, found):
                yield found


def compiled(names: Sequence[str], on: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run each shape once, all side by side, so that their kernels are compiled and kept: seconds,
    and what one said that failed."""
    command = [sys.executable, "-m", "bench.gpu.engine_gpu", *on, "--once", "--shapes"]

    def run(name: str) -> dict[str, Any]:
        started_s = time.monotonic()
        try:
            subprocess.run([*command, name], check=True, capture_output=True, timeout=COMPILE_S)
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
            return {"failed": reason(error), "said": said[-REASON_CHARACTERS:]}
        return {"seconds": round(time.monotonic() - started_s, 1)}

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def main() -> int:
    """Measure every shape, print, and write the result."""
    parser = parser_of("bench.gpu.engine_gpu", __doc__)
    parser.add_argument("--device", default="cuda:0", help="with its number (cuda:0)")
    parser.add_argument("--tiny", action="store_true", help="a shape that proves nothing")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help=f"of {', '.join(_names(FULL))}")
    parser.add_argument(
        "--no-kernels", action="store_true", help="torch's own kernels alone, no rival"
    )
    parser.add_argument(
        "--once", action="store_true", help="few steps, to compile what they run: no figures"
    )
    parser.add_argument(
        "--compile", action="store_true", help="run all shapes --once, side by side"
    )
    arguments = parser.parse_args()
    plan = TINY if arguments.tiny else FULL
    if arguments.once:
        plan = plan.once()
    if arguments.compile and arguments.out is None:
        parser.error("--compile writes to --out")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny proves that this runs")
    result: dict[str, Any] = {**provenance(SEED), **device_facts(arguments.device), "shapes": {}}
    names = arguments.shapes or _names(plan)
    if unknown := set(names) - set(_names(plan)):
        parser.error(
            f"no such shape: {', '.join(sorted(unknown))}; known: {', '.join(_names(plan))}"
        )
    if arguments.compile:
        on = ("--device", arguments.device, *(("--tiny",) if arguments.tiny else ()))
        write(arguments.out, result | {"compiled": compiled(names, on)})
        return 0
    failed = False
    for name in names:
        each = shape_figures(plan, name, arguments.device, kernels=not arguments.no_kernels)
        try:
            for found in each:
                result["shapes"][name] = found
                if arguments.out is not None:  # what was measured is not lost
                    write(arguments.out, result)
        except Exception as error:  # noqa: BLE001 - whatever one shape meets, the others follow
            result["shapes"].setdefault(name, {})["failed"] = reason(error)
            failed = True
        for what, figures in result["shapes"][name].items():
            shown = figures
            if isinstance(figures, dict):
                shown = {key: value for key, value in figures.items() if key != "kernels"}
            print(f"{name} {what}: {shown}", flush=True)
    if arguments.out is not None:
        write(arguments.out, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
