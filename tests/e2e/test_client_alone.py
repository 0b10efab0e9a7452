"""What ``locks/client.txt`` installs is all that a client needs."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from testing.local_swarm import LocalSwarm
from testing.paths import ROOT
from testing.reference import Reference
from tests.e2e.conftest import MODEL
from tests.unit.test_mistakes import assert_plain

pytestmark = pytest.mark.e2e

ALONE = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "e2e" / "client_alone")}
MEGABYTES_MAX = 200
THREE = pytest.mark.parametrize("swarm", [3], indirect=True)
"""What a client's packages are does not depend on the number of peers."""


def anabranch(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a client's packages alone."""
    return subprocess.run(
        [sys.executable, "-m", "anabranch", *words],
        cwd=ROOT,
        env=ALONE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@THREE
def test_a_client_alone_asks_lists_and_looks(swarm: LocalSwarm, reference: Reference) -> None:
    at = ("--initial-peers", *swarm.addresses)
    expected, _ = reference.greedy(reference.encode("One morning"), 12)
    asked = anabranch("ask", *at, "--prompt", "One morning", "--max-new-tokens", "12", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["token_ids"] == expected
    listed = anabranch("models", *at, "--json")
    assert listed.returncode == 0, listed.stderr
    assert MODEL.name in listed.stdout
    looked = anabranch("status", *at)
    assert looked.returncode == 0, looked.stderr
    assert "layers" in looked.stdout


@THREE
@pytest.mark.parametrize(("command", "path"), [("serve", "/v1/models"), ("page", "/api/v1/state")])
def test_a_client_alone_serves_the_gateway_and_the_page(
    swarm: LocalSwarm, command: str, path: str
) -> None:
    words = [sys.executable, "-m", "anabranch", command, "--port", "0", "--host", "127.0.0.1"]
    words += ["--model", MODEL.name] if command == "page" else []
    process = subprocess.Popen(
        [*words, "--initial-peers", *swarm.addresses],
        cwd=ROOT,
        env=ALONE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        while (found := re.search(r"http://[^\s/]+", said)) is None:
            line = process.stdout.readline()
            assert line, said
            said += line
        with urllib.request.urlopen(found[0] + path, timeout=30) as answer:  # noqa: S310
            assert MODEL.name in answer.read().decode()
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize(
    "words",
    [
        ("join", "--model", str(MODEL), "--cpu", "--identity"),
        ("plan", "--gpus", "1x3090", "--model", str(MODEL), "--json"),
    ],
)
def test_what_needs_more_says_so(words: tuple[str, ...], tmp_path: Path) -> None:
    words += (str(tmp_path / "key"),) if words[-1] == "--identity" else ()
    assert_plain(anabranch(*words), " is not installed: this is a client's installation")


def test_a_client_alone_is_small() -> None:
    size = 0
    for name in re.findall(r"^([^\s#=]+)==", (ROOT / "locks/client.txt").read_text(), re.MULTILINE):
        try:
            files = distribution(name).files or ()
        except PackageNotFoundError:  # of another system
            continue
        size += sum(path.stat().st_size for each in files if (path := Path(each.locate())).exists())
    assert 50e6 < size < MEGABYTES_MAX * 1e6, f"{size / 1e6:.0f} MB"
