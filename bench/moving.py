"""A stage of a long session leaves while others go on: what ``bench.moves_virtual`` and
``bench.moves_real`` measure, whatever the peers are made of.

Six stand-in peers hold the three stages of a model with Qwen-7B's shapes (grouped-query attention:
8 of 32 heads) twice. A session of 1,000 tokens decodes over three of them and four others over the
other three; then a stage of the long one leaves, so that it moves in with the others.
"""

import asyncio
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bench.answer_times import Stream
from bench.stand_in import MBIT, QWEN_7B_GQA, RTX_4090, StandInPeer, serving
from client import Swarm
from coordinator.batching.scheduler import BatchLimits
from dht.messages.types import NodeState
from dht.transport.interface import Transport
from node.stage.server import StageConfig

SPEC = QWEN_7B_GQA
SESSION_TOKENS = 1000
BEFORE = 48
"""New tokens of every session before a stage leaves."""
NEIGHBOURS = 4
"""Sessions over the other peers, one of which the long session moves to."""
AFTER_S = 20.0
"""For a stage to be left by all its sessions."""
ROUTE_S = 10.0
"""For what peers announce to be seen."""


class Mover(Protocol):
    """A peer that may be told to leave."""

    peer_id: str

    async def announce_room(self, kv_tokens_free: int) -> None:
        """Announce this much room, whatever there is."""
        ...

    async def leave(self) -> None:
        """Drain; returns when no session is left."""
        ...

    async def counters(self) -> Mapping[str, int]:
        """The stage's."""
        ...


@dataclass(slots=True)
class StandInMover:
    """A stand-in peer in this process."""

    peer: StandInPeer

    @property
    def peer_id(self) -> str:
        return self.peer.transport.peer_id

    async def announce_room(self, kv_tokens_free: int) -> None:
        self.peer.record = replace(self.peer.record, kv_tokens_free=kv_tokens_free)
        await self.peer.directory.publish(self.peer.record)

    async def leave(self) -> None:
        """As a peer does that drains."""
        self.peer.engine.serving = False
        self.peer.record = replace(self.peer.record, state=NodeState.DRAINING)
        await self.peer.directory.publish(self.peer.record)
        self.peer.stage.move_all()
        await self.peer.stage.wait_idle(AFTER_S)

    async def counters(self) -> Mapping[str, int]:
        return dict(self.peer.stage.counters)


async def moving_peer(
    transport: Transport, span: tuple[int, int], mbit: float, way: str
) -> StandInMover:
    """Serve ``span``. What it knows of its links is skewed where a ``way`` is prescribed."""
    limits = BatchLimits(prefill_tokens_max=256)
    known = {"chosen": mbit * MBIT, "copy": 1e15, "replay": 1.0}[way]
    return StandInMover(
        await serving(
            transport,
            span,
            SPEC,
            RTX_4090,
            limits,
            StageConfig(),
            bandwidth_from=lambda peer_id: known,
        )
    )


async def _announced(client: Swarm, peer_ids: Sequence[str]) -> None:
    """Wait until the client sees these peers without room."""
    async with asyncio.timeout(ROUTE_S):
        while any(client.view.nodes[each].kv_tokens_free for each in peer_ids):
            await asyncio.sleep(0.1)
            await client.reader.refresh()


async def move(client: Swarm, movers: Sequence[Mover], stage: int) -> dict[str, Any]:
    """One long session whose stage leaves; the others go on."""
    loop, failovers = asyncio.get_running_loop(), client.view.counters["failovers"]

    def begin(tokens: int) -> Stream:
        running = client.begin((1,) * tokens, max_new_tokens=600, ignore_eos=True, speculate=False)
        return Stream(running, clock=loop.time)

    long = begin(SESSION_TOKENS - BEFORE)
    tasks = [asyncio.create_task(long.read())]
    await asyncio.wait_for(long.reached(1), 60)
    route = [each.peer_id for each in long.running.route]
    by_id = {mover.peer_id: mover for mover in movers}
    for peer_id in route:
        await by_id[peer_id].announce_room(0)
    await _announced(client, route)
    neighbours = [begin(64) for _ in range(NEIGHBOURS)]
    tasks += [asyncio.create_task(each.read()) for each in neighbours]
    await asyncio.gather(*(each.reached(BEFORE) for each in (long, *neighbours)))
    beside = [{s.peer_id for s in each.running.route} for each in neighbours]
    assert not any(peers & set(route) for peers in beside), "neighbours are to be elsewhere"
    began_s, struck_s = max(each.at_s[8] for each in (long, *neighbours)), loop.time()
    await by_id[route[stage]].leave()
    left_s = loop.time()
    await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    usual_s = statistics.median(long.gaps_s(began_s, struck_s))
    gap_s = max(long.gaps_s(struck_s, left_s + 0.5))
    counters: Counter[str] = Counter()
    for mover in movers:
        counters.update(await mover.counters())
    return {
        "usual_token_s": round(usual_s, 5),
        "gap_s": round(gap_s, 5),
        "gap_of_usual": round(gap_s / usual_s, 2),
        "undisturbed_longest_of_usual": round(max(long.gaps_s(began_s, struck_s)) / usual_s, 2),
        "left_s": round(left_s - struck_s, 3),
        "failovers": client.view.counters["failovers"] - failovers,
        "neighbours_slowdown": [
            round(each.per_token_s(struck_s, left_s) / each.per_token_s(began_s, struck_s) - 1.0, 4)
            for each in neighbours
        ],
        "ways": {
            name: counters[name]
            for name in ("move_by_copy", "move_by_replay", "kv_copied", "copied_rows")
        },
    }
