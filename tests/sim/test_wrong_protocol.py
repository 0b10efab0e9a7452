"""A peer that speaks every protocol wrongly: it hears why or is cut off in time, alone."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import pytest

from coordinator.plans.store import PlanStore
from dht.messages.peer import SignedRecord
from dht.records.helper import RecordHelper
from dht.transport.interface import HOP_PROTOCOL, RECORDS_PROTOCOL
from node.links.reachability import ReachServer
from node.stage.layer_check import LayerCheckServer
from tests.sim.paper_swarm import LAYERS, SPEC, PaperPeer, PaperSwarm, answer_of, paper_swarm
from tests.sim.wrong_ways import PROMPT, WAYS, Way, WrongPeer, ended

pytestmark = pytest.mark.sim

HOUR_S = 3600.0
SPANS = (0, 4), (4, LAYERS)
NAMED = {"MalformedError", "OtherVersionError", "RecordError", "NetworkError", "TimeoutError"}
"""Errors that may end a stream."""


class NoRecords:
    """A full peer's records, of which there are none."""

    def now(self) -> float:
        return 1.7e9

    def fresh(self, key: str) -> bool:
        return True

    def known_signed(self, key: str) -> Mapping[str, SignedRecord]:
        return {}


async def serve_everything(swarm: PaperSwarm) -> None:
    """Two peers that serve every protocol but that of records, which is the transport's."""
    for start, end in SPANS:
        peer = await swarm.add(start, end)
        await PlanStore(peer.transport, peer.directory).serve()
        await ReachServer(peer.transport).start()
        await LayerCheckServer(peer.transport, peer.engine).start()


def refusals(peer: PaperPeer) -> Counter[str]:
    """What the stage counted, and the errors that ended streams."""
    return peer.stage.counters + peer.transport.stream_errors


@pytest.mark.virtual(limit_s=HOUR_S)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_who_speaks_wrongly_is_cut_off_alone(way: Way) -> None:
    async with paper_swarm() as swarm, swarm.client() as client:
        await serve_everything(swarm)
        for peer in swarm.peers:
            helper = RecordHelper(cast(Any, NoRecords()))
            await peer.transport.serve(RECORDS_PROTOCOL, helper.serve)
        honest = client.begin(PROMPT, max_new_tokens=50)
        pieces = aiter(honest)
        tokens = list((await anext(pieces)).token_ids)
        evil, target = swarm.network.transport(), swarm.peers[way.target]
        wrong = WrongPeer(evil, swarm.route, SPEC.fingerprint)
        wrong.stream = await evil.open_stream(target.peer_id, way.protocol)
        async with asyncio.timeout(100):
            await evil.serve(HOP_PROTOCOL, ended)  # the ring's tokens go there
            await wrong.do(list(way.steps))
        if way.counted == "ended":
            async with asyncio.timeout(way.limit_s):
                await ended(wrong.stream)
        elif way.counted:
            for _ in range(100):
                await asyncio.sleep(way.limit_s / 100)
                if refusals(target)[way.counted]:
                    break
            assert refusals(target)[way.counted], target.stage.counters
        assert target.transport.stream_errors.keys() <= NAMED
        async for piece in pieces:
            tokens += piece.token_ids
        assert tuple(tokens) == answer_of(PROMPT, 50)
        assert honest.answer().failovers == 0
        await wrong.stream.close()
