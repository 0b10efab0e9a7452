"""Simulated: how much a stage's KV serves when sessions grow, against worst-case reservation.

The project's own clients, stages, admission and links run over the in-memory network under a
virtual clock. The engine computes nothing: it waits as long as a device would
(:mod:`bench.timed_engine`) and its tokens follow from seed and position, so every answer is
compared token by token; that KV is right after a replay shows ``tests/sim/test_running_out.py``.

Shapes of Qwen-7B with grouped-query attention on three stages whose KV is short. Many clients ask
without pause, more than there is KV for: prompts and answers have the Azure trace's lengths, each
request allows ``--max-new`` tokens, as clients do who do not know how long an answer will be.
``grow`` is what stages do. ``reserve`` is the same code with every session let in by its longest
possible answer on all layers of the stage, as stages did before.
"""

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report
from bench.simulated.clock import run_virtual
from bench.simulated.network import MemoryNetwork
from bench.stand_in import (
    QWEN_7B_GQA,
    SPANS,
    TRACE,
    StandInPeer,
    client_of,
    join_client,
    join_peers,
    serving,
)
from bench.timed_engine import GpuTimes, TimedEngine
from client import Swarm
from coordinator.admission.lengths import AnswerLengths
from coordinator.admission.room import KvAsk
from coordinator.batching.scheduler import BatchLimits
from coordinator.simulator.core.trace import Request, as_in_papers, read_trace, sampled
from dht.errors import SwarmError
from dht.identity.peer_id import Identity
from dht.messages.session import SessionOpen
from node.engine.work_item import WorkItem, WorkResult
from node.peer.balancer import Balancer
from node.stage.server import StageConfig

SPEC = QWEN_7B_GQA
PLACEMENTS = {
    "three stages": SPANS,
    "stages of which sessions use a part": ((0, 16), (8, 24), (16, 32)),
}
SLOW = GpuTimes(step_s=50e-3, decode_s=0.5e-3, prefill_s=0.5e-3)
"""A stage on a device with a tenth of an RTX 4090's bandwidth and FLOP/s, about: the time of a step
hardly depends on how many decode, as long as KV is what is short."""
KV_TOKENS = 12_000
CLIENTS, STREAMS = 3, 6
"""Clients, and requests of each at once: more than there is KV for in either way."""
MBIT, DELAY_S = 1000.0, 0.002
RAMP_S = 20.0
STOP_ID = 999
LENGTH_BITS = 12


class AnsweringEngine(TimedEngine):
    """Its tokens follow from seed and position; the seed says where the answer ends."""

    def _result(self, item: WorkItem) -> WorkResult:
        result = super()._result(item)
        if item.sampling is None or result.token_id is None:
            return result
        token_id = token_of(item.sampling.seed, item.position + item.tokens)
        return replace(result, token_ids=(token_id,))


def seed_of(request: Request) -> int:
    return request.input_tokens << LENGTH_BITS | request.output_tokens


def token_of(seed: int, position: int) -> int:
    """The token at a position of a session."""
    prompt, length = seed >> LENGTH_BITS, seed & ((1 << LENGTH_BITS) - 1)
    if position == prompt + length - 1:
        return STOP_ID
    return (seed * 1_000_003 + position * 7919) % STOP_ID


class WholeLengths(AnswerLengths):
    """Expects every answer to be as long as it may be."""

    def estimate(self, client: str) -> int:
        return 1 << 30


@dataclass(slots=True)
class Told:
    """What one run was like."""

    tokens: int = 0
    done: int = 0
    failed: int = 0
    changed: int = 0
    failovers: int = 0
    held: list[int] = field(default_factory=list)
    """Sessions at the fullest stage, sampled every second."""


async def peers_of(
    network: MemoryNetwork, spans: tuple[tuple[int, int], ...], way: str
) -> list[StandInPeer]:
    peers = []
    for span in spans:
        transport = network.transport(Identity(network.rng.randbytes(32)))
        limits = BatchLimits(prefill_tokens_max=256)
        peer = await serving(
            transport,
            span,
            SPEC,
            SLOW,
            limits,
            StageConfig(idle_s=600.0),
            kv_tokens=KV_TOKENS,
            engine_class=AnsweringEngine,
        )
        if way == "reserve":
            reserve_whole(peer)
        else:
            balancer = Balancer(peer.directory, peer.stage, lambda p=peer: p.record)
            peer.tasks.append(asyncio.create_task(balancer.run()))
        peers.append(peer)
    return peers


def reserve_whole(peer: StandInPeer) -> None:
    """Let sessions in by their longest possible answer, on all layers of the stage."""
    kv, view = peer.stage.kv, peer.engine.view
    kv.room.lengths = WholeLengths()
    ask_of = kv.ask_of

    def whole(open_: SessionOpen, key: str) -> KvAsk:
        return replace(ask_of(open_, key), start=view.start, end=view.end)

    setattr(kv, "ask_of", whole)  # noqa: B010 (a method of this one object)


async def load(
    clients: list[Swarm], asked: Iterator[Request], peers: list[StandInPeer], arguments: Any
) -> Told:
    """Ask without pause until the time is over, then let all that began end."""
    loop, told = asyncio.get_running_loop(), Told()
    begun_s = loop.time()
    end_s = begun_s + RAMP_S + arguments.seconds

    async def ask(client: Swarm) -> None:
        while loop.time() < end_s:
            request = next(asked)
            seed = seed_of(request)
            came: list[int] = []
            running = client.begin(
                (1,) * request.input_tokens,
                max_new_tokens=arguments.max_new,
                stop_token_ids=(STOP_ID,),
                seed=seed,
                speculate=False,
            )
            try:
                async for piece in running:
                    came += piece.token_ids
                    if begun_s + RAMP_S <= loop.time() < end_s:
                        told.tokens += len(piece.token_ids)
            except SwarmError:
                told.failed += 1
                continue
            first = request.input_tokens
            right = [token_of(seed, first + n) for n in range(request.output_tokens)]
            told.done += 1
            told.changed += came not in (right, right[:-1])
            told.failovers += running.answer().failovers

    async def watch() -> None:
        await asyncio.sleep(RAMP_S)
        while loop.time() < end_s:
            told.held.append(max(peer.stage.sessions for peer in peers))
            await asyncio.sleep(1.0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(ask(client) for client in clients for _ in range(STREAMS)))
    watching.cancel()
    return told


def run(placement: str, way: str, arguments: Any) -> dict[str, Any]:
    """One cell of the table."""
    trace = [
        request
        for request in as_in_papers(read_trace(TRACE.read_bytes()))
        if request.output_tokens <= arguments.max_new
    ]

    async def whole() -> dict[str, Any]:
        network = MemoryNetwork(random.Random(arguments.seed))
        peers = await peers_of(network, PLACEMENTS[placement], way)
        join_peers(network, peers, MBIT, DELAY_S)
        async with AsyncExitStack() as stack:
            clients = []
            for _ in range(CLIENTS):
                transport = network.transport(Identity(network.rng.randbytes(32)))
                join_client(network, transport.peer_id, peers, DELAY_S)
                clients.append(await stack.enter_async_context(client_of(transport, SPEC)))
            told = await load(clients, sampled(trace, arguments.seed), peers, arguments)
        await asyncio.sleep(1.0)
        held = [peer.stage.kv_tokens_free != KV_TOKENS for peer in peers]
        counters = [peer.stage.counters for peer in peers]
        for peer in peers:
            await peer.close()
        layers = sum(end - start for start, end in PLACEMENTS[placement])
        gigabytes = KV_TOKENS * layers * SPEC.kv_bytes_per_token_layer / 1e9
        at_once = sum(told.held) / max(1, len(told.held))
        return {
            "tokens_per_s": round(told.tokens / arguments.seconds, 1),
            "at_once": round(at_once, 1),
            "kv_gb": round(gigabytes, 2),
            "at_once_per_gb": round(at_once / gigabytes, 2),
            "answers": told.done,
            "failed": told.failed,
            "changed": told.changed,
            "failovers": told.failovers,
            "gave_way": sum(c["gave_way"] for c in counters),
            "waited_for_kv": sum(c["waited_for_kv"] for c in counters),
            "kv_left_held": sum(held),
        }

    return {"placement": placement, "way": way, **run_virtual(whole(), limit_s=100_000)}


def main() -> int:
    parser = report.parser_of("bench.kv", __doc__)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="that count, after the ramp")
    parser.add_argument("--max-new", type=int, default=1024, help="tokens that a request allows")
    parser.add_argument("--placement", choices=PLACEMENTS, action="append", help="default: all")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    cells = []
    for placement in arguments.placement or PLACEMENTS:
        for way in ("reserve", "grow"):
            cells.append(run(placement, way, arguments))
            console.print(cells[-1])
    result = {
        **report.provenance(arguments.seed),
        "seconds": arguments.seconds,
        "max_new": arguments.max_new,
        "kv_tokens": KV_TOKENS,
        "clients": CLIENTS,
        "streams": STREAMS,
        "cells": cells,
    }
    report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
