"""Loading: what is read, what fits, and which models are refused before they serve."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dht.errors import UserError
from dht.messages.session import Sampling
from dht.messages.types import stage_bytes, weight_bytes
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore
from testing import tiny_families
from tests.unit.node.engines import opened as engine_of

LAYERS = 4
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
IDS = tuple(range(3, 33))


def make(directory: Path, family: str, **extra: Any) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SHAPE, **extra})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model


def sampled(engine: Engine) -> int | None:
    assert engine.kv.reserve("s", len(IDS)) is None
    item = WorkItem(
        session="s", start=0, end=LAYERS, position=0, token_ids=IDS, sampling=Sampling()
    )
    result = engine.step([item])[0]
    engine.kv.free("s")
    assert result.error is None, result.error
    return result.token_id


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
def test_more_layers_than_the_files_hold_are_refused_before_anything_is_built(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: 10**7}))

    def built(*_: object, **__: object) -> None:
        raise AssertionError("a configuration was built")

    monkeypatch.setattr(AutoConfig, "from_pretrained", built)
    store = WeightStore.open(str(tmp_path))
    with pytest.raises(UserError, match=rf"{key} 10000000, and its files name {LAYERS} layers"):
        ModelLayout.of(store, "float32")


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    config = tmp_path / "config.json"
    told = config.read_text().replace('"llama"', '"unheard_of"')
    config.write_text(told.replace("LlamaFor", "UnheardOfFor"))
    with pytest.raises(UserError, match="unheard_of"):
        engine_of(tmp_path)


def test_other_shapes_than_the_code_has_are_refused_before_a_weight_is_read(
    tmp_path: Path,
) -> None:
    """A peer knows them from the files' headers, before it downloads anything."""
    make(tmp_path, "llama")
    path = tmp_path / "config.json"
    config = path.read_text()
    for key, now, then, part in (
        ("intermediate_size", 96, 95, r"layers\.0\.mlp\.\w+\.weight"),
        ("vocab_size", 97, 96, r"(lm_head|embed_tokens)\.weight"),
    ):
        assert f'"{key}": {now}' in config
        path.write_text(config.replace(f'"{key}": {now}', f'"{key}": {then}'))
        with pytest.raises(UserError, match=rf"{part} has the shape .*{now}.*{then}"):
            engine_of(tmp_path)


def test_experts_that_are_missing_are_missed_before_a_weight_is_read(tmp_path: Path) -> None:
    tiny_families.make(tmp_path, "qwen3_moe")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    lacking = [name for name in tensors if "layers.2." in name and "experts.3." in name]
    assert lacking
    for name in lacking:
        del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"experts\.\w+ has the shape \(3, "):
        engine_of(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_stay_are_not_read_again(tied: bool, tmp_path: Path) -> None:
    make(tmp_path, "llama", tie_word_embeddings=tied)
    engine = engine_of(tmp_path)
    layer, embed = engine.spec.layer_bytes, engine.spec.embed_bytes
    head = engine.spec.head_bytes
    norm = head - embed  # a tied matrix that is held as the one is not read again as the other
    steps = [
        ((0, 2), 2 * layer + embed),
        ((0, 3), layer),
        ((1, 4), layer + (norm if tied else head)),
        ((1, 4), 0),
        ((0, 4), layer + (0 if tied else embed)),
        ((2, 3), 0),
        ((3, 4), layer + head),
    ]
    for (start, end), expected in steps:
        before = engine.config.store.bytes_read
        progress: list[tuple[int, int]] = []
        read = engine.load(start, end, lambda done, total, to=progress: to.append((done, total)))
        assert read == engine.config.store.bytes_read - before
        assert expected <= read <= 1.1 * expected
        assert engine.held == (start, end)
        if expected:
            assert progress[-1] == (expected, expected)
    engine.load(0, LAYERS)
    fresh = engine_of(tmp_path)
    fresh.load(0, LAYERS)
    assert sampled(engine) == sampled(fresh)


@pytest.mark.parametrize("family", ["llama", "llama4_text", "deepseek_v3", "qwen3_next", "lfm2"])
def test_each_layer_counts_with_the_bytes_that_it_takes(family: str, tmp_path: Path) -> None:
    tiny_families.make(tmp_path, family)
    engine = engine_of(tmp_path)
    spec, sizes = engine.spec, []
    for layer in range(spec.layers):
        progress: list[tuple[int, int]] = []
        engine.load(layer, layer + 1, lambda done, total, to=progress: to.append((done, total)))
        assert progress[-1][1] == stage_bytes(spec, layer, layer + 1, 0)
        sizes.append(weight_bytes(spec, layer, layer + 1))
        engine.unload()
    assert max(sizes) == spec.layer_bytes
    assert (len(set(sizes)) > 1) == (family != "llama"), sizes


def test_the_memory_that_is_named_would_do(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    with pytest.raises(UserError, match="--memory") as caught:
        engine_of(tmp_path, memory_bytes=1000)
    named = re.search(r"--memory ([0-9.]+)", str(caught.value))
    assert named is not None
    engine = engine_of(tmp_path, memory_bytes=int(float(named[1]) * 2**30))
    assert engine.layers_max >= 1
    engine.load(1, 2)
    assert engine.kv.free_tokens >= engine.kv_tokens_min


def test_a_range_that_does_not_fit_names_what_would_do(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    engine = engine_of(tmp_path, memory_bytes=300_000)
    engine.load(1, 2)
    with pytest.raises(UserError, match="--memory") as caught:
        engine.load(0, LAYERS)
    assert engine.held == (1, 2)
    named = re.search(r"--memory ([0-9.]+)", str(caught.value))
    assert named is not None
    engine_of(tmp_path, memory_bytes=int(float(named[1]) * 2**30)).load(0, LAYERS)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 1), (0, LAYERS + 1)])
def test_a_range_that_is_none_is_refused(start: int, end: int, tmp_path: Path) -> None:
    make(tmp_path, "llama")
    with pytest.raises(UserError, match="layers"):
        engine_of(tmp_path).load(start, end)


def test_a_load_that_fails_holds_nothing(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    engine = engine_of(tmp_path)
    engine.load(0, 2)
    (tmp_path / "model.safetensors").rename(tmp_path / "away")
    with pytest.raises(UserError, match="cannot be read"):
        engine.load(0, 3)
    assert engine.held == (0, 0)
    assert engine.kv.free_tokens == 0
    (tmp_path / "away").rename(tmp_path / "model.safetensors")
    engine.load(0, LAYERS)
    sampled(engine)


def test_made_up_weights_never_serve(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    engine, right = engine_of(tmp_path), engine_of(tmp_path)
    assert engine.load(0, LAYERS, made_up=True) == 0
    assert engine.config.store.bytes_read == 0
    assert engine.load(0, LAYERS) == right.load(0, LAYERS) > 0
    assert sampled(engine) == sampled(right)


def test_numbers_beyond_float16_are_named(tmp_path: Path) -> None:
    model = make(tmp_path, "llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = 1e5
    model.save_pretrained(tmp_path)
    store = WeightStore.open(str(tmp_path))
    config = EngineConfig(store=store, name="tiny", memory_bytes=64 << 20, dtype="float16")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight .* beyond float16"):
        Engine(config).load(1, 2)


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters.rope_type"),
        ({"hidden_act": "spiral"}, "hidden_act"),
    ],
)
def test_a_name_that_the_library_does_not_know_comes_with_its_place(
    said: dict[str, Any], place: str, tmp_path: Path
) -> None:
    words = f"transformers does not know 'spiral' as its {place}"
    assert words in words_for(said, tmp_path)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, "not understood: Missing required keys"),
        ({"rope_type": "linear", "factor": "4.0"}, "it says factor '4.0' of its rotary positions"),
        ({"rope_type": "yarn", "factor": -2.0}, "it says factor -2.0 of its rotary positions"),
        ({"rope_type": "default", "rope_theta": "1e6"}, "it says rope_theta '1e6'"),
        ({"rope_type": None}, "transformers looks for 'None' in vain"),
    ],
)
def test_rotary_settings_that_are_wrong_are_named(
    rope: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in words_for({"rope_parameters": rope}, tmp_path)


def words_for(said: dict[str, Any], directory: Path) -> str:
    """The refusal of a model whose configuration says ``said``."""
    make(directory, "llama")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    with pytest.raises(UserError) as caught:
        ModelLayout.of(WeightStore.open(str(directory)), "float32")
    return str(caught.value)
