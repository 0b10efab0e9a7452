"""A dozen peers that know the founder's address alone, and what people see of them."""

import asyncio

import pytest
from rich.console import Console

from bench.fleet.__main__ import BOTH, FleetOptions, run_round, summary
from bench.fleet.clients import expected_answers
from testing.forked import forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PEERS = 12


def test_a_dozen_peers_answer_before_and_after_leader_and_founder_are_killed() -> None:
    options = FleetOptions(peers=PEERS, every_s=0.5, ask_every_s=1.0, quiet_s=0.0)
    say = Console(stderr=True)
    fleet = asyncio.run(run_round(options, expected_answers(), say, forked))
    seen = summary([fleet])
    [strike] = fleet["strikes"]
    killed = len(strike["peers"])
    assert strike["kind"] == BOTH
    for part, asked in (("before_kills", PEERS), ("after_kills", PEERS - killed)):
        assert seen[part]["asked"] == asked
        assert seen[part]["failed"] == [], part
        assert seen[part]["hangs"] == [], part
    assert strike["answered_s"] is not None
    assert seen["untold"] == []
    assert seen["never_joined"] == []
    assert seen["ended_unasked"] == []
    assert seen["disagreements"] == []
    assert seen["peers_started"] == PEERS
