"""The real coordinator's shell in every peer."""

import pytest

from tests.sim.healing import run
from tests.unit.coordinator.test_runtime import solve_without_time

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("seed", range(6))
def test_a_swarm_recovers(seed):
    run(seed)


@pytest.mark.parametrize("seed", [26, 48, 69, 186])
def test_seeds_that_once_did_not_recover(seed):
    run(seed)


@pytest.mark.parametrize("seed", [26, 105, 186])
def test_a_swarm_whose_coordinators_have_no_time_to_solve_recovers(seed):
    run(seed, solve=solve_without_time)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(2))
def test_many_swarms_recover(chunk):
    for seed in range(100 + 8 * chunk, 108 + 8 * chunk):
        run(seed)


def test_a_swarm_replays_identically():
    assert run(1) == run(1)
