"""Whose plans and leases count."""

from coordinator.plans.trust import DISTRUST_S, PEERS_MAX, Trust


def test_two_refused_plans_cost_trust_for_a_while():
    trust = Trust()
    trust.strike("a", 0.0)
    assert trust.distrusted(0.0) == frozenset()
    trust.strike("a", 10.0)
    assert trust.distrusted(10.0) == {"a"}
    assert trust.distrusted(10.0 + DISTRUST_S) == frozenset()


def test_refusals_far_apart_are_forgiven():
    trust = Trust()
    trust.strike("a", 0.0)
    trust.strike("a", DISTRUST_S + 1)
    assert trust.distrusted(DISTRUST_S + 1) == frozenset()


def test_memory_is_bounded():
    trust = Trust()
    for number in range(2 * PEERS_MAX):
        trust.strike(f"s{number}", 0.0)
        trust.distrust(f"d{number}", 0.0)
    assert len(trust.distrusted(1.0)) == PEERS_MAX
    assert len(trust._strikes) == PEERS_MAX
