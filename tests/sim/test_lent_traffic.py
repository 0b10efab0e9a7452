"""What the owner lends of the connection is kept by real senders, under a virtual clock."""

import asyncio
import json
import random
import time
from pathlib import Path

import pytest

from coordinator.policies.links.scheduler import LinkScheduler
from coordinator.policies.links.token_bucket import Allowance
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.session import ActivationItem, Activations, Ping
from dht.transport.frame_sender import SENDING
from dht.transport.metered import ByteMeter, MeteredStream, MeteredTransport
from dht.transport.streams import stream_pair
from node.links.framed_stream import LinkReader, LinkSender
from node.links.lent_traffic import LentTraffic, loop_us
from node.links.probe import ProbeServer, measure_link
from testing.network import MemoryNetwork
from tests.sim.test_sessions import until

pytestmark = pytest.mark.sim

RATE = 125_000.0
"""1 Mbit/s, the least that can be lent."""
HIDDEN = 256


def rows(session: str, position: int, tokens: int) -> tuple[Activations, bytes]:
    item = ActivationItem(session=session, attempt=1, position=position, tokens=tokens)
    return Activations(items=(item,), dtype="float32", hidden=HIDDEN), bytes(4 * tokens * HIDDEN)


@pytest.mark.virtual(limit_s=600)
async def test_a_long_prompt_leaves_at_the_rate_and_decodes_overtake_it() -> None:
    loop = asyncio.get_running_loop()
    traffic = LentTraffic(up=Allowance(RATE))
    near, far = stream_pair("near", "far")
    metered = MeteredStream(near, traffic.sent, traffic.received)
    sender = LinkSender(metered, LinkScheduler(), loop_us, traffic.up)
    reader = LinkReader(far)
    arrived: list[tuple[float, str]] = []

    async def read() -> None:
        while True:
            frame = await reader.read()
            if frame is not None:
                assert isinstance(frame.message, Activations)
                arrived.append((loop.time(), frame.message.items[0].session))
            if (said := reader.acknowledgement()) is not None:
                sender.acknowledged(said)

    tasks = [asyncio.create_task(sender.run()), asyncio.create_task(read())]
    began_s = loop.time()
    sender.send(*rows("the-prompt", 0, 5000))  # 5 MB: longer than a link may stall
    for step in range(60):
        sender.send(*rows("the-chats", step, 1))
        await asyncio.sleep(0.5)
        assert not tasks[0].done(), "waiting for the owner's rate is no stall"
    chats = [at_s for at_s, session in arrived if session == "the-chats"]
    assert len(chats) >= 59
    assert max(at_s - began_s - 0.5 * n for n, at_s in enumerate(chats)) < 0.5
    await until(lambda: arrived[-1][1] == "the-prompt")
    took_s = arrived[-1][0] - began_s
    assert took_s > SENDING.stalled_s
    assert traffic.sent_bytes / took_s == pytest.approx(RATE, rel=0.1)
    for task in tasks:
        task.cancel()


@pytest.mark.virtual(limit_s=600)
async def test_a_probe_sees_the_rate_that_is_lent() -> None:
    network = MemoryNetwork(random.Random(1))
    asking = network.transport(Identity.generate())
    plain = network.transport(Identity.generate())
    traffic = LentTraffic(up=Allowance(RATE))
    meter = ByteMeter(traffic.sent, traffic.received)
    asked = MeteredTransport(plain, meter)
    await ProbeServer(asked, traffic).start()
    link = await measure_link(asking, plain.peer_id)
    assert link.bandwidth_bytes_per_s == pytest.approx(RATE, rel=0.15)
    assert traffic.received_bytes > 0
    assert meter.purposes == {"probe": traffic.sent_bytes + traffic.received_bytes}


@pytest.mark.virtual(limit_s=60)
async def test_more_than_is_lent_gets_no_credit() -> None:
    traffic = LentTraffic(down=Allowance(RATE))
    assert not traffic.down_exceeded
    traffic.received(500_000)
    assert traffic.down_exceeded
    await asyncio.sleep(6)
    assert not traffic.down_exceeded


@pytest.mark.virtual(limit_s=60)
async def test_the_month_is_kept_over_restarts(tmp_path: Path) -> None:
    file = tmp_path / "traffic.json"
    first = LentTraffic(month_bytes_max=1e6, month_file=file)
    first.sent(400_000)
    first.received(400_000)
    assert first.exhausted() is None
    first.save()
    first.save()  # books nothing twice
    second = LentTraffic(month_bytes_max=1e6, month_file=file)
    second.sent(200_001)
    assert "GB of this month's" in (second.exhausted() or "")
    second.save()
    assert LentTraffic(month_bytes_max=1e6, month_file=file).exhausted()
    assert json.loads(file.read_text())["used_bytes"] == 1_000_001
    for broken in ('{"month": "??", "used_bytes": []}', '{"month": "2026-1", "used_bytes": 1e999}'):
        file.write_text(broken)
        assert LentTraffic(month_file=file).month.used_bytes == 0


@pytest.mark.virtual(limit_s=60)
async def test_a_start_before_the_clock_is_set_forgets_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, clock = tmp_path / "traffic.json", [1.79e9]
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def started() -> LentTraffic:
        return LentTraffic(month_bytes_max=1e6, month_file=file)

    first = started()
    first.sent(900_000)
    first.save()
    clock[0] = 0.0
    second = started()
    second.sent(50_000)
    assert second.exhausted() is None
    second.save()
    clock[0] = 1.79e9
    third = started()
    assert third.exhausted() is None
    third.sent(100_000)
    assert third.exhausted()


@pytest.mark.virtual(limit_s=60)
async def test_metered_streams_count_both_ways() -> None:
    one, two = LentTraffic(), LentTraffic()
    near, far = stream_pair("near", "far")
    await codec.send_frame(MeteredStream(near, one.sent, one.received), Ping(nonce=1))
    await codec.read_frame(MeteredStream(far, two.sent, two.received))
    assert one.sent_bytes == two.received_bytes > 0
    assert one.received_bytes == two.sent_bytes == 0
