"""Reads the header of a weight file, whichever format its name says."""

from typing import BinaryIO

from dht.checkpoints.gguf_header import gguf_header_bytes, parse_gguf, read_whole_header
from dht.checkpoints.hub import GGUF
from node.weights.safetensors_header import (
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
    if not shard.endswith(GGUF):
        if len(raw) < min(PREFIX_BYTES, size_bytes):
            return PREFIX_BYTES
        return safetensors_header_bytes(raw, size_bytes, shard, where)
    try:
        return gguf_header_bytes(raw, size_bytes, where)
    except ValueError as error:
        raise DamagedError(shard, f"{where} is damaged: {error}") from error


def parse_header(raw: bytes, size_bytes: int, shard: str, where: str) -> dict[str, TensorEntry]:
    """Tensors that the header ``raw`` describes, in a file of ``size_bytes``.

    Raises DamagedError if anything does not match, UserError for a dtype that is not served.
    """
    if not shard.endswith(GGUF):
        return parse_safetensors(raw, size_bytes, shard, where)
    try:
        tensors = parse_gguf(raw, size_bytes, where).tensors
    except ValueError as error:
        raise DamagedError(shard, f"{where} is damaged: {error}") from error
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
    try:
        return read_whole_header(opened, lambda raw: header_bytes_of(raw, size_bytes, shard, where))
    except ValueError as error:
        raise DamagedError(shard, f"{where} is damaged: {error}") from error
