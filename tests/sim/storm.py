"""Whole swarms under everything at once, by seed: a run replays exactly from its number.

Peers are killed, frozen, cut off for a while or for good, get stuck, fill up and leave as planned,
in the middle of moves and failovers of several answers, while others join. Sessions that move bring
their KV along, or have their rows replayed, or are refused that halfway. Every answer must be
right, and in the end nobody holds anything. In every fourth run several tokens are drafted at
a time, most of them rightly; in another one sessions keep a state that cannot be cut, and in half
of those tokens are drafted, too.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from testing.clock import run_virtual
from tests.sim.paper_swarm import PaperPeer, PaperSwarm, answer_of, paper_swarm

SPANS = ((0, 2), (2, 5), (5, 8))
ANSWERS = 4
NEW = 80
LIMIT_S = 3600.0

Trace = list[tuple[float, int, tuple[int, ...]]]


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + 25))


@dataclass(slots=True)
class Stormy:
    """What one run was like."""

    trace: Trace = field(default_factory=list)
    """When which tokens came to which answer."""
    strikes: Counter[str] = field(default_factory=Counter)
    did: Counter[str] = field(default_factory=Counter)
    """What stages did, by their counters, and owners."""


def settle(peer: PaperPeer, rng: random.Random) -> None:
    """Draw how a peer takes in sessions that move: copied KV, replayed rows, no KV at all."""
    bandwidth = rng.choice([1e3, 1e5, 1e8, None])
    peer.bandwidth = bandwidth
    peer.engine.refuses_kv = rng.random() < 0.15


class Weather:
    """Draws what happens to the peers of a swarm."""

    def __init__(self, swarm: PaperSwarm, rng: random.Random) -> None:
        self._swarm = swarm
        self._rng = rng
        self._cut: PaperPeer | None = None
        self.lost: list[PaperPeer] = []
        self.strikes: Counter[str] = Counter()

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
        ways = ["kill", "freeze", "stick", "leave", "leave", "full"]
        way = self._rng.choice(ways + (["cut"] if self._cut is None else []))
        self.strikes[way] += 1
        match way:
            case "leave":
                victim.engine.serving = False
                await victim.announce()
                victim.stage.move_all()
            case "full":
                victim.fill()
            case "cut":
                self._cut = victim
                self._swarm.cut(victim)
                delay_s = self._rng.uniform(0.1, 9.0)
                asyncio.get_running_loop().call_later(delay_s, self.heal)
            case _:
                getattr(self._swarm, way)(victim)
                for task in victim.tasks:
                    task.cancel()

    def heal(self) -> None:
        """The one that was cut off is back, with whatever it still holds."""
        if self._cut is not None:
            self._swarm.network.heal()
            self.lost.remove(self._cut)
            self._cut = None


async def wish(swarm: PaperSwarm, rng: random.Random) -> None:
    """Have peers ask again and again for relief, by others with their layers, dead or alive."""
    while True:
        await asyncio.sleep(rng.uniform(0.05, 0.3))
        full = rng.choice(swarm.peers)
        alike = [p for p in swarm.peers if p.engine.span == full.engine.span and p is not full]
        full.stage.relieve({each: rng.choice(alike).peer_id for each in full.stage.holding()})


async def storm(seed: int, *, wishes: bool = False) -> Stormy:
    """One run. Asserts that every answer is right and that nothing is held in the end."""
    rng = random.Random(seed)
    told = Stormy()
    loop = asyncio.get_running_loop()
    state_tokens = 5 if seed % 4 == 3 else 0
    drafts = seed % 4 == 1 or seed % 8 == 7
    modelled = seed % 8 == 5
    async with (
        paper_swarm(
            *SPANS * 3,
            seed=seed,
            foretold=drafts and not modelled,
            modelled=modelled,
            state_tokens=state_tokens,
        ) as swarm,
        swarm.client(wait_s=300) as client,
    ):
        for peer in swarm.peers:
            settle(peer, rng)
        weather = Weather(swarm, rng)
        blowing = asyncio.create_task(weather.blow())
        wishing = asyncio.create_task(wish(swarm, rng)) if wishes else None

        async def ask(number: int) -> None:
            tokens: list[int] = []
            running = client.begin(prompt_of(number), max_new_tokens=NEW)
            async for piece in running:
                told.trace.append((loop.time(), number, piece.token_ids))
                tokens += piece.token_ids
            assert tuple(tokens) == answer_of(prompt_of(number), NEW)
            told.did["failovers"] += running.answer().failovers

        await asyncio.gather(*(ask(number) for number in range(ANSWERS)))
        blowing.cancel()
        if wishing is not None:
            wishing.cancel()
        weather.heal()
        sound = [peer for peer in swarm.peers if peer not in weather.lost]
        end_s = loop.time() + 120.0
        while any(peer.engine.kv for peer in sound):
            assert loop.time() < end_s, "KV is held although no session is left"
            await asyncio.sleep(0.1)
        assert all(peer.stage.shell.log.bytes_held == 0 for peer in sound), (
            "rows are kept for nobody"
        )
        for peer in sound:
            assert not (modelled and swarm.drafts[peer.peer_id].rows), "drafts are kept for nobody"
        told.strikes = weather.strikes
        for peer in swarm.peers:
            told.did.update(peer.stage.counters)
    return told


def run_storm(seed: int, *, wishes: bool = False) -> Stormy:
    """The run of one seed, under a virtual clock; a failure has a note that names the seed.

    With ``wishes`` peers ask for relief all the time, too.
    """
    try:
        return run_virtual(storm(seed, wishes=wishes), limit_s=LIMIT_S)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
