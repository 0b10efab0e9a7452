"""The real coordinator's shell in every peer."""

import pytest

from tests.examples import seeds
from tests.sim.healing import run
from tests.unit.coordinator.test_runtime import solve_without_time

pytestmark = pytest.mark.sim


@pytest.mark.property
@pytest.mark.parametrize("seed", seeds(10))
def test_a_swarm_recovers(seed):
    run(seed)


@pytest.mark.parametrize("seed", [26, 48, 69, 186])
def test_seeds_that_once_did_not_recover(seed):
    run(seed)


@pytest.mark.parametrize("seed", [26, 105, 186])
def test_a_swarm_whose_coordinators_have_no_time_to_solve_recovers(seed):
    run(seed, solve=solve_without_time)


def test_a_swarm_replays_identically():
    assert run(1) == run(1)
