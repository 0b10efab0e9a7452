"""How soon others learn that a peer with little to do has got much."""

import asyncio
from typing import Any

import pytest

from dht.messages.types import NodeRecord
from dht.records.directory import Directory
from node.peer.announcer import BUSIER, Announcer
from tests.sim.paper_swarm import NETWORK, SPEC, paper_swarm

EVERY_S = 15.0
PROMPT = (5, 6, 7)


class Counted(Directory):
    """A directory that notes what was published, and when."""

    def __init__(self, *named: Any) -> None:
        super().__init__(*named)
        self.told: list[tuple[float, int]] = []

    async def publish(self, record: Any) -> bool:
        if isinstance(record, NodeRecord):
            self.told.append((asyncio.get_running_loop().time(), record.sessions))
        return await super().publish(record)


@pytest.mark.virtual(limit_s=600)
async def test_a_peer_that_gets_busier_says_so_within_seconds_and_seldom() -> None:
    async with paper_swarm((0, 8)) as swarm, swarm.client() as client:
        (peer,) = swarm.peers
        peer.tasks[1].cancel()  # its announcer tells of it instead
        directory = Counted(peer.transport, NETWORK, SPEC.key)
        shared: Any = {"transport": peer.transport, "stage": peer.stage}
        announcer = Announcer(**shared, directory=directory, record=peer.record(), every_s=EVERY_S)
        await announcer.announce()
        peer.tasks.append(asyncio.create_task(announcer.run()))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answers = []
        for _ in range(8):
            asks = client.generate(PROMPT, max_new_tokens=400, ignore_eos=True)
            answers.append(asyncio.create_task(asks))
            await asyncio.sleep(0.4)
        assert peer.stage.sessions == 8
        await asyncio.sleep(2.0)
        told = [(at_s - began_s, sessions) for at_s, sessions in directory.told]
        first_s = next(at_s for at_s, sessions in told if sessions)
        assert first_s <= 2.0
        assert told[-1][1] >= 8 // BUSIER, "no fewer than half go unsaid"
        assert sum(sessions > 0 for _, sessions in told) <= 5, "not for every session"
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
