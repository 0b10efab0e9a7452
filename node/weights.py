"""A model's weights on disk: checked at open without reading them, then read tensor by tensor."""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dht.errors import UserError

if TYPE_CHECKING:
    import torch

HEADER_BYTES_MAX = 100 << 20
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
"""Configuration keys that do not tell two models apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as its file's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """How many numbers it holds."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class WeightStore:
    """A Hugging Face directory with safetensors files. ``bytes_read`` counts tensor data."""

    def __init__(
        self, directory: Path, config: dict[str, Any], tensors: dict[str, TensorEntry]
    ) -> None:
        self.directory = directory
        self.config = config
        self.tensors = tensors
        self.bytes_read = 0

    @classmethod
    def open(cls, path: str) -> "WeightStore":
        """Check configuration and headers of every shard; nothing else is read.

        Raises UserError for whatever keeps the model from being served.
        """
        directory = Path(path).expanduser()
        if not directory.is_dir():
            raise UserError(f"{path} is not a directory; give a model's directory")
        config = _read_config(directory)
        tensors: dict[str, TensorEntry] = {}
        for file in _shards(directory):
            tensors.update(_read_header(file))
        missing = [name for name in _indexed_names(directory) if name not in tensors]
        if missing:
            raise UserError(f"{path}: the index names {missing[0]}, which no file holds")
        return cls(directory, config, tensors)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over configuration and tensor headers, as hex."""
        known = {key: value for key, value in self.config.items() if key not in VOLATILE}
        headers = sorted((n, e.dtype, e.shape) for n, e in self.tensors.items())
        text = json.dumps([known, headers], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, "torch.Tensor"]]:
        """The tensors of these names, file by file. Raises UserError for one that is missing."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name not in self.tensors:
                raise UserError(
                    f"{self.directory} cannot be served yet: its files hold no tensor {name},"
                    " which the model's code needs"
                )
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, wanted in by_file.items():
            try:
                with safe_open(file, framework="pt", device="cpu") as opened:
                    for name in wanted:
                        tensor = opened.get_tensor(name)
                        self.bytes_read += tensor.numel() * tensor.element_size()
                        yield name, tensor
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} cannot be read: {error}") from error


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory} has no config.json; is it a model's directory?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{path} does not describe a model: it has no model_type")
    if "auto_map" in config:
        raise UserError(f"{directory} needs code of its own to run; that is never executed here")
    return config


def _shards(directory: Path) -> list[Path]:
    index = _read_index(directory)
    if index is not None:
        files = [directory / name for name in sorted(set(index.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        only = "only .bin files, which can run code" if any(directory.glob("*.bin")) else "none"
        raise UserError(f"{directory} has no safetensors files ({only}); weights must be in them")
    for file in files:
        if file.parent != directory or not file.is_file():
            raise UserError(f"{directory}: the index names {file.name}, which is not there")
    return files


def _read_index(directory: Path) -> dict[str, str] | None:
    path = directory / "model.safetensors.index.json"
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is no index of tensors: {error}") from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise UserError(f"{path} is no index of tensors")
    return weight_map


def _indexed_names(directory: Path) -> list[str]:
    index = _read_index(directory)
    return [] if index is None else list(index)


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """The file's tensors, with offsets checked against its size."""
    size_bytes = file.stat().st_size
    try:
        with file.open("rb") as opened:
            prefix = opened.read(8)
            if len(prefix) < 8:
                raise UserError(f"{file} is damaged: it has only {size_bytes} bytes")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(size_bytes - 8, HEADER_BYTES_MAX):
                raise UserError(f"{file} is damaged: its header cannot have {header_bytes} bytes")
            header = json.loads(opened.read(header_bytes))
        header.pop("__metadata__", None)
        entries = {name: _entry(file, described) for name, described in header.items()}
        end = max((int(described["data_offsets"][1]) for described in header.values()), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is damaged: its header cannot be read ({error})") from error
    if 8 + header_bytes + end != size_bytes:
        raise UserError(
            f"{file} is damaged: {size_bytes} bytes where its header promises"
            f" {8 + header_bytes + end}; download it again"
        )
    return entries


def _entry(file: Path, described: dict[str, Any]) -> TensorEntry:
    entry = TensorEntry(
        file=file, dtype=str(described["dtype"]), shape=tuple(int(n) for n in described["shape"])
    )
    if entry.dtype not in ITEM_BYTES:
        raise UserError(f"{file} holds tensors of dtype {entry.dtype}, which cannot be served yet")
    begin, end = described["data_offsets"]
    if begin < 0 or min(entry.shape, default=0) < 0:
        raise UserError(f"{file} is damaged: a tensor has a negative size")
    if end - begin != entry.numbers * ITEM_BYTES[entry.dtype]:
        raise UserError(f"{file} is damaged: a tensor's length does not fit its shape")
    return entry
