"""What a planned move costs where every peer is a machine of its own: under a virtual clock.

The setting is :mod:`bench.moving`'s. The project's own clients, stages, hops and link schedulers
run over the in-memory network; the engine waits as long as an RTX 4090 would and computes nothing,
and what travels has its true size (:mod:`bench.timed_engine`). Where ``bench.moves`` has all peers
on the same cores, here nobody's work slows a neighbour but what its own peers and links have to do.

Each cell is a link (between all peers, either way), a stage, and a way: what the new stage would
choose itself, or KV or rows alone.
"""

import asyncio
import itertools
import random
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report
from bench.moving import SESSION_TOKENS, SPEC, StandInMover, move, moving_peer
from bench.simulated.clock import run_virtual
from bench.simulated.network import MemoryNetwork
from bench.stand_in import SPANS, client_of, join_client, join_peers
from dht.identity.peer_id import Identity

LINKS = {"100 Mbit/s, 10 ms": (100.0, 0.010), "1 Gbit/s, 2 ms": (1000.0, 0.002)}
WAYS = ("chosen", "copy", "replay")


class TwiceHeld:
    """Every stage twice, over links of one shape."""

    def __init__(self, mbit: float, delay_s: float, way: str, seed: int) -> None:
        self._mbit, self._delay_s, self._way = mbit, delay_s, way
        self.network = MemoryNetwork(random.Random(seed))
        self.movers: list[StandInMover] = []

    async def __aenter__(self) -> "TwiceHeld":
        for span in SPANS * 2:
            transport = self.network.transport(Identity(self.network.rng.randbytes(32)))
            self.movers.append(await moving_peer(transport, span, self._mbit, self._way))
        peers = [each.peer for each in self.movers]
        join_peers(self.network, peers, self._mbit, self._delay_s)
        transport = self.network.transport(Identity(self.network.rng.randbytes(32)))
        join_client(self.network, transport.peer_id, peers, self._delay_s)
        await asyncio.sleep(0.5)
        self._connected = client_of(transport, SPEC)
        self.client = await self._connected.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connected.__aexit__(None, None, None)
        for mover in self.movers:
            await mover.peer.close()


def cell(link: str, stage: int, way: str, seed: int) -> dict[str, Any]:
    """One cell of the table."""
    mbit, delay_s = LINKS[link]

    async def run() -> dict[str, Any]:
        async with TwiceHeld(mbit, delay_s, way, seed) as swarm:
            return await move(swarm.client, swarm.movers, stage)

    return {"link": link, "stage": stage, "way": way, **run_virtual(run(), limit_s=3600)}


def main() -> int:
    parser = report.parser_of("bench.moves_virtual", __doc__)
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
    report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
