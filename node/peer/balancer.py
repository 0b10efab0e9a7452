"""Asks owners to move sessions from this peer to freer holders of the same layers.

:mod:`coordinator.policies.routing.balance` decides, from this peer's own state and the others' node
records. The move itself is the same as when a peer leaves and hands over its sessions
(docs/protocol.md).
"""

import asyncio
import logging
import math
from collections.abc import Callable

from coordinator.policies.routing.balance import (
    Balance,
    BalanceConfig,
    Movable,
    PeerLoad,
    load_of,
    reported,
    round_trips,
)
from dht.errors import NetworkError
from dht.messages.types import NodeRecord
from dht.records.directory import Directory
from node.stage.server import StageServer

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Interval between looks at this peer's own load."""
READ_S = 10.0
"""Interval between reads of others' records while they may be needed; renewed every 15 s."""


class Balancer:
    """Does one peer's part in balancing the load."""

    def __init__(
        self,
        directory: Directory,
        stage: StageServer,
        record: Callable[[], NodeRecord],
        config: BalanceConfig,
    ) -> None:
        """``record`` returns the record that this peer announces."""
        self._directory = directory
        self._stage = stage
        self._record = record
        self.balance = Balance(me=record().peer_id, config=config)
        stage.shell.taker_of = self.taker_of
        self._read_s = -math.inf
        self._others: dict[str, PeerLoad] = {}
        self._rtt_s: dict[frozenset[str], float] = {}

    async def run(self) -> None:
        """Look at the load at intervals until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except NetworkError as error:
                logger.info("cannot see who is freer: %s", error)

    async def look(self) -> None:
        """Look at the load once, and ask owners to move sessions. Raises NetworkError."""
        balance, stage = self.balance, self._stage
        if not balance.under_way and not balance.needs_others(stage.load):
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._read_s >= READ_S:
            self._read_s = now_s
            await self._read()
        orders = balance.step(
            now_s, stage.load, self._others, stage.movable(), stage.holding(), self._rtt_s
        )
        for order in orders:
            logger.debug("session %s should move to %s", order.session[:8], order.to)
        stage.relieve({order.session: order.to for order in orders})

    def taker_of(self, each: Movable) -> str | None:
        """A freer holder of a session's layers by records read lately, or None."""
        stale = asyncio.get_running_loop().time() - self._read_s > 2 * READ_S
        return None if stale else self.balance.taker_of(each, self._others)

    async def _read(self) -> None:
        mine = self._record()
        nodes, links = await asyncio.gather(self._directory.nodes(), self._directory.links())
        self._others = {
            peer_id: load_of(record, beside=mine)
            for peer_id, record in nodes.items()
            if peer_id != mine.peer_id and record.model.serves_with(mine.model)
        }
        self._rtt_s = round_trips(reported(links))
