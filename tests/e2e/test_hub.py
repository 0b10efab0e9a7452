"""Peers and a client that know a model only by its hub id, against a hub on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing import forked
from testing.local_swarm import LocalSwarm
from testing.paths import ROOT
from testing.reference import Reference, memory_for
from tests.e2e.conftest import MODEL
from tests.unit.node.fake_hub import FakeHub

pytestmark = pytest.mark.e2e

REPO = "org/brook"
DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub().running() as running:
        running.add(REPO, MODEL)
        yield running


def environment_of(hub: FakeHub, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


def run(
    environment: dict[str, str], module: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_peers_from_the_hub_and_from_a_directory_serve_together(
    hub: FakeHub, tmp_path: Path, reference: Reference
) -> None:
    home = environment_of(hub, tmp_path / "peers")
    memory_gib = 0.62 * memory_for(MODEL) / 2**30
    with LocalSwarm(Path(REPO), environment=home, extra=("--threads", "1")) as swarm:
        swarm.start_peer(memory_gib=memory_gib)
        swarm.peers[0].wait_for("listening")
        swarm.model = MODEL
        swarm.start_peer(memory_gib=memory_gib, extra=("--model-name", REPO))
        swarm.wait_serving()
        asked = ("--model", REPO, "--prompt", "One morning", "--max-new-tokens", "16", "--json")
        done = run(
            environment_of(hub, tmp_path / "client"),
            "client.generate",
            *asked,
            "--initial-peers",
            swarm.addresses[0],
        )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    expected = reference.greedy(reference.encode("One morning"), 16)[0]
    assert answer["token_ids"] == list(expected)
    assert len({stage["peer"] for stage in answer["route"]}) == 2
    cached = {path.name for path in (tmp_path / "client").rglob("snapshots/*/*")}
    assert "tokenizer.json" in cached
    assert not any(name.endswith(".safetensors") for name in cached)


def test_a_file_that_stays_damaged_ends_the_peer_with_one_line(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.flip = 100
    with LocalSwarm(Path(REPO), environment=environment_of(hub, tmp_path / "home")) as swarm:
        peer = swarm.start_peer()
        assert peer.process.wait(120) == 2
        log = peer.tail()
    assert "Traceback" not in log
    assert (
        log.strip().splitlines()[-1].startswith("error: model.safetensors of org/brook is damaged")
    )
    assert hub.flip == 98


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("org/missing", 2, "org/missing is neither a directory here nor a model at http"),
        ("org/brook@nowhere", 2, "no such branch"),
        ("not/a/model", 2, "not/a/model"),
    ],
)
@pytest.mark.parametrize("module", ["node.join", "client.generate"])
def test_mistakes_with_hub_ids_are_one_plain_line(
    module: str, model: str, code: int, words: str, hub: FakeHub, tmp_path: Path
) -> None:
    more = (
        ("--identity", str(tmp_path / "id.key"), "--cpu")
        if module == "node.join"
        else ("--prompt", "x", "--initial-peers", DEAD)
    )
    done = run(environment_of(hub, tmp_path / "home"), module, "--model", model, *more)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert words in done.stderr


def test_a_hub_that_is_away_and_offline_mode(hub: FakeHub, tmp_path: Path) -> None:
    ask = ("client.generate", "--model", REPO, "--prompt", "x", "--initial-peers", DEAD)
    away = environment_of(hub, tmp_path / "home") | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run(away, *ask)
    assert done.returncode == 3, done.stderr
    assert "cannot be reached" in done.stderr
    done = run(away | {"HF_HUB_OFFLINE": "1"}, *ask)
    assert done.returncode == 2, done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr


def test_a_local_file_with_a_flipped_bit_is_named_before_it_serves(tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    assert forked.run("node.weight_hashes", str(model)).returncode == 0
    shard = model / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1000] ^= 8
    shard.write_bytes(content)
    assert "is not what" in forked.run("node.weight_hashes", str(model), "--check").stderr
    with LocalSwarm(model, start=forked.forked) as swarm:
        peer = swarm.start_peer()
        assert peer.process.wait(120) == 2
        assert peer.find("serving") is None
        assert "model.safetensors is damaged: tensor model." in peer.tail()
