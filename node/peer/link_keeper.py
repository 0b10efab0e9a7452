"""Measures the links to this peer, reads those that sessions fill, and publishes both.

An unused link is probed by its receiver, and seldom; a link in use measures itself.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

from dht.errors import NetworkError
from dht.messages.types import LINKS_MAX, Link, LinksRecord, NodeRecord
from dht.records.directory import Directory
from dht.transport.interface import Transport
from node.links.measured_links import MeasuredLinks
from node.links.probe import measure_link
from node.stage.server import StageServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKeeperConfig:
    """Intervals of a link keeper."""

    every_s: float = 30.0
    fresh_s: float = 1200.0
    """Age below which a measured link is not probed again; links in use measure themselves."""
    publish_s: float = 120.0
    """Interval at which links are published even if unchanged: their record lives for 5 min."""
    per_round: int = 8


def probe_order(me: str, others: Iterable[str]) -> list[str]:
    """The peers whose links to ``me`` are probed, first ones first, in an order of its own.

    So peers probe different links, for a record has room for ``LINKS_MAX``.
    """
    return sorted(others, key=lambda peer_id: crc32(f"{me}{peer_id}".encode()))


class LinkKeeper:
    """Keeps one peer's links measured and published."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        stage: StageServer,
        measured: MeasuredLinks,
        config: LinkKeeperConfig,
    ) -> None:
        """Probes are written to ``measured``."""
        self._transport = transport
        self._directory = directory
        self._stage = stage
        self._config = config
        self._measured = measured
        self._published_s = -math.inf

    async def run(self) -> None:
        """Measure and publish until cancelled."""
        while True:
            try:
                await self._round()
            except NetworkError as error:
                logger.info("cannot measure links: %s", error)
            await asyncio.sleep(self._config.every_s)

    async def _round(self) -> None:
        config, me = self._config, self._transport.peer_id
        nodes = await self._directory.nodes()
        now_s = self._transport.now()
        fresh = {
            peer_id: link
            for peer_id, link in self._measured.links.items()
            if peer_id in nodes and now_s - link.measured_unix_s < config.fresh_s
        }
        missing = [peer_id for peer_id in nodes if peer_id not in fresh | {me: None}]
        missing = probe_order(me, missing)
        room = min(config.per_round, LINKS_MAX - len(fresh))
        for peer_id in missing[: max(0, room)]:
            try:
                link = await measure_link(self._transport, peer_id, nodes[peer_id].addresses)
                lent = self._stage.traffic.down.rate_bytes_per_s
                fresh[peer_id] = replace(
                    link, bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, lent)
                )
            except NetworkError as error:
                logger.info("no link from %s: %s", peer_id, error)
        changed = fresh != self._measured.links
        self._measured.links = fresh
        busy = self._busy(nodes)
        due = now_s - self._published_s > config.publish_s
        if (fresh or busy) and (changed or busy or due):
            newest = sorted(fresh.values(), key=lambda link: -link.measured_unix_s)
            links = (*busy, *newest)[:LINKS_MAX]
            await self._directory.publish(LinksRecord(peer_id=me, links=links))
            self._published_s = now_s

    def _busy(self, nodes: Mapping[str, NodeRecord]) -> list[Link]:
        """Links from here that sessions fill, as measured by their schedulers."""
        lent = self._stage.traffic.up.rate_bytes_per_s
        return [
            Link(
                source=self._transport.peer_id,
                target=peer_id,
                bandwidth_bytes_per_s=min(link.delivery.bandwidth_bytes_per_s, lent),
                rtt_s=link.delivery.base_rtt_us / 1e6,
                measured_unix_s=self._transport.now(),
            )
            for peer_id, link in self._stage.flow.links().items()
            if link.delivery.known and peer_id in nodes
        ]
