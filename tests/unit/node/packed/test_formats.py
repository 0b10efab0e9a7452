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
@examples(150)
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
