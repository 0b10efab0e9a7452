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
import csv
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.local_swarm import ROOT
from bench.report import provenance, write
from bench.timed_engine import GpuTimes, TimedEngine
from client import Swarm, SwarmConfig
from coordinator.suspicion import WatchConfig
from dht.directory import Directory
from dht.identity import Identity
from dht.memory import LinkModel, MemoryNetwork, MemoryTransport
from dht.types import DeviceSpec, ModelSpec, NodeRecord, NodeState
from dht.virtual_time import run_virtual
from node.batching import BatchLimits
from node.hops import HopConfig
from node.stage import StageConfig, StageServer
from node.stage_streams import StageStreams, StreamLimits

MBIT = 125_000.0
TRACE = ROOT / "bench" / "data" / "azure" / "conversations_2023.csv"
NETWORK = "wan"
WHOLE_PROMPT = 1 << 12

QWEN_7B = ModelSpec(
    name="qwen-7b-shapes",
    fingerprint="stand-in",
    layers=32,
    layer_bytes=1,
    embed_bytes=1,
    head_bytes=1,
    kv_bytes_per_token_layer=1,
    activation_bytes=4096 * 2,
    context_tokens=8192,
    vocab=1000,
)
SPANS = ((0, 11), (11, 22), (22, 32))
RTX_4090 = GpuTimes(step_s=5e-3, decode_s=2e-5, prefill_s=4.7e-5)
"""A third of 15 GB of fp16 weights at 1 TB/s; a third of 14 GFLOP a token at 100 TFLOP/s."""
KV_TOKENS = 100_000
PATIENT = WatchConfig(least_s=600.0, most_s=600.0)
"""Under ``fifo`` a ping waits behind whole prompts: nobody is given up for it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the table."""

    policy: str
    requests_per_s: float = 0.3
    mbit: float = 100.0
    delay_s: float = 0.03
    decodes_max: int = 256
    gpu_step_s: float = 5e-3
    seconds: float = 300.0
    seed: int = 1

    @property
    def chunk_tokens(self) -> int | None:
        return None if self.policy.startswith("anabranch") else WHOLE_PROMPT

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(
            decodes_max=self.decodes_max, prefill_tokens_max=max(256, self.chunk_tokens or 0)
        )

    @property
    def times(self) -> GpuTimes:
        return replace(RTX_4090, step_s=self.gpu_step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    at_s: float
    prompt_tokens: int
    new_tokens: int


def requests(setting: Setting) -> list[Request]:
    """Poisson arrivals; lengths drawn from the trace (4 ≤ input ≤ 2048, 4 ≤ output ≤ 1024)."""
    with TRACE.open() as file:
        rows = [(int(r["input_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    lengths = [(i, o) for i, o in rows if 4 <= i <= 2048 and 4 <= o <= 1024]
    rng = random.Random(setting.seed)
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(setting.requests_per_s)) < setting.seconds:
        prompt, new = rng.choice(lengths)
        found.append(Request(at_s=at_s, prompt_tokens=prompt, new_tokens=new))
    return found


@dataclass(slots=True, kw_only=True)
class StandInPeer:
    transport: MemoryTransport
    stage: StageServer
    engine: TimedEngine
    tasks: list["asyncio.Task[None]"]


async def _peer(network: MemoryNetwork, span: tuple[int, int], setting: Setting) -> StandInPeer:
    transport = network.transport(Identity(network.rng.randbytes(32)))
    engine = TimedEngine(
        QWEN_7B, transport.peer_id, span, setting.times, kv_tokens=KV_TOKENS, limits=setting.limits
    )
    config = StageConfig(
        chunk_tokens=setting.chunk_tokens,
        idle_s=600.0,
        int8="prefill" if setting.policy.endswith("+int8") else "off",
        hops=HopConfig(link_policy=setting.policy.split("+")[0], watch=PATIENT),
    )
    stage = StageServer(transport, engine, config)
    engine.on_results = stage.on_results
    await StageStreams(transport, stage, StreamLimits()).start()
    directory = Directory(transport, NETWORK, QWEN_7B.key)

    async def announce() -> None:
        while True:
            await directory.publish(
                NodeRecord(
                    peer_id=transport.peer_id,
                    name="stand-in",
                    version="0",
                    device=DeviceSpec(kind="cuda", name="RTX 4090 (stand-in)", memory_bytes=1),
                    model=QWEN_7B,
                    memory_bytes=1,
                    kv_tokens_min=1,
                    tokens_per_s=(100.0,) * QWEN_7B.layers,
                    state=NodeState.SERVING,
                    start=span[0],
                    end=span[1],
                    joined_unix_s=transport.now(),
                )
            )
            await asyncio.sleep(15)

    tasks = [asyncio.create_task(stage.run()), asyncio.create_task(announce())]
    await asyncio.sleep(0.1)
    return StandInPeer(transport=transport, stage=stage, engine=engine, tasks=tasks)


class StandInSwarm:
    """Three stages over links of one shape, and a client close to all of them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.network = MemoryNetwork(random.Random(setting.seed))
        self.peers: list[StandInPeer] = []

    async def __aenter__(self) -> "StandInSwarm":
        for span in SPANS:
            self.peers.append(await _peer(self.network, span, self.setting))
        self.shape(self.setting.mbit)
        transport = self.network.transport(Identity(self.network.rng.randbytes(32)))

        async def open_transport() -> MemoryTransport:
            return transport

        self.client = Swarm(
            model=QWEN_7B.name,
            config=SwarmConfig(network=NETWORK, wait_s=600),
            open_transport=open_transport,
        )
        await self.client.__aenter__()
        return self

    def shape(self, mbit: float) -> None:
        """Give every link between stages this bandwidth."""
        link = LinkModel(
            delay_s=self.setting.delay_s,
            bandwidth_bytes_per_s=mbit * MBIT,
            unread_bytes_max=4 << 20,  # what the p2p daemon takes before a writer waits
        )
        for one, other in itertools.permutations(self.peers, 2):
            self.network.set_link(one.transport.peer_id, other.transport.peer_id, link)

    async def __aexit__(self, *_: object) -> None:
        await self.client.__aexit__(None, None, None)
        for peer in self.peers:
            for task in peer.tasks:
                task.cancel()
            await asyncio.gather(*peer.tasks, return_exceptions=True)
            await peer.stage.close("the benchmark ended")
            await peer.transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    request: Request
    started_s: float
    ttft_s: float
    tpot_s: float
    latency_s: float


async def _ask(swarm: StandInSwarm, request: Request) -> Served:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(request.at_s)
    started_s = loop.time()
    answer = await swarm.client.generate(
        (1,) * request.prompt_tokens, max_new_tokens=request.new_tokens, ignore_eos=True
    )
    assert len(answer.token_ids) == request.new_tokens
    assert answer.failovers == 0, "a stage was lost in a benchmark of links"
    return Served(
        request=request,
        started_s=started_s,
        ttft_s=answer.ttft_s,
        tpot_s=answer.tpot_s,
        latency_s=loop.time() - started_s,
    )


def serve(setting: Setting) -> list[Served]:
    """Serve the setting's requests; all of them end."""

    async def run() -> list[Served]:
        async with StandInSwarm(setting) as swarm:
            return list(await asyncio.gather(*(_ask(swarm, r) for r in requests(setting))))

    return run_virtual(run(), limit_s=100_000)


def floor(setting: Setting) -> dict[str, float]:
    """What physics leaves: a lone request's mean TTFT and TPOT without any waiting, in seconds."""
    served = requests(setting)
    rate = setting.mbit * MBIT
    row_s = QWEN_7B.activation_bytes / rate
    # A prompt crosses two links one after the other, a row behind the other at best.
    ttft = [
        2 * setting.delay_s
        + r.prompt_tokens * max(row_s, RTX_4090.prefill_s)
        + row_s
        + 3 * RTX_4090.step_s
        for r in served
    ]
    tpot_s = 3 * setting.delay_s + 3 * RTX_4090.step_s + 2 * row_s
    return {"ttft_s": statistics.fmean(ttft), "tpot_s": tpot_s}


def summary(served: Sequence[Served]) -> dict[str, float]:
    """Mean and 95th percentile of what people wait for, in seconds."""

    def of(name: str, values: list[float]) -> Iterator[tuple[str, float]]:
        yield f"{name}_mean_s", statistics.fmean(values)
        yield f"{name}_p95_s", statistics.quantiles(values, n=20)[-1]

    return {
        "requests": len(served),
        **dict(of("ttft", [s.ttft_s for s in served])),
        **dict(of("tpot", [s.tpot_s for s in served if s.request.new_tokens > 1])),
        **dict(of("latency", [s.latency_s for s in served])),
    }


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
            served = list(await asyncio.gather(*(_ask(swarm, r) for r in requests(setting))))
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
            served = await asyncio.gather(*(_ask(swarm, each) for each in asked))
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
