"""Peers find out whether others can reach them: in namespaces, one behind a closed router."""

import json
import subprocess
import sys

import pytest

from bench.local_swarm import ROOT, LocalSwarm
from bench.wan_lab import Shape, WanLab, why_not
from tests.e2e.conftest import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.netns]
REASON = why_not()

LOOK = """
import asyncio, json, sys
from client import Swarm
async def main():
    async with Swarm.connect([sys.argv[1]], model=sys.argv[2]) as swarm:
        while not all(n.end and n.reach != "unknown" for n in swarm.nodes.values()):
            await asyncio.sleep(0.5)
            await swarm.refresh()
        print(json.dumps({n.name: n.reach for n in swarm.nodes.values()}))
asyncio.run(main())
"""


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_peer_behind_a_closed_router_says_so_and_an_open_one_does_not() -> None:
    with (
        WanLab(3, Shape(mbit=200, delay_ms=2), prefix="anar") as lab,
        LocalSwarm(MODEL, extra=("--threads", "1")) as swarm,
    ):
        lab.close(1)
        for host, (name, layers) in enumerate((("open", "0:5"), ("closed", "5:8"))):
            swarm.start_peer(
                name=name,
                host=lab.address(host),
                run_on=lab.command(host, []),
                extra=("--layers", layers),
            )
        assert swarm.peers[1].wait_for("reach")["reach"] == "none"
        assert swarm.peers[0].wait_for("reach")["reach"] == "direct"
        swarm.wait_serving()
        look = lab.command(0, [sys.executable, "-c", LOOK, swarm.peers[0].address, str(MODEL)])
        seen = subprocess.run(
            look, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert json.loads(seen) == {"open": "direct", "closed": "none"}
