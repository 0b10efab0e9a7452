"""A swarm behind ``transformers``' own pipeline."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from transformers import AutoTokenizer, pipeline

from anabranch import BlockingSwarm, SwarmModel
from client.text.tokenizer import ModelText
from dht.errors import UserError
from testing.paths import ROOT
from tests.unit.records import MODEL

BROOK = ROOT / "models" / "brook"


class _Swarm:
    """Answers every prompt with the same three tokens."""

    def __init__(self, text: ModelText) -> None:
        self.text = text

    def ready_spec(self) -> object:
        return replace(MODEL, context_tokens=512)

    def generate_all(self, asked: Sequence[object], at_once: int) -> Any:
        del at_once
        return [SimpleNamespace(token_ids=(400, 401, 402)) for _ in asked]


def test_a_pipeline_of_transformers_asks_the_swarm() -> None:
    text = ModelText.load("brook", BROOK, "")
    model = SwarmModel(cast(BlockingSwarm, _Swarm(text)), lambda: None)
    tokenizer = AutoTokenizer.from_pretrained(BROOK)
    pipe = pipeline("text-generation", model=cast(Any, model), tokenizer=tokenizer)
    (said,) = pipe("One morning", max_new_tokens=3)
    assert said["generated_text"] == "One morning" + tokenizer.decode([400, 401, 402])


@pytest.mark.parametrize("directory", [BROOK, None])
def test_a_model_has_what_others_ask_of_it(directory: object) -> None:
    text = ModelText.load("brook", BROOK, "") if directory else ModelText(name="brook")
    model = SwarmModel(cast(BlockingSwarm, _Swarm(text)), lambda: None)
    assert (model.device.type, str(model.dtype)) == ("cpu", "torch.float32")
    assert model.to("cuda").eval() is model
    assert model.can_generate()
    assert (model.config.model_type == "llama") is (directory is not None)
    assert model.generation_config.to_diff_dict() is not None
    assert model.name_or_path == (str(BROOK) if directory else "brook")


@pytest.mark.parametrize("rows", [[[np.int64(1), np.int32(2)]], np.array([[1, 2]]), ((1, 2),)])
def test_ids_may_be_of_any_type_of_whole_numbers(rows: Any) -> None:
    model = SwarmModel(cast(BlockingSwarm, _Swarm(ModelText(name="brook"))), lambda: None)
    assert model.generate(rows, max_new_tokens=3) == [[1, 2, 400, 401, 402]]


@pytest.mark.parametrize("rows", [[1, 2], "One", [["1"]], [[1.0]], [[1], [1, 2]], [[]], [None], 7])
def test_what_are_no_rows_of_ids_is_refused_by_name(rows: Any) -> None:
    model = SwarmModel(cast(BlockingSwarm, _Swarm(ModelText(name="brook"))), lambda: None)
    with pytest.raises(UserError, match="input_ids"):
        model.generate(rows)
