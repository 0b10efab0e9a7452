"""GGUF headers: read whole or in parts, and refused in a line where they cannot be right."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from dht.checkpoints import gguf_header
from dht.checkpoints.gguf_header import (
    gguf_header_bytes,
    known_kinds,
    parse_gguf,
    without_long_arrays,
)
from dht.errors import UserError


def written(path: Path, **arrays: list[str] | list[int]) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_string("long", "x" * 5000)
    for key, values in arrays.items():
        writer.add_array(key, values)
    writer.add_tensor("plain", np.arange(33, dtype=np.float32))
    codes = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_the_header_says_what_the_package_reads(tmp_path: Path) -> None:
    raw = written(tmp_path / "m.gguf", tokens=["a", "bc"], scores=[1, 2, 3])
    header = parse_gguf(raw, len(raw), "m")
    assert header.metadata == {"general.architecture": "llama", "llama.block_count": 1, "long": ""}
    assert header.lengths == {"tokens": 2, "scores": 3}
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    for mine, other in zip(header.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.kind) == (other.name, other.tensor_type.name)
        assert (mine.begin, mine.end - mine.begin) == (other.data_offset, other.n_bytes)
        assert mine.shape == other.data.shape
    assert header.tensors[1].shape == (3, 68)


def test_a_header_in_parts_asks_for_more(tmp_path: Path) -> None:
    raw = written(tmp_path / "m.gguf", tokens=[f"token {n}" for n in range(9000)])
    whole = parse_gguf(raw, len(raw), "m").size_bytes
    assert whole > 1 << 16
    asked = [0]
    while (needed := gguf_header_bytes(raw[: asked[-1]], len(raw), "m")) > asked[-1]:
        asked.append(needed)
    assert needed == whole
    assert 2 < len(asked) < 8


def test_configurations_are_made_without_vocabularies(tmp_path: Path) -> None:
    raw = written(tmp_path / "m.gguf", tokens=[f"token {n}" for n in range(9000)], few=[1, 2])
    short = without_long_arrays(raw, parse_gguf(raw, len(raw), "m"))
    again = parse_gguf(short, len(raw), "m")
    assert again.lengths == {"few": 2}
    assert [tensor.name for tensor in again.tensors] == ["plain", "packed"]
    assert len(short) < 10_000


def at(place: int, form: str, value: int) -> Callable[[bytearray], None]:
    return lambda raw: struct.pack_into(form, raw, place, value)


def of_tensor(name: str, place: int, form: str, value: int) -> Callable[[bytearray], None]:
    """Write into the description of a tensor: ``place`` counts from the end of its name."""

    def damage(raw: bytearray) -> None:
        struct.pack_into(form, raw, raw.index(name.encode()) + len(name) + place, value)

    return damage


DAMAGE: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "magic": (lambda raw: raw.__setitem__(slice(0, 4), b"GGML"), "does not begin as a GGUF"),
    "version": (at(4, "<I", 1), "GGUF version 1"),
    "other endianness": (at(4, "<I", 3 << 24), "GGUF version"),
    "tensors": (at(8, "<Q", 1 << 60), "claims 1152921504606846976 tensors"),
    "keys": (at(16, "<Q", 1 << 60), "claims 1152921504606846976 keys"),
    "name": (at(24, "<Q", 1 << 60), "a name of 1152921504606846976 bytes"),
    "truncated": (lambda raw: raw.__delitem__(slice(len(raw) - 40, None)), "promises"),
    "header cut": (lambda raw: raw.__delitem__(slice(100, None)), "ends within its header"),
    "empty": (lambda raw: raw.clear(), "ends within its header"),
    "type": (of_tensor("packed", 4 + 16, "<I", 9), "packed is packed as type 9"),
    "another type": (of_tensor("packed", 4 + 16, "<I", 4000), "type 4000"),
    "dimensions": (of_tensor("packed", 0, "<I", 1 << 31), "2147483648 dimensions"),
    "size": (of_tensor("packed", 4, "<Q", 1 << 60), "promises"),
    "no whole blocks": (of_tensor("packed", 4, "<Q", 33), "rows of 33 numbers in Q8_0"),
    "nothing": (of_tensor("packed", 4 + 8, "<Q", 0), "has no numbers"),
    "offset": (of_tensor("packed", 4 + 20, "<Q", 1 << 62), "promises"),
    "overlap": (of_tensor("packed", 4 + 20, "<Q", 0), "overlap"),
    "value": (of_tensor("block_count", 0, "<I", 77), "a value of type 77"),
    "text": (of_tensor("long", 4, "<Q", 1 << 60), "more than"),
    "array": (of_tensor("scores", 4 + 4, "<Q", 1 << 60), "elements"),
    "text in an array": (of_tensor("tokens", 4 + 4 + 8, "<Q", 1 << 63), "more than"),
    "array of arrays": (of_tensor("scores", 4, "<I", 9), "an array of type 9"),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_what_cannot_be_right_is_refused(case: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[case]
    raw = bytearray(written(tmp_path / "m.gguf", tokens=["a", "b"], scores=[1, 2]))
    damage(raw)
    with pytest.raises((ValueError, UserError), match=words) as caught:
        gguf_header_bytes(bytes(raw), len(raw), "m")
    assert "\n" not in str(caught.value)


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    raw = bytearray(written(tmp_path / "m.gguf", tokens=["a"], scoren=[1]))
    raw[raw.index(b"scoren") : raw.index(b"scoren") + 6] = b"tokens"
    with pytest.raises(ValueError, match="'tokens' twice"):
        parse_gguf(bytes(raw), len(raw), "m")


def test_a_header_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gguf_header, "HEADER_BOUNDS", replace(gguf_header.HEADER_BOUNDS, bytes_max=1 << 17)
    )
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 4000)
    raw += b"".join(struct.pack("<Q8sIQ", 8, b"%08d" % n, 8, 64) + b"x" * 64 for n in range(4000))
    with pytest.raises(ValueError, match="more than 131072 bytes"):
        gguf_header_bytes(raw, 1 << 40, "m")


def test_types_are_those_that_have_numbers() -> None:
    names = {name for name, _, _ in known_kinds().values()}
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"} <= names
    assert not names & {"Q8_1", "Q8_K"}
