"""Packed checkpoints: ids as of their numbers, held in their own bits, refused in words."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from dht.errors import UserError
from node.engine.engine import Engine, EngineConfig
from node.packed.tensor import PackedTensor
from node.weights.store import WeightStore
from testing.packed_checkpoints import BLOCK, FORMATS, write
from testing.tiny_families import make
from tests.unit.node.model.test_families import (
    NEW_TOKENS,
    Session,
    engine_of,
    greedy,
    prompt_of,
    route,
    serve,
    split,
)

LAYERS = 4
SHAPE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "moe_intermediate_size"), 64),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    "intermediate_size": 128,
    "v_head_dim": 16,
}
"""Widths that all formats' blocks divide."""
CASES = [
    *((name, "gpt_oss" if kind.of_experts else "qwen3_moe") for name, kind in FORMATS.items()),
    ("fp8", "llama, tied"),
    ("fp8, ragged blocks", "deepseek_v3"),
    ("compressed-tensors, int4", "deepseek_v3"),
    ("gptq, act-order", "llama"),
]
THEIRS_UNREAD = ("ragged", "with zeros", "nvfp4", "gptq", "awq")
"""What transformers cannot load here: blocks that do not divide a matrix, experts with zero points
or with a number for the whole, formats that need gptqmodel."""


def theirs(name: str, packed: Path, meant: Path) -> Any:
    """The model as ``transformers`` dequantises it, or where it cannot, with the numbers meant."""
    if any(word in name for word in THEIRS_UNREAD):
        return AutoModelForCausalLM.from_pretrained(meant, dtype=torch.float32).eval()
    if name.startswith("compressed"):
        pytest.importorskip("compressed_tensors")
    said = {key: value for key, value in FORMATS[name].settings.items() if key != "quant_method"}
    chosen = {
        "fp8": lambda: FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK),
        "mxfp4": lambda: Mxfp4Config(dequantize=True),
        "compressed-tensors": lambda: CompressedTensorsConfig(**said, dequantize=True),
    }[FORMATS[name].settings["quant_method"]]()
    return AutoModelForCausalLM.from_pretrained(
        packed, dtype=torch.float32, quantization_config=chosen
    ).eval()


@pytest.mark.parametrize(("name", "family"), CASES)
def test_answers_are_those_of_the_numbers(name: str, family: str, tmp_path: Path) -> None:
    make(tmp_path / "plain", family, **SHAPE)
    packed = tmp_path / "packed"
    write(tmp_path / "plain", FORMATS[name], packed, tmp_path / "meant")
    rng = random.Random(name)
    ranges = split(rng, LAYERS)
    engines = [engine_of(packed, start, end) for start, end in ranges]
    for engine in engines:
        of_layers = [bytes_of(layer) for layer in engine.loaded.layers.values()]
        assert max(of_layers) <= engine.spec.layer_bytes
    model = theirs(name, packed, tmp_path / "meant")
    prompts = [prompt_of(tokens, seed=tokens) for tokens in (1, 13, 33)]
    sessions = [
        Session(name=f"{n}/{chunk}", prompt=p, chunk=chunk, spans=route(rng, ranges, LAYERS))
        for chunk in (7, 64)
        for n, p in enumerate(prompts)
    ]
    serve(engines, sessions)
    for session in sessions:
        assert session.answer == greedy(model, session.prompt, NEW_TOKENS), session.name


def bytes_of(module: torch.nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(
        part.held_bytes if isinstance(part, PackedTensor) else part.numel() * part.itemsize
        for part in (tensor.data for tensor in tensors)
    )


@pytest.mark.parametrize(("name", "family"), CASES)
def test_layers_are_held_in_the_bits_of_the_files(name: str, family: str, tmp_path: Path) -> None:
    make(tmp_path / "plain", family, **SHAPE)
    write(tmp_path / "plain", FORMATS[name], tmp_path / "packed")
    engine = engine_of(tmp_path / "packed", 0, LAYERS)
    entries = engine.config.store.tensors.items()
    published = sum(
        entry.size_bytes
        for key, entry in entries
        if ".layers." in key and not key.endswith((".g_idx", "_shape"))
    )
    layers = engine.loaded.layers.values()
    held = sum(bytes_of(layer) for layer in layers)
    # Tiny groups weigh more than published ones: zero points take a byte here, half of one there,
    # and a number for the whole matrix is kept per row.
    spare = sum(
        part.numel() * part.element_size()
        for layer in layers
        for weight in layer.parameters()
        if isinstance(weight.data, PackedTensor)
        for key, part in weight.data.parts.items()
        if key in ("zeros", "factors", "order")
    )
    assert held <= 1.1 * published + spare
    packed = [
        weight.data
        for layer in layers
        for weight in layer.parameters()
        if isinstance(weight.data, PackedTensor)
    ]
    assert len(packed) >= 2 * LAYERS


def test_random_weights_to_time_with_are_packed_alike(tmp_path: Path) -> None:
    make(tmp_path / "plain", "llama", **SHAPE)
    write(tmp_path / "plain", FORMATS["gptq, act-order"], tmp_path / "packed")
    store = WeightStore.open(str(tmp_path / "packed"))
    engine = Engine(EngineConfig(store=store, name="tiny", memory_bytes=64 << 20))
    engine.load(1, 2, made_up=True)
    made_up = bytes_of(engine.loaded.layers[1])
    assert store.bytes_read == 0
    engine.load(1, 2)
    assert bytes_of(engine.loaded.layers[1]) == made_up


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_compute_with_the_same_bits(dtype: str, tmp_path: Path) -> None:
    make(tmp_path / "plain", "qwen3_moe", **SHAPE)
    write(
        tmp_path / "plain",
        FORMATS["compressed-tensors, int4"],
        tmp_path / "packed",
        tmp_path / "meant",
    )
    logits = []
    for name in ("packed", "meant"):
        store = WeightStore.open(str(tmp_path / name))
        engine = Engine(EngineConfig(store=store, name="tiny", memory_bytes=64 << 20, dtype=dtype))
        engine.load(0, LAYERS)
        assert engine.spec.layer_bytes < 100_000 or name == "meant"
        hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            layer = engine.loaded.layers[0]
            attention: Any = layer.self_attn
            logits.append(attention.q_proj(hidden.to(store_dtype(dtype))).float())
    torch.testing.assert_close(*logits, atol=0.02, rtol=0.02)


def store_dtype(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[name]


# What is wrong with files and configurations is said in one line, before memory is spent


def settings(**changed: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] = {**config["quantization_config"], **changed}
        path.write_text(json.dumps(config))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        found = load_file(directory / "model.safetensors")
        change(found)
        save_file(found, directory / "model.safetensors")

    return rewrite


def dropped(ending: str) -> Callable[[Path], None]:
    def change(found: dict[str, torch.Tensor]) -> None:
        del found[next(name for name in found if name.endswith(ending))]

    return tensors(change)


def replaced(ending: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(found: dict[str, torch.Tensor]) -> None:
        name = next(name for name in found if name.endswith(ending))
        found[name] = make(found[name]).contiguous()

    return tensors(change)


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def no_method(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": 7}))


def plain(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))


HEAD = "lm_head.weight"
SMOOTHING = "model.layers.0.self_attn.q_proj.pre_quant_scale"
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "unknown method": ("fp8", settings(quant_method="quip" * 99), "by the method 'quip"),
    "no method": ("fp8", no_method, "names no quant_method"),
    "missing scales": ("fp8", dropped("weight_scale_inv"), "scales .* are missing"),
    "missing exponents": ("mxfp4", dropped("down_proj_scales"), "scales .* are missing"),
    "missing zero points": ("gptq", dropped("qzeros"), "zeros .* are missing"),
    "wrong block size": ("fp8", settings(weight_block_size=[16, 64]), "blocks of 16 x 64"),
    "block size of words": ("fp8", settings(weight_block_size="big"), "block big"),
    "block size of nothing": ("fp8", settings(weight_block_size=[0, 32]), "block is 0"),
    "block beyond bounds": ("fp8", settings(weight_block_size=[1, 1 << 40]), "block is"),
    "scales of another shape": ("fp8", replaced("_scale_inv", lambda s: s[:1]), "do not fit"),
    "exponents of another shape": ("mxfp4", replaced("_scales", lambda s: s[..., :1]), "fit"),
    "five bits": ("gptq", settings(bits=5), "bits 5"),
    "bits of words": ("awq", settings(bits="4"), "bits is 4"),
    "another layout": ("awq", settings(version="gemv"), "version gemv"),
    "no zero points": ("awq", settings(zero_point=False), "zero_point False"),
    "another algorithm": ("modelopt, nvfp4", settings(quant_algo="W4A16_AWQ"), "W4A16_AWQ; known"),
    "weights rounded where they are used": (
        "compressed-tensors, fp8",
        tensors(lambda found: found.update({f"{HEAD}_scale": torch.ones(101, 1)})),
        f"{HEAD}_scale rounds a weight that is not packed",
    ),
    "no groups": ("compressed-tensors, int4", settings(config_groups=None), "no config_groups"),
    "sparse": (
        "compressed-tensors, int4",
        settings(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse",
    ),
    "truncated": ("fp8", truncated, "download it again"),
    "codes without a method": ("awq", plain, "hold no tensor"),
    "floats without a method": ("fp8", plain, "names no quantization_config"),
    "what changes a weight in a way that nobody told": (
        "awq",
        tensors(lambda found: found.update({SMOOTHING: torch.ones(64)})),
        f"{SMOOTHING} changes a packed weight",
    ),
}


def opened(directory: Path) -> Engine:
    store = WeightStore.open(str(directory))
    return Engine(EngineConfig(store=store, name="tiny", memory_bytes=64 << 20))


@pytest.mark.parametrize("case", list(DAMAGE))
def test_what_is_wrong_is_said_before_memory_is_spent(case: str, tmp_path: Path) -> None:
    name, damage, words = DAMAGE[case]
    make(tmp_path / "plain", "gpt_oss" if name == "mxfp4" else "llama", **SHAPE)
    write(tmp_path / "plain", FORMATS[name], tmp_path / "packed")
    damage(tmp_path / "packed")
    with pytest.raises(UserError, match=words) as caught:
        opened(tmp_path / "packed")
    assert len(str(caught.value)) < 700 + 2 * len(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ending", "change", "words"),
    [
        ("g_idx", lambda groups: groups * 0, "different sizes"),
        ("g_idx", lambda groups: groups + 1000, "not there"),
        ("g_idx", lambda groups: groups - 1000, "not there"),
    ],
)
def test_numbers_that_point_elsewhere_are_refused(
    ending: str, change: Callable[[torch.Tensor], torch.Tensor], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "plain", "llama", **SHAPE)
    write(tmp_path / "plain", FORMATS["gptq, act-order"], tmp_path / "packed")
    replaced(ending, change)(tmp_path / "packed")
    with pytest.raises(UserError, match=words):
        engine_of(tmp_path / "packed", 0, LAYERS)


@pytest.mark.parametrize(
    ("name", "ending", "byte"), [("fp8", ".weight", 0x7F), ("mxfp4", "_scales", 255)]
)
def test_codes_of_nan_are_refused(name: str, ending: str, byte: int, tmp_path: Path) -> None:
    make(tmp_path / "plain", "gpt_oss" if name == "mxfp4" else "llama", **SHAPE)
    write(tmp_path / "plain", FORMATS[name], tmp_path / "packed")

    def spoil(found: dict[str, torch.Tensor]) -> None:
        wanted = torch.float8_e4m3fn if name == "fp8" else torch.uint8
        key = next(k for k, t in found.items() if k.endswith(ending) and t.dtype is wanted)
        found[key].view(torch.uint8).view(-1)[0] = byte

    tensors(spoil)(tmp_path / "packed")
    with pytest.raises(UserError, match=r"NaN|beyond"):
        engine_of(tmp_path / "packed", 0, LAYERS)
