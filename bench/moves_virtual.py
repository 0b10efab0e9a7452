"""What a planned move costs where every peer is a machine of its own: under a virtual clock.

Six stand-in peers hold the three stages of a model with Qwen-7B's shapes (grouped-query attention:
8 of 32 heads) twice. A session of 1,000 tokens decodes over three of them and four others over the
other three; then a stage of the long one leaves, so that it moves in with the others. The project's
own clients, stages, hops and link schedulers run over the in-memory network; the engine waits as
long as an RTX 4090 would and computes nothing, and what travels has its true size
(:mod:`bench.timed_engine`). Where ``bench.moves`` has all peers on the same cores, here nobody's
work slows a neighbour but what its own peers and links have to do.

Each cell is a link (between all peers, either way), a stage, and a way: what the new stage would
choose itself, or KV or rows alone.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report
from bench.answer_times import Stream
from bench.stand_in import (
    MBIT,
    QWEN_7B,
    RTX_4090,
    SPANS,
    StandInPeer,
    client_of,
    join_peers,
    serving,
)
from dht.identity import Identity
from dht.memory import LinkModel, MemoryNetwork, MemoryTransport
from dht.types import NodeState
from dht.virtual_time import run_virtual
from node.batching import BatchLimits
from node.stage import StageConfig

SPEC = replace(QWEN_7B, name="qwen-7b-gqa", kv_bytes_per_token_layer=2 * 8 * 128 * 2)
SESSION_TOKENS = 1000
BEFORE = 48
"""New tokens of the long session before a stage leaves."""
NEIGHBOURS = 4
"""Sessions over the other peers, one of which the long session moves to."""
AFTER_S = 20.0
LINKS = {"100 Mbit/s, 10 ms": (100.0, 0.010), "1 Gbit/s, 2 ms": (1000.0, 0.002)}
WAYS = ("chosen", "copy", "replay")


async def leave(peer: StandInPeer) -> None:
    """As a peer does that drains."""
    peer.engine.serving = False
    peer.record = replace(peer.record, state=NodeState.DRAINING)
    await peer.directory.publish(peer.record)
    peer.stage.move_outside(0, 0)


class TwiceHeld:
    """Every stage twice, over links of one shape."""

    def __init__(self, mbit: float, delay_s: float, way: str, seed: int) -> None:
        self._mbit, self._delay_s, self._way = mbit, delay_s, way
        self.network = MemoryNetwork(random.Random(seed))
        self.peers: list[StandInPeer] = []

    def _known(self, peer_id: str) -> float:
        """What peers measured of their links; skewed where a way is prescribed."""
        rates = {"chosen": self._mbit * MBIT, "copy": 1e15, "replay": 1.0}
        return rates[self._way]

    async def _start(self, span: tuple[int, int]) -> None:
        transport = self.network.transport(Identity(self.network.rng.randbytes(32)))
        limits = BatchLimits(prefill_tokens_max=256)
        peer = await serving(transport, span, SPEC, RTX_4090, limits, StageConfig())
        peer.stage.bandwidth_from = self._known
        self.peers.append(peer)

    async def __aenter__(self) -> "TwiceHeld":
        for span in SPANS * 2:
            await self._start(span)
        join_peers(self.network, self.peers, self._mbit, self._delay_s)
        transport = self.network.transport(Identity(self.network.rng.randbytes(32)))
        for peer in self.peers:
            near = LinkModel(delay_s=self._delay_s)
            self.network.set_link(transport.peer_id, peer.transport.peer_id, near)
            self.network.set_link(peer.transport.peer_id, transport.peer_id, near)

        async def open_transport() -> MemoryTransport:
            return transport

        await asyncio.sleep(0.5)
        self.client = client_of(open_transport, SPEC)
        await self.client.__aenter__()
        return self

    async def announce_room(self, kv_tokens_free: dict[str, int]) -> None:
        """Let peers announce so little room that new sessions go elsewhere."""
        for peer in self.peers:
            if (free := kv_tokens_free.get(peer.transport.peer_id)) is not None:
                peer.record = replace(peer.record, kv_tokens_free=free)
                await peer.directory.publish(peer.record)
        await self.client.refresh()

    async def __aexit__(self, *_: object) -> None:
        await self.client.__aexit__(None, None, None)
        for peer in self.peers:
            await peer.close()


async def move(swarm: TwiceHeld, stage: int) -> dict[str, Any]:
    """One long session whose stage leaves; the others go on."""
    loop = asyncio.get_running_loop()

    def begin(tokens: int) -> Stream:
        running = swarm.client.begin((1,) * tokens, max_new_tokens=600, ignore_eos=True)
        return Stream(running, clock=loop.time)

    long = begin(SESSION_TOKENS - BEFORE)
    tasks = [asyncio.create_task(long.read())]
    await asyncio.wait_for(long.reached(1), 60)
    route = [each.peer_id for each in long.running.route]
    await swarm.announce_room(dict.fromkeys(route, 0))
    neighbours = [begin(64) for _ in range(NEIGHBOURS)]
    tasks += [asyncio.create_task(each.read()) for each in neighbours]
    await asyncio.gather(*(each.reached(BEFORE) for each in (long, *neighbours)))
    beside = [{s.peer_id for s in each.running.route} for each in neighbours]
    assert not any(peers & set(route) for peers in beside), "neighbours are to be elsewhere"
    leaving = next(p for p in swarm.peers if p.transport.peer_id == route[stage])
    began_s, struck_s = max(each.at_s[8] for each in (long, *neighbours)), loop.time()
    await leave(leaving)
    await leaving.stage.wait_idle(AFTER_S)
    left_s = loop.time()
    await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    usual_s = statistics.median(long.gaps_s(began_s, struck_s))
    slower = [
        statistics.fmean(each.gaps_s(struck_s, left_s))
        / statistics.fmean(each.gaps_s(began_s, struck_s))
        - 1.0
        for each in neighbours
    ]
    return {
        "usual_token_s": round(usual_s, 5),
        "gap_s": round(max(long.gaps_s(struck_s, left_s + 0.5)), 5),
        "gap_of_usual": round(max(long.gaps_s(struck_s, left_s + 0.5)) / usual_s, 2),
        "undisturbed_longest_of_usual": round(max(long.gaps_s(began_s, struck_s)) / usual_s, 2),
        "left_s": round(left_s - struck_s, 3),
        "neighbours_slowdown": [round(each, 4) for each in slower],
        "ways": {
            name: sum(peer.stage.counters[name] for peer in swarm.peers)
            for name in ("move_by_copy", "move_by_replay", "kv_copied", "copied_rows")
        },
    }


def cell(link: str, stage: int, way: str, seed: int) -> dict[str, Any]:
    """One cell of the table."""
    mbit, delay_s = LINKS[link]

    async def run() -> dict[str, Any]:
        async with TwiceHeld(mbit, delay_s, way, seed) as swarm:
            return await move(swarm, stage)

    return {"link": link, "stage": stage, "way": way, **run_virtual(run(), limit_s=3600)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.moves_virtual",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    cells = []
    for link, stage, way in itertools.product(LINKS, range(len(SPANS)), WAYS):
        cells.append(cell(link, stage, way, arguments.seed))
        console.print(cells[-1])
    result = {
        **report.provenance(arguments.seed),
        "session_tokens": SESSION_TOKENS,
        "kv_bytes_per_token": SPEC.kv_bytes_per_token_layer * SPEC.layers,
        "cells": cells,
    }
    if arguments.out is not None:
        report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
