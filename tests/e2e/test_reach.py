"""Peers find out whether others can reach them: in namespaces, one behind a closed router."""

import asyncio
import json
import subprocess
from collections.abc import Sequence
from functools import partial

import pytest

from client import Swarm
from dht.messages.types import Reach
from testing import forked
from testing.local_swarm import LocalPeer, LocalSwarm
from testing.wan_lab import Shape, WanLab, why_not
from tests.e2e.conftest import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.netns]
REASON = why_not()
SHAPE = Shape(mbit=200, delay_ms=2)
CLOSED, CLIENT = 1, 3
"""Hosts: nobody can open a connection to the first; nobody listens on the second."""
LOOK_S = 120.0
quick_to_look = partial(
    forked.forked, intervals={"node.links.reachability:REACH.unknown_every_s": 2.0}
)


def start(
    swarm: LocalSwarm, lab: WanLab, host: int, name: str, extra: Sequence[str] = ()
) -> LocalPeer:
    return swarm.start_peer(
        name=name, host=lab.address(host), run_on=lab.command(host, []), extra=extra
    )


def run(lab: WanLab, host: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """``python -m`` with these arguments on a host."""
    done = forked.run(*argv, limit_s=120, namespace=lab.names[host])
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def seen(lab: WanLab, swarm: LocalSwarm) -> dict[str, tuple[str, int]]:
    """How each peer is reached and where its layers end, for a client elsewhere."""

    async def look() -> dict[str, tuple[str, int]]:
        async with Swarm.connect([swarm.peers[0].address], model=str(MODEL)) as client:
            while not all(n.reach != Reach.UNKNOWN for n in client.view.nodes.values()):
                await asyncio.sleep(0.2)
                await client.reader.refresh()
            return {n.name: (n.reach.value, n.end) for n in client.view.nodes.values()}

    with lab.inside(CLIENT):
        return asyncio.run(asyncio.wait_for(look(), LOOK_S))


def rehearsed(lab: WanLab, host: int, swarm: LocalSwarm, key: str) -> str:
    """What ``--test`` finds on a host."""
    test = ["--model", str(MODEL), "--cpu", "--threads", "1", "--test", "--json-log"]
    test += ["--identity", str(swarm.directory / key), "--host", lab.address(host)]
    log = run(lab, host, "node.join", *test, "--initial-peers", swarm.peers[0].address)
    events = [json.loads(line) for line in log.stderr.splitlines() if line.startswith("{")]
    return str(next(each["reach"] for each in events if each["event"] == "test"))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_closed_peer_is_called_through_a_relay() -> None:
    with (
        WanLab(4, SHAPE, prefix="anar") as lab,
        LocalSwarm(MODEL, extra=("--threads", "1"), start=quick_to_look) as all_,
    ):
        lab.close(CLOSED)
        first = start(all_, lab, 0, "open", ("--layers", "0:5"))
        first.wait_for("listening")
        start(all_, lab, 2, "other", ("--layers", "0:5"))
        assert first.wait_for("reach")["reach"] == "direct"
        assert rehearsed(lab, CLIENT, all_, "a.key") == "direct"
        assert rehearsed(lab, CLOSED, all_, "b.key") == "relayed"
        closed = start(all_, lab, CLOSED, "closed", ("--layers", "5:8"))
        said = closed.wait_for("reach")
        assert said["reach"] == "relayed"
        assert all(f"/p2p-circuit/p2p/{closed.peer_id}" in each for each in said["beside"])
        all_.wait_serving()
        assert seen(lab, all_) == {
            "open": ("direct", 5),
            "other": ("direct", 5),
            "closed": ("relayed", 8),
        }
        # The client's stream for tokens goes to the closed peer, which never called it.
        ask = ("client.generate", "--model", str(MODEL), "--prompt", "Once", "--initial-peers")
        assert run(lab, CLIENT, *ask, first.address).stdout.strip()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_peer_that_nobody_reaches_gets_layers_once_somebody_does() -> None:
    # Peers that count their traffic are not asked to relay.
    caps = ("--threads", "1", "--monthly-cap", "100")
    with (
        WanLab(4, SHAPE, prefix="anar") as lab,
        LocalSwarm(MODEL, extra=caps, start=quick_to_look) as all_,
    ):
        lab.close(CLOSED)
        start(all_, lab, 0, "open").wait_for("listening")
        start(all_, lab, 2, "other")
        all_.wait_serving()
        closed = start(all_, lab, CLOSED, "closed")
        assert closed.wait_for("reach")["reach"] == "none"
        found = seen(lab, all_)
        assert found["closed"] == ("none", 0)
        assert found["open"][0] == found["other"][0] == "direct"
        assert closed.find("assigned") is None
        lab.open(CLOSED)
        assert closed.wait_for("assigned")
        assert closed.find("reach")["reach"] == "direct"
        closed.wait_for("serving")
