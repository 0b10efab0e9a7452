"""Whole swarms under everything at once, by seed: a run replays exactly from its number.

Peers are killed, frozen, cut off, get stuck, fill up and leave as planned, in the middle of moves
and failovers of several answers, while others join. Every answer must be right, and in the end
nobody holds anything. The seed is the test's parameter, so a failure names it.
"""

import asyncio
import random

import pytest

from dht.virtual_time import run_virtual
from tests.sim.paper_swarm import PaperPeer, PaperSwarm, answer_of, paper_swarm
from tests.sim.test_sessions import until

pytestmark = pytest.mark.sim

SPANS = ((0, 2), (2, 5), (5, 8))
ANSWERS = 4
NEW = 80

Trace = list[tuple[float, int, tuple[int, ...]]]


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + 25))


def settle(peer: PaperPeer, rng: random.Random) -> None:
    """Draw how a peer takes in sessions that move: copied KV, replayed rows, no KV at all."""
    bandwidth = rng.choice([1e3, 1e5, 1e8, None])
    peer.stage.bandwidth_from = lambda peer_id: bandwidth
    peer.engine.refuses_kv = rng.random() < 0.15


class Storm:
    """Draws what happens to the peers of a swarm."""

    def __init__(self, swarm: PaperSwarm, rng: random.Random) -> None:
        self._swarm = swarm
        self._rng = rng
        self.lost: list[PaperPeer] = []

    async def blow(self) -> None:
        """Strike and let others join, until cancelled. A second holder always stays."""
        rng, swarm = self._rng, self._swarm
        while True:
            await asyncio.sleep(rng.uniform(0.05, 1.5))
            sound = [p for p in swarm.peers if p not in self.lost]
            victim = rng.choice(sound)
            if sum(p.engine.span == victim.engine.span for p in sound) > 1:
                self.lost.append(victim)
                await self._strike(victim)
            await asyncio.sleep(rng.uniform(0.05, 0.6))
            fresh = await swarm.add(*rng.choice(SPANS), log_bytes_max=rng.choice([60, 1 << 20]))
            settle(fresh, rng)

    async def _strike(self, victim: PaperPeer) -> None:
        way = self._rng.choice(["kill", "freeze", "stick", "leave", "leave", "full"])
        match way:
            case "leave":
                victim.engine.serving = False
                await victim.announce()
                victim.stage.move_outside(0, 0)
            case "full":
                victim.engine.kv_free = 0
            case _:
                getattr(self._swarm, way)(victim)
                for task in victim.tasks:
                    task.cancel()


async def storm(seed: int) -> Trace:
    """One run: when which tokens came to which answer. Asserts everything else."""
    rng = random.Random(seed)
    trace: Trace = []
    loop = asyncio.get_running_loop()
    async with paper_swarm(*SPANS * 3, seed=seed) as swarm, swarm.client(wait_s=300) as client:
        for peer in swarm.peers:
            settle(peer, rng)
        weather = Storm(swarm, rng)
        blowing = asyncio.create_task(weather.blow())

        async def ask(number: int) -> None:
            tokens: list[int] = []
            async for piece in client.begin(prompt_of(number), max_new_tokens=NEW):
                trace.append((loop.time(), number, piece.token_ids))
                tokens += piece.token_ids
            assert tuple(tokens) == answer_of(prompt_of(number), NEW)

        await asyncio.gather(*(ask(number) for number in range(ANSWERS)))
        blowing.cancel()
        sound = [peer for peer in swarm.peers if peer not in weather.lost]
        await until(lambda: not any(peer.engine.kv for peer in sound))
        assert all(peer.stage.log_bytes == 0 for peer in sound)
    return trace


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_right_whatever_happens(seed: int) -> None:
    run_virtual(storm(seed), limit_s=3600)


def test_a_seed_replays_identically() -> None:
    first = run_virtual(storm(7), limit_s=3600)
    assert first
    assert run_virtual(storm(7), limit_s=3600) == first


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_many_seeds(block: int) -> None:
    """Eighty more, in blocks; the note of a failure names the seed."""
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        try:
            run_virtual(storm(seed), limit_s=3600)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
