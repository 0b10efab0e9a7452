"""``anabranch plan --gpus``: whether GPUs that are only named hold a model, and how fast."""

import json
import re
import sys
from dataclasses import replace

import pytest

from node.device.hardware import LENDING
from node.plan import run


def planned(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["anabranch plan", *options])
    return run()


def test_a_model_is_placed_on_gpus_that_are_only_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = ("--gpus", "2x3090,1x4070", "--model", "models/brook", "--time-limit", "1")
    assert planned(monkeypatch, *gpus, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["placement"]) == {"3090-1", "3090-2", "4070-1"}
    assert {layer for start, end in found["placement"].values() for layer in range(start, end)} == {
        *range(8)
    }
    assert found["estimate_tokens_per_s"] > 0
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert planned(monkeypatch, *gpus) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "one answer that is alone: about" in shown
    assert "Speeds are from data sheets" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("node.plan.LENDING", replace(LENDING, gpu_share=5e-4))
    assert planned(monkeypatch, "--gpus", "1x3060", "--model", "models/brook") == 2
    assert re.search(r"GiB more are needed: \d+ more 3060 would do", capsys.readouterr().err)
    assert planned(monkeypatch, "--gpus", "1x3061", "--model", "models/brook") == 2
    assert "3061" in capsys.readouterr().err


def test_without_gpus_it_plans_clusters_and_swarms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        planned(monkeypatch, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "CLUSTER.json" in shown
    assert "--gpus" in shown
    assert planned(monkeypatch, "two.json", "--mbit", "10") == 2
    assert "goes with --gpus" in capsys.readouterr().err
