"""The network that this user's commands used last, in a small file of the user's configuration.

``ANABRANCH_MEMORY`` names another file; where it is empty, nothing is remembered. What is in the
file was said by others once, so it is checked like anything they say.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dht.errors import UserError
from dht.messages.types import RECORD_BOUNDS
from dht.process.home import home_directory
from dht.process.json_file import decode_json
from dht.process.whole_file import write_whole

FORMAT = 1
FILE_BYTES_MAX = 16 << 10
VARIABLE = "ANABRANCH_MEMORY"
OneLine = Annotated[str, Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Remembered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network, how to reach it, and the model that was used in it."""

    network: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f/]+$")]
    initial_peers: Annotated[
        tuple[OneLine, ...], Meta(min_length=1, max_length=RECORD_BOUNDS.addresses_max)
    ]
    model: OneLine = ""
    """The value of ``--model``: a whole path, a hub id or a name."""
    model_name: OneLine = ""
    """The name that the model is served under."""
    fingerprint: Annotated[str, Meta(pattern="^([0-9a-f]{16,64})?$")] = ""
    """The fingerprint of the weights that were taken under that name."""
    format: int = FORMAT


class _Head(msgspec.Struct):
    format: int


class UnreadableError(UserError):
    """There is a file, and it says nothing that this software can use."""


def memory_file() -> Path | None:
    """The file that the network is remembered in; None where nothing is to be remembered."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    home = home_directory()
    if home is None:
        return None
    return user_directory(sys.platform, os.environ, home) / "network.json"


def user_directory(platform: str, environment: Mapping[str, str], home: Path) -> Path:
    """The directory of this software's configuration, where the system's own rules put it."""
    if platform == "win32":
        base = Path(environment.get("APPDATA") or home / "AppData" / "Roaming")
    elif platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        named = Path(environment.get("XDG_CONFIG_HOME") or ".")
        base = named if named.is_absolute() else home / ".config"  # as the XDG rules have it
    return base / "anabranch"


def recall() -> Remembered | None:
    """The network that is remembered; None where there is none. Raises UnreadableError."""
    path = memory_file()
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(f"{shown(path)} cannot be read: {error.strerror}") from None
    try:
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"it is larger than {FILE_BYTES_MAX} bytes")
        if (found := decode_json(data, _Head).format) != FORMAT:
            raise _OtherFormatError(f"it has format {found}, this software knows {FORMAT}")
        return decode_json(data, Remembered)
    except ValueError as error:
        raise UnreadableError(
            f"{shown(path)} is left aside: {error}; `anabranch forget` removes it"
        ) from error


def addresses_of_network(network: str) -> tuple[str, ...]:
    """The remembered addresses of peers of that network; none where another one is remembered."""
    try:
        known = recall()
    except UnreadableError:
        return ()
    return () if known is None or known.network != network else known.initial_peers


def is_remembered(network: str, model_name: str) -> bool:
    try:
        old = recall()
    except UnreadableError:
        return False
    return old is not None and (old.network, old.model_name) == (network, model_name)


class _OtherFormatError(ValueError):
    """The file was written by another version of this software, which may still need it."""


def remember(new: Remembered, say: Callable[[str], None]) -> None:
    """Remember ``new`` in the place of what was remembered.

    Other weights under the name of a model that is remembered in this network are said loudly, and
    the first ones stay. So does a file of another version. Where the file cannot be written, that
    is said, and no error.
    """
    path = memory_file()
    if path is None:
        return
    try:
        old = recall()
    except UnreadableError as error:
        if not isinstance(error.__cause__, ValueError) or isinstance(
            error.__cause__, _OtherFormatError
        ):
            say(f"not remembered: {error}")
            return
        old = None
    if old == new:
        return
    if old is not None and (warning := other_weights(old, new.network, new.model_name, new)):
        say(warning)
        return
    if not write_kept(path, new, say):
        return
    if (
        old is None
        or old.network != new.network
        or not set(old.initial_peers) & set(new.initial_peers)
    ):
        another = old is not None and old.network != new.network
        instead = f" in the place of network {old.network}" if old and another else ""
        say(f"network {new.network} is remembered in {shown(path)}{instead}")


def write_kept(path: Path, new: msgspec.Struct, say: Callable[[str], None]) -> bool:
    """Whether ``new`` is in the file at ``path`` now; where it cannot be, that is said."""
    try:
        content = msgspec.json.format(msgspec.json.encode(new)) + b"\n"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, content)
    except UnicodeEncodeError:
        say("not remembered: the model's path is not valid UTF-8 text")
        return False
    except OSError as error:
        say(f"not remembered: {shown(path)} cannot be written: {error.strerror}")
        return False
    return True


def other_weights(old: Remembered, network: str, name: str, new: Remembered) -> str:
    """A warning where ``new`` took other weights than ``old`` did; else empty."""
    if (old.network, old.model_name) != (network, name):
        return ""
    if not old.fingerprint or not new.fingerprint or _agree(old.fingerprint, new.fingerprint):
        return ""
    return (
        f"WARNING: {name} in network {network} has OTHER WEIGHTS than before: fingerprint"
        f" {new.fingerprint[:16]} now, {old.fingerprint[:16]} is remembered. Somebody may pretend"
        " to be that network. The first stays remembered; if you know of the change:"
        " `anabranch forget`"
    )


def _agree(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def forget() -> Path | None:
    """Remove the file; returns its path, or None where there was none. Raises UserError."""
    path = memory_file()
    if path is None:
        return None
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be removed: {error.strerror}") from None
    return path


def shown(path: Path) -> str:
    """A path for people, with ``~`` for the home directory."""
    home = home_directory()
    if home is None or not path.is_relative_to(home):
        return str(path)
    return f"~/{path.relative_to(home).as_posix()}"
