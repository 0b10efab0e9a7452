"""Link policies to compare with: they keep the laws of the link's scheduler, and their papers'."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.link_policies import InOrder, MoLink
from coordinator.links.scheduler import LinkScheduler, TrafficClass
from tests.examples import examples
from tests.unit.coordinator.links.paper_link import OFFERS, PaperLink, all_arrive
from tests.unit.node.links.ends import Ends, frames_arrive_whole

MBIT = 125_000.0


def paper_link(name: str, mbit: float, delay_us: int) -> PaperLink:
    link = PaperLink(LinkScheduler(), lambda _: mbit * MBIT, delay_us)
    link.scheduler = InOrder() if name == "fifo" else MoLink(lambda: link.now_us)
    return link


@pytest.mark.property
@examples(100)
@given(
    name=st.sampled_from(["molink", "fifo"]),
    offers=OFFERS,
    mbit=st.sampled_from([1, 20, 1000]),
    delay_us=st.sampled_from([0, 5_000, 150_000]),
)
def test_messages_arrive_whole_and_each_class_in_its_order(
    name: str, offers: list[tuple[TrafficClass, int, int]], mbit: int, delay_us: int
) -> None:
    all_arrive(paper_link(name, mbit, delay_us), offers)


@pytest.mark.parametrize("scheduler", [InOrder, MoLink])
def test_frames_of_all_sizes_arrive_whole(scheduler: type[LinkScheduler]) -> None:
    async def run() -> None:
        async with Ends(scheduler()) as ends:
            await frames_arrive_whole(ends)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["molink", "fifo"])
def test_nothing_leaves_while_only_urgent_messages_may(name: str) -> None:
    scheduler = paper_link(name, 10, 0).scheduler
    scheduler.offer(TrafficClass.DECODE, 10)
    assert scheduler.next_slice(0, urgent_only=True) is None
    assert scheduler.next_slice(0) is not None


def test_molink_lets_thirty_decodes_overtake_and_then_a_chunk_until_the_next_decode() -> None:
    """MoLink's Algorithm 1 on a link of 1 byte/us whose rate is known."""
    link = paper_link("molink", 8, 0)
    scheduler = link.scheduler
    assert isinstance(scheduler, MoLink)
    link.offer(TrafficClass.PREFILL, 1 << 20)
    link.run()
    assert scheduler.delivery.bandwidth_bytes_per_s == pytest.approx(1e6, rel=0.01)
    scheduler.offer(TrafficClass.PREFILL, 1 << 20)
    for _ in range(40):
        scheduler.offer(TrafficClass.DECODE, 10)
    scheduler.decode_due_us = link.now_us + 20_000
    order = [scheduler.next_slice(link.now_us) for _ in range(42)]
    kinds = [piece.traffic for piece in order if piece is not None]
    assert kinds == [TrafficClass.DECODE] * 30 + [TrafficClass.PREFILL] + [
        TrafficClass.DECODE
    ] * 10 + [TrafficClass.PREFILL]
    chunk = order[30]
    assert chunk is not None
    assert chunk.size_bytes == pytest.approx(20_000, rel=0.02)


def test_fifo_sends_whole_messages_in_their_order() -> None:
    scheduler = InOrder()
    sizes = [1 << 20, 100, 1 << 22]
    for traffic, size in zip(
        (TrafficClass.PREFILL, TrafficClass.DECODE, TrafficClass.BULK), sizes, strict=True
    ):
        scheduler.offer(traffic, size)
    pieces = [scheduler.next_slice(0) for _ in range(3)]
    assert [piece.size_bytes for piece in pieces if piece is not None] == sizes
    assert scheduler.next_slice(0) is None


def test_molink_expects_the_next_decode_after_as_long_as_the_last_ones_were_apart() -> None:
    link = paper_link("molink", 8, 0)
    scheduler = link.scheduler
    assert isinstance(scheduler, MoLink)
    for _ in range(60):
        link.now_us += 10_000
        scheduler.offer(TrafficClass.DECODE, 10)
    assert scheduler.decode_due_us == pytest.approx(link.now_us + 10_000, abs=10)
