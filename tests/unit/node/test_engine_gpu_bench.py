"""The benchmark for machines with a GPU runs, so that it is right when one is at hand."""

import json
import sys
from pathlib import Path

import pytest

from bench import engine_gpu


def test_the_smoke_path_measures_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    arguments = ["engine_gpu", "--device", "cpu", "--tiny", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert engine_gpu.main() == 0
    found = json.loads(out.read_text())["shapes"]["tiny"]
    assert found["bytes_per_s"] > 0
    for batch in engine_gpu.TINY.batches:
        assert found[f"decode_{batch}_16"]["layer_tokens_per_s"] > 0
        assert found[f"decode_{batch}_16"]["eager_layer_tokens_per_s"] > 0
    assert found["prefill_32"]["share_of_matrix_rate"] > 0
