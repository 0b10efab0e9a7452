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


def colliding(count: int) -> list[tuple[int, int, int]]:
    """Numbers of versions whose tuples hash alike: CPython's hash of a tuple (xxHash) can be solved
    for the last number."""
    every, prime_1, prime_2 = (1 << 64) - 1, 11400714785074694791, 14029467366897019727
    back_1, back_2 = pow(prime_1, -1, 1 << 64), pow(prime_2, -1, 1 << 64)
    found: list[tuple[int, int, int]] = []
    term = 0
    while len(found) < count:
        term += 1
        so_far = 2870177450012600261
        for number in (term, 7):
            so_far = (so_far + number * prime_2) & every
            so_far = ((so_far << 31 | so_far >> 33) & every) * prime_1 & every
        wanted = 12345 * back_1 & every
        wanted = (wanted >> 31 | wanted << 33) & every
        last = (wanted - so_far) * back_2 & every
        if last < 1 << 61:
            found.append((term, 7, last))
    return found


def test_nobody_can_choose_versions_that_hash_alike():
    """4,096 records with such versions took a client seven seconds to group, at every look."""
    numbers = colliding(100)
    assert len({hash(each) for each in numbers}) == 1
    versions = [PlanVersion(term=t, counter=c, rank=r) for t, c, r in numbers]
    assert len({hash(each) for each in versions}) == 100
    assert hash(versions[0]) == hash(PlanVersion(term=numbers[0][0], counter=7, rank=numbers[0][2]))
