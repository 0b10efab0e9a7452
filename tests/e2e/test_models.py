"""Two models, five peers, one network: who needs what is found by looking at the network."""

import asyncio
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from client.text.tokenizer import Tokenizer
from coordinator.plans.catalogue.reading import network_models, served_models
from dht.networks.connecting import observe
from dht.records.directory import DEFAULT_NETWORK
from testing.forked import forked, run
from testing.local_swarm import GatewayProcess, LocalSwarm
from testing.reference import Reference, memory_for
from tests.e2e.conftest import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROMPT = "Once upon a time there was"
NEWS_S, LOST_S = 40.0, 120.0
INTERVALS = {
    f"node.peer.roaming:RoamConfig.{name}": seconds
    for name, seconds in {"look_s": 2.0, "lasts_s": 4.0, "turn_s": 1.0, "settled_s": 10.0}.items()
}
"""How long a loss must last is told by a clock of their own in the tests of that module."""


def share_gib() -> float:
    """What lends room for all layers of one of the models."""
    return 1.05 * memory_for(MODEL) / 2**30


@pytest.fixture(scope="module")
def creek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with half its context, which makes it another model."""
    directory = tmp_path_factory.mktemp("models") / "creek"
    shutil.copytree(MODEL, directory)
    config = json.loads((MODEL / "config.json").read_text())
    config["max_position_embeddings"] //= 2
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def network(creek: Path) -> Iterator[LocalSwarm]:
    """Three peers with all of brook, the third of which may serve creek, and one with creek."""
    extra = ("--threads", "1", "--layers", "0:8")
    with LocalSwarm(MODEL, extra=extra, start=partial(forked, intervals=INTERVALS)) as swarm:
        for _ in range(2):
            swarm.start_peer(memory_gib=share_gib())
        swarm.wait_serving()
        swarm.start_peer(memory_gib=share_gib(), models=(MODEL, creek))
        swarm.wait_serving()
        swarm.model = creek
        swarm.start_peer(memory_gib=share_gib())
        swarm.wait_serving()
        yield swarm


def text_of(ids: list[int]) -> str:
    tokenizer = Tokenizer.load(MODEL)
    assert tokenizer is not None
    return tokenizer.decode(ids)


def ran(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of somebody who has no files, in a directory without any."""
    environment = {"ANABRANCH_MEMORY": "", "XDG_CACHE_HOME": str(cache)}
    return run("anabranch", *words, environment=environment, folder=cache)


def post(url: str, **body: object) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(  # noqa: S310  the gateway's own address
        url + "/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def listed(network: LocalSwarm, cache: Path) -> dict[str, dict[str, Any]]:
    """What ``anabranch models`` says, by name."""
    done = ran(cache, "models", "--json", "--initial-peers", network.addresses[0])
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)}


async def replicas_come(address: str, wanted: dict[str, int]) -> None:
    """Wait until who looks there sees these models, each held whole so often."""
    transport = await observe([address])
    until_s = time.monotonic() + NEWS_S
    found: dict[str, int] = {}
    try:
        while found != wanted and time.monotonic() < until_s:
            await asyncio.sleep(0.5)
            specs = await network_models(transport, DEFAULT_NETWORK)
            models = await served_models(transport, DEFAULT_NETWORK, specs)
            found = {model.name: model.replicas for model in models}
    finally:
        await transport.close()


def await_replicas(network: LocalSwarm, cache: Path, wanted: dict[str, int]) -> None:
    """Wait until the list says so: what a peer did is known to all within 10 s."""
    asyncio.run(replicas_come(network.addresses[0], wanted))
    assert {name: each["replicas"] for name, each in listed(network, cache).items()} == wanted


def test_a_stranger_sees_both_and_joins_where_holders_are_fewest(
    network: LocalSwarm, creek: Path, tmp_path: Path
) -> None:
    await_replicas(network, tmp_path, {"brook": 3, "creek": 1})
    fifth = network.start_peer(memory_gib=share_gib(), models=(MODEL, creek))
    assert fifth.wait_for("chosen")["model"] == "creek"
    fifth.wait_for("serving")
    await_replicas(network, tmp_path, {"brook": 3, "creek": 2})


def test_by_an_address_alone_a_peer_says_where_it_is_needed_and_asks(
    network: LocalSwarm, creek: Path, tmp_path: Path
) -> None:
    join = ("join", "--initial-peers", network.addresses[0], "--cpu", "--identity", "own.key")
    join += ("--memory", f"{share_gib():.9f}")
    bundled = ran(tmp_path, *join)
    assert bundled.returncode == 2
    assert "name the model with --model" in bundled.stderr, "brook's files come with the package"
    asked = ran(tmp_path, *join, "--models", str(MODEL), str(creek))
    assert asked.returncode == 2
    assert "Needed most by creek: layers 0-7 of 8" in asked.stdout
    assert "name the model with --model" in asked.stderr


def test_one_gateway_answers_for_both(
    network: LocalSwarm, reference: Reference, tmp_path: Path
) -> None:
    fingerprint = listed(network, tmp_path)["creek"]["fingerprint"]
    ids, _ = reference.greedy(reference.encode(PROMPT), 12)
    gateway = GatewayProcess(
        network.addresses, MODEL, "--models", f"creek={fingerprint}", start=forked
    )
    try:
        with urllib.request.urlopen(gateway.url + "/models", timeout=60) as response:  # noqa: S310
            assert [each["id"] for each in json.load(response)["data"]] == ["brook", "creek"]
        asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        for model in ("brook", "creek"):
            status, said = post(gateway.url, model=model, **asked)
            assert status == 200, said
            assert said["model"] == model
            assert said["choices"][0]["text"] == text_of(ids)
        status, said = post(gateway.url, model="delta", **asked)
        assert status == 404
        assert "'brook', 'creek' are" in said["error"]["message"]
    finally:
        gateway.stop()


def test_an_address_is_enough(network: LocalSwarm, reference: Reference, tmp_path: Path) -> None:
    ask = ("ask", "--initial-peers", network.addresses[0], "--prompt", PROMPT)
    undecided = ran(tmp_path, *ask)
    assert undecided.returncode == 2
    assert "brook" in undecided.stderr
    assert "creek: say which with --model" in undecided.stderr
    for _ in range(2):  # from peers, then from what was kept
        done = ran(tmp_path, *ask, "--model", "creek", "--max-new-tokens", "12")
        assert done.returncode == 0, done.stderr
        ids, _ = reference.greedy(reference.encode(PROMPT), 12)
        assert done.stdout.rstrip("\n") == text_of(ids)
    assert len(list((tmp_path / "anabranch" / "texts").iterdir())) == 1


def test_a_model_that_lost_its_holders_gets_a_volunteer(
    network: LocalSwarm, tmp_path: Path
) -> None:
    movable = network.peers[2]
    assert movable.wait_for("chosen")["model"] == "brook"
    for peer in network.peers[3:]:
        peer.kill()
    seen = len(movable.read_events())
    assert movable.wait_for("moving", LOST_S)["model"] == "creek"
    movable.wait_for("serving", LOST_S, since=seen)
    await_replicas(network, tmp_path, {"brook": 2, "creek": 1})
