"""Times that cannot be are refused, by benchmarks and by documents."""

import pytest

from bench.gpu.engine_gpu import LAYER_TRIES, StepError, layer_and_beside
from bench.gpu.floors import KERNELS_VARY, impossible
from bench.results_figures import gpu_steps


def test_a_time_is_refused_below_the_floor_or_below_its_kernels() -> None:
    assert not impossible(1.0, 1.0)
    assert "115 µs is less than the floor took, 174 µs" in impossible(115e-6, 174e-6)
    assert not impossible(1.0, 0.5, 1.0 + KERNELS_VARY / 2)
    assert "its kernels" in impossible(1.0, 0.5, 1.0 + 2 * KERNELS_VARY)


def test_a_layer_that_cannot_be_is_timed_again_and_then_refused() -> None:
    asked = []

    def took_s(layers: int) -> tuple[float, float]:
        asked.append(layers)
        return (1.0 if layers == 1 or len(asked) < 3 else 5.0), 0.5

    assert layer_and_beside(took_s, 3, 1.0) == (2.0, -0.5)
    assert asked == [1, 3, 1, 3]
    with pytest.raises(StepError, match="less than its kernels"):
        layer_and_beside(took_s, 3, 1.0, lambda: 3.0)
    assert len(asked) == 4 + 2 * LAYER_TRIES


def test_a_document_shows_no_time_that_cannot_be() -> None:
    def shown(us: float) -> dict[str, object]:
        told = {"floor_us": 100.0, "kernels_us": 120.0, "layer_tokens_per_s": 512e6 / us}
        told |= {"share_of_matrix_rate": 0.5, "eager_layer_tokens_per_s": 512e6 / us}
        shapes = {"llama": {"prefill_512": told}}
        (row,) = gpu_steps({"engine": {"found": {"shapes": shapes}}})
        return {key: row[key] for key in ("layer_us", "eager_layer_us", "share_of_matrix_rate")}

    assert shown(150.0) == pytest.approx(
        {"layer_us": 150.0, "eager_layer_us": 150.0, "share_of_matrix_rate": 0.5}
    )
    assert shown(110.0)["layer_us"] is shown(110.0)["share_of_matrix_rate"] is None
    assert shown(110.0)["eager_layer_us"] == pytest.approx(110.0)
    assert shown(90.0)["eager_layer_us"] is None
