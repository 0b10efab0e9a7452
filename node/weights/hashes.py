"""SHA-256 hashes of weight files: of each whole file, of its header, and of every tensor in it.

Per-tensor hashes let a peer check exactly the bytes that it reads, even if they are few. A local
model's are in its manifest (:mod:`dht.checkpoints.model_files`). For files from a hub they are
computed while the whole file is checked against the hub's own SHA-256, and kept
(:mod:`node.weights.hub_shards`).
"""

import hashlib
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from dht.checkpoints.model_files import Manifest, ShardHashes
from dht.errors import UserError
from node.weights.safetensors_header import ChangedError, DamagedError
from node.weights.shard_header import parse_header, read_header

BLOCK_BYTES = 1 << 20
FILES_AT_ONCE = 4
"""More would only wait for the disk."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def hash_shards(
    directory: Path, shards: Collection[str], progress: Progress | None = None
) -> Manifest:
    """The hashes of these files, all read once, several at a time.

    Raises DamagedError for a file of no format that is read, UserError for one that cannot be read.
    """
    done_bytes = dict.fromkeys(shards, 0)
    try:
        total_bytes = sum((directory / shard).stat().st_size for shard in shards)

        def hashed(shard: str) -> ShardHashes:
            def count(block_bytes: int) -> None:
                done_bytes[shard] += block_bytes
                if progress is not None:
                    progress(sum(done_bytes.values()), total_bytes)

            return hash_shard(directory / shard, count)

        with ThreadPoolExecutor(min(FILES_AT_ONCE, os.cpu_count() or 1)) as pool:
            return Manifest(shards=dict(zip(shards, pool.map(hashed, shards), strict=True)))
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error}") from error


def hash_shard(
    path: Path,
    progress: Callable[[int], None] = lambda done_bytes: None,
    shard: str = "",
) -> ShardHashes:
    """Read the file once, and hash the whole file, its header and each tensor.

    ``shard`` is its name in the model, by default the path's, and says its format. ``progress``
    gets the number of bytes hashed since its last call. Raises DamagedError if the file is of no
    format that is read, OSError if it cannot be read.
    """
    shard, size_bytes = shard or path.name, path.stat().st_size
    whole = hashlib.sha256()
    with path.open("rb") as opened:
        raw = read_header(opened, size_bytes, shard, str(path))
        entries = parse_header(raw, size_bytes, shard, str(path))
        whole.update(raw)
        tensors: dict[str, str] = {}
        at = len(raw)
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            _hash_part(opened, entry.begin - at, whole, shard)
            tensors[name] = _hash_part(opened, entry.size_bytes, whole, shard, progress)
            at = entry.end
        _hash_part(opened, size_bytes - at, whole, shard)
    return ShardHashes(
        size_bytes=size_bytes,
        sha256=whole.hexdigest(),
        header_sha256=hashlib.sha256(raw).hexdigest(),
        tensors=tensors,
    )


def _hash_part(
    opened: BinaryIO,
    size_bytes: int,
    whole: "hashlib._Hash",
    shard: str,
    progress: Callable[[int], None] = lambda done_bytes: None,
) -> str:
    """Hash what comes next, a tensor or what is between two, by itself and into ``whole``."""
    mine = hashlib.sha256()
    left = size_bytes
    while left > 0:
        block = opened.read(min(left, BLOCK_BYTES))
        if not block:
            raise DamagedError(shard, f"{shard} ended while it was read")
        mine.update(block)
        whole.update(block)
        left -= len(block)
        progress(len(block))
    return mine.hexdigest()


def check_header(raw: bytes, size_bytes: int, hashes: ShardHashes, shard: str, where: str) -> None:
    """Raise ChangedError unless a file's size and header are those of ``hashes``."""
    if size_bytes != hashes.size_bytes:
        raise ChangedError(
            shard,
            f"{where} is damaged: it has {size_bytes} bytes, {hashes.size_bytes} are right",
        )
    if hashlib.sha256(raw).hexdigest() != hashes.header_sha256:
        raise ChangedError(shard, f"{where} is damaged: its header does not match its SHA-256")


def check_tensor(data: memoryview, name: str, hashes: ShardHashes, shard: str, where: str) -> None:
    """Raise ChangedError unless ``data`` has the hash of tensor ``name``."""
    if hashlib.sha256(data).hexdigest() != hashes.tensors.get(name):
        raise ChangedError(shard, f"{where} is damaged: tensor {name} does not match its SHA-256")
