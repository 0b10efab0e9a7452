"""Models whose parts are put together in uncommon ways: their ids equal ``transformers``'."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertLMHeadModel

from bench.families.every_family import OWN, answered, greedy, small_config, write_random
from dht.errors import UserError
from dht.messages.session import Sampling
from node.engine.engine import WorkItem
from node.model.inspection.meta_model import without_missing_libraries
from node.model.inspection.tied import tied_to
from node.weights.checkpoint_names import integers_of
from tests.unit.node.engines import opened

CONTEXT = 256


def written(name: str, directory: Path) -> None:
    """Write the named family's small model; its biases and norms are random, too."""
    write_random(small_config(name, OWN.get(name)), directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(3)
    for tensor in tensors.values():
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    save_file(tensors, path, metadata={"format": "pt"})


engine_of = partial(opened, memory_bytes=256 << 20)


@pytest.mark.parametrize(
    "name",
    [
        "bert",  # the head's bias has a second name in the module around it
        "zamba2",  # layers share a block, which is stored once
        "hy_v4",  # streams are joined by a module with weights and a norm without
        "inkling_text",  # the embedding has a norm inside
        "diffllama",  # layers attend twice over the same keys
        "emu3",  # the class for text has another's configuration
        "roberta",  # positions begin behind padding's
        "roformer",  # every stage needs the table of positions
        "llava_onevision",  # a weight of no module, which text does not need
    ],
)
def test_answers_equal_transformers(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    assert answered(tmp_path) == greedy(tmp_path)


def test_a_part_whose_library_is_missing_is_left_out(tmp_path: Path) -> None:
    """Gemma 3n as it is published: its eye needs timm, which text does not."""
    with without_missing_libraries():
        written("gemma3n", tmp_path)
        expected = greedy(tmp_path)
    assert answered(tmp_path) == expected


def test_a_library_that_the_language_model_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("bert", tmp_path)

    def built(*_: object, **__: object) -> None:
        raise ImportError("\nBert requires the quill library, which\nyou can install.\n")

    monkeypatch.setattr(BertLMHeadModel, "_from_config", built)
    told = "Bert requires the quill library, which you can install"
    with pytest.raises(UserError, match=rf"cannot be served yet: {told}"):
        engine_of(tmp_path)


def test_weights_that_no_module_can_be_filled_with_are_named(tmp_path: Path) -> None:
    written("zaya", tmp_path)
    with pytest.raises(UserError, match=r"model\.input_hidden_states_\w+, which belongs to no"):
        engine_of(tmp_path)


def test_a_hybrid_whose_layers_all_attend_runs_sessions_together(tmp_path: Path) -> None:
    """Granite 4.0 has small models without a recurrence."""
    kinds = {"layer_types": ["full_attention"] * 4}
    write_random(small_config("granitemoehybrid", kinds), tmp_path)
    assert engine_of(tmp_path).layout.structure.packed
    assert answered(tmp_path) == greedy(tmp_path)


@pytest.mark.parametrize("change", [{"num_key_value_heads": 0}, {"pad_token_id": 5000}], ids=str)
def test_a_configuration_that_cannot_be_built_is_refused_in_words(
    change: dict[str, int], tmp_path: Path
) -> None:
    written("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=r"cannot be served yet|not understood"):
        engine_of(tmp_path)


def test_a_layer_is_filled_from_another_that_it_shares_weights_with(tmp_path: Path) -> None:
    written("zamba2", tmp_path)
    engine = engine_of(tmp_path)
    parameters = engine.layout.part_parameters("model.layers.3")
    borrowed = [name for name in parameters if name not in engine.layout.names]
    assert borrowed
    assert all(name.startswith("model.layers.3.shared_transformer.") for name in borrowed)
    assert {engine.layout.stored_as(name).split(".")[2] for name in borrowed} == {"1"}
    engine.load(3, 4)
    assert engine.held == (3, 4)


def test_no_position_lies_beyond_those_that_were_learned(tmp_path: Path) -> None:
    """Where the first is not 0, there are fewer than the configuration says."""
    written("roberta", tmp_path)
    engine = engine_of(tmp_path)
    engine.load(0, engine.spec.layers)
    assert engine.layout.structure.first_position == 1
    assert engine.spec.context_tokens == CONTEXT - 1, "so that opens are checked against it"
    assert engine.kv.reserve("s", CONTEXT) is None

    def error_of(position: int, tokens: int) -> str | None:
        item = WorkItem(
            session="s",
            start=0,
            end=engine.spec.layers,
            position=position,
            token_ids=(7,) * tokens,
            sampling=Sampling(),
        )
        return engine.step([item])[0].error

    assert error_of(0, CONTEXT - 1) is None
    assert "at most" in (error_of(CONTEXT - 1, 1) or "")


def test_names_of_one_weight_are_found_from_each_of_them() -> None:
    model = nn.Module()
    model.all_tied_weights_keys = {"b": "a", "c": "a", "e": "d"}  # type: ignore[assignment]
    for name in "abc":
        assert set(tied_to(model, name)) == {"a", "b", "c"}
    assert set(tied_to(model, "d")) == {"d", "e"}
    assert tied_to(model, "f") == ()
    assert tied_to(nn.Module(), "a") == ()


def test_tables_of_integers_keep_their_dtype() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(4, 2, dtype=torch.long))
    model.inner = nn.Linear(2, 2)
    assert integers_of(model, "table") is torch.long
    assert integers_of(model, "inner.weight") is None
