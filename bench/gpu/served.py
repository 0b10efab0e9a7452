"""Peers of one device that hold a model in stages over slow links, and what is asked of them.

What :mod:`bench.gpu.swarm` measures, without its order and its file.
"""

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import aiohttp
import torch

from bench.demo.slow_links import HOST, SlowLinks, free_port
from bench.gpu.engine_gpu import TINY_EXPERTS, oss
from bench.gpu.floors import impossible
from bench.sessions.answer_times import Stream
from bench.speed.local import prompt_ids
from bench.speed.real_sizes import SIZES, Size, memory_bytes
from client import Answer, Swarm
from client.answer.answer import PrefixCache
from dht.messages.types import ModelSpec, kv_tokens_least, stage_bytes
from testing.local_swarm import GatewayProcess, LocalPeer, LocalSwarm, end_group
from testing.reference import Reference
from testing.wan_lab import Shape, WanLab, why_not

SEED = 0
LINK = Shape(mbit=100, delay_ms=10)
ROW_BYTES_PER_S = LINK.mbit * 125_000
CUTS = 8
"""Parts of a model's layers at which its stages end."""
LEAVE_S = 60.0
"""Maximum seconds until a peer that was asked to leave has ended."""
STRUCK_AT = 0.25
"""Share of an answer after which a stage is struck."""
Figures = dict[str, Any]
Place = Callable[[], dict[str, Any]]
"""Where a peer runs, as arguments of :meth:`testing.local_swarm.LocalSwarm.start_peer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is served, and asked for."""

    sizes: dict[str, Size]
    dtype: str
    ends: tuple[int, ...]
    """Where stages end, in parts of the layers."""
    twice: tuple[int, ...]
    """Stages that two peers hold."""
    prompt: int
    new: int
    counts: dict[str, int]
    """Answers at once, by part."""

    def spans(self, layers: int) -> list[tuple[int, int]]:
        """The layers of each peer."""
        stages = list(pairwise(layers * end // CUTS for end in (0, *self.ends)))
        return stages + [stages[number] for number in self.twice]

    def memory_gib(self, spec: ModelSpec, start: int, end: int) -> float:
        """What a peer lends for these layers, with KV room for twice what all answers take."""
        kv_tokens = 2 * max(self.counts.values()) * (self.prompt + 2 * self.new)
        kv_tokens = max(kv_tokens, kv_tokens_least(spec))
        return stage_bytes(spec, start, end, kv_tokens) / 2**30


FULL = Plan(
    sizes={
        name: replace(SIZES[name], layers=SIZES[name].whole)
        for name in ("gpt-oss-20b", "Qwen3-30B-A3B")
    },
    dtype="bfloat16",
    ends=(3, 4, 5, 8),
    twice=(1, 2),
    prompt=128,
    new=128,
    counts={"one": 1, "eight": 8, "many": 64},
)
TINY = Plan(
    sizes={
        "gpt-oss-20b": Size(shape=oss(64, 8, 4, 16), vocab=512, layers=4, whole=4, packed="mxfp4"),
        "Qwen3-30B-A3B": Size(shape=TINY_EXPERTS, vocab=512, layers=4, whole=4),
    },
    dtype="float32",
    ends=(4, 8),
    twice=(1,),
    prompt=16,
    new=48,
    counts={"one": 1, "eight": 2, "many": 4},
)


@contextmanager
def linked(peers: int) -> Iterator[tuple[str, list[Place]]]:
    """What the links between so many peers and this process are, and where each peer runs."""
    if (why := why_not()) is None:
        with WanLab(peers + 1, LINK, prefix="anag") as lab, lab.inside(peers):
            hosts = [{"host": lab.address(n), "run_on": lab.command(n, ())} for n in range(peers)]
            yield "network namespaces", [partial(dict, host) for host in hosts]
        return
    with SlowLinks(2 * LINK.delay_ms / 1e3, ROW_BYTES_PER_S) as links:

        def place() -> dict[str, Any]:
            port = free_port()
            return {
                "extra": ("--port", str(port), "--announce", f"{HOST}:{links.before(port)}"),
            }

        yield f"connections passed on late, as this machine {why}", [place] * peers


def used_bytes(device: str, peers: list[LocalPeer]) -> int:
    """Memory of the GPU in use, as nvidia-smi says; on a CPU that of the peers' processes."""
    if not device.startswith("cuda"):
        return memory_bytes(peers)
    asked = ["nvidia-smi", f"--id={torch.device(device).index or 0}", "--query-gpu=memory.used"]
    said = subprocess.run(
        [*asked, "--format=csv,noheader,nounits"], capture_output=True, check=True
    )
    return int(said.stdout) << 20


@dataclass(slots=True, kw_only=True)
class Served:
    """One model and the peers that hold it."""

    local: LocalSwarm
    plan: Plan
    spec: ModelSpec
    device: str
    left_s: Callable[[], float]
    """Seconds that are left for everything."""
    places: dict[str, tuple[tuple[int, int], Place]] = field(default_factory=dict)
    """Layers and place by the peer's name."""
    left: LocalPeer | None = None
    """The peer that left, until another part strikes."""

    def living(self) -> list[LocalPeer]:
        return [peer for peer in self.local.peers if peer.process.poll() is None]

    def used_bytes(self) -> int:
        return used_bytes(self.device, self.living())

    def complete(self) -> float:
        """Start the peers that do not run, and wait until all serve; returns seconds."""
        started_s = time.perf_counter()
        for name in sorted(self.places.keys() - {peer.name for peer in self.living()}):
            (start, end), place = self.places[name]
            where = place()
            where["extra"] = (*where.get("extra", ()), "--layers", f"{start}:{end}")
            memory_gib = self.plan.memory_gib(self.spec, start, end)
            peer = self.local.start_peer(name=name, memory_gib=memory_gib, **where)
            peer.wait_for("listening", self.left_s())
        self.local.wait_serving(self.left_s())
        return time.perf_counter() - started_s

    def client(self) -> Any:
        """A new client, which learns of all peers as they are now."""
        return Swarm.connect(self.local.addresses[:2], model=str(self.local.model))

    def asked(self, seed: int, new: int = 0, *, speculate: bool = False) -> dict[str, Any]:
        """An answer's prompt and options."""
        return {
            "prompt": prompt_ids(self.plan.prompt, self.spec.vocab, seed),
            "max_new_tokens": new or self.plan.new,
            "ignore_eos": True,
            "speculate": speculate,
            "prefix_cache": PrefixCache.OFF,
        }

    async def warm(self, swarm: Swarm) -> None:
        """Open the links of all routes, which take turns: these answers count for nothing."""
        for _ in range(4):
            await swarm.generate(**self.asked(SEED, 2))


async def exact(served: Served) -> Figures:
    """Ids of answers beside those of transformers, in float32."""
    reference, plan = Reference.load(served.local.model), served.plan
    same = 0
    async with served.client() as swarm:
        for asked in (served.asked(1), served.asked(2)):
            expected, _ = reference.greedy(asked["prompt"], plan.new, ignore_eos=True)
            same += (await swarm.generate(**asked)).token_ids == tuple(expected)
    return {"answers": 2, "same_ids": same}


async def at_once(served: Served, count: int) -> Figures:
    """So many answers at once, without drafts and with them."""
    found: Figures = {}
    async with served.client() as swarm:
        await served.warm(swarm)
        for speculate in (False, True):
            asked = [served.asked(seed + 1, speculate=speculate) for seed in range(count)]
            started_s = time.perf_counter()
            answers = await asyncio.gather(*(swarm.generate(**each) for each in asked))
            took_s = time.perf_counter() - started_s
            tokens = sum(len(answer.token_ids) for answer in answers)
            figures = {
                "tokens_per_s": round(tokens / took_s, 2),
                "each_tokens_per_s": round(1 / median(a.tpot_s for a in answers), 2),
                "ttft_s": round(median(a.ttft_s for a in answers), 4),
                "ttft_max_s": round(max(a.ttft_s for a in answers), 4),
                "failovers": sum(a.failovers for a in answers),
                "drafted_share": round(sum(a.drafted_tokens for a in answers) / tokens, 3),
            }
            if count == 1 and not speculate:
                figures |= arithmetic(served.spec.activation_bytes, answers[0])
            found["with_drafts" if speculate else "without_drafts"] = figures
    return found


def arithmetic(row_bytes: int, answer: Answer) -> Figures:
    """What the measured steps and the links allow one answer, and the share of it that was reached.

    A token passes a link from each stage to the next as a row, and from the last to the first as an
    id.
    """
    stages = len(answer.route)
    links_s = stages * LINK.delay_ms / 1e3 + (stages - 1) * row_bytes / ROW_BYTES_PER_S
    allowed_s = answer.computed_s + links_s
    why = impossible(answer.tpot_s, allowed_s)
    return {
        "stages": stages,
        "steps_ms": round(1e3 * answer.computed_s, 3),
        "waited_ms": round(1e3 * answer.waited_s, 3),
        "links_ms": round(1e3 * links_s, 3),
        "token_ms": round(1e3 * answer.tpot_s, 3),
        **({"refused": why} if why else {"share": round(allowed_s / answer.tpot_s, 3)}),
    }


async def by_gateway(served: Served) -> Figures:
    """One whole answer by HTTP; the first one opens links."""
    model = served.local.model
    gateway = await asyncio.to_thread(GatewayProcess, served.local.addresses[:2], model)
    body = {
        "model": model.name,
        "prompt": served.asked(1)["prompt"],
        "max_tokens": served.plan.new,
        "ignore_eos": True,
    }
    try:
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            for _ in range(2):
                started_s = time.perf_counter()
                async with session.post(f"{gateway.url}/completions", json=body) as response:
                    tokens = (await response.json())["usage"]["completion_tokens"]
                took_s = time.perf_counter() - started_s
    finally:
        await asyncio.to_thread(gateway.stop)
    return {"tokens": tokens, "answer_s": round(took_s, 3)}


async def struck(served: Served, *, kill: bool) -> Figures:
    """An answer one of whose stages, which is held twice, is killed or leaves in its middle."""
    await asyncio.to_thread(served.complete)
    new = 2 * served.plan.new
    async with served.client() as swarm:
        await served.warm(swarm)
        alone, moving = (Stream(swarm.begin(**served.asked(3, new))) for _ in range(2))
        await alone.read()
        reading = asyncio.create_task(moving.read())
        await moving.reached(int(STRUCK_AT * new))
        by_id = {peer.peer_id: peer for peer in served.living()}
        on_route = [by_id[stage.peer_id] for stage in moving.running.route]
        held = [span for span, _ in served.places.values()]
        victim = next(p for p in on_route if held.count(served.places[p.name][0]) > 1)
        before_bytes, struck_s = served.used_bytes(), time.perf_counter()
        if kill:
            end_group(victim.process.pid)
        else:
            victim.signal(signal.SIGINT)
        await asyncio.to_thread(victim.process.wait, LEAVE_S)
        gone_s = time.perf_counter() - struck_s
        given_back_bytes = before_bytes - served.used_bytes()
        await reading
        answer = moving.running.answer()
    served.left = None if kill else victim
    pairs = zip(alone.token_ids, moving.token_ids, strict=False)
    apart = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    return {
        "layers": served.places[victim.name][0],
        "usual_token_ms": round(1e3 * median(alone.gaps_s(0.0, alone.at_s[-1])), 2),
        "silence_s": round(max(moving.gaps_s(struck_s, moving.at_s[-1])), 3),
        "same_ids": apart is None and len(alone.token_ids) == len(moving.token_ids),
        "first_other_token": apart,
        "failovers": answer.failovers,
        "went_on_elsewhere": victim.peer_id not in {stage.peer_id for stage in answer.route},
        "gone_s": round(gone_s, 2),
        "given_back_mib": round(given_back_bytes / 2**20),
    }


async def upgraded(served: Served) -> Figures:
    """The peer that left comes back with its identity, and answers follow."""
    if served.left is None:
        return {"skipped": "nobody has left: it follows `moved`"}
    left = served.left.peer_id
    back_s = await asyncio.to_thread(served.complete)
    async with served.client() as swarm:
        routes = [(await swarm.generate(**served.asked(seed))).route for seed in range(4, 8)]
    return {
        "serving_again_s": round(back_s, 2),
        "answers": len(routes),
        "through_it": sum(left in {stage.peer_id for stage in route} for route in routes),
    }
