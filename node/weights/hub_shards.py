"""The weights of a model on a hub: headers first, then only the files that a range needs.

The unit of fetching is the file, not the tensor: the hub vouches for a whole file's SHA-256, and a
byte range of it could not be checked against anything. A file that came is hashed once, in whole
and tensor by tensor; the tensors' hashes are kept, and every later load checks what it reads.

``huggingface_hub`` makes the requests, and ``hf_hub_download`` fetches small files. It starts anew
whenever a process was killed, and checks lengths alone, so large files come by
:func:`dht.checkpoints.hub.fetch_bytes`.
"""

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dht.checkpoints.gguf_model import hub_model
from dht.checkpoints.hub import (
    HubId,
    HubListing,
    HubOfflineError,
    HubUnreachableError,
    fetch_bytes,
    fetch_start,
    hub_errors,
    local_path,
    notes_directory,
    snapshot,
    write_note,
)
from dht.checkpoints.model_files import ShardHashes, read_config, shard_names
from dht.errors import NetworkError, UserError
from dht.process.json_file import value_or_none
from node.weights.hashes import Progress, hash_shard
from node.weights.safetensors_header import DamagedError
from node.weights.shard_header import header_bytes_of, read_header
from node.weights.store import ShardSource, WeightStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """How much is fetched of a hub at once, and how often."""

    headers_at_once: int = 8
    header_guess_bytes: int = 128 << 10
    """Bytes of a file that are requested first: most headers are shorter, so that one request is
    enough."""
    spare_bytes: int = 64 << 20
    """Bytes of the disk that a fetch leaves free."""
    fetches_max: int = 2
    """Maximum times that a file is fetched if it comes damaged."""
    report_every_s: float = 0.1


FETCH = FetchConfig()

_HASH_BYTES = hashlib.sha256().digest_size


def open_model(model: str, progress: Progress | None = None) -> WeightStore:
    """The model in a local directory or GGUF file (:meth:`WeightStore.open`), or on the hub by its
    id (:func:`open_hub_model`)."""
    if local_path(model) is not None:
        return WeightStore.open(model, progress)
    hub_id = HubId.parse(model)
    if hub_id is None:
        raise UserError(
            f"{model} is neither a directory, nor a GGUF file, nor a hub id"
            " (org/name[@revision][:file.gguf])"
        )
    return open_hub_model(hub_id)


def open_hub_model(hub_id: HubId) -> WeightStore:
    """The model on the hub, checked by its configuration and headers; no weights are fetched but
    those that the hub lists without a SHA-256.

    Raises UserError for what cannot be served or is not open to this user, NetworkError where
    something is missing here and the hub cannot be reached.
    """
    listing, directory = hub_model(hub_id)
    config = read_config(directory, str(hub_id))
    return WeightStore.of(HubShards(listing, directory), config)


class HubShards(ShardSource):
    """The weight files of a model on a hub, in the usual cache."""

    is_local = False

    def __init__(self, listing: HubListing, directory: Path) -> None:
        """``directory`` holds the text files."""
        super().__init__(directory)
        self._snapshot = snapshot(listing)
        self._listing = listing
        self._stopped = threading.Event()
        self._hashes = {}
        self.shards = shard_names(listing.repo, listing.files, directory)
        with ThreadPoolExecutor(FETCH.headers_at_once) as pool:
            found = pool.map(self._find_header, self.shards)
            self._headers = dict(zip(self.shards, found, strict=True))
        for shard in self.shards:
            if listing.files[shard].sha256 is None:
                logger.warning("%s: the hub lists no SHA-256; it is taken here", self._at(shard))
                self._bring(shard)

    # What the store asks

    def header(self, shard: str) -> tuple[bytes, int]:
        return self._headers[shard], self._size(shard)

    def path(self, shard: str) -> Path:
        return self._snapshot / shard

    def sha256(self, shard: str) -> str:
        return self._listing.files[shard].sha256 or self._hashes[shard].sha256

    def stop(self) -> None:
        self._stopped.set()

    def fetch(self, shards: Iterable[str], progress: Progress | None = None) -> None:
        """Bring the shards here and know what they must hold.

        ``progress`` counts the bytes of all files that are missing, what an earlier, interrupted
        fetch left included. Raises UserError and NetworkError; DamagedError for a file that is
        damaged even when it was fetched again.
        """
        wanted = list(shards)
        missing = [shard for shard in wanted if not self.path(shard).is_file()]
        total_bytes = sum(self._size(shard) for shard in missing)
        done_bytes = 0

        def report(file_bytes: int) -> None:
            if progress is not None:
                progress(done_bytes + file_bytes, total_bytes)

        for shard in missing:
            self._bring(shard, report)
            done_bytes += self._size(shard)
        for shard in wanted:
            self._bring(shard)

    def fetch_again(self, shard: str) -> bool:
        """Throw the cached file away and fetch it anew, once."""
        if not self._forget(shard):
            return False
        self._bring(shard, fetches_max=1)
        return True

    # Headers

    def _find_header(self, shard: str) -> bytes:
        """A shard's header: the noted one if it has its hash, else from the hub, or from the file
        if the hub cannot be reached."""
        note, path, kept = self._note(shard, "header"), self.path(shard), b""
        with suppress(OSError):
            kept = note.read_bytes()
        raw = kept[_HASH_BYTES:]
        if raw and hashlib.sha256(raw).digest() == kept[:_HASH_BYTES]:
            return raw
        try:
            size_bytes, needed = self._size(shard), FETCH.header_guess_bytes
            while len(raw) < needed:
                raw = fetch_start(self._listing, shard, min(needed, size_bytes))
                needed = header_bytes_of(raw, size_bytes, shard, self._at(shard))
            raw = raw[:needed]
        except (NetworkError, HubOfflineError):
            if not path.is_file():
                raise
            with path.open("rb") as opened:
                return read_header(opened, path.stat().st_size, shard, str(path))
        write_note(note, hashlib.sha256(raw).digest() + raw)
        return raw

    # Files

    def _bring(
        self,
        shard: str,
        report: Callable[[int], None] = lambda file_bytes: None,
        fetches_max: int = FETCH.fetches_max,
    ) -> None:
        """Have the file here and know what it must hold; a damaged one is fetched again."""
        for left in range(fetches_max - 1, -1, -1):
            try:
                if not self.path(shard).is_file():
                    with hub_errors(self._at(shard)):
                        self._download(shard, report)
                if shard not in self._hashes:
                    noted = self._noted_hashes(shard)
                    self._hashes[shard] = noted or self._hash(shard, self.path(shard))
                return
            except DamagedError as error:
                if left == 0 or not self._forget(shard):
                    raise
                logger.warning("%s; fetching it again", error)

    def _forget(self, shard: str) -> bool:
        """Throw a file away; False where it could not be fetched again."""
        from huggingface_hub import is_offline_mode

        if is_offline_mode():
            return False
        self.path(shard).resolve().unlink(missing_ok=True)
        self.path(shard).unlink(missing_ok=True)
        self._hashes.pop(shard, None)
        return True

    def _download(self, shard: str, report: Callable[[int], None]) -> None:
        """Fetch a file into the cache, going on where an earlier fetch stopped.

        It gets its name in the cache only when its SHA-256 is right.
        """
        from filelock import FileLock, Timeout

        path = self.path(shard)
        blob = self._snapshot.parents[1] / "blobs" / self._name(shard)
        partial = blob.with_name(f"{blob.name}.partial")
        blob.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(f"{blob}.lock").acquire(cancel_check=self._stopped.is_set)
        except Timeout:
            raise HubUnreachableError("stopped") from None
        with lock:
            if path.is_file():  # another peer on this machine fetched it
                return
            if not blob.is_file():  # else another commit has the same file
                self._transfer(shard, partial, report)
                try:
                    self._hashes[shard] = self._hash(shard, partial)
                except DamagedError:
                    partial.unlink()
                    raise
                partial.replace(blob)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                path.symlink_to(os.path.relpath(blob, path.parent))
            except OSError:  # a file system without links
                blob.replace(path)

    def _transfer(self, shard: str, partial: Path, report: Callable[[int], None]) -> None:
        size_bytes = self._size(shard)
        with partial.open("ab") as opened:
            if opened.tell() > size_bytes:
                opened.truncate(0)
                opened.seek(0)
            done_bytes = opened.tell()
            need_bytes = size_bytes - done_bytes + FETCH.spare_bytes
            free_bytes = shutil.disk_usage(partial.parent).free
            if need_bytes > free_bytes:
                raise UserError(
                    f"{shard} needs {need_bytes / 2**30:.1f} GiB in {partial.parent}, where"
                    f" {free_bytes / 2**30:.1f} GiB are free; HF_HOME chooses another place"
                )
            blocks = fetch_bytes(self._listing, shard, done_bytes, size_bytes, self._pause)
            reported_s = 0.0
            try:
                for block in blocks:
                    self._still_wanted()
                    opened.write(block)
                    done_bytes += len(block)
                    now_s = time.monotonic()
                    if now_s - reported_s >= FETCH.report_every_s or done_bytes == size_bytes:
                        reported_s = now_s
                        report(done_bytes)
            except NetworkError as error:
                raise HubUnreachableError(
                    f"{error}; {done_bytes} of {size_bytes} bytes of {shard} are kept, and it"
                    " goes on there"
                ) from error

    def _pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)
        self._still_wanted()

    def _still_wanted(self, _: int = 0) -> None:
        if self._stopped.is_set():
            raise HubUnreachableError("stopped")

    # Hashes

    def _noted_hashes(self, shard: str) -> ShardHashes | None:
        noted = value_or_none(self._note(shard, "json"), ShardHashes)
        if noted is None or self._listing.files[shard].sha256 not in {noted.sha256, None}:
            return None
        return noted

    def _hash(self, shard: str, path: Path) -> ShardHashes:
        """Hash the whole file; raises DamagedError where the hub lists another SHA-256."""
        expected = self._listing.files[shard].sha256
        try:
            hashes = hash_shard(path, self._still_wanted, shard)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if expected not in {hashes.sha256, None}:
            raise DamagedError(
                shard,
                f"{self._at(shard)} is damaged: its SHA-256 is not the one that the hub lists",
            )
        if hashes.header_sha256 != hashlib.sha256(self._headers[shard]).hexdigest():
            self._note(shard, "header").unlink(missing_ok=True)
            raise UserError(f"{shard}: its header came damaged from the hub; start again")
        write_note(self._note(shard, "json"), msgspec.json.encode(hashes))
        return hashes

    # Names and places

    def _at(self, shard: str) -> str:
        return f"{shard} of {self._listing.repo}"

    def _size(self, shard: str) -> int:
        return self._listing.files[shard].size_bytes

    def _name(self, shard: str) -> str:
        """Name of the file's content: its SHA-256, where the hub gives one."""
        return (
            self._listing.files[shard].sha256
            or hashlib.sha256(f"{self._listing.commit}/{shard}".encode()).hexdigest()
        )

    def _note(self, shard: str, kind: str) -> Path:
        """Where something about the file's content is kept."""
        return notes_directory() / "shards" / f"{self._name(shard)}.{kind}"
