"""SHA-256 hashes of weight files: of each whole file, of its header, and of every tensor in it.

Per-tensor hashes let a peer check exactly the bytes that it reads, even if they are few. ``python
-m node.weight_hashes MODEL_DIR`` writes them beside a local model's files as
``anabranch.sha256.json``. For files from a hub they are computed while the whole file is checked
against the hub's own SHA-256, and kept (see :mod:`node.weights.hub_shards`).
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from dht.errors import UserError
from dht.json_file import decode_json
from node.weights.safetensors_header import DamagedError, TensorEntry, header_bytes_of, parse_header

MANIFEST = "anabranch.sha256.json"
MANIFEST_BYTES_MAX = 256 << 20
BLOCK_BYTES = 1 << 20

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ShardHashes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and hashes that one safetensors file must have."""

    size_bytes: int
    sha256: Sha256
    header_sha256: Sha256
    """Hash of the header and the eight bytes of its length."""
    tensors: dict[str, Sha256]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hashes of a directory's safetensors files, by file name."""

    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    shards: dict[str, ShardHashes]


def read_manifest(path: Path) -> Manifest | None:
    """The manifest at ``path``; None if there is none. Raises UserError if it is damaged."""
    try:
        if path.stat().st_size > MANIFEST_BYTES_MAX:
            raise UserError(f"{path} is larger than {MANIFEST_BYTES_MAX} bytes; write it again")
        return decode_json(path.read_bytes(), Manifest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it, or write it again with"
            " python -m node.weight_hashes"
        ) from error


def hash_shard(
    path: Path, progress: Callable[[int], None] = lambda done_bytes: None
) -> ShardHashes:
    """Read the file once, and hash the whole file, its header and each tensor.

    ``progress`` gets the number of bytes hashed since its last call. Raises DamagedError if the
    file is no safetensors file, OSError if it cannot be read.
    """
    size_bytes = path.stat().st_size
    whole = hashlib.sha256()
    with path.open("rb") as opened:
        raw = read_header(opened, size_bytes, path.name, str(path))
        entries = parse_header(raw, size_bytes, path.name, str(path))
        whole.update(raw)
        tensors: dict[str, str] = {}
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            tensors[name] = _hash_tensor(opened, entry, whole, progress)
    return ShardHashes(
        size_bytes=size_bytes,
        sha256=whole.hexdigest(),
        header_sha256=hashlib.sha256(raw).hexdigest(),
        tensors=tensors,
    )


def read_header(opened: BinaryIO, size_bytes: int, shard: str, where: str) -> bytes:
    """Length prefix and header of the file ``opened``, read from its start."""
    prefix = opened.read(8)
    length = header_bytes_of(prefix, size_bytes, shard, where)
    return prefix + opened.read(length - len(prefix))


def _hash_tensor(
    opened: BinaryIO, entry: TensorEntry, whole: "hashlib._Hash", progress: Callable[[int], None]
) -> str:
    mine = hashlib.sha256()
    left = entry.size_bytes
    while left:
        block = opened.read(min(left, BLOCK_BYTES))
        if not block:
            raise DamagedError(entry.shard, f"{entry.shard} ended while it was read")
        mine.update(block)
        whole.update(block)
        left -= len(block)
        progress(len(block))
    return mine.hexdigest()


def check_header(raw: bytes, size_bytes: int, hashes: ShardHashes, shard: str, where: str) -> None:
    """Raise DamagedError unless a file's size and header are those of ``hashes``."""
    if size_bytes != hashes.size_bytes:
        raise DamagedError(
            shard,
            f"{where} is damaged: it has {size_bytes} bytes, {hashes.size_bytes} are right",
        )
    if hashlib.sha256(raw).hexdigest() != hashes.header_sha256:
        raise DamagedError(shard, f"{where} is damaged: its header does not match its SHA-256")


def check_tensor(data: memoryview, name: str, hashes: ShardHashes, shard: str, where: str) -> None:
    """Raise DamagedError unless ``data`` has the hash of tensor ``name``."""
    if hashlib.sha256(data).hexdigest() != hashes.tensors.get(name):
        raise DamagedError(shard, f"{where} is damaged: tensor {name} does not match its SHA-256")
