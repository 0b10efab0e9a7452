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
from dht.messages.types import RECORD_BOUNDS, Link, LinksRecord, NodeRecord
from dht.records.directory import Directory
from dht.transport.interface import Transport
from node.links.probe import PROBE, MeasuredLinks, measure_link
from node.stage.server import StageServer

logger = logging.getLogger(__name__)

STEADY = 1.5
"""Maximum ratio of two probes' rates, or round trips, of a link that did not change."""
STEADY_S = 0.005
"""Difference of two round trips that is none: plans are the same."""


def probe_order(me: str, others: Iterable[str]) -> list[str]:
    """The peers whose links to ``me`` are probed, first ones first, in an order of its own.

    So peers probe different links, for a record has room for ``RECORD_BOUNDS.links_max``.
    """
    return sorted(others, key=lambda peer_id: crc32(f"{me}{peer_id}".encode()))


def is_steady(before: Link, now: Link) -> bool:
    """Whether two measurements of a link say about the same."""
    slow, fast = sorted(min(PROBE.fast_bytes_per_s, k.bandwidth_bytes_per_s) for k in (before, now))
    near, far = sorted((before.rtt_s, now.rtt_s))
    return fast <= STEADY * slow and far <= max(STEADY * near, near + STEADY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKeepConfig:
    """How often links are measured and told."""

    every_s: float = 30.0
    fresh_s: float = 1200.0
    """Age below which a measured link is not probed again; links in use measure themselves. It
    doubles each time that a probe finds a link as it was."""
    publish_s: float = 120.0
    """Interval at which links are published even if unchanged: their record lives for 5 min."""
    per_round: int = 8


LINK_KEEPING = LinkKeepConfig()


class LinkKeeper:
    """Keeps one peer's links measured and published."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        stage: StageServer,
        measured: MeasuredLinks,
    ) -> None:
        """Probes are written to ``measured``."""
        self._transport = transport
        self._directory = directory
        self._stage = stage
        self._measured = measured
        self._probed: dict[str, tuple[Link, float, float]] = {}
        """Each neighbour's last probe, the age up to which it is fresh, and when it was made by the
        loop's clock, which nobody sets."""
        self._failed_s: dict[str, float] = {}
        """When neighbours that gave no link were asked for it last, by the loop's clock."""
        self._published_s = -math.inf

    async def run(self) -> None:
        """Measure and publish until cancelled."""
        while True:
            try:
                await self._round()
            except NetworkError as error:
                logger.info("cannot measure links: %s", error)
            await asyncio.sleep(LINK_KEEPING.every_s)

    async def _round(self) -> None:
        me = self._transport.peer_id
        nodes = await self._directory.nodes()
        now_s = asyncio.get_running_loop().time()
        self._probed = {peer_id: each for peer_id, each in self._probed.items() if peer_id in nodes}
        fresh = {
            peer_id: link
            for peer_id, (link, fresh_s, probed_s) in self._probed.items()
            if now_s - probed_s < fresh_s
        }
        missing = [peer_id for peer_id in nodes if peer_id not in fresh | {me: None}]
        # Whoever never answers comes after all others, or nobody else might have a turn.
        self._failed_s = {p: at_s for p, at_s in self._failed_s.items() if p in nodes}
        missing = sorted(probe_order(me, missing), key=lambda p: self._failed_s.get(p, -math.inf))
        room = min(LINK_KEEPING.per_round, RECORD_BOUNDS.links_max - len(fresh))
        for peer_id in missing[: max(0, room)]:
            if self._stage.traffic.beside_left_bytes < PROBE.measure_bytes:
                break  # what the owner lends is for answers
            try:
                link = await measure_link(self._transport, peer_id, nodes[peer_id].addresses)
                lent = self._stage.traffic.down.rate_bytes_per_s
                link = replace(link, bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, lent))
                fresh[peer_id] = link
                self._probed[peer_id] = (link, self._fresh_s(link), now_s)
                self._failed_s.pop(peer_id, None)
            except NetworkError as error:
                self._failed_s[peer_id] = now_s
                logger.info("no link from %s: %s", peer_id, error)
        changed = fresh != self._measured.links
        self._measured.links = fresh
        busy = self._busy(nodes)
        due = now_s - self._published_s > LINK_KEEPING.publish_s
        if (fresh or busy) and (changed or busy or due):
            newest = sorted(fresh.values(), key=lambda link: -link.measured_unix_s)
            links = (*busy, *newest)[: RECORD_BOUNDS.links_max]
            await self._directory.publish(LinksRecord(peer_id=me, links=links))
            self._published_s = now_s

    def _fresh_s(self, link: Link) -> float:
        """The age up to which a new probe is fresh."""
        before = self._probed.get(link.source)
        if before is None or not is_steady(before[0], link):
            return LINK_KEEPING.fresh_s
        return min(2 * before[1], RECORD_BOUNDS.link_fresh_max_s)

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
            for peer_id, link in self._stage.pipeline.links().items()
            if link.delivery.known and peer_id in nodes
        ]
