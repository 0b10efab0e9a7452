"""Asks owners to move sessions from this peer to freer holders of the same layers.

:mod:`coordinator.balance` decides, from this peer's own state and the others' node records; the
move itself is the one by which a peer that leaves hands its sessions over (docs/protocol.md).
"""

import asyncio
import logging
from collections.abc import Callable

from coordinator.balance import Balance, load_of
from dht.directory import Directory
from dht.errors import NetworkError
from dht.types import NodeRecord
from node.stage import StageServer

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between looks at this peer's own load. Others' records are read only where it needs relief."""


class Balancer:
    """One peer's part in evening out the load."""

    def __init__(
        self,
        directory: Directory,
        stage: StageServer,
        record: Callable[[], NodeRecord],
        balance: Balance | None = None,
    ) -> None:
        """``record`` is what this peer announces of itself."""
        self._directory = directory
        self._stage = stage
        self._record = record
        self.balance = balance or Balance(me=record().peer_id)

    async def run(self) -> None:
        """Look and ask until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except NetworkError as error:
                logger.info("cannot see who is freer: %s", error)

    async def look(self) -> None:
        """One look. Raises NetworkError."""
        balance, stage = self.balance, self._stage
        if not balance.under_way and not balance.needs_relief(stage.load):
            return
        mine = self._record()
        nodes = await self._directory.nodes()
        others = {
            peer_id: load_of(record, beside=mine)
            for peer_id, record in nodes.items()
            if peer_id != mine.peer_id and record.model.fingerprint == mine.model.fingerprint
        }
        orders = balance.step(
            asyncio.get_running_loop().time(),
            stage.load,
            others,
            stage.movable(),
            stage.holding(),
        )
        for order in orders:
            logger.debug("session %s should move to %s", order.session[:8], order.to)
        stage.relieve({order.session: order.to for order in orders})
