"""Parses a safetensors file's header: names, dtypes, shapes and positions of its tensors.

The format (github.com/huggingface/safetensors): eight bytes with the header's length, little
endian; the header, a JSON object; then every tensor's bytes without gaps. Nothing here reads more
than the header, and every number in it is checked against the file's size.
"""

import math
import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from dht.errors import UserError
from dht.process.json_file import decode_json

PREFIX_BYTES = 8
"""Fixed by safetensors: length of the number in front of a header."""
POINTER = b"version "
"""What a directory that was cloned without Git LFS has in a file's place (its specification)."""
HEADER_BYTES_MAX = 100 << 20
"""Fixed by safetensors: its library's own limit."""
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
DIMENSIONS_MAX = 64
"""Fixed by torch: maximum dimensions of a tensor."""

Size = Annotated[int, msgspec.Meta(ge=0)]


class _Described(msgspec.Struct):
    """What a header says of one tensor; its offsets count from the header's end."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
    data_offsets: tuple[Size, Size]


class DamagedError(UserError):
    """A file's content is wrong; ``shard`` is its name."""

    def __init__(self, shard: str, message: str) -> None:
        super().__init__(message)
        self.shard = shard


class ChangedError(DamagedError):
    """A file is not the one whose hashes were taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as its file's header describes it; its bytes are ``[begin, end)`` of the file."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numbers(self) -> int:
        """Number of the tensor's elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


def safetensors_header_bytes(prefix: bytes, size_bytes: int) -> int:
    """Length of prefix and header together, from the first eight bytes of a file of ``size_bytes``.

    Raises ValueError if the length is impossible.
    """
    if len(prefix) < PREFIX_BYTES:
        raise ValueError(f"it has only {size_bytes} bytes")
    (header_bytes,) = struct.unpack("<Q", prefix[:PREFIX_BYTES])
    if header_bytes > min(size_bytes - PREFIX_BYTES, HEADER_BYTES_MAX):
        raise ValueError(f"its header cannot have {header_bytes} bytes")
    return PREFIX_BYTES + int(header_bytes)


def parse_safetensors(
    raw: bytes, size_bytes: int, shard: str, where: str
) -> dict[str, TensorEntry]:
    """Tensors that ``raw`` (prefix and header) describes, in a file of ``size_bytes``.

    Raises ValueError if anything does not match, UserError for a dtype that is not served;
    ``where`` names the file.
    """
    try:
        header = decode_json(raw[PREFIX_BYTES:], dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        described = {name: decode_json(said, _Described) for name, said in header.items()}
    except ValueError as error:
        raise ValueError(f"its header cannot be read ({error})") from error
    entries = {name: _entry(said, len(raw), shard, where) for name, said in described.items()}
    at = len(raw)
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            raise ValueError("its tensors leave gaps or overlap")
        at = entry.end
    if at != size_bytes:
        raise ValueError(f"{size_bytes} bytes where its header promises {at}; download it again")
    return entries


def _entry(said: _Described, data_begin: int, shard: str, where: str) -> TensorEntry:
    begin, end = (data_begin + offset for offset in said.data_offsets)
    entry = TensorEntry(shard=shard, dtype=said.dtype, shape=said.shape, begin=begin, end=end)
    if entry.dtype not in ITEM_BYTES:
        raise UserError(
            f"{where} holds tensors of dtype {entry.dtype[:16]!r}, which cannot be served yet"
        )
    if entry.size_bytes != entry.numbers * ITEM_BYTES[entry.dtype]:
        raise ValueError("a tensor's length does not fit its shape")
    return entry
