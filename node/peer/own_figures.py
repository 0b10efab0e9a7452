"""A peer's figures of itself: those measured at the start, and its layers' times and its uplink as
refined while it serves."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from coordinator.policies.links.token_bucket import Allowance
from dht.identity.uplink import is_true
from dht.messages.types import NodeRecord, NodeState, UplinkClaim
from node import VERSION
from node.device.hardware import Machine
from node.device.nvidia import sensors
from node.links.own_rate import LinkSeen, OwnRate
from node.stage.local_engine import LocalEngine
from node.stage.server import StageServer


@dataclass(frozen=True, slots=True, kw_only=True)
class FiguresConfig:
    """How often a peer looks at itself."""

    sensors_s: float = 10.0
    """Seconds between two looks at the GPU's sensors, each of which starts a program."""


FIGURES = FiguresConfig()


def first_record(peer_id: str, engine: LocalEngine, machine: Machine) -> NodeRecord:
    """The record of a peer that has no layers yet: its model, its machine and what was measured."""
    return NodeRecord(
        peer_id=peer_id,
        name="",
        software_version=VERSION,
        device=machine.device,
        model=engine.spec,
        memory_bytes=machine.lend_bytes,
        kv_tokens_min=engine.kv_tokens_min,
        tokens_per_s=engine.tokens_per_s,
        decode_layer_ns=engine.profile.decode_times,
        prompt_layer_ns=engine.profile.prompt_times,
        precision=engine.precision,
        state=NodeState.WAITING,
    )


class OwnFigures:
    """Refines a peer's record by what its engine and its links did."""

    def __init__(
        self,
        engine: LocalEngine,
        stage: StageServer,
        nodes: Callable[[], Mapping[str, NodeRecord]],
        gpu: str = "",
    ) -> None:
        """``nodes`` are the records of all peers, as last read; ``gpu`` is the driver's name of the
        GPU, empty if there is no driver to ask."""
        self._engine, self._stage, self._nodes, self._gpu = engine, stage, nodes, gpu
        self._uplink = OwnRate()
        self.sensors: tuple[float | None, float | None] = (None, None)
        """The GPU's temperature and power, as :func:`node.device.nvidia.sensors` read them last."""

    async def watch_sensors(self) -> None:
        """Keep :attr:`sensors` fresh, if there is a driver."""
        while self._gpu:
            self.sensors = await asyncio.to_thread(sensors, self._gpu)
            await asyncio.sleep(FIGURES.sensors_s)

    def refined(self, record: NodeRecord) -> NodeRecord:
        """``record`` with the figures known now. What the owner lends bounds the rates."""
        claim, nodes = record.uplink, self._nodes()
        seen = {
            peer_id: LinkSeen(
                delivered_bytes=link.delivery.delivered_bytes, busy_us=link.delivery.busy_us
            )
            for peer_id, link in self._stage.pipeline.links().items()
            if claim is None or not _shares(claim, peer_id, nodes.get(peer_id))
        }
        self._uplink.look(seen, asyncio.get_running_loop().time())
        traffic, measured = self._stage.traffic, self._uplink.bytes_per_s
        return replace(
            self._engine.refined(record),
            up_bytes_per_s=_at_most(traffic.up, measured),
            uplink=None if claim is None else replace(claim, up_bytes_per_s=measured),
            down_bytes_per_s=_at_most(traffic.down, None),
        )


def _shares(claim: UplinkClaim, peer_id: str, record: NodeRecord | None) -> bool:
    """Whether a peer is behind the connection of ``claim``: links to it do not pass that."""
    theirs = None if record is None else record.uplink
    return theirs is not None and theirs.uplink == claim.uplink and is_true(theirs, peer_id)


def _at_most(lent: Allowance, measured_bytes_per_s: float | None) -> float | None:
    """The rate that the owner lends or that was measured, the lower one; None: neither is known."""
    if not lent.limited:
        return measured_bytes_per_s
    if measured_bytes_per_s is None:
        return lent.rate_bytes_per_s
    return min(lent.rate_bytes_per_s, measured_bytes_per_s)
