"""Reads the header of a weight file, whichever format its name says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from dht.checkpoints.gguf_header import gguf_header_bytes, parse_gguf, read_whole_header
from dht.checkpoints.hub import GGUF
from node.weights.safetensors_header import (
    POINTER,
    PREFIX_BYTES,
    DamagedError,
    TensorEntry,
    parse_safetensors,
    safetensors_header_bytes,
)


def header_bytes_of(raw: bytes, size_bytes: int, shard: str, where: str) -> int:
    """Length of the header of a file of ``size_bytes`` that begins with ``raw``; if that does not
    hold all of it, how many bytes to look at next.

    ``where`` names the file in messages. Raises DamagedError for a header that cannot be right,
    UserError for one that is not served.
    """
    with _refused(shard, where):
        if shard.endswith(GGUF):
            return gguf_header_bytes(raw, size_bytes, where)
        if len(raw) < min(PREFIX_BYTES, size_bytes):
            return PREFIX_BYTES
        if raw.startswith(POINTER):
            told = f"{where} is only Git LFS's pointer to the file; fetch that with git lfs pull"
            raise DamagedError(shard, told)
        return safetensors_header_bytes(raw, size_bytes)


def parse_header(raw: bytes, size_bytes: int, shard: str, where: str) -> dict[str, TensorEntry]:
    """Tensors that the header ``raw`` describes, in a file of ``size_bytes``.

    Raises DamagedError if anything does not match, UserError for a dtype that is not served.
    """
    with _refused(shard, where):
        if not shard.endswith(GGUF):
            return parse_safetensors(raw, size_bytes, shard, where)
        tensors = parse_gguf(raw, size_bytes, where).tensors
    return {
        each.name: TensorEntry(
            shard=shard, dtype=each.kind, shape=each.shape, begin=each.begin, end=each.end
        )
        for each in tensors
    }


def read_header(opened: BinaryIO, size_bytes: int, shard: str, where: str) -> bytes:
    """The header of the file ``opened``, whose next bytes are those behind it.

    Raises as :func:`header_bytes_of`.
    """
    with _refused(shard, where):
        return read_whole_header(opened, lambda raw: header_bytes_of(raw, size_bytes, shard, where))


@contextmanager
def _refused(shard: str, where: str) -> Iterator[None]:
    """Raises DamagedError for what a reader says of a header by a ValueError."""
    try:
        yield
    except ValueError as error:
        raise DamagedError(shard, f"{where} is damaged: {error}") from error
