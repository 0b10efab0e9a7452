"""How links of the internet treat answers: MoLink's tables (EMNLP Findings 2025, §4).

Three stages of a model with Qwen-7B's shapes on RTX 4090s, links of 100 Mbit/s and 30 ms, requests
from the Azure conversation trace at Poisson arrivals. The project's own sessions, stages, hops and
link schedulers run over the in-memory network under a virtual clock; the engine is a stand-in that
waits as long as the GPU would and sends activations of the true size (:mod:`testing.timed_engine`).

- ``fifo``: prompts are computed and sent whole, in order, as vLLM and Helix do;
- ``molink``: prompts are computed whole, sent in chunks by Algorithm 1;
- ``fifo+chunks``, ``molink+chunks``: the same with prompts computed in our chunks, so that what is
  left between them and ``anabranch`` is the order on the links;
- ``anabranch``: prompts are computed in chunks, decodes go first, credits bound what is on its way;
- ``anabranch+int8``: and prompts' rows travel as int8 with a scale per row.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.papers.jobs import Job, Recipe, Row
from testing.clock import run_virtual
from testing.stand_in import (
    MBIT,
    Served,
    Setting,
    StandInSwarm,
    ask,
    floor,
    requests,
    serve,
    summary,
)

SOURCES = (
    "testing/stand_in.py",
    "testing/timed_engine.py",
    "bench/papers/links.py",
    "bench/papers/link_policies.py",
    "bench/data/azure",
)
ROOMS = ("node", "client", "coordinator", "dht")


REQUESTS = 30
"""Per cell, on average; the same ones for every policy."""
POLICIES = ("fifo", "molink", "fifo+chunks", "molink+chunks", "anabranch", "anabranch+int8")


def settings() -> list[Setting]:
    """The cells of MoLink's tables."""
    base = Setting(policy="fifo", seconds=REQUESTS / 0.3)
    cells = [
        replace(base, requests_per_s=rate, seconds=REQUESTS / rate) for rate in (0.1, 0.2, 0.3, 0.7)
    ]
    cells += [replace(base, mbit=mbit) for mbit in (60.0, 200.0, 400.0)]
    cells += [replace(base, delay_s=ms / 1e3) for ms in (10, 20, 50)]
    return [replace(cell, policy=policy) for cell in cells for policy in POLICIES]


def cell(**arguments: Any) -> Row:
    """One cell of the tables."""
    setting = Setting(**arguments)
    started_s = time.process_time()
    served = summary(serve(setting))
    return {
        **asdict(setting),
        "floor": floor(setting),
        **served,
        "took_cpu_s": time.process_time() - started_s,
    }


def _cells(settings: Sequence[Setting]) -> Sequence[Job]:
    return [
        Job(
            key=f"{s.policy}, {s.requests_per_s:g}/s, {s.mbit:g} Mbit/s, {s.delay_s * 1e3:g} ms",
            call=cell,
            arguments=asdict(s),
            cost_s=70.0 * s.requests_per_s,
        )
        for s in settings
    ]


def _usual(setting: Setting) -> bool:
    return (setting.mbit, setting.delay_s) == (100.0, 0.03)


def _rates() -> Sequence[Job]:
    return _cells([s for s in settings() if _usual(s)])


def _shapes() -> Sequence[Job]:
    return _cells([s for s in settings() if not _usual(s)])


def changed() -> Row:
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
                    flow = swarm.peers[0].stage.pipeline
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
        "phases": {
            name: summary([s for s in served if start <= s.request.at_s < end])
            for name, (start, end) in phases.items()
        },
        "trace": trace[::10],
    }


RECIPES = (
    Recipe(
        name="molink",
        title="MoLink's tables: more and more requests over 100 Mbit/s and 30 ms",
        jobs=_rates,
        sources=(*ROOMS, *SOURCES),
    ),
    Recipe(
        name="molink-links",
        title="MoLink's tables: other bandwidths and delays, 0.3 requests/s",
        jobs=_shapes,
        sources=(*ROOMS, *SOURCES),
    ),
    Recipe(
        name="change",
        title="A link that changes: 100, 20, 100 Mbit/s",
        jobs=lambda: [Job(key="change", call=changed, arguments={}, cost_s=30.0)],
        sources=(*ROOMS, *SOURCES),
    ),
)
