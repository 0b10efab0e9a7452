"""What strangers say of packed weights is taken or refused in words, and costs no memory."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.errors import UserError
from node.device.tensors import STORED_DTYPES
from node.packed import formats
from node.packed.formats import FORMATS, stored_weights
from node.packed.stored import settings_of
from node.packed.tensor import PackedTensor
from testing.packed_checkpoints import FORMATS as PUBLISHED
from testing.packed_checkpoints import awq, fp8_blocks, fp8_rows, gptq, grouped, int32s
from tests.examples import examples

ENDINGS = (
    ".weight", ".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_packed",
    ".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".qweight", ".qzeros", ".scales",
    ".g_idx", "_blocks", "_scales",
)  # fmt: skip
KEYS = ("quant_method", "weight_block_size", "bits", "group_size", "desc_act", "version")
GROUPS = st.fixed_dictionaries(
    {"weights": st.dictionaries(
        st.sampled_from(["num_bits", "type", "group_size", "block_structure"]),
        st.sampled_from([4, 8, 3, 0, -1, 1 << 70, "int", "float", [128, 128], None]),
    )}
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]


ENTRIES = st.builds(
    Entry,
    st.sampled_from(list(STORED_DTYPES)),
    st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 64, 1 << 40]), max_size=4).map(tuple),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    method=st.sampled_from([*FORMATS, "other"]),
    settings=st.dictionaries(st.sampled_from(KEYS), ANYTHING),
    groups=ANYTHING | st.dictionaries(st.text(max_size=2), GROUPS, max_size=3),
    entries=st.dictionaries(st.sampled_from(ENDINGS), ENTRIES),
)
@examples(75)
def test_whatever_is_said_is_taken_or_refused(
    method: str, settings: dict[str, Any], groups: Any, entries: dict[str, Entry]
) -> None:
    said = {"config_groups": groups, "quant_method": method, **settings}
    tensors = {f"layers.0.proj{ending}": entry for ending, entry in entries.items()}
    try:
        stored = stored_weights("m", {"quantization_config": said}, tensors)
    except UserError as error:
        stored, words = {}, str(error)
    else:
        words = "m cannot be served"
    assert words.startswith("m cannot be served")
    assert len(words) < 1000
    for weight in stored.values():
        assert set(weight.names.values()) <= tensors.keys()
        if weight.make is not None:
            assert isinstance(weight.on_meta(tensors), PackedTensor)


def test_settings_are_found_where_they_are() -> None:
    assert settings_of({}) is None
    assert settings_of({"text_config": 3}) is None
    assert settings_of({"text_config": {"quantization_config": {"bits": 4}}}) == {"bits": 4}
    assert settings_of({"compression_config": {"a": 1}}) == {"a": 1}
    assert settings_of({"quantization_config": [1]}) == {}


def test_mixed_bits_are_told_apart_by_their_scales() -> None:
    groups = {
        str(bits): {"weights": {"num_bits": bits, "type": "int", "group_size": 16}}
        for bits in (4, 8)
    }
    tensors = {
        "a.weight_packed": Entry("I32", (4, 8)),
        "a.weight_scale": Entry("BF16", (4, 4)),
        "b.weight_packed": Entry("I32", (4, 8)),
        "b.weight_scale": Entry("BF16", (4, 2)),
    }
    said = {"quant_method": "compressed-tensors", "config_groups": groups}
    stored = stored_weights("m", {"quantization_config": said}, tensors)
    assert stored["a.weight"].on_meta(tensors).shape == (4, 64)
    assert stored["b.weight"].on_meta(tensors).shape == (4, 32)
    tensors["b.weight_scale"] = Entry("BF16", (4, 3))
    with pytest.raises(UserError, match="bits"):
        stored_weights("m", {"quantization_config": said}, tensors)


@pytest.mark.parametrize("name", ["gptq", "gptq, 8 bits", "gptq, act-order", "awq"])
def test_codes_are_brought_into_order_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    published = PUBLISHED[name]
    parts, meant = published.pack(weight)
    tensors = {f"proj{ending}": part for ending, part in parts.items()}
    kinds = {torch.int32: "I32", torch.float16: "F16"}
    entries = {n: Entry(kinds[t.dtype], tuple(t.shape)) for n, t in tensors.items()}
    config = {"quantization_config": published.settings}
    for numbers in (formats.PIECE_NUMBERS, 1):
        monkeypatch.setattr(formats, "PIECE_NUMBERS", numbers)
        stored = stored_weights("m", config, entries)["proj.weight"]
        made = stored.weight(tensors)
        assert isinstance(made, PackedTensor)
        assert torch.allclose(made.dequantised(), meant, atol=1e-6)


def packed_as(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The numbers of the only weight among ``tensors``. Raises UserError, ValueError."""
    named = {f"proj{ending}": part for ending, part in tensors.items()}
    kinds = {dtype: name for name, dtype in STORED_DTYPES.items()}
    entries = {n: Entry(kinds[t.dtype], tuple(t.shape)) for n, t in named.items()}
    stored = stored_weights("m", {"quantization_config": settings}, entries)["proj.weight"]
    made = stored.weight(named)
    assert isinstance(made, PackedTensor)
    return made.dequantised().float()


WIDE = torch.randn(64, 192, generator=torch.Generator().manual_seed(0))
"""A matrix whose columns groups of 128 do not divide."""


def ragged(group: int) -> tuple[torch.Tensor, ...]:
    """Codes, scales, zero points and numbers of WIDE, the last group of which is not whole."""
    whole = torch.nn.functional.pad(WIDE, (0, -WIDE.shape[1] % group))
    codes, scales, zeros, _ = grouped(whole, 4, group, even=False)
    zeros = zeros.clamp_min(1)
    spread = torch.arange(WIDE.shape[1]) // group
    codes = codes[:, : WIDE.shape[1]].contiguous()
    return codes, scales, zeros, (codes - zeros[:, spread]) * scales[:, spread]


def as_gptq(group: int, order: torch.Tensor | None = None) -> tuple[Any, torch.Tensor]:
    codes, scales, zeros, plain = ragged(group)
    more = {}
    if order is not None:
        codes, plain = codes[:, order].contiguous(), plain[:, order]
        more = {".g_idx": (order // group).to(torch.int32)}
    return {
        ".qweight": int32s(codes, 4).t().contiguous(),
        ".qzeros": int32s((zeros - 1).t().contiguous(), 4),
        ".scales": scales.t().half().contiguous(),
        **more,
    }, plain


def as_awq(group: int) -> tuple[Any, torch.Tensor]:
    codes, scales, zeros, plain = ragged(group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(values: torch.Tensor) -> torch.Tensor:
        return int32s(values.t().reshape(values.shape[1], -1, 8)[..., order].flatten(1), 4)

    scales = scales.t().half().contiguous()
    return {".qweight": mixed(codes), ".qzeros": mixed(zeros), ".scales": scales}, plain


def as_compressed(group: int) -> tuple[Any, torch.Tensor]:
    codes, scales, _, _ = ragged(group)
    spread = torch.arange(WIDE.shape[1]) // group
    plain = (codes - 8) * scales[:, spread]
    return {".weight_packed": int32s(codes, 4), ".weight_scale": scales.half()}, plain


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
}
SHUFFLED = torch.randperm(192, generator=torch.Generator().manual_seed(1))
RAGGED = {
    "fp8, by default 128 x 128": ({"quant_method": "fp8"}, fp8_blocks(WIDE, 128, 128)),
    "gptq": ({**GPTQ, "group_size": 128}, as_gptq(128)),
    "gptq, by default 128": (GPTQ, as_gptq(128)),
    "gptq, act-order": ({**GPTQ, "group_size": 128, "desc_act": True}, as_gptq(128, SHUFFLED)),
    "gptq, 80": ({**GPTQ, "group_size": 80}, as_gptq(80)),
    "awq": ({**AWQ, "group_size": 128}, as_awq(128)),
    "awq, by its other name": ({**AWQ, "q_group_size": 80}, as_awq(80)),
    "compressed-tensors": (COMPRESSED, as_compressed(128)),
}


@pytest.mark.parametrize("name", list(RAGGED))
def test_a_grid_that_does_not_divide_the_matrix_is_the_formats_own(name: str) -> None:
    settings, (tensors, plain) = RAGGED[name]
    assert torch.allclose(packed_as(settings, tensors), plain, atol=1e-6)


def as_modelopt(rows: int, columns: int, *, spread: bool = False) -> tuple[Any, torch.Tensor]:
    """FP8 in blocks as Model Optimizer names them; ``spread`` as it shapes its own."""
    tensors, plain = fp8_blocks(WIDE, rows, columns)
    scales = tensors[".weight_scale_inv"]
    scales = scales[:, None, :, None] if spread else scales
    return {".weight": tensors[".weight"], ".weight_scale": scales}, plain


def as_mxfp8() -> tuple[Any, torch.Tensor]:
    codes = WIDE.to(torch.float8_e4m3fn)
    exponents = torch.arange(64 * 6, dtype=torch.uint8).view(64, 6) % 8 + 123
    spread = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {".weight": codes, ".weight_scale": exponents}, codes.float() * spread


MODELOPT: dict[str, tuple[dict[str, Any], tuple[Any, torch.Tensor]]] = {
    "blocks of its own": ({"quant_algo": "fp8_pb_wo"}, as_modelopt(128, 128, spread=True)),
    "the same, flat": ({"quantization": {"quant_algo": "FP8_PB_WO"}}, as_modelopt(128, 128)),
    "among others": ({"quant_algo": "MIXED_PRECISION"}, as_modelopt(128, 128, spread=True)),
    "blocks that are named": (
        {"quant_algo": "FP8", "weight_block_size": [64, 64]},
        as_modelopt(64, 64),
    ),
    "groups with an exponent": ({"quant_algo": "MXFP8"}, as_mxfp8()),
    "rows": ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, as_modelopt(1, 192)),
}


@pytest.mark.parametrize("name", list(MODELOPT))
def test_fp8_of_model_optimizer_lies_in_the_grid_of_its_algorithm(name: str) -> None:
    said, (tensors, plain) = MODELOPT[name]
    settings = {"quant_method": "modelopt", **said}
    assert torch.allclose(packed_as(settings, tensors), plain, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_zero_point_of_0_borrowed_when_it_was_written_comes_back(bits: int) -> None:
    most = (1 << bits) - 1
    zeros = torch.tensor([0, most, 0, 0, 3, 1, most, 0])[:, None]
    codes = torch.arange(8 * 32).view(8, 32) % (most + 1)
    ones = sum(1 << at for at in range(0, 32, bits))
    tensors = {
        ".qweight": int32s(codes, bits).t().contiguous(),
        ".qzeros": int32s(zeros.t().contiguous(), bits) - ones,
        ".scales": torch.ones(1, 8, dtype=torch.float16),
    }
    for layout, shift in (("gptq", 0), ("gptq_v2", ones)):
        settings = {**GPTQ, "bits": bits, "group_size": 32, "checkpoint_format": layout}
        made = packed_as(settings, {**tensors, ".qzeros": tensors[".qzeros"] + shift})
        assert torch.equal(made, (codes - zeros).float())


def test_experts_in_fp8_may_be_stacked() -> None:
    made = [fp8_blocks(weight, 32, 64) for weight in (WIDE, WIDE * 2)]
    tensors = {
        "experts.gate_up_proj": torch.stack([parts[".weight"] for parts, _ in made]),
        "experts.gate_up_proj_scale_inv": torch.stack([p[".weight_scale_inv"] for p, _ in made]),
    }
    kinds = {dtype: name for name, dtype in STORED_DTYPES.items()}
    entries = {n: Entry(kinds[t.dtype], tuple(t.shape)) for n, t in tensors.items()}
    said = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    stored = stored_weights("m", {"quantization_config": said}, entries)
    weight = stored["experts.gate_up_proj"].weight(tensors)
    assert isinstance(weight, PackedTensor)
    assert torch.allclose(weight.dequantised(), torch.stack([plain for _, plain in made]))
    assert "experts.gate_up_proj_scale_inv" not in stored


@pytest.mark.parametrize("bits", [4, 8])
def test_one_scale_may_have_one_zero_point(bits: int) -> None:
    """A zero point of a whole matrix is not packed (compressed-tensors)."""
    codes = torch.arange(8 * 32).view(8, 32) % (1 << bits)
    tensors = {
        ".weight_packed": int32s(codes, bits),
        ".weight_scale": torch.full((1,), 0.5),
        ".weight_zero_point": torch.tensor([3], dtype=torch.int8),
    }
    weights = {"num_bits": bits, "type": "int", "strategy": "tensor", "symmetric": False}
    settings = {**COMPRESSED, "config_groups": {"0": {"weights": weights}}}
    wanted = (codes - (1 << bits - 1) - 3) * 0.5
    assert torch.equal(packed_as(settings, tensors), wanted)


def dense(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the last axis in int32s bit after bit, the lowest first."""
    ones = (codes[..., None] >> torch.arange(bits)) & 1
    words = ones.reshape(*codes.shape[:-1], -1, 32)
    whole = (words << torch.arange(32)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("even", [True, False])
def test_codes_of_other_bits_lie_one_behind_the_other(bits: int, even: bool) -> None:
    """Those of compressed-tensors begin in one int32 and end in the next."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (64, 96), generator=generator)
    zeros = torch.randint(0, 1 << bits, (64, 3), generator=generator)
    half = 1 << (bits - 1)
    tensors = {".weight_packed": dense(codes, bits), ".weight_scale": torch.full((64, 3), 0.5)}
    if not even:
        tensors[".weight_zero_point"] = dense(zeros.t(), bits).t().contiguous()
    zeros = torch.full_like(zeros, half) if even else zeros
    weights = {"num_bits": bits, "type": "int", "group_size": 32, "symmetric": even}
    settings = {**COMPRESSED, "config_groups": {"0": {"weights": weights}}}
    wanted = (codes - zeros.repeat_interleave(32, 1)) * 0.5
    assert torch.equal(packed_as(settings, tensors), wanted)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq_in_two_and_three_bits(bits: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (32, 64), generator=generator)
    zeros = torch.randint(1, 1 << bits, (32, 2), generator=generator)
    tensors = {
        ".qweight": dense(codes, bits).t().contiguous(),
        ".qzeros": dense((zeros - int(layout == "gptq")).t(), bits),
        ".scales": torch.full((2, 32), 0.5, dtype=torch.float16),
    }
    settings = {**GPTQ, "bits": bits, "group_size": 32, "checkpoint_format": layout}
    wanted = (codes - zeros.repeat_interleave(32, 1)) * 0.5
    assert torch.equal(packed_as(settings, tensors), wanted)


DYNAMIC = {
    **GPTQ,
    "group_size": 64,
    "dynamic": {
        "-:.*gate.*": {},
        "+:.*down.*": {"bits": 8, "group_size": 32},
        ".*up.*": {"group_size": 32},
    },
}
"""Settings by matrix as GPTQModel writes them."""
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 64,
    "data_type": "int",
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
    "extra_config": {
        "mlp.gate": {"bits": 16, "data_type": "float"},
        ".*down.*": {"bits": 8, "group_size": 32, "act_bits": None},
        ".*up.*": {"group_size": 32},
    },
}


@pytest.mark.parametrize("said", [DYNAMIC, AUTO_ROUND], ids=["GPTQModel", "AutoRound"])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32), (4, 32)])
def test_matrices_with_settings_of_their_own_are_told_by_their_shapes(
    said: dict[str, Any], bits: int, group: int
) -> None:
    tensors, plain = gptq(WIDE, bits, group)
    assert torch.allclose(packed_as(said, tensors), plain, atol=1e-6)


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize(
    ("packing", "layout"),
    [
        (None, "gptq"),
        ("auto_round:auto_gptq", "gptq"),
        ("auto_round:gptq", "gptq"),
        ("auto_round", "gptq_v2"),
        ("auto_round:auto_awq", "awq"),
    ],
)
def test_autoround_packs_as_others_do(packing: str | None, layout: str, method: str) -> None:
    said = {**AUTO_ROUND, "quant_method": method, "packing_format": packing, "extra_config": None}
    tensors, plain = awq(WIDE, 64) if layout == "awq" else gptq(WIDE, 4, 64)
    if layout == "gptq_v2":
        tensors[".qzeros"] += sum(1 << at for at in range(0, 32, 4))
    assert torch.allclose(packed_as(said, tensors), plain, atol=1e-6)


def test_rows_of_fp8_may_be_packed_by_fbgemm() -> None:
    tensors, plain = fp8_rows(WIDE)
    said = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    assert torch.equal(packed_as(said, tensors), plain)


def test_blocks_may_be_named_in_one_word() -> None:
    parts, plain = fp8_blocks(WIDE, 32, 64)
    tensors = {".weight": parts[".weight"], ".weight_scale": parts[".weight_scale_inv"]}
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "32x64"}
    settings = {**COMPRESSED, "config_groups": {"0": {"weights": weights}}}
    assert torch.allclose(packed_as(settings, tensors), plain)


REFUSED = {
    "another group": ({**GPTQ, "group_size": 64}, as_gptq(128)),
    "half the groups": ({**AWQ, "group_size": 48}, as_awq(96)),
    "blocks that nobody names": (
        {"quant_method": "fp8", "weight_block_size": None},
        fp8_blocks(WIDE, 64, 64),
    ),
    "other blocks": ({"quant_method": "fp8"}, fp8_blocks(WIDE, 64, 64)),
    "modelopt's blocks": (
        {"quant_method": "modelopt"},
        (
            dict(
                zip((".weight", ".weight_scale"), fp8_blocks(WIDE, 64, 64)[0].values(), strict=True)
            ),
        ),
    ),
    "another algorithm": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        as_modelopt(1, 192),
    ),
    "an order that is not there": ({**GPTQ, "group_size": 128, "desc_act": True}, as_gptq(128)),
    "another layout": ({**GPTQ, "group_size": 128, "checkpoint_format": "marlin"}, as_gptq(128)),
    "settings of no matrix": (
        {**GPTQ, "group_size": 64, "dynamic": {"+:proj": {"bits": 8}}},
        as_gptq(128),
    ),
    "settings that are none": ({**GPTQ, "dynamic": ["proj"]}, as_gptq(128)),
    "awq's other layout by its other name": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "format": "gemv"},
        awq(WIDE, 64),
    ),
    "another packing of AutoRound": (
        {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"},
        gptq(WIDE, 4, 64),
    ),
    "weights that AutoRound turned": (
        {**AUTO_ROUND, "rotation_config": {"hadamard_type": "hadamard"}},
        gptq(WIDE, 4, 64),
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_another_grid_than_the_formats_own_is_refused(name: str) -> None:
    settings, (tensors, *_) = REFUSED[name]
    with pytest.raises((UserError, ValueError)):
        packed_as(settings, tensors)


@pytest.mark.parametrize("ending", ["weight_scale_inv", "weight_scale"])
def test_scales_of_fp8_are_known_by_both_of_their_names(ending: str) -> None:
    tensors = {"a.weight": Entry("F8_E4M3", (4, 8)), f"a.{ending}": Entry("F32", ())}
    said = {"quant_method": "fp8", "activation_scheme": "static"}
    stored = stored_weights("m", {"quantization_config": said}, tensors)
    assert stored["a.weight"].on_meta(tensors).shape == (4, 8)


@pytest.mark.parametrize(("method", "key"), [("gptq", "checkpoint_format"), ("awq", "version")])
def test_null_is_what_is_not_said(method: str, key: str) -> None:
    said = {"quant_method": method, "bits": 4, key: None}
    assert stored_weights("m", {"quantization_config": said}, {}) == {}
