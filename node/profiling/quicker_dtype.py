"""The dtype in which this machine computes by default; for packed weights on a CPU, by timing.

Plain weights on a CPU are computed in float32: an answer then does not depend on the peers that
compute it. Packed and quantised ones are multiplied from their bits in bfloat16 alone, those in
8 bits in both (:mod:`node.packed.operand`, :mod:`node.model.linear.quantize`). How much that gains,
and what the rest of a layer loses where a CPU has no products in bfloat16, depends on the
checkpoint and the CPU, so a layer is timed in both.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from coordinator.problem.service import Workload
from dht.errors import UserError
from node.device.hardware import Machine
from node.engine.engine import Engine, EngineConfig
from node.packed.formats import stored_weights
from node.profiling.layer_profile import EngineLayer, layers_to_time
from node.weights.store import WeightStore

TRIED = ("float32", "bfloat16")
"""Dtypes that are timed; the first one is chosen where both take the same time."""
CHUNK_TOKENS = 128
"""Tokens of the prompt's chunk that is timed."""
TIMINGS = 3
"""Others' work only ever adds to a timing, so the minimum counts."""

Timer = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultDtype:
    """The dtype in which a machine computes a model unless it is told otherwise."""

    dtype: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of one layer for a typical answer, by dtype; empty where none were timed."""

    @property
    def reason(self) -> str:
        """A line for the machine's owner; empty where nothing was timed."""
        if not self.seconds:
            return ""
        times = ", ".join(f"{took_s:.3g} s in {dtype}" for dtype, took_s in self.seconds.items())
        return (
            f"Computing in {self.dtype}: a layer in its few bits takes {times} for a typical"
            " answer on this CPU (--dtype says otherwise)"
        )


def default_dtype(
    store: WeightStore,
    machine: Machine,
    threads: int | None,
    quantize: str | None = None,
    clock: Timer = time.perf_counter,
) -> DefaultDtype:
    """The default dtype for the model in ``store`` on ``machine``. Raises UserError.

    ``quantize``: as of :class:`~node.engine.engine.EngineConfig`.
    """
    if machine.device.kind != "cpu" or not (quantize or _is_packed(store)):
        return DefaultDtype(dtype=machine.dtype)
    config = EngineConfig(
        store=store,
        name="trial",
        device=machine.torch_device,
        memory_bytes=machine.lend_bytes,
        threads=threads,
        quantize=quantize,
    )
    seconds: dict[str, float] = {}
    refused: UserError | None = None
    for dtype in TRIED:
        try:
            seconds[dtype] = layer_answer_s(Engine(replace(config, dtype=dtype)), clock)
        except UserError as error:  # its layers do not fit
            refused = refused or error
    if not seconds and refused is not None:
        raise refused
    return DefaultDtype(dtype=min(seconds, key=seconds.__getitem__), seconds=seconds)


def layer_answer_s(engine: Engine, clock: Timer = time.perf_counter) -> float:
    """Seconds that a layer of the most frequent kind takes for a typical answer, alone.

    A chunk of the prompt and a step of one row are timed.
    """
    layer = EngineLayer(engine, next(iter(layers_to_time(engine))), clock)
    load = Workload()
    tokens = min(CHUNK_TOKENS, layer.context_tokens, layer.kv_tokens)
    chunk_s = min(layer.chunk_s(0, tokens) for _ in range(TIMINGS))
    with layer.sessions(1, 1) as step_s:
        token_s = min(step_s(1) for _ in range(TIMINGS))
    return chunk_s / tokens * load.input_tokens + token_s * load.output_tokens


def _is_packed(store: WeightStore) -> bool:
    weights = stored_weights(str(store.directory), store.config, store.tensors)
    return any(stored.make is not None for stored in weights.values())
