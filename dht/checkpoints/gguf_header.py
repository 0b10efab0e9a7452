"""Parses a GGUF file's header: metadata, and names, types, shapes and positions of its tensors.

The format (github.com/ggml-org/ggml, docs/gguf.md): magic, version and two counts; keys with typed
values; names, shapes, types and offsets of tensors; then their numbers, each tensor's at a multiple
of the alignment. Everything is little endian. A header does not say how long it is, so it is read
until it ends. Nothing here reads more, and every number is checked against the file's size.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO

from dht.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderBounds:
    """Bounds of a header that a stranger may have written."""

    bytes_max: int = 100 << 20
    tensors_max: int = 1 << 17
    keys_max: int = 1 << 12
    elements_max: int = 1 << 22
    """Maximum elements of all arrays together: tokens, their scores and kinds, merges."""
    name_bytes_max: int = 1 << 10
    kept_bytes_max: int = 1 << 10
    """Maximum bytes of a text that is kept; longer ones and all arrays are passed over."""
    short_array: int = 1 << 12
    """Longest array, in elements, that configurations are made of."""
    alignment_bytes_max: int = 1 << 20


HEADER_BOUNDS = HeaderBounds()

DIMENSIONS_MAX = 4
"""Fixed by GGUF: maximum dimensions of a tensor."""
ALIGNMENT = "general.alignment"
ALIGNMENT_BYTES = 32
"""Fixed by GGUF: alignment where a file names none."""
STRING, ARRAY = 8, 9
"""Fixed by GGUF: numbers of these two types of values."""
SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
"""Format of each type of value that has a fixed size."""


class ShortError(ValueError):
    """The header goes on behind the bytes given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor as the header describes it; its bytes are ``[begin, end)`` of the file."""

    name: str
    kind: str
    """Name of its type, as ``Q4_K``."""
    shape: tuple[int, ...]
    """The last size changes the fastest, as with torch; in bytes for types packed in blocks."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a file says before its numbers."""

    size_bytes: int
    metadata: dict[str, int | float | bool | str]
    """Values by key, without arrays and long texts."""
    lengths: dict[str, int]
    """Elements of each array, by key."""
    keys: tuple[tuple[int, int, bool], ...]
    """Bytes ``[start, end)`` of each key with its value, and whether a configuration may be made of
    it."""
    tensors_begin: int
    """Where the descriptions of tensors begin."""
    tensors: tuple[GgufTensor, ...]


def gguf_header_bytes(raw: bytes, size_bytes: int, where: str) -> int:
    """Length of the header of a file of ``size_bytes`` that begins with ``raw``; if that does not
    hold all of it, how many bytes to look at next.

    Raises ValueError for a header that cannot be right, UserError for one that is not served.
    """
    try:
        return parse_gguf(raw, size_bytes, where).size_bytes
    except ShortError:
        most = min(size_bytes, HEADER_BOUNDS.bytes_max)
        if len(raw) >= most:
            raise
        return min(most, max(2 * len(raw), 1 << 16))


def read_whole_header(opened: BinaryIO, header_bytes: Callable[[bytes], int]) -> bytes:
    """The header of a file of any format, opened at its start and left behind the header.

    ``header_bytes`` returns the header's length, or how many bytes to look at next, as
    :func:`gguf_header_bytes`. Raises ValueError where the file ends too soon.
    """
    raw = b""
    while (needed := header_bytes(raw)) > len(raw):
        if not (more := opened.read(needed - len(raw))):
            raise ValueError("it ended within its header")
        raw += more
    opened.seek(needed)
    return raw[:needed]


def parse_gguf(raw: bytes, size_bytes: int, where: str) -> GgufHeader:
    """The header at the start of ``raw``, of a file of ``size_bytes``.

    Raises ShortError where ``raw`` ends before the header, ValueError for a header that cannot be
    right, UserError for one that is not served; ``where`` names the file.
    """
    reader = _Reader(raw)
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        raise ValueError("it does not begin as a GGUF file")
    reader.take(len(MAGIC))
    (version,) = reader.numbers("<I")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise UserError(f"{where} cannot be served: it is GGUF version {version}; {known} are read")
    tensors, keys = reader.numbers("<QQ")
    for count, most, what in (
        (tensors, HEADER_BOUNDS.tensors_max, "tensors"),
        (keys, HEADER_BOUNDS.keys_max, "keys"),
    ):
        if count > most:
            raise ValueError(f"its header claims {count} {what}, {most} at most")
    spans = []
    for _ in range(keys):
        start = reader.at
        plain = reader.pair()
        spans.append((start, reader.at, plain))
    tensors_begin = reader.at
    said = [_described(reader) for _ in range(tensors)]
    alignment = reader.metadata.get(ALIGNMENT, ALIGNMENT_BYTES)
    if (
        type(alignment) is not int
        or not 0 < alignment <= HEADER_BOUNDS.alignment_bytes_max
        or alignment & (alignment - 1)
    ):
        raise ValueError(f"its alignment is {str(alignment)[:20]}")
    data_begin = -(-reader.at // alignment) * alignment
    return GgufHeader(
        size_bytes=reader.at,
        metadata=reader.metadata,
        lengths=reader.lengths,
        keys=tuple(spans),
        tensors_begin=tensors_begin,
        tensors=_placed(said, data_begin, size_bytes, where),
    )


def without_long_arrays(raw: bytes, header: GgufHeader) -> bytes:
    """The header without vocabularies: all that configurations are made of."""
    kept = [raw[start:end] for start, end, plain in header.keys if plain]
    begin = raw[: len(MAGIC) + 4] + struct.pack("<QQ", len(header.tensors), len(kept))
    return b"".join((begin, *kept, raw[header.tensors_begin : header.size_bytes]))


class _Reader:
    """Takes one value after the other from the start of a header."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.at = 0
        self.metadata: dict[str, int | float | bool | str] = {}
        self.lengths: dict[str, int] = {}
        self._elements = 0

    def take(self, count_bytes: int) -> bytes:
        end = self.at + count_bytes
        if end > HEADER_BOUNDS.bytes_max:
            raise ValueError(f"its header has more than {HEADER_BOUNDS.bytes_max} bytes")
        if end > len(self._raw):
            raise ShortError("it ends within its header")
        taken, self.at = self._raw[self.at : end], end
        return taken

    def numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def name(self) -> str:
        (length,) = self.numbers("<Q")
        if length > HEADER_BOUNDS.name_bytes_max:
            raise ValueError(f"a name of {length} bytes, {HEADER_BOUNDS.name_bytes_max} at most")
        return self.take(length).decode()

    def pair(self) -> bool:
        """Take a key and its value; returns whether a configuration may be made of it."""
        key = self.name()
        if key in self.metadata or key in self.lengths:
            raise ValueError(f"it has {key[:40]!r} twice")
        (kind,) = self.numbers("<I")
        if kind in SCALARS:
            (self.metadata[key],) = self.numbers(SCALARS[kind])
        elif kind == STRING:
            (length,) = self.numbers("<Q")
            text = self.take(length)
            self.metadata[key] = text.decode() if length <= HEADER_BOUNDS.kept_bytes_max else ""
        elif kind == ARRAY:
            self.lengths[key] = count = self._array()
            return count <= HEADER_BOUNDS.short_array
        else:
            raise ValueError(f"{key[:40]!r} has a value of type {kind}")
        return True

    def _array(self) -> int:
        """Pass over an array; returns the number of its elements."""
        kind, count = self.numbers("<IQ")
        self._elements += count
        if self._elements > HEADER_BOUNDS.elements_max:
            raise ValueError(f"its arrays have more than {HEADER_BOUNDS.elements_max} elements")
        if kind in SCALARS:
            self.take(count * struct.calcsize(SCALARS[kind]))
        elif kind == STRING:
            raw, at, length_at = self._raw, self.at, struct.Struct("<Q").unpack_from
            for _ in range(count):
                if at + 8 > len(raw):
                    break
                at += 8 + length_at(raw, at)[0]
            else:
                self.take(at - self.at)
                return count
            self.take(at + 8 - self.at)  # raises: it is too long, or goes on behind these bytes
        else:
            raise ValueError(f"an array of type {kind}")
        return count


def _described(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, sizes, type and offset of the next tensor."""
    name = reader.name()
    (dimensions,) = reader.numbers("<I")
    if not 0 < dimensions <= DIMENSIONS_MAX:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    sizes = reader.numbers(f"<{dimensions}Q")
    kind, offset = reader.numbers("<IQ")
    return name, sizes[::-1], kind, offset


def _placed(
    said: list[tuple[str, tuple[int, ...], int, int]], data_begin: int, size_bytes: int, where: str
) -> tuple[GgufTensor, ...]:
    """The tensors with their places in the file, in the order of the header."""
    placed = []
    for name, sizes, kind, offset in said:
        if kind not in known_kinds():
            raise UserError(
                f"{where} cannot be served: {name[:120]} is packed as type {kind}, which is not"
                " known"
            )
        if min(sizes) < 1:
            raise ValueError(f"{name[:120]} has no numbers")
        kind_name, block_numbers, block_bytes = known_kinds()[kind]
        *rows, columns = sizes
        if columns % block_numbers:
            raise ValueError(f"{name[:120]} has rows of {columns} numbers in {kind_name}")
        row_bytes = columns // block_numbers * block_bytes
        shape = (*rows, row_bytes if block_numbers > 1 else columns)
        count_bytes = row_bytes
        for size in rows:
            count_bytes *= size
        begin = data_begin + offset
        end = begin + count_bytes
        if end > size_bytes:
            raise ValueError(
                f"it has {size_bytes} bytes where its header promises {end}; download it again"
            )
        placed.append(GgufTensor(name=name, kind=kind_name, shape=shape, begin=begin, end=end))
    if len({tensor.name for tensor in placed}) < len(placed):
        raise ValueError("it has a tensor twice")
    at = data_begin
    for tensor in sorted(placed, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin < at:
            raise ValueError("its tensors overlap")
        at = tensor.end
    return tuple(placed)


@cache
def known_kinds() -> dict[int, tuple[str, int, int]]:
    """Name, numbers in a block and bytes of a block, of each type of tensor by its number.

    Types that nothing turns into numbers are left out.
    """
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    def is_read(kind: GGMLQuantizationType, block_bytes: int) -> bool:
        try:
            dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    return {
        int(kind): (kind.name, numbers, block_bytes)
        for kind, (numbers, block_bytes) in GGML_QUANT_SIZES.items()
        if numbers == 1 or is_read(kind, block_bytes)
    }
