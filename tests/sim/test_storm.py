"""Storms by seed; ``python -m bench sessions.storm`` runs thousands."""

from collections import Counter

import pytest

from tests.examples import seeds
from tests.sim.storm import run_storm

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_right_whatever_happens(seed: int) -> None:
    run_storm(seed)


@pytest.mark.parametrize("block", range(3))
def test_wishes_for_relief_do_no_harm(block: int) -> None:
    did: Counter[str] = Counter()
    for seed in range(2000 + 3 * block, 2003 + 3 * block):
        did += run_storm(seed, wishes=True).did
    assert did["relief_asked"] > 0
    assert did["kv_copied"] > 0


def test_a_seed_replays_identically() -> None:
    first = run_storm(7)
    assert first.trace
    assert run_storm(7) == first


@pytest.mark.slow
@pytest.mark.property
def test_many_seeds() -> None:
    """More, in which everything happens that storms are made of, also what is rare."""
    did: Counter[str] = Counter()
    for seed in seeds(30, first=1000):
        told = run_storm(seed)
        did += told.strikes + told.did
    for what in ("kill", "freeze", "cut", "leave", "full", "stick", "failovers", "kv_copied"):
        assert did[what] > 0, what
