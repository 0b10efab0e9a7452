"""A founder's invitation is all that others need, once; after that, nothing is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dht.networks.invitation import read_invitation
from testing.forked import forked
from testing.local_swarm import LocalSwarm
from testing.paths import ROOT
from tests.e2e.conftest import MODEL
from tests.unit.test_anabranch import IMPORTED

pytestmark = pytest.mark.e2e
ASK = ("ask", "--prompt-ids", "1,2,3", "--max-new-tokens", "8", "--json")


def test_an_invitation_once_and_then_nothing(tmp_path: Path) -> None:
    memory = tmp_path / "network.json"
    environment = {**os.environ, "ANABRANCH_MEMORY": str(memory)}

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", IMPORTED, json.dumps(words)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )

    def answered(*words: str) -> tuple[int, list[str], str]:
        """Exit code, what was printed on stdout, and on stderr; nothing heavy was imported."""
        done = ran(*words)
        *shown, last = done.stdout.splitlines()
        code, names = json.loads(last)
        assert not {"torch", "transformers", "node"} & set(names)
        return code, [line for line in shown if line], done.stderr

    with LocalSwarm(MODEL, extra=("--threads", "1"), start=forked) as swarm:
        founder = swarm.start_peer()
        invitation = str(founder.wait_for("invitation")["text"])
        said = read_invitation(invitation)
        swarm.wait_serving()
        assert said.addresses == (founder.address,)

        code, (first,), told = answered(*ASK, invitation)
        assert code == 0, told
        assert "by an invitation to /ip4/127.0.0.1/tcp/" in told
        assert f"network anabranch is remembered in {memory}" in told
        kept = json.loads(memory.read_bytes())
        assert kept["fingerprint"].startswith(said.fingerprint)
        assert kept["initial_peers"] == [founder.address]

        code, (second,), told = answered(*ASK)
        assert code == 0, told
        assert f"network anabranch, remembered in {memory}" in told
        assert json.loads(second)["token_ids"] == json.loads(first)["token_ids"]

        code, shown, told = answered("status")
        assert code == 0, told
        assert shown[0] == f"brook in network anabranch, fingerprint {kept['fingerprint'][:16]}"
        assert shown[1].startswith("Healthy, but fragile: every layer is on the one serving peer")
        (row,) = [line for line in shown if line.startswith("peer0 ")]
        assert "0–7" in row.split()

        # Weights that are not those of before are refused under the remembered name.
        memory.write_text(json.dumps({**kept, "fingerprint": "ab" * 32}))
        code, shown, told = answered(*ASK, "--wait", "0")
        assert (code, shown) == (3, [])
        assert "with other weights" in told

        # A joiner's invitation lets others in, too.
        second_peer = swarm.start_peer()
        both = read_invitation(str(second_peer.wait_for("invitation")["text"]))
        assert both.addresses == (founder.address, second_peer.address)
