"""How far terms and counters may have come."""

from coordinator.plans.versions import (
    BEGINNING_UNIX_S,
    CLOCKS_DIFFER_S,
    believed,
    next_version,
    number_max,
    plausible,
)
from dht.messages.types import NO_VERSION, PlanVersion

NOW_S = BEGINNING_UNIX_S + 1e6


def test_numbers_beyond_the_seconds_that_passed_are_made_up():
    most = number_max(NOW_S)
    assert most == 1_000_000 + CLOCKS_DIFFER_S
    assert plausible(PlanVersion(term=most, counter=most), NOW_S)
    for made_up in (PlanVersion(term=most + 1), PlanVersion(term=1, counter=1 << 48)):
        assert believed(made_up, NOW_S) == NO_VERSION
    assert plausible(PlanVersion(term=most + 1), NOW_S + 1), "a second later there is room again"


def test_the_next_version_is_past_what_was_seen():
    seen = PlanVersion(term=4, counter=7, rank=9)
    assert next_version(seen, 4, 1) == PlanVersion(term=4, counter=8, rank=1)
    assert next_version(seen, 5, 1) == PlanVersion(term=5, counter=1, rank=1)
    assert next_version(seen, 5, 1) > next_version(seen, 4, 1) > seen
