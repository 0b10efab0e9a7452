"""A light peer that nobody can dial serves through the relays of full peers: in namespaces."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from testing.local_swarm import LocalPeer, LocalSwarm
from testing.paths import ROOT
from testing.reference import Reference
from testing.wan_lab import Shape, WanLab, why_not
from tests.e2e.conftest import MODEL
from tests.e2e.light import HIDING, PYTHON, needs_libp2p

pytestmark = [pytest.mark.e2e, pytest.mark.netns, needs_libp2p]
REASON = why_not()
SHAPE = Shape(mbit=200, delay_ms=2)
CLOSED, CLIENT = 1, 3
"""Hosts: nobody can open a connection to the first; nobody listens on the second."""
NEW_TOKENS = 24


def asked(
    lab: WanLab, address: str, prompt: tuple[int, ...], *, light: bool = False
) -> dict[str, Any]:
    """What ``client.generate --json`` says on the client's host."""
    python = PYTHON if light else sys.executable
    command = [python, "-m", "client.generate", "--model", str(MODEL), "--json"]
    command += ["--prompt-ids", ",".join(map(str, prompt)), "--max-new-tokens", str(NEW_TOKENS)]
    done = subprocess.run(
        lab.command(CLIENT, [*command, "--initial-peers", address]),
        cwd=ROOT,
        env={**os.environ, **(HIDING if light else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_light_peer_that_nobody_can_dial_is_called_through_relays(reference: Reference) -> None:
    with (
        WanLab(4, SHAPE, prefix="anal") as lab,
        LocalSwarm(MODEL, extra=("--threads", "1")) as all_,
    ):
        lab.close(CLOSED)

        def start(host: int, name: str, layers: str, *, light: bool = False) -> LocalPeer:
            return all_.start_peer(
                name=name,
                host=lab.address(host),
                run_on=lab.command(host, []),
                extra=("--layers", layers),
                python=PYTHON if light else sys.executable,
                environment=HIDING if light else None,
            )

        first = start(0, "open", "0:5")
        first.wait_for("listening")
        other = start(2, "other", "0:5")
        assert first.wait_for("reach")["reach"] == "direct"
        closed = start(CLOSED, "closed", "5:8", light=True)
        said = closed.wait_for("reach")
        assert said["reach"] == "relayed", closed.tail()
        assert all(each.endswith(f"/p2p-circuit/p2p/{closed.peer_id}") for each in said["beside"])
        all_.wait_serving()
        prompt = tuple(reference.encode("Once upon a time a small otter found a boat. " * 30))[:300]
        expected = list(reference.greedy(prompt, NEW_TOKENS)[0])
        for light in (False, True):
            answer = asked(lab, first.address, prompt, light=light)
            assert answer["token_ids"] == expected
            assert answer["route"][-1]["peer"] == closed.peer_id
        # On a busy machine a daemon may keep libp2p's own limits: then the other is the only relay.
        relays = [each for each in (first, other) if f"/p2p/{each.peer_id}/" in str(said["beside"])]
        gone, left = (other, first) if first in relays else (first, other)
        gone.kill()
        assert asked(lab, left.address, prompt)["token_ids"] == expected
