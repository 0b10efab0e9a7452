"""Configurations whose code would run, but not as the file says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from dht.errors import UserError
from node.model.inspection.meta_model import check_factors, check_window, model_of
from node.model.inspection.session_inspection import Unservable
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore
from testing.tiny_families import SHAPE, make

FOUR = [1.0, 1.5, 2.0, 4.0]
FACTORS = {"short_factor": FOUR, "long_factor": FOUR, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **FACTORS}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def config_of(family: str, rope: dict[str, Any], **more: Any) -> Any:
    return AutoConfig.for_model(family, **{**SHAPE, **more}, rope_parameters=rope)


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
@pytest.mark.parametrize("factors", [FOUR[:3], [*FOUR, 5.0], ["1.0"] * 4, [0.0] * 4, []])
def test_factors_that_do_not_fit_the_heads_are_refused_by_name(name: str, factors: Any) -> None:
    config = config_of("llama", {**LONGROPE, name: factors})
    with pytest.raises(Unservable, match=rf"^{name} in its config\.json is not one number"):
        check_factors(config)


def test_factors_of_one_kind_of_layer_are_looked_at(tmp_path: Path) -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2, "head_dim": 8}
    both = {"full_attention": dict(LONGROPE), "sliding_attention": PLAIN}
    config = config_of("gemma3_text", both, **kinds)
    check_factors(config)
    config.rope_parameters["full_attention"]["long_factor"] = FOUR[:3]
    with pytest.raises(Unservable, match="long_factor"):
        check_factors(config)
    check_factors(config_of("llama", PLAIN))


def test_the_file_and_the_field_are_named_before_weights_are_read(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    store = WeightStore.open(str(tmp_path))
    for changed, words in (
        ({"rope_parameters": {**LONGROPE, "long_factor": FOUR[:3]}}, "long_factor in its config"),
        ({"num_hidden_layers": 4.0}, r"num_hidden_layers in its config.json is 4\.0, no whole"),
    ):
        path.write_text(json.dumps({**config, **changed}))
        store.config.update(changed)
        with pytest.raises(UserError, match=words):
            ModelLayout.of(store, "float32")
        store.config.update(config)


def test_a_window_of_no_token_is_refused_where_layers_have_one() -> None:
    for window in (0, -1):
        config = AutoConfig.for_model("mistral", **SHAPE, sliding_window=window)
        with pytest.raises(Unservable, match=f"sliding_window in its config.json is {window}"):
            check_window(config)
    check_window(AutoConfig.for_model("mistral", **SHAPE, sliding_window=None))
    check_window(AutoConfig.for_model("qwen2", **SHAPE, sliding_window=0))


def test_the_form_of_outputs_is_the_codes_own_not_the_files() -> None:
    model = model_of(config_of("llama", PLAIN, return_dict=False), torch.float32, None)
    with torch.device("meta"):
        assert model(torch.zeros(1, 2, dtype=torch.long)).logits.shape == (
            1,
            2,
            SHAPE["vocab_size"],
        )
