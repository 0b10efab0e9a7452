"""The benchmark for machines with a GPU runs, so that it is right when one is at hand."""

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench import engine_gpu
from bench.engine_gpu import EngineSide
from tests.unit.node.fake_cuda import fake_cuda


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_smoke_path_measures_both_sides(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is not there all that differs from a GPU is the figures; what small layers take
    is noise, so these times are made up."""
    out = tmp_path / "out.json"
    arguments = ["engine_gpu", "--device", device, "--tiny", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    for name, shape in engine_gpu.TINY.shapes.items():  # imports what may not be imported on fakes
        engine_gpu.make_layers(tmp_path / name, shape, 1, 64)
    clock = itertools.count(1)

    def parts(run: Callable[[], object], engine: EngineSide, rounds: int) -> tuple[float, float]:
        run()
        assert (engine.inside_s() > 0) == (rounds > 0)
        return 1e-3 * engine._layers, 1e-3

    def seconds(run: Callable[[], object], *_: object) -> float:
        run()
        return 1e-3 * next(clock)

    monkeypatch.setattr(engine_gpu, "parts_of", parts)
    monkeypatch.setattr(engine_gpu, "seconds_of", seconds)
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
