"""A swarm whose peers share one GPU, each a process of its own, over a wide network's links.

A model of a published one's shape, with one random layer under every layer's name, is held in
stages by ``node.join`` peers; some stages are held twice. Links take 20 ms there and back at
100 Mbit/s: network namespaces behind a hub, or connections that are passed on late where there can
be none. The parts:

- ``exact``: a small model in float32 says the ids that transformers says.
- ``one``, ``eight``, ``many``: answers at once, without drafts and with them. What random weights
  say repeats itself, so drafts gain more than with a real model. Of one answer without drafts, the
  share of what its stages' steps and the links allow.
- ``gateway``: one answer by OpenAI's interface.
- ``killed``, ``moved``: a stage that is held twice is killed in mid-answer, or leaves.
- ``upgraded``: the peer that left is started again with its identity, and serves again.
- ``whole``: as many answers by transformers in one process, which holds the whole model.

Each part is printed and written as soon as it is there; parts of earlier runs in ``--out`` stay.
``--tiny --device cpu`` runs the same code over two stages of small models in float32, which says
nothing about speed.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bench import report
from bench.gpu.engine_gpu import clean, device_facts, fast_directory, reason
from bench.gpu.served import (
    FULL,
    SEED,
    TINY,
    Figures,
    Plan,
    Served,
    at_once,
    by_gateway,
    exact,
    linked,
    struck,
    upgraded,
    used_bytes,
)
from bench.speed.real_sizes import written
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore
from testing.local_swarm import LocalSwarm

PARTS = ("exact", *FULL.counts, "gateway", "killed", "moved", "upgraded", "whole")
Part = Callable[[], Awaitable[Figures]]


@dataclass(slots=True, kw_only=True)
class Bench:
    """Parts and what they found, written after each."""

    arguments: argparse.Namespace
    result: Figures
    ends_s: float

    def left_s(self) -> float:
        return max(0.0, self.ends_s - time.monotonic())

    def keep(self, model: str, part: str, figures: Figures) -> None:
        self.result["models"].setdefault(model, {})[part] = {**figures, **report.code()}
        print(f"{model} {part}: {json.dumps(figures)} ({self.left_s():.0f} s left)", flush=True)
        report.write(self.arguments.out, self.result)

    async def part(self, model: str, part: str, run: Part) -> None:
        """Run a part in the time that is left; how it failed is its figure."""
        try:
            async with asyncio.timeout(self.left_s()):
                figures = await run()
        except Exception as error:  # noqa: BLE001 - whatever one part meets, the others follow
            figures = {"failed": reason(error)}
        self.keep(model, part, figures)

    async def swarm(self, name: str, model: Path, plan: Plan, parts: list[str]) -> Figures:
        """The wanted parts that a swarm of ``plan`` runs; figures of the swarm itself."""
        device = self.arguments.device
        spec = ModelLayout.of(WeightStore.open(str(model)), plan.dtype, device=device).spec(name)
        gpu = str(torch.device(device).index or 0)
        on = ("--gpu", gpu) if device.startswith("cuda") else ("--cpu",)
        spans = plan.spans(spec.layers)
        threads = str(max(1, (os.cpu_count() or 1) // len(spans)))
        extra = ("--dtype", plan.dtype, "--threads", threads)
        before_bytes = used_bytes(device, [])
        with (
            linked(len(spans)) as (links, places),
            LocalSwarm(model, extra=extra, device=on) as local,
        ):
            served = Served(local=local, plan=plan, spec=spec, device=device, left_s=self.left_s)
            held = zip(spans, places, strict=True)
            served.places |= {f"peer{number}": each for number, each in enumerate(held)}
            serving_s = served.complete()
            serving_bytes = served.used_bytes()
            runs: dict[str, Part] = {
                "exact": partial(exact, served),
                **{key: partial(at_once, served, n) for key, n in plan.counts.items()},
                "gateway": partial(by_gateway, served),
                "killed": partial(struck, served, kill=True),
                "moved": partial(struck, served, kill=False),
                "upgraded": partial(upgraded, served),
            }
            for part in parts:
                await self.part(name, part, runs[part])
        return {
            "links": links,
            "layers": spec.layers,
            "of_layers": plan.sizes[name].whole,
            "spans": spans,
            "serving_s": round(serving_s, 1),
            "before_mib": before_bytes >> 20,
            "serving_mib": serving_bytes >> 20,
            "after_mib": used_bytes(device, []) >> 20,
        }

    async def whole(self, model: Path, plan: Plan) -> Figures:
        """The whole model in a process of its own, whose memory ends with it."""
        command = [sys.executable, "-m", "bench.gpu.whole", str(model), "--dtype", plan.dtype]
        command += ["--device", self.arguments.device, "--answers", str(plan.counts["many"])]
        command += ["--prompt", str(plan.prompt), "--new", str(plan.new)]
        done = await asyncio.to_thread(
            partial(subprocess.run, cwd=report.ROOT, capture_output=True, check=False),
            command,
            timeout=self.left_s(),
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-200:].decode(errors="replace"))
        found: Figures = json.loads(done.stdout.splitlines()[-1])
        return {"answers": plan.counts["many"], **found}

    async def model(self, name: str, plan: Plan, wanted: list[str]) -> None:
        """Make a model, run the wanted parts over it, and remove it."""
        of_swarm = [part for part in wanted if part != "whole"]
        where = self.arguments.directory
        with tempfile.TemporaryDirectory(dir=where, prefix="anabranch-") as made:
            started_s = time.monotonic()
            model = written(plan.sizes[name], Path(made), self.arguments.device).directory
            clean(self.arguments.device)
            print(f"{name}: made in {time.monotonic() - started_s:.0f} s", flush=True)
            if of_swarm:
                what = "swarm" if of_swarm != ["exact"] else "exact_swarm"
                await self.part(name, what, partial(self.swarm, name, model, plan, of_swarm))
            if "whole" in wanted:
                await self.part(name, "whole", partial(self.whole, model, plan))


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = report.parser_of("bench.gpu.swarm", __doc__)
    add = parser.add_argument
    add("--device", default="cuda:0", help="with its number (cuda:0)")
    add("--tiny", action="store_true", help="small models, which prove nothing")
    add("--models", nargs="+", choices=FULL.sizes, default=list(FULL.sizes), metavar="NAME")
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--layers", type=int, metavar="N", help="at most so many layers, where memory is short")
    add("--directory", default=fast_directory(), metavar="DIR", help="where models are made")
    add("--minutes", type=float, default=9.0, help="no part goes on for longer, in all (9)")
    return parser.parse_args()


def main() -> int:
    """Run the wanted parts of each model; 1 where one failed, 2 without such a device."""
    arguments = parse()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("error: there is no CUDA device here; --device cpu --tiny runs", file=sys.stderr)
        return 2
    result: Figures = {**report.provenance(SEED), **device_facts(arguments.device)}
    result["models"] = report.earlier(arguments.out).get("models", {})
    bench = Bench(
        arguments=arguments, result=result, ends_s=time.monotonic() + 60 * arguments.minutes
    )
    wanted = [part for part in PARTS if part in arguments.only]
    for name in arguments.models:
        if arguments.tiny:
            runs = [(TINY, wanted)]
        else:
            size = FULL.sizes[name]
            size = replace(size, layers=min(size.layers, arguments.layers or size.layers))
            small = [part for part in wanted if part == "exact"]
            large = [part for part in wanted if part != "exact"]
            runs = [(TINY, small), (replace(FULL, sizes={name: size}), large)]
        for plan, parts in runs:
            if parts:
                asyncio.run(bench.model(name, plan, parts))
    found = [figures for parts in result["models"].values() for figures in parts.values()]
    return int(any("failed" in figures for figures in found))


if __name__ == "__main__":
    sys.exit(main())
