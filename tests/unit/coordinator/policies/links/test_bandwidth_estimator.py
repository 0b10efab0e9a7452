"""The estimate follows the link: its rate, its delay and their changes."""

import bisect
import random
from collections.abc import Callable

import pytest

from coordinator.policies.links.bandwidth_estimator import (
    CreditError,
    DeliveryConfig,
    DeliveryEstimator,
)
from coordinator.policies.links.scheduler import LinkScheduler, TrafficClass
from tests.unit.coordinator.policies.links.paper_link import PaperLink

MBIT = 125_000.0


def busy(link: PaperLink, until_us: int) -> None:
    """Keep prefill waiting until then."""

    def refill() -> None:
        while link.scheduler.queued_bytes < 4 << 20:
            link.offer(TrafficClass.PREFILL, 1 << 20)
        if link.now_us < until_us:
            link.at(link.now_us + 10_000, refill)

    link.at(link.now_us, refill)
    link.run(until_us)


@pytest.mark.parametrize("mbit", [10, 100, 1000])
@pytest.mark.parametrize("delay_ms", [1, 30, 100])
def test_finds_the_links_rate_and_delay(mbit: int, delay_ms: int) -> None:
    link = PaperLink(LinkScheduler(), lambda _: mbit * MBIT, delay_ms * 1000)
    busy(link, 40 * 2 * delay_ms * 1000 + 2_000_000)
    delivery = link.scheduler.delivery
    assert delivery.bandwidth_bytes_per_s == pytest.approx(mbit * MBIT, rel=0.1)
    frame_us = link.scheduler.frame_bytes / (mbit * MBIT) * 1e6
    assert 2 * delay_ms * 1000 <= delivery.base_rtt_us <= 2 * delay_ms * 1000 + 3 * frame_us


def test_follows_a_fall_and_a_rise_within_ten_round_trips() -> None:
    """100 Mbit/s falls to 20 at 3 s and returns at 6 s; a round trip takes 60 ms."""
    link = PaperLink(
        LinkScheduler(), lambda t: (20 if 3e6 <= t < 6e6 else 100) * MBIT, delay_us=30_000
    )
    busy(link, 3_000_000)
    assert link.scheduler.delivery.bandwidth_bytes_per_s == pytest.approx(100 * MBIT, rel=0.1)
    busy(link, 3_000_000 + 14 * 60_000 * 2)
    assert link.scheduler.delivery.bandwidth_bytes_per_s == pytest.approx(20 * MBIT, rel=0.15)
    busy(link, 6_000_000 + 14 * 60_000 * 2)
    assert link.scheduler.delivery.bandwidth_bytes_per_s == pytest.approx(100 * MBIT, rel=0.15)


def naps(seed: int, nap_ms: tuple[int, int]) -> Callable[[int], int]:
    """A reader that reads all that is there, then looks away for a random time."""
    rng = random.Random(seed)
    looks_us = [0]

    def wakes_us(arrived_us: int) -> int:
        while looks_us[-1] < arrived_us:
            looks_us.append(looks_us[-1] + rng.randint(*nap_ms) * 1000)
        return looks_us[bisect.bisect_left(looks_us, arrived_us)]

    return wakes_us


@pytest.mark.parametrize("nap_ms", [(1, 60), (20, 120)])
@pytest.mark.parametrize(("mbit", "delay_ms"), [(10, 30), (100, 30), (100, 1), (300, 5)])
def test_a_reader_that_looks_away_does_not_talk_the_link_small(
    nap_ms: tuple[int, int], mbit: int, delay_ms: int
) -> None:
    """Its least round trip is the link's, its usual one is not: Wi-Fi, or a busy machine."""
    link = PaperLink(
        LinkScheduler(), lambda _: mbit * MBIT, delay_ms * 1000, wakes_us=naps(1, nap_ms)
    )
    busy(link, 5_000_000)
    read_before = link.read_bytes
    busy(link, 10_000_000)
    assert (link.read_bytes - read_before) / 5 >= 0.6 * mbit * MBIT
    assert link.scheduler.delivery.bandwidth_bytes_per_s <= 1.3 * mbit * MBIT


def test_a_sender_with_little_to_send_does_not_lower_the_estimate() -> None:
    link = PaperLink(LinkScheduler(), lambda _: 100 * MBIT, delay_us=20_000)
    busy(link, 2_000_000)
    link.run()
    known = link.scheduler.delivery.bandwidth_bytes_per_s
    for _ in range(200):
        link.offer(TrafficClass.DECODE, 8192)
        link.run(link.now_us + 50_000)
    assert link.scheduler.delivery.bandwidth_bytes_per_s >= 0.9 * known


def test_acknowledgements_of_nothing_are_not_remembered() -> None:
    delivery = DeliveryEstimator()
    delivery.sent(4096, 0, limited=False)
    delivery.acknowledged(4096, 10_000_000)
    delivery.sent(4096, 10_000_000, limited=False)
    for step in range(5000):
        delivery.acknowledged(4096 + min(4095, step), 10_000_001 + step)
    assert len(delivery._bunches) <= DeliveryConfig().bunch_rounds + 1


def test_credits_that_cannot_be_are_refused() -> None:
    delivery = DeliveryEstimator()
    delivery.sent(1000, 0, limited=False)
    with pytest.raises(CreditError, match="1001 bytes acknowledged, 1000 were sent"):
        delivery.acknowledged(1001, 10)
    delivery.acknowledged(600, 20)
    with pytest.raises(CreditError, match="500 bytes acknowledged after 600"):
        delivery.acknowledged(500, 30)
    assert delivery.in_flight_bytes == 400
