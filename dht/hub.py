"""Lists a model's files on a hub and fetches the small ones into the usual cache.

It uses ``huggingface_hub``, so that its conventions hold: ``HF_HOME``, ``HF_HUB_CACHE``,
``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``. The hub's listing of a model is kept beside the
cache, so that a peer or a client can start again without the hub.
"""

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from dht.errors import NetworkError, UserError

logger = logging.getLogger(__name__)

TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Files of a model that a client needs; a model may lack some."""
TEXT_BYTES_MAX = 256 << 20
FILES_MAX = 100_000

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9_][A-Za-z0-9_./-]*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubId:
    """The id of a model on the hub: ``org/name``, and a branch, tag or commit if given."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubId | None":
        """The id in ``org/name`` or ``org/name@revision``; None for other text."""
        found = _HUB_ID.fullmatch(text)
        return None if found is None else cls(repo=found[1], revision=found[2])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


class HubUnreachableError(NetworkError):
    """The hub does not answer, or its answer makes no sense."""


def served_name(model: str) -> str:
    """The name that a model is served under: its hub id, or the name of its directory."""
    directory = Path(model).expanduser()
    return directory.resolve().name if directory.is_dir() else model


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file as the hub lists it."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """Hash of a large file, which the hub keeps outside git; None for other files."""


class HubListing(msgspec.Struct, frozen=True, kw_only=True):
    """A model's files at one commit. A process fetches all files at that commit."""

    repo: str
    commit: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40,64}$")]
    files: Annotated[dict[str, HubFile], msgspec.Meta(max_length=FILES_MAX)]


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` forbids every request."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def notes_directory() -> Path:
    """The directory for listings and notes on hub files: ``anabranch`` in ``HF_HOME``."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "anabranch"


def cached_snapshot(listing: HubListing) -> Path:
    """The directory in the usual cache where this commit's files are, or will be."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder: str = repo_folder_name(repo_id=listing.repo, repo_type="model")
    cache = Path(constants.HF_HUB_CACHE)
    return cache / folder / "snapshots" / listing.commit


def list_model(hub_id: HubId) -> HubListing:
    """The model's files now, or the last known listing where the hub cannot be asked.

    Raises UserError for a model that does not exist or is not open to this user, NetworkError where
    the hub cannot be reached and no listing is known.
    """
    kept = notes_directory() / "listings" / f"{str(hub_id).replace('/', '--')}.json"
    if is_offline():
        return _kept_listing(kept, hub_id)
    try:
        listing = _ask(hub_id)
    except NetworkError as error:
        if not kept.is_file():
            raise
        logger.warning("%s; going on with what it said last", error)
        return _kept_listing(kept, hub_id)
    write_note(kept, msgspec.json.encode(listing))
    return listing


def _ask(hub_id: HubId) -> HubListing:
    with hub_errors(str(hub_id)):
        from huggingface_hub import HfApi

        info = HfApi().model_info(hub_id.repo, revision=hub_id.revision, files_metadata=True)
    try:
        described = {
            "repo": hub_id.repo,
            "commit": info.sha,
            "files": {
                file.rfilename: {
                    "size_bytes": file.size,
                    "sha256": None if file.lfs is None else file.lfs.sha256,
                }
                for file in info.siblings or ()
                if file.size is not None
            },
        }
        return msgspec.convert(described, HubListing)
    except msgspec.ValidationError as error:
        raise HubUnreachableError(
            f"the hub's answer about {hub_id} makes no sense: {error}"
        ) from error


def _kept_listing(kept: Path, hub_id: HubId) -> HubListing:
    try:
        listing = msgspec.json.decode(kept.read_bytes(), type=HubListing)
        if listing.repo == hub_id.repo:
            return listing
    except (OSError, msgspec.MsgspecError):
        pass
    found = _cached_listing(hub_id)
    if found is None:
        raise UserError(
            f"{hub_id} is neither a directory here nor in the cache, and HF_HUB_OFFLINE forbids to"
            " ask the hub"
        )
    return found


def _cached_listing(hub_id: HubId) -> HubListing | None:
    """A listing of the model's files in the usual cache, from other tools; None: there are none.

    The cache stores a file that the hub keeps outside git under its SHA-256.
    """
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id.repo, "config.json", revision=hub_id.revision)
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    files: dict[str, HubFile] = {}
    for path in snapshot.rglob("*"):
        if path.is_file():
            blob = path.resolve().name
            known = re.fullmatch("[0-9a-f]{64}", blob) is not None
            files[path.relative_to(snapshot).as_posix()] = HubFile(
                size_bytes=path.stat().st_size, sha256=blob if known else None
            )
    return HubListing(repo=hub_id.repo, commit=snapshot.name, files=files)


def write_note(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, whole or not at all; a failure is only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning("cannot keep %s: %s", path, error)


def fetch_text_files(hub_id: HubId) -> Path:
    """Fetch the files that a client needs, configuration and tokenizer; returns their directory.

    Raises UserError and NetworkError as :func:`list_model`.
    """
    listing = list_model(hub_id)
    for name in TEXT_FILES:
        if name in listing.files:
            fetch_file(listing, name)
    return cached_snapshot(listing)


def fetch_file(listing: HubListing, name: str) -> Path:
    """Fetch one small file of the model, from the cache or the hub; returns its path."""
    at = cached_snapshot(listing) / name
    if at.is_file():
        return at
    size_bytes = listing.files[name].size_bytes
    if size_bytes > TEXT_BYTES_MAX:
        raise UserError(f"{listing.repo}: {name} has {size_bytes} bytes, {TEXT_BYTES_MAX} at most")
    if is_offline():
        raise UserError(
            f"{name} of {listing.repo} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it"
        )
    with hub_errors(listing.repo):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        return Path(hf_hub_download(listing.repo, name, revision=listing.commit))


@contextmanager
def hub_errors(model: str) -> Iterator[None]:
    """Turn all errors of the hub into one plain line: UserError or NetworkError."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model} is gated: accept its terms at {hub} and set HF_TOKEN to a token that may"
            " read it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{model} is neither a directory here nor a model at {hub}; if it is private, set"
            " HF_TOKEN to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{model}: there is no such branch, tag or commit at {hub}") from error
    except errors.HFValidationError as error:
        raise UserError(f"{model} is neither a directory here nor a hub id: {error}") from error
    except errors.OfflineModeIsEnabled as error:
        raise UserError(f"{model} is not all in the cache, and HF_HUB_OFFLINE is set") from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            cause = error.__cause__
            if isinstance(cause, errors.HfHubHTTPError):
                raise _http_error(model, hub, cause) from error
            raise HubUnreachableError(f"{model}: the hub at {hub} cannot be reached") from error
        raise UserError(f"{model}: a file that {hub} listed is not there") from error
    except errors.HfHubHTTPError as error:
        raise _http_error(model, hub, error) from error
    except (errors.HTTPError, ConnectionError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise HubUnreachableError(
            f"{model}: the hub at {hub} cannot be reached ({reason})"
        ) from error


def _http_error(model: str, hub: str, error: Exception) -> UserError | NetworkError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in {401, 403}:
        return UserError(
            f"{model}: {hub} refuses access ({status}); set HF_TOKEN to a token that may read it"
        )
    return HubUnreachableError(f"{model}: the hub at {hub} answered with an error ({status})")
