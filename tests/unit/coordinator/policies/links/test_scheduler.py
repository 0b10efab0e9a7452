"""Laws of the link's scheduler, whatever is offered."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.links.bandwidth_estimator import CreditError
from coordinator.policies.links.scheduler import (
    LinkConfig,
    LinkScheduler,
    Slice,
    TrafficClass,
)
from tests.examples import examples
from tests.unit.coordinator.policies.links.paper_link import OFFERS, PaperLink, all_arrive

MBIT = 125_000.0


@pytest.mark.property
@examples(75)
@given(
    offers=OFFERS,
    mbit=st.sampled_from([1, 20, 1000]),
    delay_us=st.sampled_from([0, 5_000, 150_000]),
)
def test_messages_arrive_whole_and_each_class_in_its_order(
    offers: list[tuple[TrafficClass, int, int]], mbit: int, delay_us: int
) -> None:
    all_arrive(PaperLink(LinkScheduler(), lambda _: mbit * MBIT, delay_us), offers)


@pytest.mark.property
@given(offers=OFFERS, mbit=st.sampled_from([5, 100]), delay_us=st.sampled_from([1_000, 60_000]))
def test_bulk_in_flight_stays_within_the_window(
    offers: list[tuple[TrafficClass, int, int]], mbit: int, delay_us: int
) -> None:
    scheduler = LinkScheduler()
    link = PaperLink(scheduler, lambda _: mbit * MBIT, delay_us)
    for traffic, size, pause_us in offers:
        link.run(link.now_us + pause_us)
        window = scheduler.window_bytes
        before = scheduler.slow_in_flight_bytes
        link.offer(traffic, size)
        assert scheduler.slow_in_flight_bytes <= max(window, before)
        assert scheduler.slow_in_flight_bytes >= 0


def test_a_decode_overtakes_a_waiting_prompt() -> None:
    link = PaperLink(LinkScheduler(), lambda _: 100 * MBIT, 30_000)
    link.offer(TrafficClass.PREFILL, 4 << 20)
    link.run(200_000)
    decode = link.offer(TrafficClass.DECODE, 8192)
    written_us, piece = next((t, p) for t, p in link.left if p.number == decode)
    assert written_us == 200_000
    assert piece.last
    prefill = next(p.number for _, p in link.left if p.traffic is TrafficClass.PREFILL)
    link.run()
    assert link.arrived[decode] < link.arrived[prefill]
    # It waited for what was in flight: a quarter of a round trip by the window's gain, not 335 ms.
    assert link.arrived[decode] - 200_000 < 30_000 + 2 * 60_000


def test_no_more_than_one_frame_goes_before_a_waiting_decode() -> None:
    """Endless decodes, each offered before the last has left, and an endless prompt."""
    scheduler = LinkScheduler()
    scheduler.offer(TrafficClass.PREFILL, 1 << 30)
    acknowledged = slow = behind = 0
    for now_us in range(0, 4_000_000, 1_000):
        scheduler.offer(TrafficClass.DECODE, 8192)
        while scheduler.waiting(TrafficClass.DECODE):
            piece = scheduler.next_slice(now_us)
            assert piece is not None
            behind = behind + piece.size_bytes if piece.traffic is TrafficClass.PREFILL else 0
            assert behind <= LinkConfig().frame_bytes_max
            acknowledged += piece.size_bytes
            slow += piece.size_bytes if piece.traffic is TrafficClass.PREFILL else 0
        scheduler.acknowledged(acknowledged, slow, now_us + 500)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25])
def test_prefill_gets_its_share_under_endless_decode(share: float) -> None:
    scheduler = LinkScheduler(LinkConfig(prefill_share=share))
    link = PaperLink(scheduler, lambda _: 100 * MBIT, 2_000)
    link.offer(TrafficClass.PREFILL, 1 << 30)

    def decode() -> None:
        while scheduler.waiting(TrafficClass.DECODE) < 8:
            link.offer(TrafficClass.DECODE, 8192)
            if scheduler.waiting(TrafficClass.DECODE) == 0 and link.free_us > link.now_us + 20_000:
                break
        link.at(link.now_us + 500, decode)

    link.at(0, decode)
    link.run(5_000_000)
    sent = dict.fromkeys(TrafficClass, 0)
    for at_us, piece in link.left:
        if at_us > 500_000:
            sent[piece.traffic] += piece.size_bytes
    got = sent[TrafficClass.PREFILL] / sum(sent.values())
    assert got >= 0.9 * share
    assert sent[TrafficClass.DECODE] > sent[TrafficClass.PREFILL]


def test_bulk_is_not_starved_by_prefill() -> None:
    link = PaperLink(LinkScheduler(), lambda _: 100 * MBIT, 10_000)
    link.offer(TrafficClass.PREFILL, 1 << 28)
    link.offer(TrafficClass.BULK, 1 << 28)
    link.run(5_000_000)
    sent = dict.fromkeys(TrafficClass, 0)
    for _, piece in link.left:
        sent[piece.traffic] += piece.size_bytes
    assert 0.08 <= sent[TrafficClass.BULK] / sum(sent.values()) <= 0.2


def test_without_credits_bulk_stops_and_decodes_go_on() -> None:
    scheduler = LinkScheduler()
    scheduler.offer(TrafficClass.PREFILL, 1 << 24)
    pieces: list[Slice] = []
    while (piece := scheduler.next_slice(0)) is not None:
        pieces.append(piece)
    assert sum(piece.size_bytes for piece in pieces) <= scheduler.window_bytes
    assert scheduler.queued_bytes > 0
    scheduler.offer(TrafficClass.DECODE, 4096)
    piece = scheduler.next_slice(1)
    assert piece is not None
    assert piece.traffic is TrafficClass.DECODE


def test_a_dead_reader_bounds_what_leaves() -> None:
    scheduler = LinkScheduler()
    for _ in range(10_000):
        scheduler.offer(TrafficClass.DECODE, 8192)
    left = 0
    while (piece := scheduler.next_slice(0)) is not None:
        left += piece.size_bytes
    assert left <= 3 * scheduler.window_bytes + 8192


def test_ten_thousand_tiny_sessions_all_get_through() -> None:
    link = PaperLink(LinkScheduler(), lambda _: 10 * MBIT, 20_000)
    numbers = [link.offer(TrafficClass(1 + n % 3), 1 + n % 50) for n in range(10_000)]
    link.run()
    assert set(link.arrived) == set(numbers)


def test_a_frame_takes_about_as_long_whatever_the_link() -> None:
    for mbit in (1, 10, 100, 300, 10_000):
        link = PaperLink(LinkScheduler(), lambda _, mbit=mbit: mbit * MBIT, 5_000)
        link.offer(TrafficClass.PREFILL, int(mbit * MBIT))
        link.run()
        wanted = min(max(mbit * MBIT * 1.5e-3, 4096), LinkConfig().frame_bytes_max)
        assert math.isclose(link.scheduler.frame_bytes, wanted, rel_tol=0.15)


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        LinkScheduler().offer(TrafficClass.DECODE, 0)


def test_a_receiver_that_is_behind_holds_prefill_back_and_not_decodes() -> None:
    scheduler = LinkScheduler()
    scheduler.offer(TrafficClass.PREFILL, 1 << 26)
    sent = 0
    while (piece := scheduler.next_slice(0)) is not None:
        sent += piece.size_bytes
    for now_us in range(1000, 100_000, 1000):
        scheduler.acknowledged(sent, 0, now_us)
        while (piece := scheduler.next_slice(now_us)) is not None:
            sent += piece.size_bytes
    assert scheduler.slow_in_flight_bytes <= scheduler.window_bytes
    assert scheduler.waiting(TrafficClass.PREFILL)
    for _ in range(100):
        scheduler.offer(TrafficClass.DECODE, 4096)
        decode = scheduler.next_slice(100_000)
        assert decode is not None
        assert decode.traffic is TrafficClass.DECODE
        sent += decode.size_bytes
        scheduler.acknowledged(sent, 0, 100_500)
    scheduler.acknowledged(sent, scheduler.slow_in_flight_bytes, 101_000)
    again = scheduler.next_slice(101_001)
    assert again is not None
    assert again.traffic is TrafficClass.PREFILL


@pytest.mark.parametrize("slow", [-1, 10**9])
def test_impossible_credits_are_refused(slow: int) -> None:
    scheduler = LinkScheduler()
    scheduler.offer(TrafficClass.PREFILL, 1 << 24)
    assert scheduler.next_slice(0) is not None
    with pytest.raises(CreditError, match=f"credit for {slow} bytes"):
        scheduler.acknowledged(0, slow, 5)
