"""A model's files: which they are, their hashes, and the root that stands for all of them.

Peers and clients compute the same root, from a directory or from what a hub lists, without reading
a weight. A directory's hashes are in its manifest, which the first ``node.join`` with it makes, or
``python -m node.weight_hashes MODEL_DIR``.
"""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any

import msgspec

from dht.checkpoints.hub import HubListing, notes_directory
from dht.checkpoints.library_files import check_numbers, key_words, read_by_library, without_code
from dht.checkpoints.text_files import digest_of, text_hashes
from dht.errors import UserError
from dht.messages.types import RECORD_BOUNDS, fingerprint_of
from dht.process.json_file import decode_json, object_or_empty, read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
MANIFEST = "anabranch.sha256.json"
MANIFEST_BYTES_MAX = 256 << 20
CONTEXTS = ("max_position_embeddings", "seq_length", "max_seq_len", "max_target_positions")
"""What families call their longest context."""
CONTEXT_TOKENS = 2048
"""Longest context that is assumed if a configuration names none, as for models with ALiBi."""

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


def root_of(texts: Mapping[str, str], weights: str) -> str:
    """The root of a model, as hex: SHA-256 over the SHA-256 of its text files, by name, and over
    the digest of its weight files (:func:`dht.checkpoints.text_files.digest_of`).

    A client that knows the root can check the text files without knowing the weight files.
    """
    return hashlib.sha256(f"{digest_of(texts)} {weights}".encode()).hexdigest()


def directory_root(directory: Path) -> str:
    """The root of the model in a directory; empty where it has no manifest or no configuration.

    Raises UserError for files that cannot be read.
    """
    manifest = manifest_of(directory)
    if manifest is None or not (directory / "config.json").is_file():
        return ""
    read_config(directory)
    shards = shards_of(directory)
    hashes = {shard: known_hashes(manifest, shard, directory).sha256 for shard in shards}
    return root_of(text_hashes(directory), digest_of(hashes))


def listed_root(listing: HubListing, directory: Path) -> str:
    """The root of a model on a hub, whose small files with the index are in ``directory``.

    Empty where the hub lists no SHA-256 for one of the files. Raises UserError as
    :func:`read_config` and :func:`shard_names`.
    """
    hashes = {
        shard: listing.files[shard].sha256
        for shard in shard_names(listing.repo, listing.files, directory)
    }
    known = {shard: sha256 for shard, sha256 in hashes.items() if sha256 is not None}
    read_config(directory, listing.repo)
    return root_of(text_hashes(directory), digest_of(known)) if known == hashes else ""


# Hashes


def manifest_paths(directory: Path) -> tuple[Path, Path]:
    """Where a directory's manifest may be: in it, or kept elsewhere if nobody may write there."""
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()
    return directory / MANIFEST, notes_directory() / "manifests" / f"{name}.json"


def manifest_of(directory: Path) -> Manifest | None:
    """The manifest of a directory; None if there is none. Raises UserError if it is damaged."""
    for path in manifest_paths(directory):
        if (manifest := read_manifest(path)) is not None:
            return manifest
    return None


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


def known_hashes(manifest: Manifest, shard: str, directory: Path) -> ShardHashes:
    """What the manifest of ``directory`` says of a file; raises UserError if it says nothing."""
    if shard not in manifest.shards:
        raise UserError(
            f"{directory / MANIFEST} does not know {shard}; write it again with"
            " python -m node.weight_hashes"
        )
    return manifest.shards[shard]


# Names and configuration


def read_config(directory: Path, name: str = "") -> dict[str, Any]:
    """The model's configuration without what names code; ``name`` stands for the model in messages.

    Raises UserError, also for a model that only code of its own could run.
    """
    name = name or str(directory)
    path = directory / "config.json"
    try:
        config = read_object(path)
    except FileNotFoundError:
        found = next(directory.glob("*.gguf"), None)
        what = "is it a model's directory?" if found is None else f"give {found}, if that is meant"
        raise UserError(f"{name} has no config.json; {what}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{path} does not describe a model: it has no model_type")
    if "auto_map" in config and library_type(config) is None:
        raise UserError(f"{name} needs code of its own to run; that is never executed here")
    return without_code(config)


def library_type(config: Mapping[str, Any]) -> str | None:
    """The model type under which transformers has this model's class; None where it has none.

    A type that it does not know may come with the name of a class that it has: Kimi K2 names
    DeepSeek V3's. Imports transformers.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if (named := config.get("model_type")) in CONFIG_MAPPING_NAMES:
        return str(named)
    from transformers.models.auto import modeling_auto

    wanted = config.get("architectures")
    first = wanted[0] if isinstance(wanted, list) and wanted else None
    classes = {
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    return next((kind for kind, known in classes.items() if known == first), None)


def library_config(directory: Path) -> Any:
    """The configuration of the model in ``directory`` as an object of transformers.

    Code that comes with a model is never run. Raises UserError for a configuration that
    transformers does not understand, and OSError where nothing can be written here.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    config = read_config(directory)
    kind = library_type(config)
    try:
        if kind is None or kind == config["model_type"]:
            with read_by_library(directory, ("config.json",)) as cleaned:
                return AutoConfig.from_pretrained(cleaned, trust_remote_code=False)
        check_numbers(config)
        borrowed = {key: value for key, value in config.items() if key != "auto_map"}
        return CONFIG_MAPPING[kind].from_dict({**borrowed, "model_type": kind})
    except KeyError as error:
        told = key_words(error, config)
        raise UserError(f"{directory / 'config.json'} is not understood: {told}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of this machine, such as a full disk; transformers' own have no number
        said = " ".join(str(error).split())[:1000]
        raise UserError(f"{directory / 'config.json'} is not understood: {said}") from error


def sizes_of(config: Any) -> tuple[int, int, int]:
    """Layers, longest context in tokens, and vocabulary of a transformers configuration.

    A context beyond what messages can count ends there. Raises ValueError for one of no tokens.
    """
    text = config.get_text_config()
    named = next(filter(None, (getattr(text, name, None) for name in CONTEXTS)), CONTEXT_TOKENS)
    context = max(int(named), *_extended(getattr(text, "rope_parameters", None)))
    if context < 1:
        raise ValueError(f"it names a context of {named} tokens")
    longest = min(context, RECORD_BOUNDS.context_tokens_max)
    return int(text.num_hidden_layers), longest, int(text.vocab_size)


def _extended(rope: Any) -> Iterator[int]:
    """Contexts to which YaRN extends rotary parameters, perhaps given by kind of layer: the factor
    times the original context. What a configuration names may be the original one (Qwen's)."""
    yield 0
    if not isinstance(rope, Mapping):
        return
    for inner in rope.values():
        yield from _extended(inner)
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "yarn" and factor and original:
        yield int(factor * original)


def directory_fingerprint(root: str, directory: Path) -> str:
    """The fingerprint of the model in a directory, whose root is ``root``, by its configuration.

    Imports transformers, which takes a second or two. Raises UserError for a configuration that it
    does not know.
    """
    try:
        return fingerprint_of(root, *sizes_of(library_config(directory)))
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{directory / 'config.json'} is not understood: {error}") from error


def shards_of(directory: Path) -> tuple[str, ...]:
    """The safetensors files of the model in a directory. Raises UserError."""
    files = {file.name for file in directory.iterdir() if file.is_file()}
    chosen = _chosen(directory)
    named = {chosen}
    if chosen == INDEX or not (chosen or SINGLE in files):
        named = set((read_index(directory) or {}).values())
    files |= {name for name in named if _is_within(name) and (directory / name).is_file()}
    return shard_names(str(directory), files, directory)


def _chosen(directory: Path) -> str:
    """The weight file or index that a configuration chooses among several; empty: none."""
    said = object_or_empty(directory / "config.json").get("transformers_weights")
    return "" if said is None else str(said)


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
    return {tensor: str(PurePosixPath(name)) for tensor, name in weight_map.items()}


def shard_names(where: str, files: Collection[str], directory: Path) -> tuple[str, ...]:
    """The safetensors files of a model that has these files, as transformers takes them: the file
    that its configuration chooses, and a single file before the index in ``directory``, which is
    not read then. Where two hold the same tensor, the later one counts.

    Raises UserError.
    """
    chosen = _chosen(directory)
    if chosen and chosen != INDEX:
        if not chosen.endswith(SUFFIX) or chosen not in files or not _is_within(chosen):
            raise UserError(
                f"{where}: its config.json chooses the weights {chosen[:200]}, which are not there"
                f" as a {SUFFIX} file"
            )
        return (chosen,)
    if SINGLE in files and not chosen:
        return (SINGLE,)
    if index := read_index(directory):
        names = tuple(sorted(set(index.values())))
        for name in names:
            if name not in files or not _is_within(name):
                raise UserError(
                    f"{where}: the index names the file {name[:200]}, which is not there"
                )
        return names
    loose = sorted(name for name in files if name.endswith(SUFFIX))
    if loose:
        raise UserError(
            f"{where} has {loose[0][:200]}, but neither {SINGLE} nor an index ({INDEX}) that says"
            " which files are the model's"
        )
    pickled = sorted(name for name in files if name.endswith(PICKLED))
    only = f"only {pickled[0]}, which can run code" if pickled else "none"
    raise UserError(f"{where} has no safetensors files ({only}); weights must be in them")


def _is_within(name: str) -> bool:
    """Whether a file's name stays within its directory, on any system."""
    path = PureWindowsPath(name)  # takes the other systems' names apart, too
    return not path.anchor and ".." not in path.parts
