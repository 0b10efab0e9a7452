"""A GGUF file as a model's directory: links to the file, and text files made of its metadata.

Whatever serves or uses a model reads a directory in Hugging Face's layout, so a GGUF file is given
one, kept beside the hub's cache: the configuration and the tokenizer, which transformers makes of
the metadata, and an index that says which file holds which tensor. The header is checked
(:mod:`dht.checkpoints.gguf_header`) before any library reads it. Peers with the same file and the
same transformers make the same text files.
"""

import hashlib
import logging
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from dht.checkpoints.gguf_header import (
    HEADER_BOUNDS,
    GgufHeader,
    GgufTensor,
    gguf_header_bytes,
    parse_gguf,
    read_whole_header,
    without_long_arrays,
)
from dht.checkpoints.gguf_settings import SETTINGS_VERSION, settings_of
from dht.checkpoints.gguf_tokenizer import gguf_tokenizer
from dht.checkpoints.hub import (
    GGUF,
    HubId,
    HubListing,
    fetch_small_files,
    fetch_start,
    gguf_names,
    list_model,
    local_path,
    notes_directory,
    snapshot,
)
from dht.checkpoints.model_files import INDEX, listed_root
from dht.checkpoints.text_files import digest_of
from dht.errors import UserError, first_line

logger = logging.getLogger(__name__)

HEADER_GUESS_BYTES = 4 << 20
"""Bytes requested from a hub at first: a header with a vocabulary of usual size."""
ARCHITECTURE = "gguf_architecture"
"""Key of a configuration that was made of a GGUF file: what the file calls its architecture."""
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
SPLITS_MAX = 1 << 10
FACTORS_MAX = 1 << 12
"""Maximum numbers of a tensor that becomes a setting: one for each pair of a head's channels."""
TIED_ANYWAY = ("falcon", "bloom")
"""Architectures that are tied though their files hold an output head, as transformers knows."""
Read = Callable[[str, GgufTensor], bytes]
"""Reads a tensor of one of a model's files."""
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens that end an answer, by their keys behind ``tokenizer.ggml.``."""


def model_directory(model: str) -> Path | None:
    """The directory of the local model that ``model`` names: a directory, or a GGUF file, whose
    directory is made where it is not there yet.

    None where ``model`` names neither. Raises UserError for a file that cannot be served.
    """
    path = local_path(model)
    if path is None or path.is_dir():
        return path
    return _directory_of(path.absolute())


def is_gguf(model: str) -> bool:
    """Whether ``model`` names a GGUF file, here or on the hub."""
    if (path := local_path(model)) is not None:
        return path.is_file()
    hub_id = HubId.parse(model)
    return hub_id is not None and hub_id.file is not None


def hub_model(hub_id: HubId) -> tuple[HubListing, Path]:
    """The files of a model on the hub, and the directory of its small files.

    Of a GGUF file only the header is fetched. Raises UserError for what is not there or cannot be
    served, NetworkError where something is missing here and the hub cannot be reached.
    """
    listing = list_model(hub_id)
    if hub_id.file is None:
        return listing, fetch_small_files(listing, INDEX)
    files = split_names(hub_id.file)
    for name in files:
        if name not in listing.files or not name.endswith(GGUF):
            found = gguf_names(listing) or "none"
            raise UserError(f"{hub_id.repo} has no GGUF file {name}; it has {found}")
    contents = {name: listing.files[name].sha256 or listing.commit for name in files}
    place = _place(digest_of(contents), Path(hub_id.file).name)
    if not (place / INDEX).is_file():
        headers = [(name, *_hub_header(listing, name)) for name in files]
        write_directory(place, headers, read=partial(_hub_numbers, listing))
    return listing, place


def hub_root(hub_id: HubId) -> tuple[Path, str]:
    """The directory of a hub model's small files, fetched where they are missing, and its root.

    Raises as :func:`hub_model` and :func:`dht.checkpoints.model_files.listed_root`.
    """
    listing, directory = hub_model(hub_id)
    return directory, listed_root(listing, directory)


def _hub_header(listing: HubListing, name: str) -> tuple[bytes, GgufHeader]:
    """The header of a GGUF file on the hub, or in the cache. Raises UserError, NetworkError."""
    if (here := snapshot(listing) / name).is_file():
        return read_gguf_header(here)
    where, size_bytes = f"{name} of {listing.repo}", listing.files[name].size_bytes
    raw, needed = b"", HEADER_GUESS_BYTES
    try:
        while len(raw) < (needed := min(needed, size_bytes)):
            raw = fetch_start(listing, name, needed)
            needed = gguf_header_bytes(raw, size_bytes, where)
        return raw[:needed], parse_gguf(raw, size_bytes, where)
    except ValueError as error:
        raise UserError(f"{where} is damaged: {error}") from error


def _hub_numbers(listing: HubListing, name: str, tensor: GgufTensor) -> bytes:
    """The bytes of a tensor near the start of a file on the hub. Raises UserError, NetworkError."""
    if (here := snapshot(listing) / name).is_file():
        return _numbers(here, tensor)
    if tensor.end > HEADER_BOUNDS.bytes_max:
        raise UserError(
            f"{name} of {listing.repo} cannot be served from the hub: {tensor.name} stands behind"
            f" its first {HEADER_BOUNDS.bytes_max} bytes; download the file"
        )
    return fetch_start(listing, name, tensor.end)[tensor.begin :]


def _numbers(file: Path, tensor: GgufTensor) -> bytes:
    """The bytes of a tensor. Raises UserError."""
    try:
        with file.open("rb") as opened:
            opened.seek(tensor.begin)
            return opened.read(tensor.end - tensor.begin)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def split_names(name: str) -> list[str]:
    """Names of all files of a model of which ``name`` is one. Raises UserError."""
    found = SPLIT.fullmatch(name)
    if found is None:
        return [name]
    count = int(found[3])
    if not 0 < int(found[2]) <= count <= SPLITS_MAX:
        raise UserError(f"{name} is no part of a split GGUF file")
    return [f"{found[1]}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]


def read_gguf_header(path: Path) -> tuple[bytes, GgufHeader]:
    """The header of a GGUF file as bytes, and parsed. Raises UserError."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as opened:
            raw = read_whole_header(
                opened, lambda raw: gguf_header_bytes(raw, size_bytes, str(path))
            )
        return raw, parse_gguf(raw, size_bytes, str(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _directory_of(path: Path) -> Path:
    files = [path.with_name(name) for name in split_names(path.name)]
    known = []
    try:
        for file in files:
            said = file.stat()
            known.append(f"{file.resolve()} {said.st_size} {said.st_mtime_ns}")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    place = _place("\n".join(known), path.name)
    if (place / INDEX).is_file():
        return place
    headers = [(file.name, *read_gguf_header(file)) for file in files]
    return write_directory(place, headers, files)


def _place(content: str, name: str) -> Path:
    """The directory for the GGUF file ``name``, the bytes of whose files have the hash ``content``.

    Another version of transformers may make other text files of them, and so has a directory of its
    own.
    """
    told = f"{content}\n{version('transformers')}\n{SETTINGS_VERSION}"
    return notes_directory() / "gguf" / hashlib.sha256(told.encode()).hexdigest() / name


def write_directory(
    place: Path,
    headers: Sequence[tuple[str, bytes, GgufHeader]],
    files: Sequence[Path] = (),
    read: Read | None = None,
) -> Path:
    """Make the directory ``place`` of the GGUF model whose files have these names and headers.

    ``files``, one for each, are linked from it; ``read`` reads tensors where there are none.
    Raises UserError for a model that cannot be served,
    or a place that cannot be written.
    """
    by_name = {file.name: file for file in files}
    read = read or (lambda name, tensor: _numbers(by_name[name], tensor))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            directory = Path(made) / "model"
            directory.mkdir()
            where = str(files[0] if files else headers[0][0])
            for name, data in _texts(where, headers, directory, read):
                (directory / name).write_bytes(data)
            for file in files:
                _link(file, directory / file.name)
            if not place.is_dir():
                os.replace(directory, place)
        _forget_gone()
    except OSError as error:
        if not (place / INDEX).is_file():  # else another process has made it meanwhile
            raise UserError(f"{place} cannot be written: {error}") from error
    return place


def _link(file: Path, link: Path) -> None:
    try:
        link.symlink_to(file)
    except OSError:  # a system that lets only some users make them
        os.link(file, link)


def _forget_gone() -> None:
    """Remove the directories of files that are no longer where they were."""
    for link in (notes_directory() / "gguf").glob(f"*/*/*{GGUF}"):
        if link.is_symlink() and not link.exists():
            shutil.rmtree(link.parents[1], ignore_errors=True)


# Text files


def _texts(
    where: str, headers: Sequence[tuple[str, bytes, GgufHeader]], directory: Path, read: Read
) -> Iterable[tuple[str, bytes]]:
    """Name and content of each text file; those of the tokenizer are written to ``directory``."""
    from transformers.integrations.gguf import read_gguf_metadata

    _, raw, header = headers[0]
    names: dict[str, str] = {}
    for name, _, each in headers:
        for tensor in each.tensors:
            if names.setdefault(tensor.name, name) != name:
                raise UserError(f"{where} is damaged: two of its files hold {tensor.name[:120]}")
    count = header.metadata.get("split.count", 1) or 1
    if count != len(headers):
        raise UserError(f"{where} cannot be served: it is one of {count} files, not {len(headers)}")
    made = _config(where, raw, header, names)
    with _Hollow(without_long_arrays(raw, header), header) as file:
        metadata, _ = read_gguf_metadata(str(file))
    begin = f"{made[ARCHITECTURE]}."
    said = {
        key.removeprefix(begin): value for key, value in metadata.items() if key.startswith(begin)
    }
    tensors = {t.name: (name, t) for name, _, each in headers for t in each.tensors}

    def factors(name: str) -> list[float]:
        file, tensor = tensors[name]
        if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > FACTORS_MAX:
            raise UserError(f"{where} is damaged: {name} is {tensor.kind} of {tensor.shape}")
        return list(struct.unpack(f"<{tensor.shape[0]}f", read(file, tensor)))

    config = settings_of(where, made, said, tuple(names), factors)
    yield "config.json", msgspec.json.encode(config)
    yield INDEX, msgspec.json.encode({"weight_map": names})
    ends = [header.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    known = [token for token in dict.fromkeys(ends) if type(token) is int]
    if known:
        yield "generation_config.json", msgspec.json.encode({"eos_token_id": known})
    try:
        _write_tokenizer(where, raw, header, directory)
    except UserError as error:
        logger.warning("%s", error)


def _config(where: str, raw: bytes, header: GgufHeader, names: Mapping[str, str]) -> dict[str, Any]:
    """The configuration that transformers makes of the metadata. Raises UserError."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise UserError(f"{where} cannot be served: it does not say of which architecture it is")
    from transformers import CONFIG_MAPPING
    from transformers.integrations.gguf import (
        GGUF_CONFIG_ARCHS,
        get_gguf_config,
        read_gguf_metadata,
    )
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # It would warn of the vocabulary that is left out.
    logging.getLogger("transformers.modeling_gguf_pytorch_utils").setLevel(logging.ERROR)
    vocabulary = header.lengths.get("tokenizer.ggml.tokens")
    try:
        if architecture in GGUF_CONFIG_ARCHS:
            with _Hollow(raw, header) as file:
                metadata, _ = read_gguf_metadata(str(file))
            config = get_gguf_config(metadata, tuple(names))
        else:
            with _Hollow(without_long_arrays(raw, header), header) as file:
                config = load_gguf_checkpoint(str(file))["config"]
            if "output.weight" in names and architecture not in TIED_ANYWAY:
                config["tie_word_embeddings"] = False  # it may be in another file than the first
            if vocabulary is not None:
                config.setdefault("vocab_size", vocabulary)
        known = config["model_type"] in CONFIG_MAPPING
    except Exception as error:
        raise UserError(
            f"{where} cannot be served: transformers does not read its architecture"
            f" {architecture[:40]!r} ({first_line(error)[:200]})"
        ) from error
    if not known:
        raise UserError(
            f"{where} cannot be served: transformers has no model for its architecture"
            f" {architecture[:40]!r}"
        )
    plain = {key: value for key, value in config.items() if not key.startswith("_")}
    return {**plain, ARCHITECTURE: architecture}


def _write_tokenizer(where: str, raw: bytes, header: GgufHeader, directory: Path) -> None:
    """Write the tokenizer that transformers makes of the metadata, with its chat template.

    Raises UserError where it makes none.
    """
    try:
        with _Hollow(raw, header) as file:
            made = gguf_tokenizer(file)
        made.save_pretrained(directory)
    except Exception as error:
        raise UserError(
            f"{where} has no tokenizer that transformers understands, only token ids"
            f" ({first_line(error)[:200]})"
        ) from error


class _Hollow:
    """A sparse file that begins with a header and has the size that the header promises, for
    libraries that read a header from a path."""

    def __init__(self, raw: bytes, header: GgufHeader) -> None:
        self._raw = raw
        self._size_bytes = max((tensor.end for tensor in header.tensors), default=len(raw))
        self._folder = Path()

    def __enter__(self) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-gguf-"))
        file = self._folder / "header.gguf"
        with file.open("wb") as opened:
            opened.write(self._raw)
            opened.truncate(self._size_bytes)
        return file

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
