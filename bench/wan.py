"""How links of the internet treat answers: policies side by side over slow, far links.

    python -m bench.wan molink [--quick] [--out bench/results/wan_molink.json]
    python -m bench.wan change [--out bench/results/wan_change.json]
    python -m bench.wan groups [--out bench/results/wan_groups.json]

``molink`` is the setting of MoLink (EMNLP Findings 2025, §4): three stages of a model with
Qwen-7B's shapes on RTX 4090s, links of 100 Mbit/s and 30 ms, requests from the Azure conversation
trace at Poisson arrivals. The project's own sessions, stages, hops and link schedulers run over
the in-memory network under a virtual clock; the engine is a stand-in that waits as long as the GPU
would and sends activations of the true size (:mod:`bench.timed_engine`).

- ``fifo``: prompts are computed and sent whole, in order, as vLLM and Helix do;
- ``molink``: prompts are computed whole, sent in chunks by Algorithm 1;
- ``anabranch``: prompts are computed in chunks, decodes go first, credits bound what is on its way;
- ``anabranch+int8``: and prompts' rows travel as int8 with a scale per row.

``groups``: many answers at once over the same stages, with at most so many decodes per step:
whether splitting the sessions of a route into groups (MoLink's micro-batches) serves more than
running whatever is ready.

``change``: the bandwidth falls from 100 to 20 Mbit/s and returns, under load; the estimator's
trace beside the truth.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import provenance, write
from bench.stand_in import (
    MBIT,
    RTX_4090,
    SPANS,
    Request,
    Served,
    Setting,
    StandInSwarm,
    ask,
    floor,
    requests,
    serve,
    summary,
)
from dht.simulated.clock import run_virtual

REQUESTS = 30
"""Per cell, on average; the same ones for every policy."""
POLICIES = ("fifo", "molink", "anabranch", "anabranch+int8")


def settings(*, quick: bool) -> list[Setting]:
    """The cells of MoLink's tables."""
    base = Setting(policy="fifo", seconds=60.0 if quick else REQUESTS / 0.3)
    cells = [
        replace(base, requests_per_s=rate, seconds=REQUESTS / rate) for rate in (0.1, 0.2, 0.3, 0.7)
    ]
    cells += [replace(base, mbit=mbit) for mbit in (60.0, 200.0, 400.0)]
    cells += [replace(base, delay_s=ms / 1e3) for ms in (10, 20, 50)]
    if quick:
        cells = [replace(cells[2], seconds=60.0)]
    return [replace(cell, policy=policy) for cell in cells for policy in POLICIES]


def molink(*, quick: bool) -> dict[str, Any]:
    """Serve every cell; returns the result file's content."""
    cells = []
    for setting in settings(quick=quick):
        started_s = time.monotonic()
        measured = summary(serve(setting))
        cells.append(
            {
                "policy": setting.policy,
                "requests_per_s": setting.requests_per_s,
                "mbit": setting.mbit,
                "delay_ms": setting.delay_s * 1e3,
                "virtual_s": setting.seconds,
                "took_s": time.monotonic() - started_s,
                **measured,
                "floor": floor(setting),
            }
        )
    return {
        "what": "MoLink's setting under a virtual clock; the engine is a stand-in that waits as"
        " long as an RTX 4090 would, activations have their true size",
        "stand_in": {
            "step_s": RTX_4090.step_s,
            "decode_s": RTX_4090.decode_s,
            "prefill_s": RTX_4090.prefill_s,
            "spans": SPANS,
        },
        "cells": cells,
    }


def print_cells(cells: Sequence[dict[str, Any]]) -> None:
    """The table for people."""
    table = Table(
        "policy", "req/s", "Mbit/s", "ms", "n", "TTFT s", "p95", "TPOT ms", "p95", "floor"
    )
    for cell in cells:
        table.add_row(
            cell["policy"],
            f"{cell['requests_per_s']}",
            f"{cell['mbit']:.0f}",
            f"{cell['delay_ms']:.0f}",
            f"{cell['requests']}",
            f"{cell['ttft_mean_s']:.2f}",
            f"{cell['ttft_p95_s']:.2f}",
            f"{cell['tpot_mean_s'] * 1e3:.0f}",
            f"{cell['tpot_p95_s'] * 1e3:.0f}",
            f"{cell['floor']['ttft_s']:.2f} s, {cell['floor']['tpot_s'] * 1e3:.0f} ms",
        )
    Console().print(table)


def change() -> dict[str, Any]:
    """100 Mbit/s, 20 from 120 s to 240 s, 100 again; the estimate of the first link beside it."""
    setting = Setting(policy="anabranch", requests_per_s=0.3, seconds=360.0)

    def truth(at_s: float) -> float:
        return 20.0 if 120 <= at_s < 240 else 100.0

    async def run() -> tuple[list[Served], list[dict[str, float]]]:
        trace: list[dict[str, float]] = []
        async with StandInSwarm(setting) as swarm:
            loop = asyncio.get_running_loop()
            start_s = loop.time()

            async def vary() -> None:
                while True:
                    at_s = loop.time() - start_s
                    swarm.shape(truth(at_s))
                    flow = swarm.peers[0].stage.flow
                    link = flow.links().get(swarm.peers[1].transport.peer_id)
                    if link is not None:
                        trace.append(
                            {
                                "at_s": round(at_s, 3),
                                "truth_mbit": truth(at_s),
                                "estimate_mbit": link.delivery.bandwidth_bytes_per_s / MBIT,
                                "base_rtt_ms": link.delivery.base_rtt_us / 1e3,
                            }
                        )
                    await asyncio.sleep(0.5)

            varying = asyncio.create_task(vary())
            served = list(await asyncio.gather(*(ask(swarm.client, r) for r in requests(setting))))
            varying.cancel()
        return served, trace

    served, trace = run_virtual(run(), limit_s=100_000)
    phases = {"before": (0, 120), "low": (120, 240), "after": (240, 360)}
    return {
        "what": "bandwidth 100 → 20 → 100 Mbit/s under load, virtual clock, stand-in engine",
        "phases": {
            name: summary([s for s in served if start <= s.request.at_s < end])
            for name, (start, end) in phases.items()
        },
        "trace": trace,
    }


GROUP_SESSIONS = 32
GROUP_TOKENS = 150


def groups() -> dict[str, Any]:
    """32 answers at once, by the decodes that one step may take and by how slow a step is."""
    cells = []
    for step_s, delay_s in itertools.product((5e-3, 2e-2, 8e-2), (1e-3, 3e-2)):
        for decodes_max in (256, 16, 11, 8, 4):
            setting = Setting(
                policy="anabranch",
                mbit=400.0,
                delay_s=delay_s,
                decodes_max=decodes_max,
                gpu_step_s=step_s,
            )
            cells.append(
                {
                    "step_ms": step_s * 1e3,
                    "delay_ms": delay_s * 1e3,
                    "decodes_max": decodes_max,
                    **_together(setting),
                }
            )
    return {
        "what": f"{GROUP_SESSIONS} answers of {GROUP_TOKENS} tokens over three stages, virtual"
        " clock, stand-in engine; 256 decodes a step is whatever is ready",
        "cells": cells,
    }


def _together(setting: Setting) -> dict[str, float]:
    async def run() -> dict[str, float]:
        async with StandInSwarm(setting) as swarm:
            rng = random.Random(setting.seed)
            asked = [
                Request(at_s=rng.uniform(0, 1.0), prompt_tokens=64, new_tokens=GROUP_TOKENS)
                for _ in range(GROUP_SESSIONS)
            ]
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            served = await asyncio.gather(*(ask(swarm.client, each) for each in asked))
            tokens = sum(each.request.new_tokens for each in served)
            return {
                "tokens_per_s": tokens / (loop.time() - start_s),
                "tpot_mean_s": statistics.fmean(each.tpot_s for each in served),
            }

    return run_virtual(run(), limit_s=100_000)


def print_groups(cells: Sequence[dict[str, Any]]) -> None:
    """The table for people."""
    table = Table("step ms", "delay ms", "decodes a step", "tokens/s", "TPOT ms")
    for cell in cells:
        most = cell["decodes_max"]
        table.add_row(
            f"{cell['step_ms']:.0f}",
            f"{cell['delay_ms']:.0f}",
            "all ready" if most >= GROUP_SESSIONS else f"{most}",
            f"{cell['tokens_per_s']:.0f}",
            f"{cell['tpot_mean_s'] * 1e3:.0f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wan", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("molink", "change", "groups"))
    parser.add_argument("--quick", action="store_true", help="one cell, one minute")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    match arguments.what:
        case "molink":
            result = molink(quick=arguments.quick)
            print_cells(result["cells"])
        case "groups":
            result = groups()
            print_groups(result["cells"])
        case _:
            result = change()
            for name, phase in result["phases"].items():
                tpot_ms = phase["tpot_mean_s"] * 1e3
                print(f"{name}: TPOT {tpot_ms:.0f} ms, TTFT {phase['ttft_mean_s']:.2f} s")
    if arguments.out:
        write(arguments.out, {**result, "provenance": provenance(seed=1)})


if __name__ == "__main__":
    main()
