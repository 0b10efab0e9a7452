"""Three real peers, the last of which was given an EAGLE-3 head."""

import asyncio
import signal
from pathlib import Path

import pytest

from client import GenerationOptions, Swarm
from testing.forked import forked
from testing.local_swarm import LocalSwarm
from tests.unit.node.engine.eagle import foretold_target, write_head
from tests.unit.node.engine.test_engine import prompt_of

pytestmark = pytest.mark.e2e

SPANS = ("0:3", "3:5", "5:8")
NEW_TOKENS = 60


def test_a_head_that_the_last_peer_was_given_drafts_and_changes_no_token(tmp_path: Path) -> None:
    model = foretold_target(tmp_path / "model")
    head = write_head(tmp_path / "head", model, right=True)

    async def ask(addresses: list[str]) -> dict[bool, tuple[tuple[int, ...], int]]:
        async with Swarm.connect(addresses, model=str(model)) as client:
            told = {}
            for speculate in (False, True):
                options = GenerationOptions(max_new_tokens=NEW_TOKENS, speculate=speculate)
                answer = await client.generate(prompt_of(20), options)
                told[speculate] = answer.token_ids, answer.drafted_tokens
        return told

    with LocalSwarm(model, extra=("--threads", "1"), start=forked) as swarm:
        for span in SPANS:
            extra = ("--draft", str(head)) if span == SPANS[-1] else ()
            swarm.start_peer(memory_gib=0.03, extra=("--layers", span, *extra))
        swarm.wait_serving()
        told = asyncio.run(ask(swarm.addresses))
        first, *_, last = swarm.peers
        for peer in (first, last):
            peer.signal(signal.SIGINT)
            peer.wait_for("left")
        counts = [(peer.find("stats") or {})["counters"] for peer in (first, last)]
    assert told[False][0] == told[True][0]
    assert told[True][1] > 0
    assert counts[0]["accepted_by_head"] > 0, counts
    assert "strange_features" not in counts[1]
