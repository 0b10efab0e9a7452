"""Keeps a :class:`client.view.view.SwarmView` fresh: reads records and plans, pings who serves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from client.errors import StatusCallback, UnavailableError
from client.view.pulse import Pulse, PulseConfig
from client.view.view import SwarmView
from coordinator.plans.followed import FollowedPlans
from dht.errors import NetworkError
from dht.messages.types import ModelSpec, NodeState, model_key
from dht.records.directory import DEFAULT_NETWORK, Directory
from dht.transport.interface import Transport

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Time between two looks for a first peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    """How a client looks at the swarm. Times in seconds."""

    network: str = DEFAULT_NETWORK
    poll_s: float = 2.0
    """Time between two looks at the DHT while all is well."""
    wait_s: float = 60.0
    """Time that an answer waits for missing layers before it gives up; 0 gives up at once."""
    avoid_s: float = 15.0
    """Time for which a peer that failed is avoided, unless it joins anew."""
    busy_s: float = 1.0
    """Time for which a peer without room is avoided."""
    pings: PulseConfig | None = None
    """Times of pings to the peers that serve, so that a dead one is known before a request fails;
    None sends no pings."""


class SwarmReader:
    """Reads what peers announce about one model into :attr:`view`."""

    def __init__(
        self, transport: Transport, model_name: str, config: ReaderConfig, on_status: StatusCallback
    ) -> None:
        self._model_name = model_name
        self._config = config
        self._on_status = on_status
        self._pulse = pulse = Pulse(transport, lambda: None, config.pings)
        self._blind = ""
        """Why the last look showed nothing; empty when it was answered."""
        self.directory = Directory(transport, config.network, model_key(model_name))
        self._plans = FollowedPlans(transport, self.directory)
        self.view = SwarmView(
            avoid_s=config.avoid_s,
            busy_s=config.busy_s,
            stale_s=2 * config.poll_s,
            is_silent=lambda peer_id: pulse.beat(peer_id).silent,
        )

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read now and every ``poll_s``; raises NetworkError when nobody answers at first."""
        await self.refresh()
        await self._read_plans()
        # Two tasks: holders of plans that do not answer must not keep the records from being read.
        polls = [
            asyncio.create_task(self._again(self.look), name="swarm view"),
            asyncio.create_task(self._again(self._read_plans), name="plans"),
        ]
        try:
            yield
        finally:
            for task in polls:
                task.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
            await self._pulse.close()

    async def _again(self, read: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._config.poll_s)
            await read()

    async def look(self) -> None:
        """Read all anew; where nobody answers, the view stays as it is."""
        try:
            await self.refresh()
        except NetworkError as error:
            self._blind = str(error)
            self.view.counters["refresh_failed"] += 1
            logger.info("cannot read who serves what: %s", error)

    async def _read_plans(self) -> None:
        """Read the plans that peers follow; who has them may take its time."""
        with suppress(NetworkError):  # routes are drawn without
            await self._plans.refresh(self.view.nodes)
        self.view.take_plans(self._plans.plans)

    async def refresh(self) -> None:
        """Read node records now; raises NetworkError."""
        self.view.take_nodes(await self.directory.nodes())
        self._blind = ""
        if self._config.pings is not None:
            serving = (r for r in self.view.nodes.values() if r.state is NodeState.SERVING)
            self._pulse.watch({record.peer_id: record.addresses for record in serving})

    async def ready_spec(self) -> ModelSpec:
        """The model's description; waits for a first peer as long as an answer would.

        Raises UnavailableError when none came.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.wait_s
        told = ""
        while (spec := self.view.spec) is None:
            reason = f"nobody in network {self._config.network!r} announces {self._model_name}"
            if self._blind:  # then nobody said so
                reason = f"cannot read who serves {self._model_name}: {self._blind}"
            if reason != told:
                told = reason
                self._on_status(f"waiting: {reason}")
            if loop.time() >= deadline_s:
                raise UnavailableError(reason)
            await asyncio.sleep(LOOK_S)
            await self.look()
        return spec
