"""Links that nobody measured, guessed over peers that are linked to both ends."""

from dataclasses import replace
from itertools import permutations

from coordinator.problem.config import ASSUMED
from coordinator.problem.unmeasured import with_guesses
from dht.messages.types import Link

NEAR, FAR = (1e9, 0.002), (1e7, 0.1)


def link(source: str, target: str, kind: tuple[float, float]) -> Link:
    return Link(
        source=source,
        target=target,
        bandwidth_bytes_per_s=kind[0],
        rtt_s=kind[1],
        measured_unix_s=1.0,
    )


def two_sites() -> dict[tuple[str, str], Link]:
    """Four peers a… and four b…; near within a site, far between."""
    names = [f"{site}{number}" for site in "ab" for number in range(4)]
    return {
        (a, b): link(a, b, NEAR if a[0] == b[0] else FAR) for a in names for b in names if a != b
    }


def guessed(links: dict[tuple[str, str], Link]) -> dict[tuple[str, str], Link]:
    names = sorted({name for pair in links for name in pair})
    return {(k.source, k.target): k for k in with_guesses(names, tuple(links.values()))}


def test_measured_links_stay_as_they_are() -> None:
    known = two_sites()
    assert guessed(known) == known


def test_missing_links_are_as_near_or_far_as_the_others_of_their_sites() -> None:
    known = two_sites()
    missing = ("a0", "a1"), ("a0", "b1")
    found = guessed({pair: each for pair, each in known.items() if pair not in missing})
    assert found.keys() == known.keys()
    for pair in missing:
        assert found[pair].bandwidth_bytes_per_s == known[pair].bandwidth_bytes_per_s
        assert found[pair].rtt_s == known[pair].rtt_s, "the way back was measured"


def test_without_a_way_back_round_trips_add_up() -> None:
    known = two_sites()
    missing = ("a0", "a1"), ("a1", "a0")
    found = guessed({pair: each for pair, each in known.items() if pair not in missing})
    assert found["a0", "a1"].rtt_s == found["a1", "a0"].rtt_s == 2 * NEAR[1]


def test_the_way_back_is_a_witness() -> None:
    """Sites of three: a pair there has one near neighbour in common, the others are far."""
    names = [f"{site}{number}" for site in "abc" for number in range(3)]
    known = {(a, b): link(a, b, NEAR if a[0] == b[0] else FAR) for a, b in permutations(names, 2)}
    del known["a0", "a1"]
    assert guessed(known)["a0", "a1"].bandwidth_bytes_per_s == NEAR[0]
    del known["a1", "a0"]
    assert guessed(known)["a0", "a1"].bandwidth_bytes_per_s == FAR[0]


def test_one_liar_is_no_witness() -> None:
    known = two_sites()
    del known["a0", "b0"]
    for pair in (("a0", "a1"), ("a1", "b0")):
        known[pair] = replace(known[pair], bandwidth_bytes_per_s=1e12)
    assert guessed(known)["a0", "b0"].bandwidth_bytes_per_s == FAR[0]


def test_pairs_without_two_witnesses_get_none() -> None:
    chain = {("a", "b"): link("a", "b", NEAR), ("b", "c"): link("b", "c", NEAR)}
    assert guessed(chain) == chain


def test_of_many_peers_nothing_is_guessed() -> None:
    names = [f"p{number}" for number in range(ASSUMED.guessed_peers_max + 1)]
    known = tuple(link(a, b, NEAR) for a in names[:5] for b in names[5:10])
    assert with_guesses(names, known) == known
