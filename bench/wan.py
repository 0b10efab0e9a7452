"""Many answers at once over slow, far links: ``python -m bench.wan groups [--out FILE]``.

What stages choose as the decodes of a step, beside fixed bounds (MoLink's micro-batches) and beside
running whatever is ready. Stages, links and clock are those of the papers' recipe ``molink``
(:mod:`bench.papers.links`).
"""

import argparse
import asyncio
import itertools
import random
import statistics
from pathlib import Path
from typing import Any

from bench import results_links
from bench.report import provenance, write
from bench.simulated.clock import run_virtual
from bench.stand_in import (
    Request,
    Setting,
    StandInSwarm,
    ask,
)

GROUP_SESSIONS = 32
GROUP_TOKENS = 150
GPUS = ((3, 5e-3, 2e-5), (8, 5e-3, 1e-4))
"""Stages, seconds of a stage's step, and what each row adds: on few large GPUs nearly nothing, on
many small ones a fiftieth, as on the T4s of Helix's tables."""
DELAYS_S = (1e-3, 3e-2)


def groups() -> dict[str, Any]:
    """32 answers at once, by the decodes that one step may take and by how slow a step is."""
    cells = []
    for (stages, step_s, row_s), delay_s in itertools.product(GPUS, DELAYS_S):
        for decodes_max in (None, 256, 11, 4):
            setting = Setting(
                policy="anabranch",
                mbit=400.0,
                delay_s=delay_s,
                decodes_max=decodes_max or 256,
                micro_batches=decodes_max is None,
                stages=stages,
                gpu_step_s=step_s,
                gpu_decode_s=row_s,
            )
            cells.append(
                {
                    "stages": stages,
                    "step_ms": step_s * 1e3,
                    "row_us": row_s * 1e6,
                    "delay_ms": delay_s * 1e3,
                    "decodes_max": decodes_max,
                    **_together(setting),
                }
            )
    return {
        "what": f"{GROUP_SESSIONS} answers of {GROUP_TOKENS} tokens, virtual clock, stand-in"
        " engine; 256 decodes a step is whatever is ready",
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wan", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("groups",))
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    result = groups()
    print(results_links.groups(result))
    if arguments.out:
        write(arguments.out, {**result, "provenance": provenance(seed=1)})


if __name__ == "__main__":
    main()
