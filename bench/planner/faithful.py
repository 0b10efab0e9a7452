"""The simulator beside real processes on this machine.

Two peers of half a model each, one thread each, and a client on loopback serve Poisson arrivals.
The same requests go through the simulator. What it knows: the engine's step times per stage,
measured here in this process by batch size, and the time that a message takes from peer to peer,
which is what a lone answer takes beyond its steps. Nothing is fitted to the runs compared.

The processes need as many idle cores as there are peers, and one for the rest: on fewer, or on a
machine that does other work, the real swarm is slower than the simulated one, and the error says
so.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.report import parser_of, provenance, write
from client import Swarm
from coordinator.commands.full_load import LIVING, as_plan, build_simulation
from coordinator.problem.service import KvCapacity
from coordinator.simulator.core.profiles import (
    PeerProfile,
    Points,
    Profiles,
    interpolated,
)
from coordinator.simulator.core.trace import Request
from coordinator.simulator.runs.runs import Arrivals
from dht.messages.session import Sampling
from dht.messages.types import SINK, SOURCE, Assignment, Link, ModelSpec, PlannerNode, Problem
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore
from testing.local_swarm import ROOT, LocalSwarm
from testing.random_model import make_llama
from testing.reference import memory_for

HIDDEN, LAYERS = 512, 8
SPANS = ((0, 4), (4, 8))
DECODES = (1, 2, 4, 8, 16)
PROMPTS = (8, 32, 64, 128)
CONTEXT_TOKENS = 96
"""Held by each session while decodes are timed: about half of an average request of the load."""
TIMINGS = 15
PROMPT_TOKENS = (16, 160)
NEW_TOKENS = (16, 64)
LOADS = (0.3, 0.6)
"""Shares of the requests/s at which the slower stage would always be busy."""
BANDWIDTH = 1e9
"""Approximate bandwidth of loopback; only the delay is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage's measured steps."""

    decode: Points
    prompt: Points
    layers_max: int

    layers: int

    def decode_s(self, count: int) -> float:
        """Seconds of a step with this number of decodes, all layers."""
        return self.layers * interpolated(self.decode, count)[count]

    def prompt_s(self, tokens: int) -> float:
        """Seconds of a step with this number of prompt tokens, all layers."""
        return self.layers * interpolated(self.prompt, tokens)[tokens]


class Stage:
    """An engine in this process that holds one span."""

    def __init__(self, model: Path, span: tuple[int, int]) -> None:
        store = WeightStore.open(str(model))
        memory_bytes = memory_for(model) + (256 << 20)
        config = EngineConfig(store=store, name=model.name, memory_bytes=memory_bytes, threads=1)
        self.engine = Engine(config)
        self.engine.load(*span)
        self.span = span
        self._draw = torch.Generator().manual_seed(0)

    def _item(self, session: str, position: int, tokens: int) -> WorkItem:
        start, end = self.span
        last = end == self.engine.spec.layers
        item = WorkItem(
            session=session,
            start=start,
            end=end,
            position=position,
            sampling=Sampling() if last else None,
        )
        if start == 0:
            return replace(item, token_ids=tuple(range(1, tokens + 1)))
        return replace(item, hidden=torch.randn(tokens, HIDDEN, generator=self._draw))

    def _step_s(self, items: Sequence[WorkItem]) -> float:
        started_s = time.perf_counter()
        for result in self.engine.step(items):
            assert result.error is None, result.error
        return time.perf_counter() - started_s

    def measure(self) -> StageTimes:
        """Medians of steps of decodes and of chunks, in seconds per layer."""
        decodes: dict[int, list[float]] = {count: [] for count in DECODES}
        prompts: dict[int, list[float]] = {tokens: [] for tokens in PROMPTS}
        for _ in range(TIMINGS):
            for tokens in PROMPTS:
                assert self.engine.kv.reserve("p", tokens) is None
                prompts[tokens].append(self._step_s([self._item("p", 0, tokens)]))
                self.engine.kv.free("p")
            for n in range(max(DECODES)):
                assert self.engine.kv.reserve(str(n), CONTEXT_TOKENS + len(DECODES)) is None
                self._step_s([self._item(str(n), 0, CONTEXT_TOKENS)])
            for turn, count in enumerate(DECODES):
                position = CONTEXT_TOKENS + turn
                items = [self._item(str(n), position, 1) for n in range(max(DECODES))]
                decodes[count].append(self._step_s(items[:count]))
                for item in items[count:]:
                    self._step_s([item])  # keeps the others' positions alike
            for n in range(max(DECODES)):
                self.engine.kv.free(str(n))
        layers = self.span[1] - self.span[0]
        decode = tuple((n, statistics.median(v) / layers) for n, v in decodes.items())
        prompt = tuple((n, statistics.median(v) / layers) for n, v in prompts.items())
        return StageTimes(
            decode=((0, 0.0), *decode),
            prompt=((0, 0.0), *prompt),
            layers=layers,
            layers_max=self.engine.layers_max,
        )


def requests(per_s: float, count: int, seed: int) -> tuple[Request, ...]:
    """Poisson arrivals with uniform lengths."""
    draw = Random(seed)
    found, at_s = [], 0.0
    for _ in range(count):
        at_s += draw.expovariate(per_s)
        found.append(
            Request(
                arrival_s=at_s,
                input_tokens=draw.randint(*PROMPT_TOKENS),
                output_tokens=draw.randint(*NEW_TOKENS),
            )
        )
    return tuple(found)


async def _ask(swarm: Swarm, request: Request, index: int) -> tuple[float, float, float]:
    """TTFT, TPOT, and when the answer ended."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(request.arrival_s)
    ids = tuple(1 + (index * 31 + n) % 8000 for n in range(request.input_tokens))
    answer = await swarm.generate(ids, max_new_tokens=request.output_tokens, ignore_eos=True)
    assert answer.failovers == 0, "a stage was lost"
    return answer.ttft_s, answer.tpot_s, loop.time()


def figures(
    load: Sequence[Request], ttft: Sequence[float], tpot: Sequence[float], took_s: float
) -> dict[str, float]:
    """What is compared."""
    return {
        "tokens_per_s": sum(r.output_tokens for r in load) / took_s,
        "ttft_mean_s": statistics.fmean(ttft),
        "ttft_p95_s": statistics.quantiles(ttft, n=20)[-1],
        "tpot_mean_s": statistics.fmean(tpot, [r.output_tokens - 1 for r in load]),
    }


async def real(swarm: Swarm, load: Sequence[Request]) -> dict[str, float]:
    """The requests through the processes."""
    started_s = asyncio.get_running_loop().time()
    done = await asyncio.gather(*(_ask(swarm, r, n) for n, r in enumerate(load)))
    took_s = max(end_s for _, _, end_s in done) - started_s
    return figures(load, [d[0] for d in done], [d[1] for d in done], took_s)


def swarm_on_paper(
    spec: ModelSpec, stages: Sequence[StageTimes], hop_s: float
) -> tuple[Problem, Profiles, tuple[Assignment, ...]]:
    """The two peers, a message takes ``hop_s`` between any two; the ring closes directly."""
    names = ("first", "second")
    problem = Problem(
        model=spec,
        nodes=tuple(
            PlannerNode(
                peer_id=name, memory_bytes=1 << 34, kv_tokens_min=1, tokens_per_s=(1.0,) * LAYERS
            )
            for name in names
        ),
        links=tuple(
            Link(
                source=source,
                target=target,
                bandwidth_bytes_per_s=BANDWIDTH,
                rtt_s=2 * hop_s,
                measured_unix_s=0.0,
            )
            for source, target in (names, names[::-1])
        ),
    )
    profiles = Profiles(
        peers={
            name: PeerProfile(
                prefill=stage.prompt,
                decode=stage.decode,
                kv=KvCapacity(beside=(1 << 30,)),
                layers_max=stage.layers_max,
            )
            for name, stage in zip(names, stages, strict=True)
        },
        client_links={
            (names[1], SINK): (BANDWIDTH, hop_s),
            (SOURCE, names[0]): (BANDWIDTH, 0.0),
        },
    )
    held = tuple(
        Assignment(peer_id=name, start=start, end=end)
        for name, (start, end) in zip(names, SPANS, strict=True)
    )
    return problem, profiles, held


def simulated(
    swarm: tuple[Problem, Profiles, tuple[Assignment, ...]],
    load: Sequence[Request],
    open_s: float,
) -> dict[str, float]:
    """The requests through the simulator; each takes ``open_s`` until its prompt is on its way."""
    problem, profiles, held = swarm
    engine, scheduler = build_simulation(problem, profiles, as_plan(problem, held), LIVING)
    run = Arrivals(
        engine,
        scheduler,
        # The prompt's end is the first token here; the simulator counts the others.
        [
            replace(r, arrival_s=r.arrival_s + open_s, output_tokens=r.output_tokens - 1)
            for r in load
        ],
        start_s=0.0,
        end_s=1e9,
    )
    while not run.all_done:
        engine.run(engine.now_s + 0.01, run)
    return {
        "tokens_per_s": sum(r.output_tokens for r in load) / engine.now_s,
        "ttft_mean_s": open_s + statistics.fmean(run.prompt_s),
        "ttft_p95_s": open_s + statistics.quantiles(run.prompt_s, n=20)[-1],
        "tpot_mean_s": statistics.fmean(run.decode_s),
    }


async def compare(
    local: LocalSwarm, model: Path, stages: Sequence[StageTimes], arguments: argparse.Namespace
) -> dict[str, Any]:
    """A lone answer, then each load on both sides."""
    compute_s = sum(stage.decode_s(1) for stage in stages)
    lone = Request(arrival_s=0.0, input_tokens=32, output_tokens=NEW_TOKENS[1])
    async with Swarm.connect(local.addresses, model=str(model)) as swarm:
        await _ask(swarm, lone, 0)
        alone = [await _ask(swarm, lone, n) for n in range(1, 6)]
        tpot_s = statistics.median(tpot for _, tpot, _ in alone)
        hop_s = max(0.0, (tpot_s - compute_s) / 2)
        prompt_s = sum(stage.prompt_s(lone.input_tokens) for stage in stages)
        ttft_s = statistics.median(ttft for ttft, _, _ in alone)
        open_s = max(0.0, ttft_s - prompt_s - 2 * hop_s)
        paper = swarm_on_paper(spec_of(model), stages, hop_s)
        slowest_s = max(busy_s(stage) for stage in stages)
        loads = []
        for share in LOADS:
            load = requests(share / slowest_s, arguments.requests, arguments.seed)
            measured = await real(swarm, load)
            expected = simulated(paper, load, open_s)
            loads.append(
                {
                    "share": share,
                    "requests_per_s": share / slowest_s,
                    "requests": len(load),
                    "real": measured,
                    "simulated": expected,
                    "error": {name: expected[name] / measured[name] - 1 for name in measured},
                }
            )
    return {
        "lone": {"ttft_s": ttft_s, "tpot_s": tpot_s, "hop_s": hop_s, "open_s": open_s},
        "loads": loads,
    }


def busy_s(stage: StageTimes) -> float:
    """Seconds of a stage that an average request takes, its decodes in batches of four."""
    prompt = round(statistics.fmean(PROMPT_TOKENS))
    return stage.prompt_s(prompt) + statistics.fmean(NEW_TOKENS) * stage.decode_s(4) / 4


def spec_of(model: Path) -> ModelSpec:
    """The model's shapes."""
    return ModelLayout.of(WeightStore.open(str(model)), "float32").spec(model.name)


def main() -> int:
    """Run the benchmark."""
    parser = parser_of(
        "bench.planner.faithful", __doc__, out=ROOT / "bench" / "results" / "faithful.json"
    )
    parser.add_argument("--requests", type=int, default=60, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as scratch:
        model = make_llama(Path(scratch) / f"{HIDDEN}x{LAYERS}", hidden=HIDDEN, layers=LAYERS)
        stages = [Stage(model, span).measure() for span in SPANS]
        with LocalSwarm(model, extra=("--threads", "1")) as local:
            memory_gib = (memory_for(model) + (256 << 20)) / 2**30
            for start, end in SPANS:
                local.start_peer(memory_gib=memory_gib, extra=("--layers", f"{start}:{end}"))
            local.wait_serving()
            result = asyncio.run(compare(local, model, stages, arguments))
    show(result)
    result["stages"] = [
        {"span": span, "decode_layer_s": stage.decode, "prompt_layer_s": stage.prompt}
        for span, stage in zip(SPANS, stages, strict=True)
    ]
    write(arguments.out, {**provenance(arguments.seed), **result})
    return 0


def show(result: dict[str, Any]) -> None:
    """The errors for people."""
    lone = result["lone"]
    print(
        f"alone: TTFT {lone['ttft_s'] * 1e3:.1f} ms, TPOT {lone['tpot_s'] * 1e3:.2f} ms;"
        f" a hop {lone['hop_s'] * 1e3:.2f} ms, opening {lone['open_s'] * 1e3:.1f} ms"
    )
    for load in result["loads"]:
        print(f"load {load['share']:.0%}, {load['requests_per_s']:.2f} requests/s")
        for name, value in load["real"].items():
            print(
                f"  {name:12} real {value:9.4f}  simulated {load['simulated'][name]:9.4f}"
                f"  error {load['error'][name]:+.1%}"
            )


if __name__ == "__main__":
    sys.exit(main())
