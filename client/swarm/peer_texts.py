"""A model's small text files from its peers, for clients that have none of its files.

Whatever a peer sends is checked against the model's root before it is used or kept. What is kept is
checked again when it is read.
"""

import asyncio
import hashlib
import logging
import os
import random
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from dht.checkpoints.hub import TEXT_FILES
from dht.checkpoints.model_files import root_of
from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.peer import (
    PEER_BOUNDS,
    TextFile,
    TextPiece,
    TextRequest,
    TextsFound,
    TextsRequest,
)
from dht.messages.types import NodeRecord
from dht.process.home import cache_directory, passing_directory
from dht.process.json_file import decode_json
from dht.transport.interface import TEXT_PROTOCOL, Stream, Transport

T = TypeVar("T")
logger = logging.getLogger(__name__)

ROOT = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsConfig:
    """How long and how many peers are asked for text files, and how much they may send."""

    peers_asked_max: int = 8
    peer_limit_s: float = 120.0
    """Time for one peer to send all files."""
    answer_limit_s: float = 10.0
    bytes_max: int = 96 << 20
    """Maximum size of a model's text files together."""
    kept_max: int = 16
    """Maximum models whose files are kept; those unused for longest go first."""
    list_bytes_max: int = 16 << 10


TEXTS = TextsConfig()


LIST = "files.json"


def texts_folder() -> Path:
    """The folder of models' text files (:func:`dht.process.home.cache_directory`)."""
    return cache_directory("texts")


async def fetched_texts(
    transport: Transport, root: str, nodes: Mapping[str, NodeRecord], folder: Path | None = None
) -> Path:
    """The directory with the text files of the model of this root, from the cache or its peers.

    ``nodes`` are the peers that announce it. Raises NetworkError where none gives them.
    """
    if ROOT.fullmatch(root) is None:  # it becomes the name of a directory
        raise NetworkError("peers announce a root of the model's files that is none")
    folder = folder or texts_folder()
    if (kept := await asyncio.to_thread(_kept, folder, root)) is not None:
        return kept
    reasons = []
    # Drawn: a peer that makes up records could come first in any order that it knows.
    rng = random.Random(transport.peer_id)  # noqa: S311
    for peer_id in rng.sample(sorted(nodes), min(len(nodes), TEXTS.peers_asked_max)):
        try:
            async with asyncio.timeout(TEXTS.peer_limit_s):
                found, texts = await _asked(transport, peer_id, nodes[peer_id].addresses, root)
        except (NetworkError, PeerError, TimeoutError) as error:
            logger.info("no text files from %s: %s", peer_id, error or "it took too long")
            reasons.append(str(error) or "it took too long")
            continue
        return await asyncio.to_thread(_keep, folder, root, found, texts)
    why = reasons[-1] if reasons else "no peer announces it"
    raise NetworkError(f"no peer gives the model's tokenizer and text files: {why}")


def checked(found: TextsFound, root: str) -> TextsFound:
    """``found`` if it is of this root; raises MalformedError."""
    names = [file.name for file in found.files]
    if not set(names) <= set(TEXT_FILES) or len(set(names)) != len(names):
        raise codec.MalformedError("it lists files that no model passes on")
    if sum(file.size_bytes for file in found.files) > TEXTS.bytes_max:
        raise codec.MalformedError(f"its text files have more than {TEXTS.bytes_max} bytes")
    if root_of({file.name: file.sha256 for file in found.files}, found.weights) != root:
        raise codec.MalformedError("its text files are not those of the model's fingerprint")
    return found


async def _asked(
    transport: Transport, peer_id: str, addresses: tuple[str, ...], root: str
) -> tuple[TextsFound, dict[str, bytes]]:
    stream = await transport.open_stream(peer_id, TEXT_PROTOCOL, addresses=addresses)
    try:
        found, _ = await _ask(stream, TextsRequest(root=root), TextsFound, TEXTS.list_bytes_max)
        if not found.files:
            raise NetworkError("it has no text files of this model")
        checked(found, root)
        return found, {file.name: await _file(stream, file) for file in found.files}
    finally:
        await stream.close()


async def _file(stream: Stream, file: TextFile) -> bytes:
    data = bytearray()
    while len(data) < file.size_bytes:
        request = TextRequest(sha256=file.sha256, start=len(data))
        _, body = await _ask(stream, request, TextPiece, PEER_BOUNDS.text_piece_bytes + 1024)
        if not body:
            raise NetworkError(f"it no longer has the {file.name} that it began to serve with")
        if len(data) + len(body) > file.size_bytes:
            raise codec.MalformedError(f"{file.name} comes with another length than listed")
        data += body
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise codec.MalformedError(f"{file.name} has another hash than listed")
    return bytes(data)


async def _ask(stream: Stream, request: object, kind: type[T], limit_bytes: int) -> tuple[T, bytes]:
    async with asyncio.timeout(TEXTS.answer_limit_s):
        await codec.send_frame(stream, request)
        frame = await codec.read_frame(stream, limit_bytes=limit_bytes)
    if not isinstance(frame.message, kind):
        raise codec.MalformedError(f"{type(frame.message).__name__} instead of {kind.__name__}")
    return frame.message, bytes(frame.body)


# On disk


def _kept(folder: Path, root: str) -> Path | None:
    """The kept files of this root, checked anew; None where there are none or others."""
    directory = folder / root
    try:
        with (directory / LIST).open("rb") as file:
            found = decode_json(file.read(TEXTS.list_bytes_max), TextsFound)
        checked(found, root)
        for each in found.files:
            data = (directory / each.name).read_bytes()
            if hashlib.sha256(data).hexdigest() != each.sha256:
                return None
        os.utime(directory)
    except (OSError, ValueError, PeerError):
        return None
    return directory


def _keep(folder: Path, root: str, found: TextsFound, texts: Mapping[str, bytes]) -> Path:
    """Keep the files under their root. Where the cache cannot be written, whether it is read-only,
    full, or another process keeps the same files now, in a passing place. Raises OSError."""
    files = {**texts, LIST: msgspec.json.encode(found)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = _written(folder, files)
        try:
            shutil.rmtree(folder / root, ignore_errors=True)
            os.replace(made, folder / root)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        logger.info("cannot keep text files in %s: %s", folder, error)
        return _written(passing_directory(), files)
    with suppress(OSError):  # another process removes some, too
        _prune(folder)
    return folder / root


def _written(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A new directory in ``folder`` with these files; raises OSError, and then there is none."""
    made = Path(tempfile.mkdtemp(prefix=".", dir=folder))
    try:
        for name, data in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(data)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return made


def _prune(folder: Path) -> None:
    kept = sorted(
        (path for path in folder.iterdir() if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
    )
    for path in kept[: -TEXTS.kept_max]:
        shutil.rmtree(path, ignore_errors=True)
