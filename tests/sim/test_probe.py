"""Probes over links on paper: what they measure is the link, whatever its rate and delay."""

import contextlib
import random
from dataclasses import replace

import pytest

from dht.budget import PROBE_BYTES, Budget
from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.peer import ProbeRequest
from dht.transport.interface import PROBE_PROTOCOL
from dht.transport.metered import ByteMeter, MeteredTransport
from node.links.lent_traffic import LentTraffic
from node.links.probe import PROBE, ProbeServer, late_rate, measure_link
from testing.network import LinkModel, MemoryNetwork, MemoryTransport

pytestmark = pytest.mark.sim
MBIT = 125_000.0


@pytest.mark.virtual(limit_s=60)
@pytest.mark.parametrize("mbit", [2, 10, 100, 1000])
@pytest.mark.parametrize("delay_ms", [0.1, 15, 100])
async def test_a_probe_finds_rate_and_round_trip(mbit: float, delay_ms: float) -> None:
    link = LinkModel(
        delay_s=delay_ms / 1e3, bandwidth_bytes_per_s=mbit * MBIT, unread_bytes_max=16 << 20
    )
    network = MemoryNetwork(random.Random(1), link=link)
    asker = network.transport(Identity.generate())
    asked = network.transport(Identity.generate())
    await ProbeServer(asked).start()
    measured = await measure_link(asker, asked.peer_id)
    assert (measured.source, measured.target) == (asked.peer_id, asker.peer_id)
    assert measured.bandwidth_bytes_per_s == pytest.approx(mbit * MBIT, rel=0.05)
    assert measured.rtt_s == pytest.approx(2 * delay_ms / 1e3, rel=0.1, abs=6e-4)


@pytest.mark.virtual(limit_s=60)
async def test_a_fast_link_costs_less_than_a_megabyte_and_does_not_look_faster_than_it_is() -> None:
    link = LinkModel(delay_s=1e-4, bandwidth_bytes_per_s=10_000 * MBIT)
    network = MemoryNetwork(random.Random(1), link=link)
    asker = network.transport(Identity.generate())
    traffic = LentTraffic()
    plain = network.transport(Identity.generate())
    asked = MeteredTransport(plain, ByteMeter(traffic.sent, traffic.received))
    await ProbeServer(asked, traffic).start()
    measured = await measure_link(asker, plain.peer_id)
    assert 1000 * MBIT <= measured.bandwidth_bytes_per_s <= 10_000 * MBIT
    assert 0 < traffic.sent_bytes < 1e6


async def drawn_bytes(asker: MemoryTransport, asked: str, streams: int, size_bytes: int) -> int:
    """What one peer gets that asks for probes on stream after stream until each is refused."""
    got_bytes = 0
    for _ in range(streams):
        stream = await asker.open_stream(asked, PROBE_PROTOCOL)
        with contextlib.suppress(NetworkError):
            while True:
                await codec.send_frame(stream, ProbeRequest(size_bytes=size_bytes))
                left_bytes = size_bytes
                while left_bytes:
                    frame = await codec.read_frame(stream)
                    left_bytes -= len(frame.body)
                    got_bytes += len(frame.body)
                    if not frame.body:
                        raise NetworkError("no more")
        await stream.close()
    return got_bytes


@pytest.mark.virtual(limit_s=60)
async def test_one_peer_draws_no_more_probes_on_many_streams() -> None:
    network = MemoryNetwork(random.Random(1))
    asker, asked = network.transport(), network.transport()
    await ProbeServer(asked).start()
    got_bytes = await drawn_bytes(asker, asked.peer_id, 20, PROBE.first_bytes)
    assert got_bytes <= PROBE_BYTES.burst + 60 * PROBE_BYTES.per_s


@pytest.mark.virtual(limit_s=60)
async def test_strangers_get_short_probes_and_all_together_leave_half_to_members() -> None:
    network = MemoryNetwork(random.Random(1))
    asked, member = network.transport(), network.transport()
    budget = Budget(replace(PROBE_BYTES, all_burst=4 << 20, all_per_s=0))
    budget.parties.member = budget.parties.work = {member.peer_id}.__contains__
    await ProbeServer(asked, budget=budget).start()
    strangers = [network.transport() for _ in range(64)]
    each = [await drawn_bytes(s, asked.peer_id, 3, PROBE.first_bytes) for s in strangers]
    assert 0 < max(each) <= PROBE_BYTES.stranger_burst
    assert sum(each) <= 2 << 20
    full = 4 * PROBE.first_bytes
    assert await drawn_bytes(network.transport(), asked.peer_id, 1, full) == 0
    assert await drawn_bytes(member, asked.peer_id, 1, full) == 2 << 20
    with pytest.raises(NetworkError, match="sends no more probes"):
        await measure_link(member, asked.peer_id)


@pytest.mark.virtual(limit_s=60)
async def test_probes_take_a_tenth_of_the_month_at_most_and_sessions_go_on() -> None:
    network = MemoryNetwork(random.Random(1))
    plain, asker = network.transport(), network.transport()
    traffic = LentTraffic(month_bytes_max=20e6)
    meter = ByteMeter(traffic.sent, traffic.received)
    meter.beside = lambda peer_id, count: traffic.beside(count, lambda: False)
    asked = MeteredTransport(plain, meter)
    budget = Budget(replace(PROBE_BYTES, per_s=1e9, burst=1e9, all_per_s=1e9, all_burst=1e9))
    await ProbeServer(asked, traffic, budget).start()
    for size_bytes in (PROBE.first_bytes, 4 << 10):
        await drawn_bytes(asker, asked.peer_id, 40, size_bytes)
    assert traffic.sent_bytes + traffic.received_bytes <= 2e6 + 64 * 1024
    assert traffic.exhausted() is None
    with pytest.raises(NetworkError):
        await measure_link(asker, asked.peer_id)


@pytest.mark.parametrize("pause_every", [16, 40, 1000])
@pytest.mark.parametrize("mbit", [10, 20, 50])
def test_pauses_and_late_reads_do_not_change_the_rate(mbit: float, pause_every: int) -> None:
    """A flow-control window waits for its update; the reader comes up to 5 ms late."""
    rng = random.Random(1)
    frame_s = PROBE.frame_bytes / (mbit * MBIT)
    arrivals_s = [
        number * frame_s + (number - 1) // pause_every * 0.04 + rng.uniform(0, 0.005)
        for number in range(1, 129)
    ]
    assert late_rate(sorted(arrivals_s), 0.2) == pytest.approx(mbit * MBIT, rel=0.08)


def test_a_probe_that_came_all_at_once_is_one_span() -> None:
    assert late_rate([0.0] * 64 + [0.016] * 64, 0.2) == pytest.approx(
        64 * PROBE.frame_bytes / 0.016
    )
