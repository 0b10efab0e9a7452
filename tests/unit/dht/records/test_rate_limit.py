"""Token buckets by name."""

from dht.records.rate_limit import Rates


def test_a_burst_is_followed_by_the_steady_rate() -> None:
    rates = Rates(per_s=2.0, burst=3.0)
    assert [rates.take("a", 1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert not rates.take("a", 1, 0.4)
    assert rates.take("a", 1, 0.5)
    assert rates.take("b", 3, 0.5), "each name by itself"


def test_a_debt_is_worked_off() -> None:
    rates = Rates(per_s=1.0, burst=10.0)
    rates.charge("a", 25, 0.0)
    assert not rates.take("a", 1, 15.0)
    assert rates.take("a", 1, 16.0)


def test_names_are_bounded_and_the_silent_are_forgotten_first() -> None:
    rates = Rates(per_s=0.0, burst=1.0, names_max=2)
    assert rates.take("a", 1, 0.0)
    assert rates.take("b", 1, 0.0)
    assert not rates.take("a", 1, 1.0)
    assert rates.take("c", 1, 2.0)  # b, which was silent, makes room
    assert not rates.take("a", 1, 3.0)
    assert rates.take("b", 1, 3.0)
    assert len(rates._buckets) == 2
