"""Probes over links on paper: what they measure is the link, whatever its rate and delay."""

import random

import pytest

from dht.errors import NetworkError, PeerError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.peer import ProbeRequest
from dht.transport.interface import PROBE_PROTOCOL
from dht.transport.metered import ByteMeter, MeteredTransport
from node.links.lent_traffic import LentTraffic
from node.links.probe import FRAME_BYTES, SERVED_BYTES_MAX, ProbeServer, late_rate, measure_link
from testing.clock import run_virtual
from testing.network import LinkModel, MemoryNetwork

pytestmark = pytest.mark.sim
MBIT = 125_000.0


@pytest.mark.parametrize("mbit", [2, 10, 100, 1000])
@pytest.mark.parametrize("delay_ms", [0.1, 15, 100])
def test_a_probe_finds_rate_and_round_trip(mbit: float, delay_ms: float) -> None:
    async def scenario() -> None:
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

    run_virtual(scenario(), limit_s=60)


def test_a_fast_link_costs_less_than_a_megabyte_and_does_not_look_faster_than_it_is() -> None:
    async def scenario() -> None:
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

    run_virtual(scenario(), limit_s=60)


def test_a_stream_cannot_make_a_peer_upload_for_ever() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(1))
        asker = network.transport(Identity.generate())
        asked = network.transport(Identity.generate())
        await ProbeServer(asked).start()
        stream = await asker.open_stream(asked.peer_id, PROBE_PROTOCOL)
        got_bytes = 0

        async def ask_on() -> None:
            nonlocal got_bytes
            while True:
                stream.write(codec.encode_frame(ProbeRequest(size_bytes=3 << 20)))
                for _ in range(0, 3 << 20, 32 << 10):
                    got_bytes += len((await codec.read_frame(stream)).body)

        with pytest.raises((NetworkError, PeerError)):
            await ask_on()
        assert got_bytes <= SERVED_BYTES_MAX

    run_virtual(scenario(), limit_s=60)


@pytest.mark.parametrize("pause_every", [16, 40, 1000])
@pytest.mark.parametrize("mbit", [10, 20, 50])
def test_pauses_and_late_reads_do_not_change_the_rate(mbit: float, pause_every: int) -> None:
    """A flow-control window waits for its update; the reader comes up to 5 ms late."""
    rng = random.Random(1)
    frame_s = FRAME_BYTES / (mbit * MBIT)
    arrivals_s = [
        number * frame_s + (number - 1) // pause_every * 0.04 + rng.uniform(0, 0.005)
        for number in range(1, 129)
    ]
    assert late_rate(sorted(arrivals_s), 0.2) == pytest.approx(mbit * MBIT, rel=0.08)


def test_a_probe_that_came_all_at_once_is_one_span() -> None:
    assert late_rate([0.0] * 64 + [0.016] * 64, 0.2) == pytest.approx(64 * FRAME_BYTES / 0.016)
