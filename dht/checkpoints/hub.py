"""Lists a model's files on a hub and fetches the small ones into the usual cache.

It uses ``huggingface_hub``, so that its conventions hold: ``HF_HOME``, ``HF_HUB_CACHE``,
``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``. The hub's listing of a model is kept beside the
cache, so that a peer or a client can start again without the hub.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated

import msgspec

from dht.errors import NetworkError, UserError
from dht.process.json_file import value_or_none
from dht.process.whole_file import write_whole

logger = logging.getLogger(__name__)

TOOL_USE_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""A model's chat template for chats with functions, where it is not the same."""
ADDED_TOKENS = "added_tokens.json"
"""Added tokens and their ids, in models from before ``tokenizer_config.json`` listed them."""
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_USE_TEMPLATE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    ADDED_TOKENS,
)
"""Files of a model that a client needs; a model may lack some."""
VOCABULARIES = (
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
"""What a tokenizer is made of in a model without a ``tokenizer.json``."""
GGUF = ".gguf"
"""End of the name of a file that is a whole model, or a part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """Bounds of what a hub says of a model, and how often it is asked again; times in seconds."""

    text_bytes_max: int = 256 << 20
    files_max: int = 100_000
    shown_max: int = 8
    """Names that a message shows."""
    again_max: int = 5
    """Maximum times in a row that a file is asked for again where no byte of it came."""
    again_s: float = 1.0
    """Wait before the first of them; each later one is twice as long."""
    asked_wait_max_s: float = 300.0
    """Maximum wait that a hub may ask for: huggingface.co counts requests for five minutes."""


HUB_BOUNDS = HubConfig()

_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(
    rf"({_PART}/{_PART})(?:@([A-Za-z0-9_][A-Za-z0-9_./-]*))?(?::([A-Za-z0-9_][A-Za-z0-9_.+/-]*))?"
)


_PAGE = re.compile(r"\w+://|(?:huggingface\.co|hf\.co)/")
"""What the address of a page begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubId:
    """The id of a model on the hub: ``org/name``, a branch, tag or commit if given, and the name
    of a GGUF file where that is the model."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubId | None":
        """The id in ``org/name[@revision][:file.gguf]``; None for other text."""
        found = _HUB_ID.fullmatch(text)
        return None if found is None else cls(repo=found[1], revision=found[2], file=found[3])

    @property
    def place(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    def __str__(self) -> str:
        return self.place if self.file is None else f"{self.place}:{self.file}"


class HubUnreachableError(NetworkError):
    """The hub does not answer, or its answer makes no sense."""

    wait_s: float = 0.0
    """Time that the hub asks to wait."""


class HubOfflineError(UserError):
    """Something is not here, and ``HF_HUB_OFFLINE`` forbids every request."""


def local_path(model: str) -> Path | None:
    """The directory or GGUF file here that ``model`` names; None where there is none."""
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # of a user who does not exist
        return None
    return path if path.is_dir() or (path.suffix == GGUF and path.is_file()) else None


def typed_model(text: str) -> str:
    """A model as it was typed or pasted: the address of its page on a hub is its hub id."""
    known = local_path(text) is not None or HubId.parse(text) is not None
    if known or not _PAGE.match(text):
        return text
    from huggingface_hub import errors, parse_hf_uri

    try:
        page = parse_hf_uri(text)
    except errors.HfUriError:
        return text
    if page.type != "model":
        return text
    file = page.path_in_repo if page.path_in_repo.endswith(GGUF) else None
    revision = None if page.revision == "main" else page.revision
    return str(HubId(repo=page.id, revision=revision, file=file))


def absolute_model(model: str) -> str:
    """``model`` as other working directories know it: what is local, by its whole path."""
    path = local_path(model)
    return model if path is None else str(path.resolve() if path.is_dir() else path.absolute())


def served_name(model: str) -> str:
    """The name that a model is served under: its hub id, the name of its directory, or that of its
    GGUF file without the ending and the number of a part; without bytes that are no text."""
    path = local_path(model)
    if path is None:
        return model
    name = path.resolve().name if path.is_dir() else _PART_NUMBER.sub("", path.stem)
    return name.encode(errors="ignore").decode()


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """Hash of a large file, which the hub keeps outside git; None for other files."""


class HubListing(msgspec.Struct, frozen=True, kw_only=True):
    """A model's files at one commit. A process fetches all files at that commit."""

    repo: str
    commit: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40,64}$")]
    files: Annotated[dict[str, HubFile], msgspec.Meta(max_length=HUB_BOUNDS.files_max)]


def notes_directory() -> Path:
    """The directory for listings and notes on hub files: ``anabranch`` in ``HF_HOME``."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "anabranch"


def list_model(hub_id: HubId) -> HubListing:
    """The model's files now, or the last known listing where the hub cannot be asked.

    Raises UserError for a model that does not exist or is not open to this user, NetworkError where
    the hub cannot be reached and no listing is known.
    """
    kept = notes_directory() / "listings" / f"{hub_id.place.replace('/', '--')}.json"
    try:
        listing = _ask(hub_id)
    except NetworkError as error:
        if (said := _kept_listing(kept, hub_id)) is None:
            unknown = HubUnreachableError(f"there is no directory {hub_id.repo} here, and {error}")
            raise _mistyped(hub_id) or unknown from None
        logger.warning("%s; going on with what it said last", error)
        return said
    except HubOfflineError as error:
        known = _kept_listing(kept, hub_id) or _cached_listing(hub_id)
        if known is None:
            raise _mistyped(hub_id) or error from None
        return known
    write_note(kept, msgspec.json.encode(listing))
    return listing


def _mistyped(hub_id: HubId) -> UserError | None:
    """The likelier mistake where ``models/broook`` was not found and ``models`` is a directory."""
    here = Path(hub_id.repo)
    if not here.parent.is_dir():
        return None
    return UserError(
        f"there is no directory {here} here, though there is {here.parent}; a model of that name"
        " on the hub could not be looked for"
    )


def _ask(hub_id: HubId) -> HubListing:
    with hub_errors(hub_id.place):
        from huggingface_hub import HfApi, constants

        info = HfApi().model_info(
            hub_id.repo,
            revision=hub_id.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        files = {
            file.rfilename: {
                "size_bytes": file.size,
                "sha256": None if file.lfs is None else file.lfs.sha256,
            }
            for file in info.siblings or ()
            if file.size is not None
        }
        described = {"repo": hub_id.repo, "commit": info.sha, "files": files}
        return msgspec.convert(described, HubListing)


def _kept_listing(kept: Path, hub_id: HubId) -> HubListing | None:
    listing = value_or_none(kept, HubListing)
    return listing if listing is not None and listing.repo == hub_id.repo else None


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
        write_whole(path, content)
    except OSError as error:
        logger.warning("cannot keep %s: %s", path, error)


def fetch_small_files(listing: HubListing, *more: str) -> Path:
    """:data:`TEXT_FILES`, what a tokenizer is made of, and ``more``, as far as the model has them.

    They come from the cache or the hub.

    Returns their directory. Raises UserError without ``config.json`` or for a file too large, else
    as :func:`list_model`.
    """
    if "config.json" not in listing.files:
        if found := gguf_names(listing):
            raise UserError(
                f"{listing.repo} holds GGUF files; say which, as {listing.repo}:FILE: {found}"
            )
        raise UserError(f"{listing.repo} has no config.json; is it a model?")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    vocabularies = () if "tokenizer.json" in listing.files else VOCABULARIES
    for name in (*TEXT_FILES, *vocabularies, *more):
        if name not in listing.files:
            continue
        what, size_bytes = f"{name} of {listing.repo}", listing.files[name].size_bytes
        if size_bytes > HUB_BOUNDS.text_bytes_max:
            raise UserError(f"{what} has {size_bytes} bytes, {HUB_BOUNDS.text_bytes_max} at most")
        with hub_errors(what):
            path = Path(hf_hub_download(listing.repo, name, revision=listing.commit))
        if name == "config.json":
            directory = path.parent
    return directory


def gguf_names(listing: HubListing) -> str:
    """Names of the GGUF files in a listing, in words; empty where there are none."""
    names = sorted(name for name in listing.files if name.endswith(GGUF))
    return ", ".join((*names[: HUB_BOUNDS.shown_max], "…")[: len(names)])


def snapshot(listing: HubListing) -> Path:
    """The directory in the usual cache where the model's files at the listed commit are."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = str(repo_folder_name(repo_id=listing.repo, repo_type="model"))
    return Path(constants.HF_HUB_CACHE) / folder / "snapshots" / listing.commit


def file_url(listing: HubListing, name: str) -> str:
    from huggingface_hub import hf_hub_url

    return str(hf_hub_url(listing.repo, name, revision=listing.commit))


def fetch_start(listing: HubListing, name: str, count_bytes: int) -> bytes:
    """The first bytes of a file on the hub, and no more. Raises as :func:`fetch_bytes`."""
    return b"".join(fetch_bytes(listing, name, 0, count_bytes))


def fetch_bytes(
    listing: HubListing,
    name: str,
    begin: int,
    end: int,
    wait: Callable[[float], object] = time.sleep,
) -> Iterator[bytes]:
    """The bytes ``[begin, end)`` of a file on the hub, in order, in blocks as they come.

    Where the hub breaks off it is asked for the rest, after ``wait``, which takes seconds.
    Raises UserError, NetworkError.
    """
    again = 0
    while begin < end:
        try:
            for block in _blocks(listing, name, begin, end):
                begin, again = begin + len(block), 0
                yield block
            if begin < end:
                raise HubUnreachableError(f"the hub cut {name} of {listing.repo} short")
        except HubUnreachableError as error:
            if again == HUB_BOUNDS.again_max:
                raise
            wait_s = max(error.wait_s, HUB_BOUNDS.again_s * 2**again)
            again += 1
            logger.warning("%s; asking again in %.0f s", error, wait_s)
            wait(wait_s)


def _blocks(listing: HubListing, name: str, begin: int, end: int) -> Iterator[bytes]:
    """What one request for the bytes ``[begin, end)`` of a file brings of them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    what, size_bytes = f"{name} of {listing.repo}", listing.files[name].size_bytes
    asked = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if begin > 0 or end < size_bytes:
        asked["Range"] = f"bytes={begin}-{end - 1 if end < size_bytes else ''}"
    with (
        hub_errors(what),
        get_session().stream(
            "GET",
            file_url(listing, name),
            headers=asked,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response,
    ):
        hf_raise_for_status(response)
        at = begin if response.status_code == 206 else 0  # else it ignores ranges
        if not _is_part(response.headers, at, size_bytes, partial=response.status_code == 206):
            raise HubUnreachableError(f"the hub sends something else than {what} as it listed it")
        for block in response.iter_bytes():
            if at + len(block) > begin:
                yield block[max(0, begin - at) : end - at]
            at += len(block)
            if at >= end:
                return


def _is_part(headers: Mapping[str, str], at: int, size_bytes: int, *, partial: bool) -> bool:
    """Whether an answer may be the bytes from ``at`` on of a file of this size, by its headers."""
    if partial:
        found = re.match(r"bytes (\d+)-\d+/(\d+|\*)$", headers.get("Content-Range", ""))
        return found is not None and int(found[1]) == at and found[2] in {str(size_bytes), "*"}
    return "Content-Encoding" in headers or headers.get("Content-Length") in {None, str(size_bytes)}


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn all errors of the hub about ``what`` into one plain line: UserError or NetworkError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:  # not in the cache; why the hub was no help
        raise _plain(what, error.__cause__ or error) from error
    except (errors.HTTPError, OSError, ValueError, ImportError) as error:
        raise _plain(what, error) from error


def endpoint_fault() -> str:
    """What is wrong with the hub that the user named; empty: nothing."""
    from huggingface_hub import constants

    is_address = constants.ENDPOINT.startswith(("http://", "https://"))
    return "" if is_address else f"HF_ENDPOINT is {constants.ENDPOINT!r}; it begins with https://"


def _plain(what: str, error: BaseException) -> UserError | NetworkError:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    match error:
        case errors.OfflineModeIsEnabled():
            return HubOfflineError(
                f"{what} is neither here nor in the cache, and HF_HUB_OFFLINE forbids to fetch it"
            )
        case errors.GatedRepoError():
            return UserError(
                f"{what} is gated: accept its terms at {hub} and set HF_TOKEN to a token that may"
                " read it"
            )
        case errors.RepositoryNotFoundError():
            return UserError(
                f"{what} is neither a directory here nor a model at {hub}; if it is private, set"
                " HF_TOKEN to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return UserError(f"{what}: there is no such branch, tag or commit at {hub}")
        case errors.HFValidationError():
            return UserError(f"{what} is neither a directory here nor a hub id: {error}")
        case errors.RemoteEntryNotFoundError():
            return UserError(f"{what} is not there, though {hub} listed it")
        case errors.HfHubHTTPError():
            status = error.response.status_code
            if status in {401, 403}:
                return UserError(
                    f"{what}: {hub} refuses access ({status}); set HF_TOKEN to a token that may"
                    " read it"
                )
            failed = HubUnreachableError(
                f"{what}: the hub at {hub} answered with an error ({status})"
            )
            failed.wait_s = _asked_wait_s(error.response.headers)
            return failed
        case json.JSONDecodeError() | msgspec.ValidationError():
            return HubUnreachableError(f"the hub's answer about {what} makes no sense: {error}")
        case errors.HTTPError() | ConnectionError() | TimeoutError() | errors.EntryNotFoundError():
            reason = endpoint_fault() or str(error) or type(error).__name__
            return HubUnreachableError(f"{what}: the hub at {hub} cannot be reached ({reason})")
        # of this machine's disk, by its number; without what a SOCKS proxy needs
        case ValueError() | OSError(errno=int()) | ImportError():
            return UserError(f"{what} cannot be fetched: {error}")
        case _:
            return HubUnreachableError(f"{what} cannot be fetched: {error}")


def _asked_wait_s(headers: Mapping[str, str]) -> float:
    """The time that an answer asks to wait: a number of seconds, or a moment by the hub's clock."""
    said = headers.get("Retry-After", "")
    try:
        if said.isdecimal():
            asked_s = float(said)
        else:
            until, now = map(parsedate_to_datetime, (said, headers.get("Date", "")))
            asked_s = (until - now).total_seconds()
    except (ValueError, TypeError):
        return 0.0
    return min(max(0.0, asked_s), HUB_BOUNDS.asked_wait_max_s)
