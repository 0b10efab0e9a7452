"""An idle peer stays as small as ``bench speed.footprint`` found it, and imports what it needs."""

import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bench.speed.footprint import footprint, wait_idle
from client import BlockingSwarm
from testing.local_swarm import LocalSwarm
from testing.paths import ROOT
from testing.reference import Reference, memory_for
from tests.e2e.conftest import MODEL

pytestmark = pytest.mark.e2e

HEADROOM = 1.1
"""Over what was recorded: other processors, kernels and allocators differ by less."""
NEEDLESS = frozenset(
    {
        *("PIL", "bitsandbytes", "jinja2", "matplotlib", "networkx", "ortools"),
        *("pandas", "pydantic", "scipy", "sklearn", "sympy", "trio"),
        *("aiohttp", "client", "torch._dynamo", "torch._inductor"),
    }
)
"""Heavy, or of other commands: each was or would be loaded by what a peer does need."""


@pytest.fixture(scope="module")
def told_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a peer says at its end what it imported."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def swarm(told_in: Path) -> Iterator[LocalSwarm]:
    """One peer that serves the whole model and was asked nothing yet."""
    paths = [str(ROOT / "tests" / "e2e" / "modules_told"), os.environ.get("PYTHONPATH", "")]
    told = {"PYTHONPATH": os.pathsep.join(paths), "MODULES_TOLD_IN": str(told_in)}
    with LocalSwarm(MODEL, environment=told, extra=("--threads", "2")) as started:
        peer = started.start_peer(memory_gib=1.2 * memory_for(MODEL) / 2**30)
        peer.wait_for("serving")
        yield started


def test_an_idle_peer_is_as_small_as_it_was_measured_to_be(swarm: LocalSwarm) -> None:
    recorded = json.loads((ROOT / "bench" / "results" / "footprint.json").read_text())
    reason = incomparable(recorded)
    if reason:
        pytest.skip(reason)
    [peer] = swarm.peers
    wait_idle(peer)
    found = footprint(peer)
    assert found["anonymous_mib"] < HEADROOM * recorded["idle_peer"]["anonymous_mib"], (
        f"{found}; where that is meant, record it: {recorded['command']}"
    )


def test_a_peer_imports_nothing_heavy_that_it_does_not_need(
    swarm: LocalSwarm, told_in: Path, reference: Reference
) -> None:
    [peer] = swarm.peers
    expected, _ = reference.greedy(reference.encode("One morning"), 8)
    with BlockingSwarm.connect(swarm.addresses, model=str(MODEL)) as client:
        answer = client.generate("One morning", max_new_tokens=8)
    assert answer.token_ids == tuple(expected)
    assert peer.stop() == 0, peer.tail()
    modules = (told_in / str(peer.process.pid)).read_text(encoding="utf-8").splitlines()
    assert "node.stage.local_engine" in modules
    assert NEEDLESS.isdisjoint(modules), sorted(NEEDLESS.intersection(modules))


def incomparable(recorded: dict[str, Any]) -> str:
    """Why what was recorded says nothing about this machine; empty where it does."""
    if sys.platform != "linux":
        return "it was recorded on Linux, where /proc tells what a process holds"
    if os.sysconf("SC_PAGE_SIZE") != 4096:
        return "memory comes in larger pages here"
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge.exists() and "[always]" in huge.read_text():
        return "the kernel rounds memory up to huge pages here"
    if platform.python_version_tuple()[:2] != tuple(recorded["python"].split(".")[:2]):
        return f"it was recorded with Python {recorded['python']}"
    if version("torch").partition("+")[2] != recorded["torch"].partition("+")[2]:
        return f"it was recorded with torch {recorded['torch']}"
    return ""
