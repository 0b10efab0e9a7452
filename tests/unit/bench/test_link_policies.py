"""Link policies to compare with: they keep the laws of the link's scheduler, and their papers'."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.link_policies import OVERTAKING_MAX, DecodeProfile, InOrder, MoLink
from coordinator.policies.links.scheduler import LinkScheduler, TrafficClass
from tests.unit.coordinator.policies.links.paper_link import OFFERS, PaperLink, all_arrive
from tests.unit.node.links.ends import Ends, frames_arrive_whole

MBIT = 125_000.0


def paper_link(name: str, mbit: float, delay_us: int) -> PaperLink:
    link = PaperLink(LinkScheduler(), lambda _: mbit * MBIT, delay_us)
    link.scheduler = InOrder() if name == "fifo" else MoLink(profile(), lambda: link.now_us, 10)
    return link


def profile() -> DecodeProfile:
    """Three stages; a step takes 5 ms and 1 ms for each decode; 10 ms and 0.1 ms a row on links."""
    return DecodeProfile(
        decode_us=lambda count: 5_000.0 + 1_000.0 * count, stages=3, hop_us=10_000.0, row_us=100.0
    )


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
async def test_frames_of_all_sizes_arrive_whole(scheduler: type[LinkScheduler]) -> None:
    async with Ends(scheduler()) as ends:
        await frames_arrive_whole(ends)


@pytest.mark.parametrize("name", ["molink", "fifo"])
def test_nothing_leaves_while_only_urgent_messages_may(name: str) -> None:
    scheduler = paper_link(name, 10, 0).scheduler
    scheduler.offer(TrafficClass.DECODE, 10)
    assert scheduler.next_slice(0, urgent_only=True) is None
    assert scheduler.next_slice(0) is not None


def warmed() -> tuple[PaperLink, MoLink]:
    """A link of 1 byte/us and 5 ms whose rate is known."""
    link = paper_link("molink", 8, 5_000)
    scheduler = link.scheduler
    assert isinstance(scheduler, MoLink)
    link.offer(TrafficClass.PREFILL, 1 << 20)
    link.run()
    assert scheduler.delivery.bandwidth_bytes_per_s == pytest.approx(1e6, rel=0.01)
    return link, scheduler


def test_molink_lets_thirty_decodes_overtake_and_then_sends_all_that_is_left() -> None:
    link, scheduler = warmed()
    scheduler.offer(TrafficClass.PREFILL, 200_000)
    for _ in range(40):
        scheduler.offer(TrafficClass.DECODE, 10)
    link.left.clear()
    link.pump()
    link.run()
    kinds = [piece.traffic for _, piece in link.left]
    first = kinds.index(TrafficClass.PREFILL)
    assert first == OVERTAKING_MAX
    last = len(kinds) - 1 - kinds[::-1].index(TrafficClass.PREFILL)
    assert kinds[first : last + 1] == [TrafficClass.PREFILL] * (last + 1 - first)
    assert kinds[last + 1 :] == [TrafficClass.DECODE] * 10


def test_molinks_chunk_ends_when_the_next_decode_is_due() -> None:
    link, scheduler = warmed()
    known = scheduler._profile
    assert known is not None
    # A step of 15 decodes began 8 ms ago: it takes 20, so 12 ms are left.
    known.running = lambda: (link.now_us - 8_000, 15)
    scheduler.offer(TrafficClass.PREFILL, 1 << 20)
    first = scheduler.next_slice(link.now_us)
    assert first is not None
    scheduler.offer(TrafficClass.DECODE, 10)  # it comes too late: the chunk goes on before it
    chunk = first.size_bytes
    while (piece := scheduler.next_slice(link.now_us)).traffic is TrafficClass.PREFILL:
        chunk += piece.size_bytes
    assert piece.traffic is TrafficClass.DECODE
    assert chunk == pytest.approx(12_000, rel=0.05)


def test_molink_expects_decodes_back_after_all_stages_and_links() -> None:
    known = profile()
    assert known.due_us(0.0, None) is None
    # Four decodes left 10 ms ago: three steps of 9 ms, three delays, four rows over two links.
    around = 3 * 9_000 + 3 * 10_000 + 2 * 4 * 100
    assert known.due_us(50_000.0, (40_000.0, 4)) == pytest.approx(around - 10_000)
    assert known.due_us(500_000.0, (40_000.0, 4)) == 0.0
    known.running = lambda: (50_000.0, 4)  # a chunk that starts with a step has its whole time
    assert known.due_us(50_000.0, (40_000.0, 4)) == pytest.approx(9_000)
    assert known.due_us(53_000.0, (40_000.0, 4)) == pytest.approx(6_000)


def test_molink_leaves_no_more_below_than_a_window() -> None:
    link, scheduler = warmed()
    scheduler.offer(TrafficClass.PREFILL, 4 << 20)
    taken = 0
    while (piece := scheduler.next_slice(link.now_us)) is not None:
        taken += piece.size_bytes
    assert taken <= scheduler.window_bytes < 100_000


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
