"""The benchmark for machines with a GPU runs, so that it is right when one is at hand."""

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench.gpu import engine_gpu
from bench.gpu.engine_gpu import BatchingSide, EngineSide, expert_share
from tests.unit.node.fake_cuda import fake_cuda


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("cpu", (*engine_gpu.TINY.shapes, *engine_gpu.TINY.packed)),
        ("cuda:1", ("tiny", "tiny-int4", "tiny-experts-fp8", "tiny-experts-mxfp4")),  # each layout
    ],
    ids=["cpu", "cuda:1"],
)
def test_the_smoke_path_measures_both_sides(
    device: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is not there all that differs from a GPU is the figures; what small layers take
    is noise, so these times are made up."""
    out = tmp_path / "out.json"
    arguments = ["engine_gpu", "--device", device, "--tiny", "--out", str(out), "--shapes"]
    monkeypatch.setattr(sys, "argv", [*arguments, *names])
    shapes = [*engine_gpu.TINY.shapes.values(), *(p.shape for p in engine_gpu.TINY.packed.values())]
    for n, shape in enumerate(shapes):  # imports what may not be imported on fakes
        engine_gpu.make_layers(tmp_path / str(n), shape, 1, 64)
    clock = itertools.count(1)

    def parts(run: Callable[[], object], engine: EngineSide, rounds: int) -> tuple[float, float]:
        for _ in range(rounds + 2):  # as often as there: sessions have room for so many
            run()
        assert (engine.inside_s() > 0) == (rounds > 0)
        return 1.0 * engine._layers, 1e-3  # more than any floor by the rates below

    def seconds(run: Callable[[], object], *_: object) -> float:
        run()
        return 1e-3 * next(clock)

    def batched(
        side: BatchingSide, layers: int, batch: int, context: int, until_s: float, *, graphs: bool
    ) -> float:
        if device == "cpu":
            real(side, layers, batch, context, until_s, graphs=graphs)
        return 1e-3 * layers

    real = BatchingSide.step_s
    monkeypatch.setattr(BatchingSide, "step_s", batched)
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
        assert found[f"decode_{batch}_16"]["batching_layer_tokens_per_s"] == 1000.0 * batch
    assert found["prefill_32"]["share_of_matrix_rate"] > 0
    for name in engine_gpu.TINY.packed.keys() & set(names):
        assert told["shapes"][name]["decode_2_16"]["times_floor"] > 0
        assert told["shapes"][name]["prefill_32"]["share_of_matrix_rate"] > 0


def side_of(directory: Path) -> EngineSide:
    return EngineSide(directory, "cpu", 256, engine_gpu.TINY, kernels=False)


def test_packed_weights_are_fewer_bytes_and_as_many_numbers(tmp_path: Path) -> None:
    plan = engine_gpu.TINY
    packed = plan.packed["tiny-experts-fp8"]
    plain = side_of(engine_gpu.make_layers(tmp_path / "plain", packed.shape, 2, 64))
    other = side_of(engine_gpu.make_packed(tmp_path / "packed", packed, plan, "cpu"))
    assert other.row_numbers == plain.row_numbers
    heads, experts = 2 * 64 * 64 + 2 * 64 * 32, 8 * 3 * 64 * 32
    norms = 2 * 64 + 2 * 16
    assert plain.row_numbers == heads + norms + 8 * 64 + experts * 2 / 8
    assert plain.layer_bytes == 2 * (heads + norms + 8 * 64 + experts)
    scale_bytes = 4 * experts // (16 * 32)
    assert other._expert_bytes == pytest.approx(experts + scale_bytes)
    assert plain._expert_bytes == pytest.approx(2 * experts)
    assert expert_share(tmp_path / "plain") == pytest.approx(2 * experts / plain.layer_bytes)
    whole = plain.step_bytes(1, 0)  # two of eight experts
    assert whole == pytest.approx(plain.layer_bytes - 2 * experts * 6 / 8)


def test_continuous_batching_costs_no_figure_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> float:
        raise RuntimeError("no such kernel")

    made = engine_gpu.make_layers(tmp_path, engine_gpu.TINY.shapes["tiny"], 2, 64)
    monkeypatch.setattr(BatchingSide, "step_s", fails)
    found = {"decode_1_16": {"floor_us": 1.0}, "decode_2_16": "no room for its KV"}
    assert len(list(engine_gpu.batching_figures(made, "cpu", engine_gpu.TINY, found))) == 1
    assert found == {
        "decode_1_16": {"floor_us": 1.0, "batching": "RuntimeError: no such kernel"},
        "decode_2_16": "no room for its KV",
    }


def test_continuous_batching_stops_in_time(tmp_path: Path) -> None:
    made = engine_gpu.make_layers(tmp_path, engine_gpu.TINY.shapes["tiny"], 2, 64)
    side = BatchingSide(made, "cpu", engine_gpu.TINY)
    with pytest.raises(TimeoutError, match="1 steps"):
        side.step_s(1, 1, 16, 0.0, graphs=False)
