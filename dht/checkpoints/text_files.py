"""A model's small text files: what a client needs of it besides token ids.

Their hashes are part of the model's root (:func:`dht.checkpoints.model_files.root_of`), so a client
that knows the root, or the fingerprint over it, can take them from anybody.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dht.checkpoints.hub import TEXT_FILES
from dht.errors import UserError
from dht.messages.peer import PEER_BOUNDS
from dht.process.json_file import read_object

VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
"""Configuration keys that do not tell two models apart."""
CONFIGURATIONS = ("config.json", "generation_config.json")


def text_bytes(directory: Path, name: str) -> bytes | None:
    """A text file as peers pass it on; None where the model has none.

    Configurations are written anew without ``VOLATILE`` keys, which differ from save to save.
    Raises UserError for one that cannot be read.
    """
    path = directory / name
    try:
        if path.stat().st_size > PEER_BOUNDS.text_bytes_max:
            raise UserError(f"{path} is larger than {PEER_BOUNDS.text_bytes_max} bytes")
        return plain(read_object(path)) if name in CONFIGURATIONS else path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def plain(config: Mapping[str, Any]) -> bytes:
    """A configuration without ``VOLATILE`` keys, always written in the same way."""
    known = {key: value for key, value in config.items() if key not in VOLATILE}
    return json.dumps(known, sort_keys=True).encode()


def texts_in(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each text file that the model in ``directory`` has. Raises UserError."""
    for name in TEXT_FILES:
        if (data := text_bytes(directory, name)) is not None:
            yield name, data


def text_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of each text file that the model in ``directory`` has. Raises UserError."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in texts_in(directory)}


def digest_of(hashes: Mapping[str, str]) -> str:
    """SHA-256 over the SHA-256 of some files, by name; as hex."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()
