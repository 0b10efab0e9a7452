"""The master problem: which chains live together, against brute force, and what its duals say."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from coordinator.planning.search import columns as search
from coordinator.planning.search.chain_dp import Chain, Chains
from coordinator.planning.search.columns import Master
from tests.unit.coordinator.problems import span


def columns(seed: int) -> dict[Chain, float]:
    """Chains over some of seven peers, with drawn worths."""
    draw = random.Random(seed)
    found: dict[Chain, float] = {}
    for _ in range(9):
        peers = draw.sample("abcdefg", draw.randint(1, 4))
        cut = draw.randint(1, 3)
        chain = tuple(span(peer, 0, 4) for peer in peers)
        if len(peers) > 1:
            chain = (span(peers[0], 0, cut), *(span(peer, cut, 4) for peer in peers[1:]))
        found[chain] = draw.uniform(1.0, 50.0)
    return found


def offered(worths: dict[Chain, float]) -> Master:
    master = Master()
    for chain, worth in worths.items():
        assert master.offer(chain, worth)
    return master


def peers_of(chain: Chain) -> set[str]:
    return {a.peer_id for a in chain}


def brute_force(worths: dict[Chain, float]) -> float:
    """The most that chains without a common peer are worth together."""
    best = 0.0
    for count in range(1, len(worths) + 1):
        for some in combinations(worths, count):
            if sum(len(peers_of(chain)) for chain in some) == len(
                set().union(*map(peers_of, some))
            ):
                best = max(best, sum(worths[chain] for chain in some))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    worths = columns(seed)
    chosen: Chains = offered(worths).chosen()
    taken = [a.peer_id for chain in chosen for a in chain]
    assert len(taken) == len(set(taken))
    assert sum(worths[chain] for chain in chosen) == pytest.approx(brute_force(worths))


def test_what_counts_most_is_chosen_where_cpsat_has_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worths = {}
    for seed in range(60):
        worths |= columns(seed)
    monkeypatch.setattr(search, "MASTER", replace(search.MASTER, work_s=0.0))
    master = offered(worths)
    assert master.chosen() == master.packed(max(worths, key=worths.__getitem__))
    assert master.solves == 1


@pytest.mark.parametrize("seed", range(12))
def test_prices_cover_every_column_and_bound_the_choice(seed: int) -> None:
    """Duals of the relaxation: no known column is worth more than its peers' prices (up to the
    bound of one on each column), and together they are worth no less than the best choice."""
    worths = columns(seed)
    prices = offered(worths).prices()
    excess = sum(
        max(0.0, worth - sum(prices[peer] for peer in peers_of(chain)))
        for chain, worth in worths.items()
    )
    assert sum(prices.values()) + excess >= brute_force(worths) * (1 - 1e-9)


def test_a_scarce_peer_costs_more() -> None:
    one, other, both = ((span("a", 0, 2), span(peer, 2, 4)) for peer in "bcd")
    master = offered({one: 10.0, other: 9.0, both: 8.0})
    prices = master.prices()
    assert prices["a"] >= 9.0 - 1e-9, "without a, nobody serves; b is worth the difference at most"
    assert prices["c"] == pytest.approx(0.0)
    assert prices["d"] == pytest.approx(0.0)
    assert master.chosen() == (one,)


def test_what_is_judged_counts_and_the_others_by_what_was_hoped_of_them() -> None:
    one, other = (span("a", 0, 4),), (span("a", 0, 2), span("b", 2, 4))
    master = offered({one: 10.0, other: 9.0})
    assert not master.offer(one, 99.0)
    master.settle(one, 4.0)
    assert master.settled(one)
    assert not master.settled(other)
    assert master.chosen() == (other,)
    master.trust(0.4)
    assert master.chosen() == (one,)
    assert master.solves == 2
    assert len(master) == 2


def test_without_worth_nothing_is_chosen() -> None:
    master = Master()
    assert master.chosen() == ()
    assert not master.offer((span("a", 0, 4),), 0.0)
    master.settle((span("a", 0, 4),), 0.0)
    assert master.chosen() == ()


def over_one_uplink(worths: dict[Chain, float], uses: dict[Chain, float]) -> Master:
    master = Master(
        uses_per_token=lambda chain: (
            {("home", "up"): uses[chain] / worths[chain]} if chain in uses else {}
        )
    )
    for chain, worth in worths.items():
        assert master.offer(chain, worth)
    return master


def test_columns_over_one_uplink_take_no_more_of_it_than_there_is() -> None:
    """One linear constraint for the uplink: of two chains that fill it, the second adds nothing,
    and one elsewhere with the same peers is worth more."""
    one, other = (span("a", 0, 4),), (span("b", 0, 4),)
    elsewhere = (span("b", 0, 2), span("c", 2, 4))
    worths = {one: 10.0, other: 9.0, elsewhere: 3.0}
    assert over_one_uplink(worths, {}).chosen() == (one, other)
    assert over_one_uplink(worths, {one: 1.0, other: 1.0}).chosen() == (one, elsewhere)
    both = over_one_uplink(worths, {one: 0.7, other: 0.7})
    assert both.chosen() == (one, other), "together they are still worth 14 of 19"


def test_a_full_uplink_has_a_toll_and_one_with_room_has_none() -> None:
    one, other = (span("a", 0, 4),), (span("b", 0, 4),)
    worths = {one: 10.0, other: 9.0}
    full = over_one_uplink(worths, {one: 0.9, other: 0.9})
    prices = full.prices()
    assert full.tolls["home", "up"] == pytest.approx(10.0)
    assert prices["b"] == pytest.approx(0.0), "another chain over the uplink would add nothing"
    roomy = over_one_uplink(worths, {one: 0.2, other: 0.2})
    roomy.prices()
    assert roomy.tolls["home", "up"] == pytest.approx(0.0)


def test_what_a_column_takes_follows_its_worth() -> None:
    one, other = (span("a", 0, 4),), (span("b", 0, 4),)
    master = over_one_uplink({one: 10.0, other: 9.0}, {one: 0.4, other: 0.4})
    master.prices()
    assert master.tolls["home", "up"] == pytest.approx(0.0)
    master.settle(one, 20.0)
    master.settle(other, 18.0)
    master.prices()
    assert master.tolls["home", "up"] > 1.0
