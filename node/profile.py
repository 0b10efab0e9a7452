"""How fast this machine is: tokens/s as a function of the layers it holds (T_j, Helix §4.2).

One real layer is timed with several batch sizes and, for a peer that holds the model's head, its
cost stays out of the profile: it is one matrix product at one peer of the route.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from node.engine import Engine, WorkItem

STEP_OVERHEAD_S = 0.002
"""Per step, whatever it runs: receiving, queueing, sending."""
SESSION_TOKENS = 512
"""Typical length of a session, which bounds the batch by KV room."""
BATCHES = (1, 4, 16)
TIMINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds that one layer takes for one decode row each of several sessions, by batch size."""

    seconds: dict[int, float]


def time_layer(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> LayerTimes:
    """Load one layer and time it; the engine holds that layer afterwards.

    A layer in the middle is taken where there is one, so that no embedding or head is read.
    """
    index = 1 if engine.spec.layers > 2 else 0
    engine.load(index, index + 1)
    width = engine.layout.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    seconds: dict[int, float] = {}
    for batch in BATCHES:
        sessions = [f"profile-{n}" for n in range(batch)]
        if any(engine.reserve(session, TIMINGS + 1) for session in sessions):
            for session in sessions:
                engine.free(session)
            break
        rows = torch.randn(batch, width, generator=generator)
        took = []
        for position in range(TIMINGS + 1):
            items = [
                WorkItem(
                    session=session,
                    start=index,
                    end=index + 1,
                    position=position,
                    hidden=rows[n : n + 1],
                )
                for n, session in enumerate(sessions)
            ]
            started_s = clock()
            engine.step(items)
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            took.append(clock() - started_s)
        seconds[batch] = min(took[1:])  # the first step warms up
        for session in sessions:
            engine.free(session)
    return LayerTimes(seconds=seconds)


def tokens_per_s(engine: Engine, times: LayerTimes) -> tuple[float, ...]:
    """T_j for j = 1 to the most layers that fit: the best rate over the batches that KV allows.

    T_j = max over batches b of b / (overhead + j × t(b)), where the KV room left by j layers holds
    b sessions of typical length, and at least one.
    """
    return tuple(
        _rate(layers, _sessions(engine, layers), times.seconds)
        for layers in range(1, engine.layers_max + 1)
    )


def _sessions(engine: Engine, layers: int) -> int:
    spec = engine.spec
    free = engine.config.memory_bytes - layers * spec.layer_bytes
    tokens = max(0, free) // (spec.kv_bytes_per_token_layer * layers)
    return max(1, tokens // SESSION_TOKENS)


def _rate(layers: int, sessions: int, seconds: dict[int, float]) -> float:
    feasible: Sequence[int] = [batch for batch in seconds if batch <= sessions] or [min(seconds)]
    return max(batch / (STEP_OVERHEAD_S + layers * seconds[batch]) for batch in feasible)
