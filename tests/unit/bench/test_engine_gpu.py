"""The benchmark for machines with a GPU runs, so that it is right when one is at hand."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench import engine_gpu
from tests.unit.node.fake_cuda import fake_cuda


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_smoke_path_measures_both_sides(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is not there all that differs from a GPU is the figures."""
    out = tmp_path / "out.json"
    arguments = ["engine_gpu", "--device", device, "--tiny", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    with nullcontext() if device == "cpu" else fake_cuda():
        assert engine_gpu.main() == 0
    told = json.loads(out.read_text())
    assert device == "cpu" or told["capability"] == "8.6"
    found = told["shapes"]["tiny"]
    assert found["bytes_per_s"] > 0
    for batch in engine_gpu.TINY.batches:
        assert found[f"decode_{batch}_16"]["layer_tokens_per_s"] > 0
        assert found[f"decode_{batch}_16"]["eager_layer_tokens_per_s"] > 0
    assert found["prefill_32"]["share_of_matrix_rate"] > 0
