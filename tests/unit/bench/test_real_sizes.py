"""Models of real sizes for measuring: one layer under every layer's name, and what a step reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.gpu.engine_gpu import FULL
from bench.speed.real_sizes import Rates, Size, floors, written
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore

EXPERTS, CHOSEN, HIDDEN, LAYERS = 8, 2, 64, 3


@pytest.mark.parametrize("packed", ["", "mxfp4"])
def test_a_model_repeats_its_layer_and_its_floor_counts_the_experts_that_rows_choose(
    packed: str, tmp_path: Path
) -> None:
    shape = {
        **FULL.shapes["gpt-oss-20b"],
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    size = Size(shape=shape, vocab=96, layers=LAYERS, whole=LAYERS, packed=packed)
    model = written(size, tmp_path)
    spec = ModelLayout.of(WeightStore.open(str(model.directory)), "bfloat16").spec("size")
    assert (spec.layers, spec.vocab) == (LAYERS, 96)
    first, last = (load_file(model.directory / f"model-{n}.safetensors") for n in (0, LAYERS - 1))
    for name, part in first.items():
        assert torch.equal(part, last[name.replace(".layers.0.", f".layers.{LAYERS - 1}.")])

    one = load_file(tmp_path / "one" / "model.safetensors")
    routed = {key: part.numel() for key, part in one.items() if ".experts." in key}
    dense = sum(
        part.numel() for key, part in one.items() if ".layers.0." in key and key not in routed
    )
    share = CHOSEN / EXPERTS
    assert model.numbers == LAYERS * (dense + share * sum(routed.values()))

    least = floors(spec, model, Rates(bytes_per_s=1.0, flops_per_s=2.0))
    assert least["ttft_512_s"] == 512 * model.numbers
    others = LAYERS * spec.layer_bytes * model.experts * (1 - share)
    assert least["step_s"][1] == pytest.approx(LAYERS * spec.layer_bytes + spec.head_bytes - others)
    assert least["step_s"][8] == pytest.approx(
        LAYERS * spec.layer_bytes + spec.head_bytes - others * (1 - share) ** 7
    )
