"""What moving sessions to freer holders gains: real shells under a virtual clock, with and without.

Three stages of a model with Qwen-7B's shapes (grouped-query attention) on slow devices, with room
for some twenty sessions each. Requests with the Azure conversation trace's lengths arrive as a
Poisson process, more of them than one holder of each stage serves well; a tenth is of high
priority. After 40 s a second holder of each stage joins, and a new plan gives both as much.
What has begun stays on the first three, unless it is moved.

Every seed runs twice, with the same requests: with moves for balance and without. The engine waits
and computes nothing, links have their true shapes (:mod:`bench.timed_engine`).
"""

import asyncio
import itertools
import random
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report
from bench.answer_times import Stream
from bench.simulated.clock import run_virtual
from bench.simulated.network import MemoryNetwork, MemoryTransport
from bench.stand_in import (
    QWEN_7B_GQA,
    SPANS,
    Request,
    Setting,
    StandInPeer,
    client_of,
    join_client,
    join_peers,
    requests,
    serving,
)
from bench.timed_engine import GpuTimes
from coordinator.batching.scheduler import BatchLimits
from coordinator.plans.store import PlanStore
from coordinator.routing.balance import load_of
from dht.identity.peer_id import Identity
from dht.messages.types import SINK, SOURCE, Assignment, FlowEdge, NodeRecord, Plan, PlanVersion
from node.peer.balancer import Balancer
from node.stage.server import StageConfig

SPEC = QWEN_7B_GQA
SLOW = GpuTimes(step_s=20e-3, decode_s=2e-3, prefill_s=0.5e-3)
"""A stage on a device with a tenth of an RTX 4090's bandwidth and FLOP/s, about."""
KV_TOKENS = 24_000
MBIT, DELAY_S = 100.0, 0.01
JOIN_S, END_S = 40.0, 120.0
ANNOUNCE_S = 15.0
URGENT = 0.1


@dataclass(slots=True)
class Told:
    """What one run was like."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    urgent_ttft_s: list[float] = field(default_factory=list)
    urgent_gaps_s: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    moves: int = 0


class Growing:
    """One holder of each stage, and later a second."""

    def __init__(self, seed: int, *, balance: bool) -> None:
        self._balance = balance
        self._plans_made = 0
        self.network = MemoryNetwork(random.Random(seed))
        self.peers: list[StandInPeer] = []
        self._asker = self._transport()

    def _transport(self) -> MemoryTransport:
        return self.network.transport(Identity(self.network.rng.randbytes(32)))

    async def __aenter__(self) -> "Growing":
        await self.grow()
        self._plans = PlanStore(self.peers[0].transport, self.peers[0].directory)
        await self._plans.serve()
        await self.plan()
        self._connected = client_of(self._asker, SPEC)
        self.client = await self._connected.__aenter__()
        return self

    async def grow(self) -> None:
        """One more holder of each stage."""
        for span in SPANS:
            limits = BatchLimits(prefill_tokens_max=64)
            peer = await serving(
                self._transport(), span, SPEC, SLOW, limits, StageConfig(), kv_tokens=KV_TOKENS
            )
            self.peers.append(peer)
            peer.tasks.append(asyncio.create_task(self._announce(peer)))
            if self._balance:
                balancer = Balancer(peer.directory, peer.stage, lambda p=peer: now(p))
                peer.tasks.append(asyncio.create_task(balancer.run()))
        join_peers(self.network, self.peers, MBIT, DELAY_S)
        join_client(self.network, self._asker.peer_id, self.peers, DELAY_S)

    async def _announce(self, peer: StandInPeer) -> None:
        """As :mod:`node.peer.announcer` does."""
        while True:
            peer.record = now(peer)
            await peer.directory.publish(peer.record)
            await asyncio.sleep(ANNOUNCE_S)

    async def plan(self) -> None:
        """Give all holders of a stage the same share."""
        self._plans_made += 1
        by_span = [[p for p in self.peers if (p.record.start, p.record.end) == s] for s in SPANS]
        layers = [[SOURCE], *([p.transport.peer_id for p in each] for each in by_span), [SINK]]
        flow = 100.0
        edges = tuple(
            FlowEdge(tail=tail, head=head, tokens_per_s=flow / (len(tails) * len(heads)))
            for tails, heads in itertools.pairwise(layers)
            for tail, head in itertools.product(tails, heads)
        )
        transport = self.peers[0].transport
        plan = Plan(
            version=PlanVersion(term=1, counter=self._plans_made),
            coordinator=transport.peer_id,
            model=SPEC,
            assignments=tuple(
                Assignment(peer_id=p.transport.peer_id, start=p.record.start, end=p.record.end)
                for p in self.peers
            ),
            edges=edges,
            flow_tokens_per_s=flow,
            bound_tokens_per_s=flow,
            planner="equal shares",
            solve_s=0.0,
            created_unix_s=transport.now(),
        )
        await self.peers[0].directory.publish(await self._plans.add(plan))

    async def __aexit__(self, *_: object) -> None:
        await self._connected.__aexit__(None, None, None)
        for peer in self.peers:
            await peer.close()


def now(peer: StandInPeer) -> NodeRecord:
    """What a peer would announce now."""
    return replace(
        peer.record,
        kv_tokens_free=peer.stage.kv_tokens_free,
        kv_tokens_wanted=peer.stage.wanted_tokens,
        sessions=peer.stage.sessions,
    )


async def serve(swarm: Growing, asked: list[Request], rng: random.Random) -> Told:
    """Serve all of ``asked``."""
    loop, told = asyncio.get_running_loop(), Told()
    started_s = loop.time()

    async def ask(request: Request, urgent: bool) -> None:
        await asyncio.sleep(request.at_s)
        begun_s = loop.time()
        running = swarm.client.begin(
            (1,) * request.prompt_tokens,
            max_new_tokens=request.new_tokens,
            ignore_eos=True,
            speculate=False,
            priority="high" if urgent else "normal",
        )
        stream = Stream(running, clock=loop.time)
        await stream.read()
        assert len(stream.token_ids) == request.new_tokens, "a token was lost or came twice"
        assert running.answer().failovers == 0
        gaps = stream.gaps_s(started_s + JOIN_S, float("inf"))
        told.gaps_s += gaps
        told.urgent_gaps_s += gaps if urgent else []
        if request.at_s >= JOIN_S:
            ttft_s = stream.at_s[0] - begun_s
            told.ttft_s.append(ttft_s)
            told.urgent_ttft_s += [ttft_s] if urgent else []

    async def watch() -> None:
        await asyncio.sleep(JOIN_S)
        await swarm.grow()
        await swarm.plan()
        while True:
            await asyncio.sleep(1.0)
            pairs = zip(swarm.peers[: len(SPANS)], swarm.peers[len(SPANS) :], strict=True)
            told.spread += [
                abs(load_of(now(a)).freeness - load_of(now(b)).freeness) for a, b in pairs
            ]

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(ask(request, rng.random() < URGENT) for request in asked))
    watching.cancel()
    await asyncio.sleep(5.0)
    assert all(peer.stage.kv_tokens_free == KV_TOKENS for peer in swarm.peers), "KV is held"
    counters = [peer.stage.counters for peer in swarm.peers]
    told.moves = sum(c["move_by_copy"] + c["move_by_replay"] for c in counters)
    return told


def run(seed: int, per_s: float, *, balance: bool) -> Told:
    """One run; both kinds of a seed get the same requests."""
    setting = Setting(policy="anabranch", requests_per_s=per_s, seconds=END_S, seed=seed)
    asked = requests(setting)

    async def whole() -> Told:
        async with Growing(seed, balance=balance) as swarm:
            return await serve(swarm, asked, random.Random(seed))

    return run_virtual(whole(), limit_s=10_000)


def of(values: Iterable[float]) -> dict[str, float]:
    """Median and 99th percentile, in seconds."""
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 4),
        "max": round(ordered[-1], 4),
    }


def cell(told: list[Told], per_s: float, *, balance: bool) -> dict[str, Any]:
    """All seeds' runs of one kind."""

    def whole(name: str) -> list[float]:
        return [value for each in told for value in getattr(each, name)]

    return {
        "balance": balance,
        "requests_per_s": per_s,
        "requests": len(whole("ttft_s")),
        "moves": sum(each.moves for each in told),
        "ttft_s": of(whole("ttft_s")),
        "token_s": of(whole("gaps_s")),
        "urgent_ttft_s": of(whole("urgent_ttft_s")),
        "urgent_token_s": of(whole("urgent_gaps_s")),
        "freeness_apart_tokens": round(statistics.fmean(whole("spread"))),
    }


def main() -> int:
    parser = report.parser_of("bench.balance_virtual", __doc__)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="seeds 1 to N (2)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.4, 0.6], metavar="R", help="requests/s"
    )
    arguments = parser.parse_args()
    console = Console(stderr=True)
    cells = []
    for per_s, balance in itertools.product(arguments.rates, (False, True)):
        told = [run(seed, per_s, balance=balance) for seed in range(1, arguments.seeds + 1)]
        cells.append(cell(told, per_s, balance=balance))
        console.print(cells[-1])
    result = {
        **report.provenance(arguments.seeds),
        "seeds": arguments.seeds,
        "join_s": JOIN_S,
        "end_s": END_S,
        "kv_tokens": KV_TOKENS,
        "cells": cells,
    }
    report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
