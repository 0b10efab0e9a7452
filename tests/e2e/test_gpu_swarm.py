"""The benchmark of a swarm on one GPU runs on a CPU, from the models that it makes to the file."""

import json
import sys
from pathlib import Path

import pytest

from bench.gpu import swarm

pytestmark = pytest.mark.e2e


def test_a_tiny_swarm_says_what_transformers_says_and_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    asked = ["--device", "cpu", "--tiny", "--models", "gpt-oss-20b", "--only", "exact", "killed"]
    monkeypatch.setattr(sys, "argv", ["swarm", *asked, "--out", str(out)])
    assert swarm.main() == 0
    found = json.loads(out.read_text())["models"]["gpt-oss-20b"]
    assert found["exact"]["same_ids"] == found["exact"]["answers"]
    assert found["killed"]["same_ids"]
    assert found["killed"]["went_on_elsewhere"]
    assert found["killed"]["failovers"] == 1
    assert found["swarm"]["links"]
