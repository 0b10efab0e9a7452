"""The weights of a model on a hub: headers first, then only the files that a range needs.

The unit of fetching is the file, not the tensor: the hub vouches for a whole file's SHA-256, and a
byte range of it could not be checked against anything. A file that came is hashed once, in whole
and tensor by tensor; the tensors' hashes are kept, and every later load checks what it reads.
"""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dht.errors import NetworkError, UserError
from dht.hub import (
    TEXT_FILES,
    HubId,
    HubListing,
    HubUnreachableError,
    cached_snapshot,
    fetch_file,
    hub_errors,
    is_offline,
    list_model,
    notes_directory,
    write_note,
)
from node.weights.hashes import ShardHashes, hash_shard, read_header
from node.weights.safetensors_header import PREFIX_BYTES, DamagedError, header_bytes_of
from node.weights.store import (
    INDEX,
    PICKLED,
    SINGLE,
    Progress,
    WeightStore,
    read_config,
    read_index,
)

logger = logging.getLogger(__name__)

HEADERS_AT_ONCE = 8
HEADER_GUESS_BYTES = 128 << 10
"""Asked for at first; most headers are shorter, and then one request is enough."""
SPARE_BYTES = 64 << 20
"""Left free on the disk."""
_HASH_BYTES = hashlib.sha256().digest_size


def open_model(model: str) -> WeightStore:
    """The model in a local directory, or on the hub by its id; see :func:`open_hub_model`."""
    if Path(model).expanduser().is_dir():
        return WeightStore.open(model)
    hub_id = HubId.parse(model)
    if hub_id is None:
        raise UserError(f"{model} is neither a directory nor a hub id (org/name[@revision])")
    return open_hub_model(hub_id)


def open_hub_model(hub_id: HubId) -> WeightStore:
    """The model on the hub, checked by its configuration and headers; no weights are fetched.

    Raises UserError for what cannot be served or is not open to this user, NetworkError where
    something is missing here and the hub cannot be reached.
    """
    listing = list_model(hub_id)
    if "config.json" not in listing.files:
        raise UserError(f"{hub_id} has no config.json; is it a model?")
    for name in (*TEXT_FILES, INDEX):
        if name in listing.files:
            fetch_file(listing, name)
    directory = cached_snapshot(listing)
    config = read_config(directory, str(hub_id))
    return WeightStore.of(HubShards(listing, directory), config)


class HubShards:
    """Implements :class:`node.weights.store.ShardSource` over a hub and the usual cache."""

    def __init__(self, listing: HubListing, directory: Path) -> None:
        self.directory = directory
        self.is_local = False
        self._listing = listing
        self._notes = notes_directory() / "shards"
        self._stopped = threading.Event()
        self._hashes: dict[str, ShardHashes] = {}
        self.shards = _shard_names(listing, directory)
        self.verified = all(listing.files[shard].sha256 for shard in self.shards)
        with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
            found = pool.map(self._find_header, self.shards)
            self._headers = dict(zip(self.shards, found, strict=True))

    # What the source protocol asks

    def header(self, shard: str) -> tuple[bytes, int]:
        return self._headers[shard], self._size(shard)

    def path(self, shard: str) -> Path:
        return self.directory / shard

    def hashes(self, shard: str) -> ShardHashes | None:
        return self._hashes.get(shard)

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
            self._download(shard, report, times_max=2)
            done_bytes += self._size(shard)
        for shard in wanted:
            if shard not in self._hashes:
                self._verify(shard)

    def fetch_again(self, shard: str) -> bool:
        """Throw the cached file away and fetch it anew."""
        if is_offline():
            return False
        self._forget(shard)
        self._download(shard, lambda _: None, times_max=1)
        return True

    # Headers

    def _find_header(self, shard: str) -> bytes:
        noted = self._noted_header(shard)
        if noted is not None:
            return noted
        path, size_bytes = self.path(shard), self._size(shard)
        if is_offline():
            if not path.is_file():
                raise self._forbidden(f"the header of {shard}")
            with path.open("rb") as opened:
                return read_header(opened, path.stat().st_size, shard, str(path))
        where = f"{shard} of {self._listing.repo}"
        raw = self._range(shard, min(HEADER_GUESS_BYTES, size_bytes))
        length = header_bytes_of(raw[:PREFIX_BYTES], size_bytes, shard, where)
        raw = raw[:length] if length <= len(raw) else self._range(shard, length)
        if (note := self._note(shard, "header")) is not None:
            write_note(note, hashlib.sha256(raw).digest() + raw)
        return raw

    def _noted_header(self, shard: str) -> bytes | None:
        """The header as it came once; its own hash goes before it in the note."""
        note = self._note(shard, "header")
        try:
            kept = b"" if note is None else note.read_bytes()
        except OSError:
            return None
        raw = kept[_HASH_BYTES:]
        return raw if raw and hashlib.sha256(raw).digest() == kept[:_HASH_BYTES] else None

    def _forbidden(self, what: str) -> UserError:
        return UserError(
            f"{what} of {self._listing.repo} is not in the cache, and HF_HUB_OFFLINE forbids to"
            " fetch it"
        )

    def _range(self, shard: str, count_bytes: int) -> bytes:
        """The first bytes of a file on the hub, and no more, even where it ignores ranges."""
        got = bytearray()
        with hub_errors(self._listing.repo):
            from huggingface_hub.utils import (
                build_hf_headers,
                hf_raise_for_status,
                http_stream_backoff,
            )

            headers = {**build_hf_headers(), "Range": f"bytes=0-{count_bytes - 1}"}
            with http_stream_backoff("GET", self._url(shard), headers=headers) as response:
                hf_raise_for_status(response)
                for block in response.iter_bytes():
                    got += block
                    if len(got) >= count_bytes:
                        break
        if len(got) < count_bytes:
            raise HubUnreachableError(
                f"{self._listing.repo}: the hub cut the header of {shard} short"
            )
        return bytes(got[:count_bytes])

    # Files

    def _download(self, shard: str, report: Callable[[int], None], *, times_max: int) -> None:
        """Fetch a file into the cache, going on where an earlier fetch stopped.

        It gets its name in the cache only when its SHA-256 is right; else it is fetched again,
        up to ``times_max`` times in all.
        """
        if is_offline():
            raise self._forbidden(shard)
        path, partial = self.path(shard), self._partial(shard)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(partial.with_suffix(".lock")):
            for left in range(times_max - 1, -1, -1):
                if path.is_file():  # another peer on this machine fetched it
                    return
                self._check_disk(shard, partial)
                with partial.open("ab") as opened:
                    self._transfer(shard, opened, report)
                try:
                    self._check(shard, partial)
                except DamagedError as error:
                    partial.unlink(missing_ok=True)
                    if left == 0:
                        raise
                    logger.warning("%s; fetching it again", error)
                else:
                    break
            self._move_in(partial, path)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """While no other process fetches the same file."""
        from filelock import FileLock, Timeout

        lock = FileLock(path)
        while True:
            self._still_wanted(0)
            try:
                lock.acquire(timeout=0.5)
                break
            except Timeout:
                continue
        try:
            yield
        finally:
            lock.release()

    @staticmethod
    def _move_in(partial: Path, path: Path) -> None:
        """Give a file its place in the cache: a blob, and a link from the snapshot."""
        blob = partial.with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(blob)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # a file system without links
            blob.replace(path)

    def _transfer(self, shard: str, opened: BinaryIO, report: Callable[[int], None]) -> None:
        size_bytes = self._size(shard)
        if opened.tell() > size_bytes:
            opened.seek(0)
            opened.truncate()
        counted: Any = _Counted(opened, report, self._stopped)
        try:
            with hub_errors(self._listing.repo):
                from huggingface_hub.file_download import http_get
                from huggingface_hub.utils import build_hf_headers, disable_progress_bars

                disable_progress_bars()
                http_get(
                    self._url(shard),
                    counted,
                    resume_size=opened.tell(),
                    headers=build_hf_headers(),
                    expected_size=size_bytes,
                )
        except NetworkError as error:
            kept = (
                f"{opened.tell()} of {size_bytes} bytes of {shard} are kept, and it goes on there"
            )
            raise HubUnreachableError(f"{error}; {kept}") from error
        except ValueError as error:
            raise UserError(f"{self._listing.repo}: {error}") from error
        except OSError as error:
            raise HubUnreachableError(
                f"{self._listing.repo}: {shard} cannot be fetched: {error}"
            ) from error

    def _check_disk(self, shard: str, partial: Path) -> None:
        have_bytes = partial.stat().st_size if partial.is_file() else 0
        need_bytes = self._size(shard) - have_bytes + SPARE_BYTES
        free_bytes = shutil.disk_usage(partial.parent).free
        if need_bytes > free_bytes:
            raise UserError(
                f"{shard} needs {need_bytes / 2**30:.1f} GiB in {partial.parent}, where"
                f" {free_bytes / 2**30:.1f} GiB are free; HF_HOME chooses another place"
            )

    def _forget(self, shard: str) -> None:
        path = self.path(shard)
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        self._hashes.pop(shard, None)

    # Hashes

    def _verify(self, shard: str) -> None:
        """Know what the file must hold: noted before, or hashed now against the hub's SHA-256."""
        note = self._note(shard, "json")
        if note is None:
            logger.warning(
                "%s of %s: the hub gives no SHA-256, so it cannot be checked",
                shard,
                self._listing.repo,
            )
            return
        try:
            noted = msgspec.json.decode(note.read_bytes(), type=ShardHashes)
        except (OSError, msgspec.MsgspecError):
            noted = None
        if noted is not None and noted.sha256 == self._listing.files[shard].sha256:
            self._hashes[shard] = noted
            return
        try:
            self._check(shard, self.path(shard))
        except DamagedError as error:
            if is_offline():
                raise
            logger.warning("%s; fetching it again", error)
            self.fetch_again(shard)

    def _check(self, shard: str, path: Path) -> None:
        """Hash the whole file; DamagedError unless it is what the hub listed."""
        expected, note = self._listing.files[shard].sha256, self._note(shard, "json")
        if expected is None or note is None:
            return
        try:
            hashes = hash_shard(path, self._still_wanted)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if hashes.sha256 != expected:
            raise DamagedError(
                shard,
                f"{shard} of {self._listing.repo} is damaged: its SHA-256 is not the one that the"
                " hub lists",
            )
        if hashes.header_sha256 != hashlib.sha256(self._headers[shard]).hexdigest():
            if (kept := self._note(shard, "header")) is not None:
                kept.unlink(missing_ok=True)
            raise UserError(f"{shard}: its header came damaged from the hub; start again")
        self._hashes[shard] = hashes
        write_note(note, msgspec.json.encode(hashes))

    def _still_wanted(self, _: int) -> None:
        if self._stopped.is_set():
            raise HubUnreachableError("stopped")

    # Places

    def _size(self, shard: str) -> int:
        return self._listing.files[shard].size_bytes

    def _url(self, shard: str) -> str:
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self._listing.repo, shard, revision=self._listing.commit))

    def _note(self, shard: str, kind: str) -> Path | None:
        """Where something about this file's content is kept; None where it has no name."""
        sha256 = self._listing.files[shard].sha256
        return None if sha256 is None else self._notes / f"{sha256}.{kind}"

    def _partial(self, shard: str) -> Path:
        name = self._listing.files[shard].sha256
        if name is None:
            name = hashlib.sha256(f"{self._listing.commit}/{shard}".encode()).hexdigest()
        return self.directory.parents[1] / "blobs" / f"{name}.partial"


class _Counted:
    """The file that is written to, telling how long it is; ends the transfer when stopped."""

    def __init__(
        self, opened: BinaryIO, report: Callable[[int], None], stopped: threading.Event
    ) -> None:
        self._opened = opened
        self._report = report
        self._stopped = stopped

    def write(self, block: bytes) -> int:
        if self._stopped.is_set():
            raise HubUnreachableError("stopped")
        written = self._opened.write(block)
        self._report(self._opened.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)


def _shard_names(listing: HubListing, directory: Path) -> tuple[str, ...]:
    if INDEX in listing.files:
        names = sorted(set((read_index(directory) or {}).values()))
    elif SINGLE in listing.files:
        names = [SINGLE]
    else:
        names = sorted(n for n in listing.files if n.endswith(".safetensors") and "/" not in n)
    if not names:
        endings = tuple(kind.removeprefix("*") for kind in PICKLED)
        pickled = sorted(name for name in listing.files if name.endswith(endings))
        only = f"only {pickled[0]}, which can run code" if pickled else "none"
        raise UserError(
            f"{listing.repo} has no safetensors files ({only}); weights must be in them"
        )
    for name in names:
        if name not in listing.files or ".." in name.split("/"):
            raise UserError(f"{listing.repo}: the index names {name[:200]}, which is not there")
    return tuple(names)
