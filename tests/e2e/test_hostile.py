"""Attacks of ``bench.hostile`` on real peers: what they send arrives, and nobody else notices."""

import asyncio
import time

import pytest

from bench.hostile.attacker import Target
from bench.hostile.attacks import ATTACKS
from bench.hostile.callers import through_swarm
from bench.hostile.verdict import Asked
from client import Swarm
from testing.local_swarm import LocalSwarm
from testing.reference import Reference
from tests.e2e.conftest import MODEL, start_swarm

pytestmark = pytest.mark.e2e
PROMPT = "One morning"
ANSWERS = 5
LONG_S = 600.0


async def ask_during(swarm: LocalSwarm, expected: dict[str, tuple[int, ...]]) -> list[Asked]:
    """Answers asked while an attack runs, which goes on until it was felt."""
    peers = tuple(swarm.addresses)
    answers: list[Asked] = []
    async with (
        Swarm.connect(peers, model=str(MODEL)) as client,
        Target(peers, "", LONG_S) as forged,
        asyncio.TaskGroup() as group,
    ):
        attack = group.create_task(ATTACKS["opens_in_anothers_name"].attack(forged))
        felt = 0
        while felt < ANSWERS:
            answers.append(await through_swarm(client, peers, PROMPT, expected, time.time()))
            felt += forged.sent.refused["bad_request"] > 0
        attack.cancel()
    assert forged.sent.gained == 0
    return answers


def test_forged_opens_fail_no_answer_and_end_no_process(reference: Reference) -> None:
    ids = reference.greedy(reference.encode(PROMPT), 8, ignore_eos=True)[0]
    swarm = start_swarm((0.62, 0.62, 0.62))
    try:
        answers = asyncio.run(ask_during(swarm, {PROMPT: tuple(ids)}))
        assert [each.failed for each in answers if each.failed is not None] == []
        assert all(peer.process.poll() is None for peer in swarm.peers)
        told = [(peer.find("stats") or {}).get("counters", {}) for peer in swarm.peers]
        assert sum(counters.get("ungranted", 0) for counters in told) > 0, "the opens arrived"
    finally:
        swarm.stop()
