"""What this peer lent last, and on which port: kept beside its key, so that it comes back the same.

To lend more than a person said is a breach of trust, and a peer on another port makes every
invitation to it useless. A file of flags (``--config``) says all by itself, and is not mixed with
this. Nothing is kept where nothing is to be remembered (:mod:`dht.networks.remembered`).
"""

import argparse
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta

from dht.command_line import flag_of
from dht.errors import UserError
from dht.networks.remembered import VARIABLE, shown
from dht.process.home import cache_directory
from dht.process.json_file import decode_json
from dht.process.whole_file import write_whole
from dht.transport.listening import listen_error
from node.owner.machine_watch import BESIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class LentConfig:
    """What a peer gets that says nothing, and bounds of what it remembers."""

    port_default: int = 31337
    ports_tried: int = 64
    """Ports that are tried from the default one on: one for each peer of a machine."""
    file_bytes_max: int = 16 << 10
    name_max: int = 64
    """Maximum length of a peer's name, in characters."""
    number_max: float = 1e9
    """Bound of all limits that are numbers."""


LENT_BEFORE = LentConfig()
TAKEN = frozenset({errno.EADDRINUSE, errno.EACCES})
"""What listening at a port fails with where another port may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a person may say of their machine: a flag, which is remembered."""

    help: str
    words: str
    """How it is told when it holds again; ``{}`` is its value."""
    metavar: str = ""
    """Empty: it is said or not, and has no value."""
    least: float | None = None
    """Minimum, 0 for any number above 0; None: it is no number."""
    of_device: bool = False
    """It was said of one kind of device."""
    of_gpu: bool = False
    """It is for a GPU alone."""
    of_traffic: bool = False
    """It is of what the machine sends or receives: peers of several GPUs share it."""
    rare: bool = False
    """Only ``--help-all`` shows the flag."""

    @property
    def flag(self) -> dict[str, Any]:
        """How the command line reads it."""
        if not self.metavar:
            return {"action": "store_true"}
        how = {"nargs": "+", "default": []} if self.least is None else {"type": float}
        return {"metavar": self.metavar, **how}

    @property
    def kept(self) -> Any:
        """The type of what is remembered of it."""
        if self.metavar and self.least is None:
            return Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=64)]
        return Annotated[float, Meta(gt=0, lt=LENT_BEFORE.number_max)] if self.metavar else bool


LIMITS: Mapping[str, Limit] = {
    "memory": Limit(
        metavar="GIB",
        help="memory to lend (85%% of the free; CPU: 50%%)",
        words="{:g} GiB",
        least=0,
        of_device=True,
    ),
    "max_vram": Limit(
        metavar="GIB",
        help="most of the GPU's memory to lend",
        words="at most {:g} GiB of the GPU",
        least=0,
        of_gpu=True,
        rare=True,
    ),
    "power_limit": Limit(
        metavar="W",
        help="power limit of the GPU while it is lent",
        words="at most {:g} W",
        least=0,
        of_gpu=True,
        rare=True,
    ),
    "max_up": Limit(
        metavar="MBIT",
        help="most megabits per second to send",
        words="at most {:g} Mbit/s up",
        least=1,
        of_traffic=True,
    ),
    "max_down": Limit(
        metavar="MBIT",
        help="most megabits per second to receive",
        words="at most {:g} Mbit/s down",
        least=1,
        of_traffic=True,
        rare=True,
    ),
    "monthly_cap": Limit(
        metavar="GB",
        help="GB a month, both ways (no limit)",
        words="{:g} GB a month",
        least=0.001,
        of_traffic=True,
    ),
    "idle_only": Limit(
        help="step aside while the machine is in use", words="only while nobody uses the machine"
    ),
    "pause_on_process": Limit(
        metavar="P",
        help="step aside while such a program (game) runs",
        words="not while {} runs",
        rare=True,
    ),
    "mains_only": Limit(
        help="step aside while the machine runs on its battery",
        words="not on battery",
        rare=True,
    ),
    "schedule": Limit(
        metavar="T", help="serve only then: 22:00-07:30 (local time)", words="only at {}"
    ),
}
"""By the names of their flags."""
OF_TRAFFIC = tuple(name for name, limit in LIMITS.items() if limit.of_traffic)


class LentBefore(msgspec.Struct, frozen=True, kw_only=True):
    """The file beside the key."""

    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """TCP port; 0: none was kept."""
    name: Annotated[str, Meta(max_length=LENT_BEFORE.name_max)] | None = None
    """What others see this peer as; empty: nothing, as its owner said. None: it was not settled."""
    device: str = ""
    """``cpu`` or ``gpu``: what the limits were said of."""
    limits: dict[str, Any] = {}
    """Values of :data:`LIMITS` that were said."""


def _file(identity: Path) -> Path:
    return identity.with_suffix(".lent.json")


def lent_before(identity: Path) -> LentBefore:
    """What the peer with this key file lent last. Raises UserError for a file that is there and
    says nothing clear: to go on without it would lend more than was said."""
    path = _file(identity)
    try:
        with path.open("rb") as file:
            before = decode_json(file.read(LENT_BEFORE.file_bytes_max), LentBefore)
        for name, limit in LIMITS.items():
            if said := before.limits.get(name):
                msgspec.convert(said, limit.kept)
        return before
    except (FileNotFoundError, NotADirectoryError):
        return LentBefore()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{shown(path)}, which says what was lent last, cannot be read: {error}; remove it and"
            " say what to lend"
        ) from None


def _before(arguments: argparse.Namespace) -> LentBefore:
    try:
        return lent_before(arguments.identity)
    except UserError:
        if not arguments.anew:
            raise
        return LentBefore()


def _remembers() -> bool:
    return os.environ.get(VARIABLE) != ""


def _kind(arguments: argparse.Namespace) -> str:
    return "cpu" if arguments.cpu else "gpu"


def take_limits(arguments: argparse.Namespace) -> None:
    """Fill in the limits that were said last time and are not said now; ``arguments.as_last`` says
    in words which these are, empty for none. Raises UserError."""
    arguments.as_last, arguments.taken = "", ()
    if arguments.name is None and _remembers() and not arguments.config:
        arguments.name = _before(arguments).name
    if not _remembers() or BESIDE in os.environ or arguments.config or arguments.anew:
        return
    before = lent_before(arguments.identity)
    taken = []
    is_same_kind = before.device == _kind(arguments)
    for name, limit in LIMITS.items():
        value = before.limits.get(name)
        if not value or ((limit.of_device or limit.of_gpu) and not is_same_kind):
            continue
        if not getattr(arguments, name):
            setattr(arguments, name, value)
            taken.append(name)
    arguments.taken = tuple(taken)
    if taken:
        words = (_in_words(name, getattr(arguments, name)) for name in taken)
        flags = ", ".join(map(flag_of, taken))
        arguments.as_last = (
            f"As last time: {', '.join(words)}; change with {flags}, or all at once with --anew"
        )


def check_limits(arguments: argparse.Namespace) -> None:
    """Raises UserError for a limit that is no number above its least."""
    most = LENT_BEFORE.number_max
    for name, limit in LIMITS.items():
        value, least = getattr(arguments, name), limit.least
        if value is None or least is None or (value > 0 and least <= value < most):
            continue
        wanted = f"at least {least:g}" if least else "a finite number above 0"
        wanted = f"between {least:g} and {most:g}" if value >= most else wanted
        raise UserError(f"{flag_of(name)} is {value:g}; it must be {wanted}")


def _in_words(name: str, value: Any) -> str:
    return LIMITS[name].words.format(" or ".join(value) if isinstance(value, list) else value)


def keep_lent(arguments: argparse.Namespace) -> None:
    """Keep what is lent now for the next time. Raises UserError where it cannot be written."""
    if not _remembers():
        return
    before = _before(arguments)
    limits, device = before.limits, before.device
    if BESIDE not in os.environ and not arguments.config:  # else they are kept elsewhere
        limits = {name: said for name in LIMITS if (said := getattr(arguments, name))}
        device = _kind(arguments)
    name = before.name if arguments.name is None or arguments.config else arguments.name
    kept = LentBefore(port=arguments.port or before.port, name=name, device=device, limits=limits)
    path = _file(arguments.identity)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(kept) + b"\n")
    except OSError as error:
        raise UserError(
            f"what is lent cannot be kept in {shown(path)}: {error.strerror}; give another"
            " --identity FILE, or remember nothing with ANABRANCH_MEMORY="
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    number: int
    said: str = ""
    """What to tell the owner of it; empty: nothing."""
    claim: IO[bytes] | None = None
    """Held open while this peer has it: another peer of this user then takes the next."""


def port_of(arguments: argparse.Namespace) -> Port:
    """The port to listen on where none is said: that of last time, else the default one, else the
    next that is free; any free one where nothing is to be remembered."""
    if not _remembers():
        return Port(number=0)
    before = _before(arguments).port
    for number in _candidates(before):
        claim = _claimed(number)
        error = None if claim is None else listen_error(arguments.host, number)
        if claim is not None and (error is None or error.errno not in TAKEN):
            said = ""
            if before and number != before:
                said = (
                    f"Port {before}, which this peer had last time, is in use: it takes {number},"
                    " and older invitations lead nowhere"
                )
            return Port(number=number, said=said, claim=claim)
        if claim is not None:
            claim.close()
    return Port(number=0)


def _candidates(before: int) -> Iterator[int]:
    if before:
        yield before
    yield from (
        n
        for n in range(LENT_BEFORE.port_default, LENT_BEFORE.port_default + LENT_BEFORE.ports_tried)
        if n != before
    )


def _claimed(number: int) -> IO[bytes] | None:
    """A lock on this port among this user's peers, which start at once; None: another has it."""
    try:
        import fcntl
    except ImportError:  # Windows: whoever comes second fails to listen
        return open(os.devnull, "rb")
    folder = cache_directory("ports")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / f"{number}.lock").open("ab")
    except OSError:  # nothing can be kept there: as on Windows
        return open(os.devnull, "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system without locks
        pass
    return file
