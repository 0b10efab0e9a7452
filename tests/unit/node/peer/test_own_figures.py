"""What a peer's record says of its own connection: what was measured, what its owner lends."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from coordinator.policies.links.token_bucket import Allowance
from dht.identity.uplink import claim_of
from dht.messages.types import NodeRecord
from node.links.lent_traffic import LentTraffic
from node.links.own_rate import RateConfig
from node.peer.own_figures import OwnFigures
from node.stage.local_engine import LocalEngine
from node.stage.server import StageServer
from testing.clock import run_virtual
from tests.unit.records import record_of

TIMES = ((1, 10, 20),)


class Stage:
    """The part of a stage that is looked at: its traffic, and its links' measurements."""

    def __init__(self, traffic: LentTraffic) -> None:
        self.traffic = traffic
        self.pipeline = self
        self.totals = {"a": (0.0, 0.0), "b": (0.0, 0.0)}

    def links(self) -> dict[str, object]:
        return {
            name: SimpleNamespace(
                delivery=SimpleNamespace(delivered_bytes=sent, busy_us=busy_s * 1e6)
            )
            for name, (sent, busy_s) in self.totals.items()
        }

    async def carry(self, seconds: float, **bytes_per_s: float) -> None:
        for name, rate in bytes_per_s.items():
            sent, busy_s = self.totals[name]
            self.totals[name] = sent + rate * seconds, busy_s + seconds
        await asyncio.sleep(seconds)


class Engine:
    def refined(self, record: NodeRecord) -> NodeRecord:
        return replace(record, decode_layer_ns=TIMES)


@pytest.mark.parametrize(
    ("lent_bytes_per_s", "up_before", "up_after"),
    [(None, None, 1.2e6), (5e6, 5e6, 1.2e6), (1e6, 1e6, 1e6)],
)
def test_rates_are_those_measured_or_lent_or_unknown(
    lent_bytes_per_s: float | None, up_before: float | None, up_after: float
) -> None:
    lent = Allowance() if lent_bytes_per_s is None else Allowance(lent_bytes_per_s)
    stage = Stage(LentTraffic(up=lent, down=Allowance(7e6)))

    async def scenario() -> tuple[NodeRecord, NodeRecord]:
        figures = OwnFigures(cast("LocalEngine", Engine()), cast("StageServer", stage), dict)
        first = last = figures.refined(record_of("me"))
        for carried in ({"a": 1e6}, {"b": 1e6}, {"a": 0.6e6, "b": 0.6e6}):
            await stage.carry(2 * RateConfig().window_s, **carried)
            last = figures.refined(first)
        return first, last

    first, last = run_virtual(scenario(), limit_s=1000)
    assert first.decode_layer_ns == TIMES
    assert first.up_bytes_per_s == up_before
    assert last.up_bytes_per_s == pytest.approx(up_after)
    assert first.down_bytes_per_s == last.down_bytes_per_s == 7e6


def test_links_to_peers_behind_the_same_connection_tell_nothing_of_it() -> None:
    """b is on this machine: its link is ten times as fast as the connection, and not part of it."""
    claims = {name: claim_of(bytes(32), "net", name) for name in ("me", "b")}
    elsewhere = {name: record_of(name) for name in ("a", "c")}
    strangers = {"b": record_of("b", uplink=replace(claims["b"], signature=b"none"))}
    at_home = {"b": record_of("b", uplink=claims["b"])}

    def measured(nodes: dict[str, NodeRecord]) -> float | None:
        stage = Stage(LentTraffic(up=Allowance(), down=Allowance()))
        stage.totals["c"] = (0.0, 0.0)

        async def scenario() -> NodeRecord:
            figures = OwnFigures(
                cast("LocalEngine", Engine()), cast("StageServer", stage), lambda: nodes
            )
            record = figures.refined(record_of("me", uplink=claims["me"]))
            for carried in ({"a": 1e6}, {"b": 1e7}, {"c": 1e6}, {"a": 0.6e6, "c": 0.6e6}):
                await stage.carry(2 * RateConfig().window_s, **carried)
                record = figures.refined(record)
            return record

        record = run_virtual(scenario(), limit_s=1000)
        assert record.up_bytes_per_s == record.shared_up_bytes_per_s
        return record.shared_up_bytes_per_s

    assert measured(elsewhere | at_home) == pytest.approx(1.2e6)
    assert measured(elsewhere | strangers) == pytest.approx(1e7)
