"""Swarms of real coordinators' shells by seed: kills, cuts, loss, lag and clocks that differ, then
all is healed. How long until everybody follows one leader's plan, and goes on to?
"""

import asyncio
import random
from dataclasses import dataclass

from coordinator.runtime import Solver
from testing.clock import run_virtual
from testing.network import LinkModel
from tests.unit.coordinator.conftest import Make
from tests.unit.coordinator.test_runtime import Member, Swarm, solve_here

SKEW_S = 3.0
LOSS = 0.02
HEALED_S = 60.0
"""Time within which a healed swarm has one leader and one plan."""
STAYS_S = 10.0
"""Minimum time for which both stay."""
ROUNDS = 4


@dataclass
class Watched:
    """Plan versions that one peer was seen to follow, in order."""

    member: Member
    versions: list


async def watch(seen: Watched) -> None:
    while True:
        version = seen.member.plans.version
        if not seen.versions or seen.versions[-1] != version:
            seen.versions.append(version)
        await asyncio.sleep(0.5)


def skewed(member: Member, skew_s: float) -> Member:
    """Let a peer's clock differ from the network's."""
    right = member.transport.now
    member.transport.now = lambda: right() + skew_s
    return member


async def live(seed: int, *, limit_s: float = HEALED_S, solve: Solver = solve_here) -> float:
    """Seconds until a swarm had one leader and one plan, and kept them, after all was healed."""
    rng = random.Random(seed)
    swarm = Swarm(
        Make,
        [rng.choice((600, 1000)) for _ in range(rng.randint(3, 5))],
        seed=seed,
        solve=solve,
        dht_loss=LOSS,
        dht_stale_s=2.0,
        link=LinkModel(delay_s=0.02, loss=LOSS),
    )
    for member in swarm.members:
        skewed(member, rng.uniform(-SKEW_S, SKEW_S))
    watches = [Watched(member, []) for member in swarm.members]
    tasks = [asyncio.create_task(watch(each)) for each in watches]
    async with swarm:
        for _ in range(ROUNDS):
            await asyncio.sleep(rng.uniform(5, 30))
            dice = rng.random()
            if dice < 0.3 and len(swarm.members) > 2:
                await swarm.kill(rng.choice(swarm.leaders() or swarm.members))
            elif dice < 0.45 and len(swarm.members) > 2:
                await swarm.kill(rng.choice(swarm.members))
            elif dice < 0.75:
                names = [member.transport.peer_id for member in swarm.members]
                swarm.network.partition(names[::2], names[1::2], breaks=rng.random() < 0.5)
            else:
                swarm.network.heal()
                skewed(swarm.join(1000), rng.uniform(-SKEW_S, SKEW_S)).start()
        swarm.network.heal()
        swarm.network.dht_loss = 0.0
        swarm.network.link = LinkModel(delay_s=0.02)
        took_s = await calm(swarm, limit_s)
    for task in tasks:
        task.cancel()
    for each in watches:
        assert each.versions == sorted(set(each.versions)), f"seed {seed}: versions went back"
    return took_s


async def calm(swarm: Swarm, limit_s: float) -> float:
    """Seconds until the swarm has one leader and one plan, and has them for ``STAYS_S``."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    since_s = None
    while since_s is None or loop.time() - since_s < STAYS_S:
        if not (swarm.agreed() and len(swarm.leaders()) == 1):
            since_s = None
            assert loop.time() - started_s < limit_s, "did not settle"
        elif since_s is None:
            since_s = loop.time()
        await asyncio.sleep(0.25)
    return since_s - started_s


def run(seed: int, *, limit_s: float = HEALED_S, solve: Solver = solve_here) -> float:
    """The run of one seed; its seconds until it was calm. A failure names the seed."""
    try:
        return run_virtual(live(seed, limit_s=limit_s, solve=solve), limit_s=2000)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
