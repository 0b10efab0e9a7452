"""Moves a volunteer to another model that lost its last holder, where its owner allows that.

It is rare and slow on purpose: a loss must last, the volunteer's own model must stay whole, and of
many that could go, one goes at a time.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from coordinator.plans.catalogue.need import Need, needed_elsewhere
from coordinator.plans.catalogue.reading import network_models, served_models
from dht.errors import NetworkError
from dht.messages.types import ModelSpec, NodeRecord, NodeState
from dht.records.directory import Directory
from dht.transport.interface import Transport
from node.peer.choosing import files_of, known_root

logger = logging.getLogger(__name__)


def turn_of(peer_id: str, model: str, peers: Sequence[str]) -> int:
    """The place of a peer in the order in which ``peers`` move to ``model``: by hash, so that all
    agree on it and nobody is always the first."""

    def rank(peer: str) -> bytes:
        return hashlib.sha256(f"{model} {peer}".encode()).digest()

    return min(
        RoamConfig().turns_max,
        sum(rank(other) < rank(peer_id) for other in peers if other != peer_id),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoamConfig:
    """When a peer turns to another model."""

    look_s: float = 10.0
    lasts_s: float = 20.0
    """Time for which a loss must last before anybody moves."""
    turn_s: float = 10.0
    """Time by which each volunteer in the order waits for the one before it to go."""
    turns_max: int = 4
    settled_s: float = 60.0
    """Minimum time that a volunteer stays with the model that it joined."""
    moved_s: float = 600.0
    """Minimum time that a volunteer stays with a model that it moved to."""


class Roamer:
    """Watches the network's other models, and calls ``move`` once one of them needs this peer."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        record: Callable[[], NodeRecord],
        move: Callable[[Need], None],
        is_spare: Callable[[], Awaitable[bool]],
        *,
        named: Sequence[str],
        allowed: Sequence[str],
        stays_s: float,
        config: RoamConfig | None = None,
    ) -> None:
        """``directory`` is that of this peer's model, ``record`` its newest announcement;
        ``is_spare`` tells whether others have shown that they hold its layers
        (:mod:`node.stage.layer_check`); ``allowed`` are models that its owner lends the machine to.
        """
        self._config = config or RoamConfig()
        self._transport = transport
        self._directory = directory
        self._record = record
        self._move = move
        self._is_spare = is_spare
        self._named = named
        self._allowed = allowed
        self._stays_s = stays_s
        self._wanted = ""
        self._since_s = 0.0
        self._roots: dict[str, str] = {}
        """Roots of the allowed models, where they are known."""

    async def run(self) -> None:
        """Look every ``look_s`` until there was a reason to move."""
        await asyncio.sleep(self._stays_s)
        while True:
            try:
                need = await self.look(asyncio.get_running_loop().time())
            except NetworkError as error:
                logger.info("cannot read what the network needs: %s", error)
                need = None
            if need is not None:
                self._move(need)
                await asyncio.Event().wait()
            await asyncio.sleep(self._config.look_s)

    async def look(self, now_s: float) -> Need | None:
        """The model to move to now; None while there is no reason. Raises NetworkError."""
        record, network = self._record(), self._directory.network
        specs = await network_models(self._transport, network, self._named, record.precision)
        served = await served_models(self._transport, network, specs)
        mine = next((each for each in served if each.spec.serves_with(record.model)), None)
        lacking = [each for each in served if each is not mine and not each.replicas]
        others = [each for each in lacking if await self._is_here(each.spec)]
        need = None
        if mine is not None and record.state is NodeState.SERVING:
            span = (record.start, record.end)
            need = needed_elsewhere(mine, *span, others, record.memory_bytes)
        wanted = "" if need is None else need.model.fingerprint
        if wanted != self._wanted:
            self._wanted, self._since_s = wanted, now_s
        if need is None:
            return None
        nodes = await self._directory.nodes()
        serving = [p for p, each in nodes.items() if each.state is NodeState.SERVING]
        turn = turn_of(record.peer_id, wanted, serving)
        if now_s - self._since_s < self._config.lasts_s + self._config.turn_s * turn:
            return None
        return need if await self._is_spare() else None

    async def _is_here(self, spec: ModelSpec) -> bool:
        """Whether the owner allows this model and its very files are here, or on the hub."""
        files = files_of(spec.name, self._allowed)
        if files is None:
            return False
        if not self._roots.get(files):
            self._roots[files] = await known_root(files)
        return self._roots[files] == spec.root != ""
