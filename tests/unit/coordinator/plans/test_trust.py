"""Whose plans and leases count."""

from coordinator.plans.trust import Trust, TrustConfig

CONFIG = TrustConfig()


def test_two_refused_plans_cost_trust_for_a_while():
    trust = Trust()
    trust.strike("a", 0.0)
    assert trust.distrusted(0.0) == frozenset()
    trust.strike("a", 10.0)
    assert trust.distrusted(10.0) == {"a"}
    assert trust.distrusted(10.0 + CONFIG.distrust_s) == frozenset()


def test_refusals_far_apart_are_forgiven():
    trust = Trust()
    trust.strike("a", 0.0)
    trust.strike("a", CONFIG.distrust_s + 1)
    assert trust.distrusted(CONFIG.distrust_s + 1) == frozenset()


def test_memory_is_bounded():
    trust = Trust()
    for number in range(2 * CONFIG.peers_max):
        trust.strike(f"s{number}", 0.0)
        trust.distrust(f"d{number}", 0.0)
    assert len(trust.distrusted(1.0)) == CONFIG.peers_max
    assert len(trust._strikes) == CONFIG.peers_max
