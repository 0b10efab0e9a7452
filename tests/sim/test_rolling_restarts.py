"""Machines that are restarted one after the other, each of which holds the whole model.

Real peers on the in-memory network under a virtual clock, as in :mod:`tests.sim.test_self_help`.
"""

import asyncio

import pytest

from coordinator.plans.reviewer import Reviewer
from dht.identity.peer_id import Identity
from tests.sim.paper_swarm import LAYERS
from tests.sim.test_self_help import SETTLE_S, Living, World

pytestmark = pytest.mark.sim

WHOLE = (0, LAYERS)
DOWN_S, NEXT_S = 10.0, 30.0
"""How long each machine is away, and how long until the next one goes."""
FALL = 1.25
"""Rates fall faster than layers are added: three peers serve the most with the whole model each,
two of them with a half each."""


@pytest.mark.virtual(limit_s=2000)
@pytest.mark.parametrize("before_s", [40.0, 400.0], ids=["young", "old"])
async def test_machines_that_restart_in_turn_move_nobody_and_stop_nothing(before_s: float) -> None:
    """Whoever leads is among them, so that each loss is planned for by another."""
    swarm = World(1, anybody_leads=True, fall=FALL, full=True)
    names = [Identity(swarm.network.rng.randbytes(32)) for _ in range(3)]

    def join(name: Identity) -> Living:
        peer = swarm.join(LAYERS + 1, identity=name)
        peer.plans._review = Reviewer(peer.transport, peer.plans._directory)
        return peer

    def whole(*peers: Living) -> bool:
        return all(peer.held == WHOLE for peer in peers)

    peers = [join(name) for name in names]
    try:
        await swarm.until(lambda: whole(*peers), SETTLE_S)
        await asyncio.sleep(before_s)
        for index, name in enumerate(names):
            await swarm.kill(peers[index])
            others = [peer for at, peer in enumerate(peers) if at != index]
            for _ in range(int(4 * DOWN_S)):
                assert whole(*others), [peer.held for peer in others]
                await asyncio.sleep(0.25)
            peers[index] = join(name)
            await swarm.until(lambda: whole(*peers), NEXT_S)
            await asyncio.sleep(NEXT_S)
            assert whole(*peers)
    finally:
        for peer in list(swarm.peers):
            await swarm.kill(peer)
