"""How fast this machine is: tokens/s as a function of the layers it holds (T_j, Helix §4.2).

One real layer is timed with several batch sizes and, for a peer that holds the model's head, its
cost stays out of the profile: it is one matrix product at one peer of the route.

``python -m node.profile MODEL`` prints what a peer here would announce.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dht.command_line import EXIT_DONE, Parser, run_command
from dht.hub import served_name
from node.engine import Engine, EngineConfig, WorkItem
from node.hardware import machine_of
from node.hub_shards import open_model

STEP_OVERHEAD_S = 0.002
"""Per step, whatever it runs: receiving, queueing, sending."""
SESSION_TOKENS = 512
"""Typical length of a session, which bounds the batch by KV room."""
BATCHES = (1, 4, 16)
PREFILLS = (32, 128, 256)
"""Tokens of the chunks of a prompt that are timed."""
TIMINGS_MIN = 3
TIMINGS_MAX = 64
TIMING_BUDGET_S = 0.3
"""For all batches together. Other processes only ever add to a timing, so the least of many is
the machine's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds that one layer takes for one decode row each of several sessions, by batch size."""

    seconds: dict[int, float]


def time_layer(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> LayerTimes:
    """Time one layer, filled with made-up numbers so that no weights need to be here yet.

    A layer in the middle is taken where there is one, so that no embedding or head is read. The
    batches are timed in turn, so that a busy moment does not fall on one of them alone.
    """
    index = 1 if engine.spec.layers > 2 else 0
    engine.load(index, index + 1, made_up=True)
    batches = _batches(engine)
    generator = torch.Generator().manual_seed(0)
    width = engine.layout.config.get_text_config().hidden_size
    rows = torch.randn(max(batches), width, generator=generator)
    for batch in batches:  # the first step of a size warms up
        _time_step(engine, index, rows[:batch], clock)
    seconds = dict.fromkeys(batches, math.inf)
    started_s = clock()
    for timing in range(TIMINGS_MAX):
        if timing >= TIMINGS_MIN and clock() - started_s > TIMING_BUDGET_S:
            break
        for batch in batches:
            seconds[batch] = min(seconds[batch], _time_step(engine, index, rows[:batch], clock))
    for n in range(max(batches)):
        engine.free(_session(n))
    return LayerTimes(seconds=seconds)


def time_prefill(
    engine: Engine, clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Seconds that one layer takes for a chunk of a prompt, by its tokens; least of several.

    The engine must hold the layer already (:func:`time_layer`). What KV has no room for, or
    the model's context, is left out.
    """
    start, _ = engine.held
    width = engine.layout.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    seconds: dict[int, float] = {}
    for tokens in (tokens for tokens in PREFILLS if tokens <= engine.spec.context_tokens):
        rows = torch.randn(tokens, width, generator=generator)
        item = WorkItem(session="prefill", start=start, end=start + 1, position=0, hidden=rows)
        for timing in range(1 + TIMINGS_MIN):  # the first one warms up
            if engine.reserve(item.session, tokens) is not None:
                break
            took_s = _time_items(engine, [item], clock)
            if timing:
                seconds[tokens] = min(took_s, seconds.get(tokens, math.inf))
            engine.free(item.session)
    return seconds


def _session(number: int) -> str:
    return f"profile-{number}"


def _batches(engine: Engine) -> list[int]:
    """The batch sizes that KV has room for; their sessions hold a page each afterwards."""
    held = 0
    while held < max(BATCHES) and engine.reserve(_session(held), 1) is None:
        held += 1
    return [batch for batch in BATCHES if batch <= held]


def _time_step(engine: Engine, index: int, rows: torch.Tensor, clock: Callable[[], float]) -> float:
    items = [
        WorkItem(session=_session(n), start=index, end=index + 1, position=0, hidden=row[None])
        for n, row in enumerate(rows)
    ]
    for item in items:  # a position runs once
        engine.free(item.session)
        engine.reserve(item.session, 1)
    return _time_items(engine, items, clock)


def _time_items(engine: Engine, items: Sequence[WorkItem], clock: Callable[[], float]) -> float:
    started_s = clock()
    for result in engine.step(items):
        if result.error is not None:
            raise RuntimeError(f"a layer could not be timed: {result.error}")
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return clock() - started_s


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


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m node.profile",
        description="Measure how fast this machine runs a model's layers, without joining.",
        epilog="exit codes: 0 done, 2 your mistake, 3 the hub cannot be reached",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="directory in Hugging Face layout, or a hub id"
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="N", help="compute on GPU number N")
    device.add_argument("--cpu", action="store_true", help="compute on the CPU (default)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="as for node.join")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


async def main(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    machine = machine_of(arguments.gpu, arguments.memory)
    store = await asyncio.to_thread(open_model, arguments.model)
    on_cpu = machine.torch_device == "cpu"
    config = EngineConfig(
        store=store,
        name=served_name(arguments.model),
        device=machine.torch_device,
        dtype="float32" if on_cpu else "bfloat16",
        memory_bytes=machine.lend_bytes,
    )
    engine = Engine(config)
    times = time_layer(engine)
    rates = tokens_per_s(engine, times)
    if arguments.json:
        fields = {
            "device": machine.device.name,
            "dtype": config.dtype,
            "memory_bytes": config.memory_bytes,
            "layers": engine.spec.layers,
            "layers_max": engine.layers_max,
            "layer_s": {str(batch): seconds for batch, seconds in times.seconds.items()},
            "tokens_per_s": list(rates),
        }
        print(json.dumps(fields))
        return EXIT_DONE
    print(
        f"{machine.device.name}, {config.dtype}, {config.memory_bytes / 2**30:.2f} GiB:"
        f" up to {engine.layers_max} of {engine.spec.layers} layers"
    )
    for batch, seconds in times.seconds.items():
        print(f"  one layer, batch of {batch}: {seconds * 1e3:.3f} ms")
    for layers, rate in enumerate(rates, start=1):
        print(f"  {layers} layers: {rate:.0f} tokens/s")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(run_command(parse, main))
