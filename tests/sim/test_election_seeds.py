"""Hundreds of seeds of crashes, leader kills, cuts, loss, lag and clocks that differ."""

import pytest

from tests.examples import seeds
from tests.sim.election_world import World

FAULTS_S = 100
HEALED_S = 90
STABLE_S = 5
PER_CHUNK = 50


def run(seed: int) -> tuple[int, str]:
    """Virtual seconds until the swarm had settled after healing, and what happened."""
    world = World(seed, count=2 + seed % 5)
    for _ in world.ticks(FAULTS_S):
        pass
    world.faults = False
    world.heal()
    steady = 0
    for _ in world.ticks(HEALED_S):
        steady = steady + 1 if world.settled() else 0
        if steady == STABLE_S:
            break
    assert steady == STABLE_S, f"seed {seed} did not settle within {HEALED_S} s"
    return int(world.now_s) - FAULTS_S - STABLE_S, world.trace.hexdigest()


@pytest.mark.sim
@pytest.mark.property
@pytest.mark.parametrize("first", seeds(300)[::PER_CHUNK])
def test_hundreds_of_seeds_settle_and_break_no_law(first):
    for seed in range(first, first + PER_CHUNK):
        run(seed)


@pytest.mark.sim
@pytest.mark.parametrize("seed", [3, 77, 512])
def test_a_seed_replays_identically(seed):
    assert run(seed) == run(seed)
    assert run(seed) != run(seed + 1)
