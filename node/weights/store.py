"""A model's weights: checked at open by their headers, then read and verified tensor by tensor."""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from dht.checkpoints.gguf_model import model_directory
from dht.checkpoints.model_files import (
    ShardHashes,
    known_hashes,
    manifest_of,
    manifest_paths,
    read_config,
    root_of,
    shards_of,
)
from dht.checkpoints.text_files import digest_of, text_hashes
from dht.errors import UserError
from dht.process.whole_file import Stamp, stamp_of, write_whole
from node.weights.hashes import Progress, check_header, check_tensor, hash_shard, hash_shards
from node.weights.safetensors_header import ChangedError, DamagedError, TensorEntry
from node.weights.shard_header import parse_header, read_header

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class ShardSource(ABC):
    """Where a model's files come from."""

    is_local: bool
    """Whether all files are here, so that nothing is ever fetched."""
    shards: tuple[str, ...]
    _hashes: dict[str, ShardHashes]

    def __init__(self, directory: Path) -> None:
        """``directory`` holds ``config.json``."""
        self.directory = directory

    @abstractmethod
    def header(self, shard: str) -> tuple[bytes, int]:
        """Prefix and header of a shard, and the size of the whole file in bytes."""

    @abstractmethod
    def fetch(self, shards: Iterable[str], progress: Progress | None) -> None:
        """Make these shards readable here; nothing to do where they are."""

    def path(self, shard: str) -> Path:
        return self.directory / shard

    def sha256(self, shard: str) -> str:
        """The hash of a whole shard, known before it is fetched."""
        return self._hashes[shard].sha256

    def hashes(self, shard: str) -> ShardHashes:
        """What a fetched shard must hold."""
        return self._hashes[shard]

    def fetch_again(self, shard: str) -> bool:
        """Replace a damaged shard; False where that is not possible."""
        return False

    def explained(self, error: ChangedError) -> ChangedError:
        """The error of a file that is not as its hashes say, with what its owner may do."""
        return error

    def stop(self) -> None:  # noqa: B027
        """Let a fetch that is under way in another thread end soon, with an error."""


class WeightStore:
    """The tensors of one model. ``bytes_read`` counts what was read of them from disk."""

    def __init__(
        self,
        source: ShardSource,
        config: dict[str, Any],
        tensors: dict[str, TensorEntry],
        header_bytes: dict[str, int],
    ) -> None:
        """``header_bytes``: length of each shard's header."""
        self._source = source
        self._header_bytes = header_bytes
        self.directory = source.directory
        self.is_local = source.is_local
        self.config = config
        self.tensors = tensors
        self.bytes_read = 0

    @classmethod
    def open(cls, path: str, progress: Progress | None = None) -> "WeightStore":
        """The model in a local directory or GGUF file: its configuration and headers are checked.

        Without a manifest all files are hashed first, which ``progress`` tells, and it is written.
        Raises UserError for whatever keeps the model from being served.
        """
        directory = model_directory(path)
        if directory is None:
            raise UserError(f"{path} is not a directory; give a model's directory or a GGUF file")
        config = read_config(directory)
        return cls.of(LocalShards(directory, progress), config)

    @classmethod
    def of(cls, source: ShardSource, config: dict[str, Any]) -> "WeightStore":
        """The model whose files ``source`` brings. Raises UserError."""
        tensors: dict[str, TensorEntry] = {}
        header_bytes: dict[str, int] = {}
        for shard in source.shards:
            raw, size_bytes = source.header(shard)
            header_bytes[shard] = len(raw)
            tensors.update(parse_header(raw, size_bytes, shard, str(source.directory / shard)))
        return cls(source, config, tensors, header_bytes)

    @cached_property
    def root(self) -> str:
        """Hash of text files and all weights (:func:`dht.checkpoints.model_files.root_of`)."""
        return root_of(text_hashes(self.directory), self.weights_digest)

    @cached_property
    def weights_digest(self) -> str:
        """Hash of the weight files alone (:func:`dht.checkpoints.text_files.digest_of`)."""
        shards = self._source.shards
        return digest_of({shard: self._source.sha256(shard) for shard in shards})

    @property
    def layers_max(self) -> int:
        """Maximum number of layers that the tensors' names tell apart: each has its number in some
        name."""
        return len({number for name in self.tensors for number in re.findall(r"\d+", name)})

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
        """Random numbers in the shapes of these tensors, to time with; nothing is read.

        Zeros where they are no plain numbers: codes of packed weights, indices.
        """
        import torch

        from node.device.tensors import stored_dtype

        block = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.02
        for name in names:
            entry = self._entry(name)
            dtype = stored_dtype(entry.dtype)
            if not dtype.is_floating_point or dtype.itemsize == 1:
                yield name, torch.zeros(entry.shape, dtype=dtype)
                continue
            times = -(-entry.numbers // block.numel())
            yield name, block.repeat(times)[: entry.numbers].reshape(entry.shape).to(dtype)

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
                    if isinstance(error, ChangedError):
                        raise self._source.explained(error) from error
                    raise
                logger.warning("%s; it was fetched again", error)
            else:
                return

    def _read_once(self, shard: str, names: list[str]) -> Iterator[tuple[str, "torch.Tensor"]]:
        path = self._source.path(shard)
        hashes = self._source.hashes(shard)
        try:
            with path.open("rb", buffering=0) as opened:
                size_bytes = path.stat().st_size
                raw = opened.read(self._header_bytes[shard])
                self.bytes_read += len(raw)
                check_header(raw, size_bytes, hashes, shard, str(path))
                for name in names:
                    yield name, self._read_tensor(opened, name, hashes, path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from error

    def _read_tensor(
        self, opened: BinaryIO, name: str, hashes: ShardHashes, path: Path
    ) -> "torch.Tensor":
        import torch

        from node.device.tensors import is_finite, stored_dtype

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
        check_tensor(view, name, hashes, entry.shard, str(path))
        tensor = data.view(stored_dtype(entry.dtype)).reshape(entry.shape)
        if not is_finite(tensor):
            raise DamagedError(entry.shard, f"{path} is damaged: {name} holds NaN or infinity")
        return tensor


class LocalShards(ShardSource):
    """The weight files of a local directory, with its manifest, which is made if it lacks."""

    is_local = True

    def __init__(self, directory: Path, progress: Progress | None = None) -> None:
        super().__init__(directory)
        self.shards = shards_of(directory)
        manifest = manifest_of(directory)
        if manifest is None:
            manifest = hash_shards(directory, self.shards, progress)
            _keep(msgspec.json.encode(manifest), manifest_paths(directory))
        self._hashes = {shard: known_hashes(manifest, shard, directory) for shard in self.shards}
        self._stamps: dict[str, Stamp] = {}
        """Under which a file was opened, or seen to have the right hashes."""

    def header(self, shard: str) -> tuple[bytes, int]:
        path = self.directory / shard
        try:
            _, size_bytes, _ = stamp = stamp_of(path)
            with path.open("rb") as opened:
                raw = read_header(opened, size_bytes, shard, str(path))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        try:
            check_header(raw, size_bytes, self.hashes(shard), shard, str(path))
        except ChangedError as error:
            raise self.explained(error) from error
        self._stamps[shard] = stamp
        return raw, size_bytes

    def fetch(self, shards: Iterable[str], progress: Progress | None) -> None:
        """See that the files are still here, as they were; one that was written since is hashed.

        Raises UserError.
        """
        for shard in shards:
            path = self.directory / shard
            try:
                stamp = stamp_of(path)
                same = self._stamps.get(shard) == stamp
                if not same and hash_shard(path, shard=shard) != self.hashes(shard):
                    told = f"{path} has changed since this process opened it"
                    raise self.explained(ChangedError(shard, told))
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error}") from error
            self._stamps[shard] = stamp

    def explained(self, error: ChangedError) -> ChangedError:
        """The error with the file of hashes that a new model in this directory must not have."""
        kept = next((path for path in manifest_paths(self.directory) if path.exists()), None)
        if kept is None:
            return error
        anew = f"if it was changed on purpose, remove {kept}: the next start takes hashes anew"
        return ChangedError(error.shard, f"{error}; {anew}")


def _keep(content: bytes, places: Iterable[Path]) -> None:
    """Write to the first place that takes it; a failure is only logged."""
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            logger.info("cannot keep %s: %s", path, error)
        else:
            return
    logger.warning("the hashes of the model's files cannot be kept; each start takes them anew")
