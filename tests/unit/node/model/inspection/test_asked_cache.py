"""What a layer's code asks of its cache is answered, or its family runs session by session."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from dht.errors import UserError
from node.attention.cache_view import LookingCache
from node.model.inspection.structure import ModelStructure
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore
from testing.tiny_families import make


def structure_of(directory: Path) -> ModelStructure:
    return ModelLayout.of(WeightStore.open(str(directory)), "float32").structure


def asking(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    """Let attention ask its cache for something first."""
    own = LlamaAttention.forward

    def forward(self: Any, *given: Any, past_key_values: Any = None, **named: Any) -> Any:
        if past_key_values is not None:
            ask(past_key_values, self.layer_idx)
        return own(self, *given, past_key_values=past_key_values, **named)

    monkeypatch.setattr(LlamaAttention, "forward", forward)


def test_a_layer_that_asks_for_the_length_is_not_run_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    assert structure_of(tmp_path).packed
    asking(monkeypatch, lambda cache, layer: cache.get_seq_length(layer))
    found = structure_of(tmp_path)
    assert not found.packed
    assert found.asks_length


def test_a_forward_whose_arguments_go_by_the_cache_is_not_run_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    own = LlamaForCausalLM.forward

    def forward(self: Any, *given: Any, past_key_values: Any = None, **named: Any) -> Any:
        known = 0 if past_key_values is None else past_key_values.get_seq_length()
        return own(self, *given, past_key_values=past_key_values, scale=1.0 + known, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert not structure_of(tmp_path).packed


def test_a_question_that_has_no_answer_refuses_the_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    asking(monkeypatch, lambda cache, _: hasattr(cache, "seen_tokens"))
    with pytest.raises(UserError, match=r"cannot be served yet.*asks its cache for seen_tokens"):
        structure_of(tmp_path)


@pytest.mark.usefixtures("found_anew")
def test_sessions_that_run_together_need_layers_that_do_not_ask_for_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "falcon_h1")
    assert structure_of(tmp_path).may_stack
    own = LookingCache.update

    def update(self: LookingCache, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.get_seq_length()
        return own(self, *given, **named)

    monkeypatch.setattr(LookingCache, "update", update)
    assert not structure_of(tmp_path).may_stack
