"""A model's weights: checked at open by their headers, then read and verified tensor by tensor."""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from dht.errors import UserError
from dht.json_file import read_object
from node.weights.hashes import (
    MANIFEST,
    ShardHashes,
    check_header,
    check_tensor,
    read_header,
    read_manifest,
)
from node.weights.safetensors_header import DamagedError, TensorEntry, parse_header

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
"""Configuration keys that do not tell two models apart."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


class ShardSource(Protocol):
    """Where a model's files come from."""

    directory: Path
    """Holds ``config.json``."""
    shards: tuple[str, ...]
    verified: bool
    """Whether there are hashes that every tensor is checked against."""
    is_local: bool
    """Whether all files are here, so that nothing is ever fetched."""

    def header(self, shard: str) -> tuple[bytes, int]:
        """Prefix and header of a shard, and the size of the whole file in bytes."""

    def fetch(self, shards: Iterable[str], progress: Progress | None) -> None:
        """Make these shards readable here; nothing to do where they are."""

    def path(self, shard: str) -> Path:
        """Where a shard that was fetched is."""

    def hashes(self, shard: str) -> ShardHashes | None:
        """What a fetched shard must hold, None where nobody knows."""

    def fetch_again(self, shard: str) -> bool:
        """Replace a damaged shard; False where that is not possible."""

    def stop(self) -> None:
        """Let a fetch that is under way in another thread end soon, with an error."""


class WeightStore:
    """The tensors of one model. ``bytes_read`` counts what was read of them from disk."""

    def __init__(
        self, source: ShardSource, config: dict[str, Any], tensors: dict[str, TensorEntry]
    ) -> None:
        self._source = source
        self.directory = source.directory
        self.is_local = source.is_local
        self.config = config
        self.tensors = tensors
        self.bytes_read = 0

    @classmethod
    def open(cls, path: str) -> "WeightStore":
        """The model in a local directory: its configuration and headers are checked, no more.

        Raises UserError for whatever keeps the model from being served.
        """
        directory = Path(path).expanduser()
        if not directory.is_dir():
            raise UserError(f"{path} is not a directory; give a model's directory")
        config = read_config(directory)
        return cls.of(LocalShards(directory), config)

    @classmethod
    def of(cls, source: ShardSource, config: dict[str, Any]) -> "WeightStore":
        """The model whose files ``source`` brings. Raises UserError."""
        tensors: dict[str, TensorEntry] = {}
        for shard in source.shards:
            raw, size_bytes = source.header(shard)
            tensors.update(parse_header(raw, size_bytes, shard, str(source.directory / shard)))
        for name, shard in (read_index(source.directory) or {}).items():
            if name not in tensors or tensors[name].shard != shard:
                raise UserError(
                    f"{source.directory}: the index names {name}, which no file holds"
                    if name not in tensors
                    else f"{source.directory}: the index places {name} in {shard}, where it is not"
                )
        return cls(source, config, tensors)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over configuration and tensor headers, as hex."""
        known = {key: value for key, value in self.config.items() if key not in VOLATILE}
        headers = sorted((n, e.dtype, e.shape) for n, e in self.tensors.items())
        text = json.dumps([known, headers], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def verified(self) -> bool:
        """Whether every tensor is held against a SHA-256 when it is read."""
        return self._source.verified

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        """Bring the files of these tensors here, where they are not yet (see :meth:`read`)."""
        shards = {self.tensors[name].shard for name in names if name in self.tensors}
        self._source.fetch(sorted(shards), progress)

    def stop(self) -> None:
        """End a :meth:`fetch` or :meth:`read` that waits for the network in another thread."""
        self._source.stop()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, "torch.Tensor"]]:
        """The tensors of these names, in the order of their files, each read once and checked.

        A damaged file is fetched again once, where it came from a hub. Raises UserError for a
        tensor that is missing, damaged (DamagedError) or not finite; NetworkError where a file
        must be fetched and cannot.
        """
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self._entry(name).shard, []).append(name)
        self._source.fetch(sorted(by_shard), None)
        for shard in sorted(by_shard):
            wanted = sorted(by_shard[shard], key=lambda name: self.tensors[name].begin)
            yield from self._read_shard(shard, wanted)

    def make_up(self, names: Iterable[str]) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Random numbers in the shapes of these tensors, to time with; nothing is read."""
        import torch

        block = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.02
        for name in names:
            entry = self._entry(name)
            times = -(-entry.numbers // block.numel())
            yield name, block.repeat(times)[: entry.numbers].reshape(entry.shape)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            raise UserError(
                f"{self.directory} cannot be served yet: its files hold no tensor {name},"
                " which the model's code needs"
            )
        return self.tensors[name]

    def _read_shard(self, shard: str, names: list[str]) -> Iterator[tuple[str, "torch.Tensor"]]:
        done = 0
        for again in (False, True):
            try:
                for name, tensor in self._read_once(shard, names[done:]):
                    done += 1
                    yield name, tensor
            except DamagedError as error:
                if again or not self._source.fetch_again(shard):
                    raise
                logger.warning("%s; it was fetched again", error)
            else:
                return

    def _read_once(self, shard: str, names: list[str]) -> Iterator[tuple[str, "torch.Tensor"]]:
        path = self._source.path(shard)
        hashes = self._source.hashes(shard)
        try:
            with path.open("rb", buffering=0) as opened:
                if hashes is not None:
                    size_bytes = path.stat().st_size
                    raw = read_header(opened, size_bytes, shard, str(path))
                    self.bytes_read += len(raw)
                    check_header(raw, size_bytes, hashes, shard, str(path))
                for name in names:
                    yield name, self._read_tensor(opened, name, hashes, path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from error

    def _read_tensor(
        self, opened: BinaryIO, name: str, hashes: ShardHashes | None, path: Path
    ) -> "torch.Tensor":
        import torch

        from node.device.tensors import is_finite

        entry = self.tensors[name]
        data = torch.empty(entry.size_bytes, dtype=torch.uint8)
        view = memoryview(data.numpy().data)
        opened.seek(entry.begin)
        at = 0
        while at < len(view):
            read = opened.readinto(view[at:])  # type: ignore[attr-defined]
            if not read:
                raise DamagedError(entry.shard, f"{path} is damaged: it ends within {name}")
            at += read
        self.bytes_read += at
        if hashes is not None:
            check_tensor(view, name, hashes, entry.shard, str(path))
        tensor = data.view(_torch_dtype(entry.dtype)).reshape(entry.shape)
        if not is_finite(tensor):
            raise DamagedError(entry.shard, f"{path} is damaged: {name} holds NaN or infinity")
        return tensor


def _torch_dtype(dtype: str) -> "torch.dtype":
    import torch

    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U8": torch.uint8, "BOOL": torch.bool,
    }[dtype]  # fmt: skip


class LocalShards:
    """The safetensors files of a local directory, with its hash manifest where it has one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_local = True
        files = {file.name for file in directory.iterdir() if file.is_file()}
        self.shards = shard_names(str(directory), files, read_index(directory))
        self._manifest = read_manifest(directory / MANIFEST)
        self.verified = self._manifest is not None
        for shard in self.shards:
            if self._manifest is not None and shard not in self._manifest.shards:
                raise UserError(
                    f"{directory / MANIFEST} does not know {shard}; write it again with"
                    " python -m node.weight_hashes"
                )

    def header(self, shard: str) -> tuple[bytes, int]:
        path = self.directory / shard
        try:
            size_bytes = path.stat().st_size
            with path.open("rb") as opened:
                raw = read_header(opened, size_bytes, shard, str(path))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if (hashes := self.hashes(shard)) is not None:
            check_header(raw, size_bytes, hashes, shard, str(path))
        return raw, size_bytes

    def fetch(self, shards: Iterable[str], progress: Progress | None) -> None:
        """Local files are here."""

    def path(self, shard: str) -> Path:
        return self.directory / shard

    def hashes(self, shard: str) -> ShardHashes | None:
        return None if self._manifest is None else self._manifest.shards[shard]

    def fetch_again(self, shard: str) -> bool:
        """Nobody knows where a local file came from."""
        return False

    def stop(self) -> None:
        """Nothing here waits."""


def read_config(directory: Path, name: str = "") -> dict[str, Any]:
    """The model's configuration; ``name`` stands for the model in messages.

    Raises UserError, also for a model that wants code of its own.
    """
    name = name or str(directory)
    path = directory / "config.json"
    try:
        config = read_object(path)
    except FileNotFoundError:
        raise UserError(f"{name} has no config.json; is it a model's directory?") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if "model_type" not in config:
        raise UserError(f"{path} does not describe a model: it has no model_type")
    if "auto_map" in config:
        raise UserError(f"{name} needs code of its own to run; that is never executed here")
    return config


def read_index(directory: Path) -> dict[str, str] | None:
    """File name by tensor name of a sharded model, None without an index. Raises UserError."""
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        weight_map = read_object(path).get("weight_map")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no index of tensors: {error}") from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise UserError(f"{path} is no index of tensors")
    return weight_map


def shard_names(
    where: str, files: Collection[str], index: dict[str, str] | None
) -> tuple[str, ...]:
    """The safetensors files of a model that has these files. Raises UserError."""
    if index is not None:
        names = sorted(set(index.values()))
    elif SINGLE in files:
        names = [SINGLE]
    else:
        names = sorted(n for n in files if n.endswith(".safetensors") and "/" not in n)
    if not names:
        pickled = sorted(name for name in files if name.endswith(PICKLED))
        only = f"only {pickled[0]}, which can run code" if pickled else "none"
        raise UserError(f"{where} has no safetensors files ({only}); weights must be in them")
    for name in names:
        path = PureWindowsPath(name)  # takes the other systems' names apart, too
        if name not in files or path.anchor or ".." in path.parts:
            raise UserError(f"{where}: the index names {name[:200]}, which is not there")
    return tuple(names)
