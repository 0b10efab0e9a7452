"""GGUF files: ids as of transformers' own load, held in the bits of the file, refused in words."""

import random
import re
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dht.checkpoints.gguf_model import ARCHITECTURE
from dht.checkpoints.gguf_settings import settings_of
from dht.checkpoints.model_files import read_config
from dht.errors import UserError
from node.engine.engine import Engine, EngineConfig
from node.packed.ggml import BlockPacking
from node.packed.tensor import PackedTensor
from node.weights.gguf_names import Undone
from node.weights.store import WeightStore
from testing.gguf_files import of_kind, write_gguf
from testing.tiny_families import CONTEXT, VOCAB, make
from tests.unit.node.model.test_families import (
    NEW_TOKENS,
    Session,
    engine_of,
    greedy,
    listen,
    prompt_of,
    route,
    rows_of,
    serve,
    split,
)
from tests.unit.node.model.test_packed_checkpoints import bytes_of

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
"""Widths of whole blocks of 256 numbers."""
CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", {}, ("F32", "F16", "BF16")),
    ("llama, tied", {}, ("Q8_0", "Q4_0", "Q4_1")),
    ("llama", WIDE, ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ2_XS")),
    ("qwen2", {}, ("Q5_0", "Q5_1", "Q8_0")),
    ("qwen3", {"head_dim": 128}, ("Q8_0",)),
    ("qwen3_moe", {"moe_intermediate_size": 768}, ("Q4_0",)),
    ("qwen3_moe", {"moe_intermediate_size": 768}, ("Q8_0", "F16", "Q4_0")),
    ("gemma2", {}, ("Q8_0",)),
    ("gemma3", {}, ("Q4_0",)),
    ("phi3", {"vocab_size": 32064}, ("Q8_0",)),
    ("lfm2", {"conv_L_cache": 3}, ("Q8_0",)),
    ("nemotron", {}, ("Q8_0",)),
    ("mamba", {}, ("Q8_0",)),
]


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))


def written(
    directory: Path, family: str, shape: dict[str, Any], kinds: tuple[str, ...], **more: Any
) -> Path:
    make(directory / "plain", family, **{"intermediate_size": 64, **shape})
    write_gguf(directory / "plain", directory / "tiny.gguf", of_kind(*kinds), **more)
    return directory / "tiny.gguf"


def packed_weights(engine: Engine) -> list[PackedTensor]:
    return [
        weight.data
        for layer in engine.loaded.layers.values()
        for weight in layer.parameters()
        if isinstance(weight.data, PackedTensor)
    ]


def check(file: Path, chunks: tuple[int, ...] = (7, 64)) -> list[Engine]:
    """Engines with random ranges of the file's layers, whose answers are those of the checkpoint
    beside the file, with the file's numbers as transformers unpacks them."""
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(file.parent / "plain", dtype=torch.float32).eval()
    model.load_state_dict(theirs.state_dict())
    rng = random.Random(file.stat().st_size)
    layers = model.config.num_hidden_layers
    ranges = split(rng, layers)
    engines = [engine_of(file, start, end) for start, end in ranges]
    for engine in engines:
        of_layers = [bytes_of(layer) for layer in engine.loaded.layers.values()]
        assert max(of_layers) <= engine.spec.layer_bytes
    sessions = [
        Session(name=f"{n}/{chunk}", prompt=p, chunk=chunk, spans=route(rng, ranges, layers))
        for chunk in chunks
        for n, p in enumerate([prompt_of(tokens, seed=tokens) for tokens in (1, 13, 33)])
    ]
    serve(engines, sessions)
    assert len({tuple(session.answer) for session in sessions}) > 1
    for session in sessions:
        assert session.answer == greedy(model, session.prompt, NEW_TOKENS), session.name
    return engines


@pytest.mark.parametrize(("family", "shape", "kinds"), CASES)
def test_answers_are_those_of_transformers_own_load(
    family: str, shape: dict[str, Any], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    check(written(tmp_path, family, shape, kinds))


QWEN35: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "full_attention_interval", "num_attention_heads"), 4),
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
}


@pytest.mark.parametrize(("family", "more"), [("qwen3_5_text", {}), ("qwen3_5_moe_text", EXPERTS)])
def test_rows_and_columns_of_heads_move_packed(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Qwen3.5's files have the heads of linear attention in another order."""
    config = AutoConfig.for_model(family, **QWEN35, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file, of_kind("Q8_0"))
    engines = check(file)
    plain = [
        name
        for engine in engines
        for layer in engine.loaded.layers.values()
        for name, weight in layer.named_parameters()
        if weight.dim() > 1 and not isinstance(weight.data, PackedTensor)
    ]
    # One has rows of 4 numbers, the other is a single row.
    assert {name.split(".")[-2] for name in plain} <= {"conv1d", "shared_expert_gate"}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "lfm2"])
def test_layers_are_held_in_the_bits_of_the_file(family: str, tmp_path: Path) -> None:
    shape = {"moe_intermediate_size": 768} if family == "qwen3_moe" else {}
    file = written(tmp_path, family, shape, ("Q4_0",))
    engine = engine_of(file, 0, 4)
    published = sum(
        entry.size_bytes
        for name, entry in engine.config.store.tensors.items()
        if name.startswith("blk.")
    )
    assert sum(bytes_of(layer) for layer in engine.loaded.layers.values()) == published
    assert len(packed_weights(engine)) >= 4 * 4
    assert {weight.packing for weight in packed_weights(engine)} == {BlockPacking(kind="Q4_0")}


def test_random_weights_to_time_with_are_packed_alike(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", WIDE, ("Q4_K", "Q6_K"))
    store = WeightStore.open(str(file))
    engine = Engine(EngineConfig(store=store, name="tiny", memory_bytes=64 << 20))
    engine.load(1, 2, made_up=True)
    made_up = bytes_of(engine.loaded.layers[1])
    assert all(weight.dequantised().abs().max() < 10 for weight in packed_weights(engine))
    assert store.bytes_read == 0
    engine.load(1, 2)
    assert bytes_of(engine.loaded.layers[1]) == made_up


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_compute_with_the_same_bits(dtype: str, tmp_path: Path) -> None:
    file = written(tmp_path, "llama", {}, ("Q8_0",))
    config = EngineConfig(
        store=WeightStore.open(str(file)), name="tiny", memory_bytes=64 << 20, dtype=dtype
    )
    engine = Engine(config)
    engine.load(0, 4)
    [session] = [Session(name="a", prompt=prompt_of(9), chunk=64, spans=[(0, 0, 4)])]
    serve([engine], [session])
    assert len(session.answer) == NEW_TOKENS
    assert {weight.dtype for weight in packed_weights(engine)} == {getattr(torch, dtype)}


def test_numbers_beyond_the_dtype_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", {}, ("Q8_0",))
    entry = WeightStore.open(str(file)).tensors["blk.1.attn_v.weight"]
    with file.open("r+b") as opened:
        opened.seek(entry.begin)
        opened.write(np.float16(np.inf).tobytes())
    engine = engine_of(file, 0, 1)
    with pytest.raises(UserError, match="numbers beyond float32, or that are none"):
        engine.load(0, 2)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    whole = engine_of(written(tmp_path, "llama", {}, ("Q8_0",)), 0, 4)
    write_gguf(tmp_path / "plain", tmp_path / "part.gguf", of_kind("Q8_0"), splits=13)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) > 2
    engine = engine_of(parts[1], 0, 4)
    assert engine.spec.layer_bytes == whole.spec.layer_bytes
    sessions = [Session(name="a", prompt=prompt_of(9), chunk=64, spans=[(0, 0, 4)])]
    serve([engine], sessions)
    again = [Session(name="a", prompt=prompt_of(9), chunk=64, spans=[(0, 0, 4)])]
    serve([whole], again)
    assert sessions[0].answer == again[0].answer
    parts[2].unlink()
    with pytest.raises(UserError, match="cannot be read"):
        WeightStore.open(str(parts[0]))


def without(file: Path, name: str) -> None:
    """Write the file again without one of its tensors."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_name("less.gguf"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        if tensor.name != name:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_missing_tensor_is_named_before_weights_are_read(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", {}, ("Q8_0",))
    without(file, "blk.2.ffn_up.weight")
    store = WeightStore.open(str(tmp_path / "less.gguf"))
    with pytest.raises(UserError, match=r"no tensor for model\.layers\.2\.mlp\.up_proj\.weight"):
        Engine(EngineConfig(store=store, name="tiny", memory_bytes=64 << 20)).load(0, 1)
    assert store.bytes_read == 0


def test_shapes_that_the_configuration_does_not_tell_are_named(tmp_path: Path) -> None:
    """transformers reads no width of experts from a GGUF file of Qwen3, and takes 768."""
    file = written(tmp_path, "qwen3_moe", {"moe_intermediate_size": 64}, ("Q8_0",))
    words = r"experts\.gate_up_proj has the shape \(4, 128, 32\) in its files, and \(4, 1536, 32\)"
    with pytest.raises(UserError, match=words):
        engine_of(file, 0, 1)


def test_another_file_is_another_model(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", {}, ("Q8_0",))
    first = WeightStore.open(str(file))
    assert WeightStore.open(str(file)).root == first.root
    assert read_config(first.directory)[ARCHITECTURE] == "llama"
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        last = opened.read(1)[0]
        opened.seek(-1, 2)
        opened.write(bytes([last ^ 1]))
    assert WeightStore.open(str(file)).root != first.root


class Turned:
    """Changes weights in ways that move no whole rows."""

    def process(self, weights: np.ndarray, name: str, **_: Any) -> Any:
        changed = {"t": weights.T, "plus": weights + 1, "half": weights * 0.5}[name]
        return type("Done", (), {"weights": changed, "name": name})()


@pytest.mark.parametrize("name", ["t", "plus", "half"])
def test_what_is_no_order_of_rows_is_done_to_the_numbers(name: str) -> None:
    undone = Undone(Turned(), {each: each for each in ("t", "plus", "half")})
    weight = torch.randn(4, 6)
    undone.add_tensor(name, name, name, weight)
    made = undone.convert(name, model=torch.nn.Module(), config=None)[name]
    right = {"t": weight.t(), "plus": weight + 1, "half": weight * 0.5}[name]
    assert torch.equal(made, right)


def rope_of(kind: str, theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LAYERED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LLAMA3 = rope_of(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 4.0, 8.0]
FACTORED = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64}
LONGROPE = {
    "original_max_position_embeddings": 64,
    "sliding_window": None,
    "vocab_size": 32064,
    **rope_of("longrope", **FACTORED),
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
FACTORS = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
SAYINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "attention's scale": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 9}, {}, {}),
    "a linear factor of some layers": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 9, "num_hidden_layers": 6, **LAYERED},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {},
    ),
    "yarn": (
        "qwen2",
        rope_of("yarn", 1e6, factor=4.0, original_max_position_embeddings=64),
        {**YARN, "rope.scaling.original_context_length": 64},
        {},
    ),
    "longrope": (
        "phi3",
        LONGROPE,
        {"rope.scaling.original_context_length": 64},
        FACTORS,
    ),
    "divisors": ("llama", LLAMA3, {}, {"rope_freqs.weight": []}),
    "another base": ("stablelm", rope_of("default", 5e5, partial_rotary_factor=0.5), {}, {}),
    "a factor alone": (
        "llama",
        rope_of("linear", factor=4.0),
        {"rope.scaling.factor": 4.0},
        {},
    ),
    "no width of rotations": (
        "stablelm",
        rope_of("default", partial_rotary_factor=1.0),
        {"rope.dimension_count": None},
        {},
    ),
    "queries, keys and values together": ("bloom", {}, {}, {}),
    "a head's width": ("qwen3", {"head_dim": 24}, {"attention.key_length": 24}, {}),
    "experts' width": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True},
        {"expert_feed_forward_length": 24, "expert_weights_norm": True},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SAYINGS))
def test_logits_are_those_of_the_checkpoint_that_the_file_was_made_of(
    name: str, tmp_path: Path
) -> None:
    """At positions within and beyond the original context, whatever a library reads of the file."""
    family, shape, stated, beside = SAYINGS[name]
    config = AutoConfig.for_model(family, **{**SMALL, **shape})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "plain")
    if "rope_freqs.weight" in beside:
        plain = 1e4 ** (-torch.arange(0, 8, 2) / 8)
        beside = {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).tolist()}
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file, of_kind("F32"), stated=stated, beside=beside)
    layers = config.num_hidden_layers
    engine = engine_of(file, 0, layers)
    logits: list[torch.Tensor] = []
    listen(engine, logits)
    for tokens in (40, 150):
        logits.clear()
        ids = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(tokens))
        prompt = tuple(ids.tolist())
        session = Session(name=name, prompt=prompt, chunk=64, spans=[(0, 0, layers)])
        serve([engine], [session])
        wanted = rows_of(model, prompt, session.answer)
        assert (torch.cat(logits) - wanted).abs().max() < 1e-3 * wanted.abs().max()


UNREAD: dict[str, dict[str, Any]] = {
    "rope.scaling.type": {"rope.scaling.type": "spiral"},
    "rope.scaling.yarn_log_multiplier": {**YARN, "rope.scaling.yarn_log_multiplier": 0.1},
    "rope.dimension_count": {"rope.dimension_count": 4},
    "attention.scale": {"attention.scale": 0.7},
    "attention.value_length": {"attention.value_length": 16},
    "expert_count": {"expert_count": 4, "expert_used_count": 2},
    "attention.sliding_window": {"attention.sliding_window": 16},
    "final_logit_softcapping": {"final_logit_softcapping": 30.0},
    "attention.spiral": {"attention.spiral": 1},
    "rope_freqs.weight": YARN,
}


def test_what_a_file_leaves_out_is_never_another_models(tmp_path: Path) -> None:
    """transformers has values of its own for both."""
    config = AutoConfig.for_model("qwen3", **SMALL, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    file, epsilon = tmp_path / "tiny.gguf", "attention.layer_norm_rms_epsilon"
    write_gguf(tmp_path / "plain", file, of_kind("F32"), stated={"rope.freq_base": None})
    assert WeightStore.open(str(file)).config["rope_parameters"]["rope_theta"] == 1e4
    write_gguf(tmp_path / "plain", file, of_kind("F32"), stated={epsilon: None})
    with pytest.raises(UserError, match="does not say 'attention"):
        WeightStore.open(str(file))


def test_a_width_that_no_attribute_has_is_that_of_the_tensors() -> None:
    made = settings_of(
        "f",
        {"model_type": "bloom", "hidden_size": 32, "n_head": 4},
        {
            "feed_forward_length": 128,
            "attention.head_count": 4,
            "embedding_length": 32,
            "attention.layer_norm_epsilon": 1e-5,
        },
        (),
        lambda name: [],
    )
    assert made["layer_norm_epsilon"] == 1e-5
    assert "feed_forward_length" not in made


@pytest.mark.parametrize("key", list(UNREAD))
def test_what_is_not_read_is_refused_by_name(key: str, tmp_path: Path) -> None:
    make(tmp_path / "plain", "llama")
    beside = {"rope_freqs.weight": [1.0] * 4} if key == "rope_freqs.weight" else {}
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file, of_kind("F32"), stated=UNREAD[key], beside=beside)
    with pytest.raises(UserError, match=f"cannot be served: its file says {re.escape(key)}"):
        WeightStore.open(str(file))


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path / "plain", "llama")
    for name, is_known in (
        ("blk.1.attn_sinks.weight", False),
        ("blk.4.nextn.eh_proj.weight", True),
    ):
        file = tmp_path / f"{is_known}.gguf"
        write_gguf(tmp_path / "plain", file, of_kind("F32"), beside={name: [1.0] * 4})
        if is_known:
            engine_of(file, 0, 1)
            continue
        with pytest.raises(UserError, match=f"no place for the tensor {re.escape(name)}"):
            engine_of(file, 0, 1)


@pytest.mark.parametrize(("layers", "scalar"), [(46, 8), (26, None)])
def test_the_scale_of_an_unnamed_size_is_that_of_a_known_one(
    layers: int, scalar: int | None, tmp_path: Path
) -> None:
    """Published files do not say the scale: llama.cpp goes by the number of layers."""
    shape = {"head_dim": 16, "num_hidden_layers": layers, "query_pre_attn_scalar": 8}
    config = AutoConfig.for_model("gemma2", **{**SMALL, **shape})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "plain", file, of_kind("F32"), stated={"attention.scale": None})
    if scalar is None:
        with pytest.raises(UserError, match=r"does not say attention\.scale"):
            WeightStore.open(str(file))
    else:
        assert WeightStore.open(str(file)).config["query_pre_attn_scalar"] == scalar
