"""How often a peer probes the links to it: seldom while they stay as they are."""

import asyncio
import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.policies.links.bandwidth_estimator import DeliveryEstimator
from coordinator.policies.links.token_bucket import Allowance
from dht.errors import NetworkError
from dht.messages.types import RECORD_BOUNDS, Link, LinksRecord, NodeRecord
from dht.transport.interface import Transport
from node.links.lent_traffic import LentTraffic
from node.links.probe import PROBE, MeasuredLinks
from node.peer import link_keeper
from node.peer.link_keeper import LinkKeepConfig, LinkKeeper, is_steady, probe_order
from testing.clock import run_virtual
from testing.network import MemoryNetwork
from tests.unit.records import record_of

pytestmark = pytest.mark.sim
HOUR_S = 3600.0
SLOW, FAST = 5e6, 12e6
LINK = Link(source="b", target="a", bandwidth_bytes_per_s=FAST, rtt_s=0.03, measured_unix_s=0.0)


class PaperDirectory:
    """The neighbours, and the links that were published."""

    def __init__(self) -> None:
        self.records = {"b": record_of("b", 0, 8)}
        self.published: list[LinksRecord] = []

    async def nodes(self) -> dict[str, NodeRecord]:
        return self.records

    async def publish(self, record: LinksRecord) -> None:
        self.published.append(record)


def probed_s(
    monkeypatch: pytest.MonkeyPatch, hours: float, changes_at_s: float, away_s: float = -1.0
) -> tuple[list[float], PaperDirectory]:
    """When a link is probed that becomes slower at one time, and whose source is away at one."""
    times_s: list[float] = []
    directory = PaperDirectory()

    async def measure(transport: Transport, peer_id: str, addresses: object) -> Link:
        now_s = asyncio.get_running_loop().time()
        times_s.append(now_s)
        return replace(
            LINK,
            bandwidth_bytes_per_s=FAST if now_s < changes_at_s else SLOW,
            measured_unix_s=transport.now(),
        )

    async def scenario() -> None:
        stage: Any = SimpleNamespace(
            traffic=LentTraffic(), pipeline=SimpleNamespace(links=lambda: {})
        )
        there = directory.records
        here: Any = directory
        transport = MemoryNetwork(random.Random(1)).transport()
        keeper = LinkKeeper(transport, here, stage, MeasuredLinks())
        task = asyncio.create_task(keeper.run())
        if away_s > 0:
            await asyncio.sleep(away_s)
            directory.records = {}
            await asyncio.sleep(2 * LinkKeepConfig().every_s)
            directory.records = there
        await asyncio.sleep(hours * HOUR_S - max(0.0, away_s))
        task.cancel()

    monkeypatch.setattr(link_keeper, "measure_link", measure)
    run_virtual(scenario(), limit_s=100 * HOUR_S)
    return times_s, directory


def test_a_link_that_stays_as_it_is_is_probed_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times_s, directory = probed_s(monkeypatch, 48, changes_at_s=1e9)
    waits_h = [(b - a) / HOUR_S for a, b in pairwise(times_s)]
    assert waits_h[:6] == pytest.approx([1 / 3, 2 / 3, 4 / 3, 8 / 3, 16 / 3, 6], rel=0.03)
    assert waits_h[5:] == pytest.approx([6] * len(waits_h[5:]), rel=0.01)
    told = [each.links[0].measured_unix_s for each in directory.published]
    assert len(told) > 48 * HOUR_S / 160, "it is published all the time"


def test_a_link_that_changed_is_looked_at_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s, directory = probed_s(monkeypatch, 12, changes_at_s=2 * HOUR_S)
    seen = next(at for at, time_s in enumerate(times_s) if time_s >= 2 * HOUR_S)
    assert times_s[seen + 1] - times_s[seen] == pytest.approx(HOUR_S / 3, rel=0.03)
    assert times_s[seen + 2] - times_s[seen + 1] == pytest.approx(2 * HOUR_S / 3, rel=0.03)
    assert directory.published[-1].links[0].bandwidth_bytes_per_s == SLOW


def test_who_was_away_is_probed_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s, _ = probed_s(monkeypatch, 12, changes_at_s=1e9, away_s=3 * HOUR_S)
    back = next(at for at, time_s in enumerate(times_s) if time_s > 3 * HOUR_S)
    assert times_s[back] < 3.1 * HOUR_S
    assert times_s[back + 1] - times_s[back] == pytest.approx(HOUR_S / 3, rel=0.03)


def test_neighbours_that_never_answer_take_no_others_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreachable or made-up, they come first for this peer whenever it looks."""
    directory, links = PaperDirectory(), MeasuredLinks()
    names = [f"peer {number}" for number in range(2 * LinkKeepConfig().per_round + 1)]
    directory.records = {name: record_of(name, 0, 8) for name in names}
    dead: list[str] = []

    async def measure(_: Transport, peer_id: str, addresses: object) -> Link:
        if peer_id in dead:
            raise NetworkError("it does not answer")
        return replace(LINK, source=peer_id)

    async def scenario() -> None:
        stage: Any = SimpleNamespace(
            traffic=LentTraffic(), pipeline=SimpleNamespace(links=lambda: {})
        )
        here: Any = directory
        transport = MemoryNetwork(random.Random(1)).transport()
        dead.extend(probe_order(transport.peer_id, names)[:-1])
        task = asyncio.create_task(LinkKeeper(transport, here, stage, links).run())
        await asyncio.sleep(5 * LinkKeepConfig().every_s)
        task.cancel()

    monkeypatch.setattr(link_keeper, "measure_link", measure)
    run_virtual(scenario(), limit_s=HOUR_S)
    assert links.links.keys() == set(names) - set(dead)


def announced_from_here(delivery: DeliveryEstimator, up: Allowance) -> list[Link]:
    """The links from a peer to another that it announces, by what its frames found."""
    pipeline = SimpleNamespace(links=lambda: {"b": SimpleNamespace(delivery=delivery)})
    stage: Any = SimpleNamespace(traffic=LentTraffic(up=up), pipeline=pipeline)
    directory = PaperDirectory()

    async def scenario() -> str:
        here: Any = directory
        transport = MemoryNetwork(random.Random(1)).transport()
        task = asyncio.create_task(LinkKeeper(transport, here, stage, MeasuredLinks()).run())
        await asyncio.sleep(3 * LinkKeepConfig().every_s)
        task.cancel()
        return transport.peer_id

    me = run_virtual(scenario(), limit_s=HOUR_S)
    return [link for record in directory.published for link in record.links if link.source == me]


def delivered(for_us: int, *, limited: bool = False) -> DeliveryEstimator:
    """A link of 3 MB/s: 30 KB every 10 ms, acknowledged 40 ms later; ``limited``: by the sender."""
    delivery = DeliveryEstimator()
    for at_us in range(0, for_us, 10_000):
        if at_us >= 40_000:
            delivery.acknowledged((at_us - 30_000) // 10_000 * 30_000, at_us)
        delivery.sent(30_000, at_us, limited=limited)
    return delivery


@pytest.mark.parametrize(("up_mbit", "told"), [(None, 3e6), (8, 1e6)])
def test_a_busy_link_is_announced_as_its_frames_found_it(
    up_mbit: float | None, told: float
) -> None:
    """Its round trip in seconds, and its rate up to what the owner lends."""
    up = Allowance() if up_mbit is None else Allowance(up_mbit * 125_000)
    links = announced_from_here(delivered(2_000_000), up)
    assert links
    assert {link.target for link in links} == {"b"}
    assert all(link.rtt_s == pytest.approx(0.04, rel=0.01) for link in links)
    assert all(link.bandwidth_bytes_per_s == pytest.approx(told, rel=0.05) for link in links)


@pytest.mark.parametrize(
    "unsure", [delivered(60_000), delivered(2_000_000, limited=True)], ids=["new", "never full"]
)
def test_a_link_that_is_unsure_is_not_announced(unsure: DeliveryEstimator) -> None:
    """Its first round trips, or its sender's own pace, say little of what it carries."""
    assert unsure.bandwidth_bytes_per_s > 0, "it has a figure, which would mislead planners"
    assert not announced_from_here(unsure, Allowance())


def test_small_differences_are_none() -> None:
    local = replace(LINK, rtt_s=0.0002, bandwidth_bytes_per_s=400e6)
    assert is_steady(local, replace(local, rtt_s=0.004, bandwidth_bytes_per_s=1e9))
    assert not is_steady(local, replace(local, bandwidth_bytes_per_s=50e6))
    assert not is_steady(LINK, replace(LINK, rtt_s=0.05))
    assert not is_steady(replace(LINK, bandwidth_bytes_per_s=0.0), LINK)


def test_the_documents_say_what_it_costs() -> None:
    probe = sum((128 << 10) * 4**n for n in range(3)) + PROBE.bytes_max
    month = 2 * 20 * probe * 30 * 24 * HOUR_S / RECORD_BOUNDS.link_fresh_max_s
    assert probe / 1e6 == pytest.approx(7, abs=0.1)
    assert month / 1e9 == pytest.approx(33, abs=0.5)
