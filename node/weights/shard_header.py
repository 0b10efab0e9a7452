"""Reads the header of a weight file, whichever format its name says."""

from typing import BinaryIO

from dht.gguf_header import header_bytes_of as gguf_header_bytes_of
from dht.gguf_header import parse_gguf
from dht.hub import GGUF
from node.weights import safetensors_header
from node.weights.safetensors_header import PREFIX_BYTES, DamagedError, TensorEntry


def header_bytes_of(raw: bytes, size_bytes: int, shard: str, where: str) -> int:
    """Length of the header of a file of ``size_bytes`` that begins with ``raw``; if that does not
    hold all of it, how many bytes to look at next.

    ``where`` names the file in messages. Raises DamagedError for a header that cannot be right,
    UserError for one that is not served.
    """
    if not shard.endswith(GGUF):
        if len(raw) < min(PREFIX_BYTES, size_bytes):
            return PREFIX_BYTES
        return safetensors_header.header_bytes_of(raw, size_bytes, shard, where)
    try:
        return gguf_header_bytes_of(raw, size_bytes, where)
    except ValueError as error:
        raise DamagedError(shard, f"{where} is damaged: {error}") from error


def parse_header(raw: bytes, size_bytes: int, shard: str, where: str) -> dict[str, TensorEntry]:
    """Tensors that the header ``raw`` describes, in a file of ``size_bytes``.

    Raises DamagedError if anything does not match, UserError for a dtype that is not served.
    """
    if not shard.endswith(GGUF):
        return safetensors_header.parse_header(raw, size_bytes, shard, where)
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
    raw = b""
    while (needed := header_bytes_of(raw, size_bytes, shard, where)) > len(raw):
        more = opened.read(needed - len(raw))
        if not more:
            raise DamagedError(shard, f"{where} is damaged: it ended within its header")
        raw += more
    opened.seek(needed)
    return raw[:needed]
