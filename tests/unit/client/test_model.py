"""A swarm behind ``transformers``' own pipeline."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoTokenizer, pipeline

from anabranch import BlockingSwarm, SwarmModel
from client.text.tokenizer import ModelText
from testing.paths import ROOT
from tests.unit.records import MODEL

BROOK = ROOT / "models" / "brook"


class _Swarm:
    """Answers every prompt with the same three tokens."""

    def __init__(self, text: ModelText) -> None:
        self.text = text

    def ready_spec(self) -> object:
        return replace(MODEL, context_tokens=512)

    def generate(self, prompt: Sequence[int], options: object) -> Any:
        del prompt, options
        return SimpleNamespace(token_ids=(400, 401, 402))


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
