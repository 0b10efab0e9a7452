"""Code that all commands share: options, errors in one plain line, exit codes, interrupts.

Exit codes are the same for all commands (docs/ask.md): 0 done; 1 a fault of this software; 2 the
caller's mistake, with which the command cannot work later either; 3 the swarm or the hub cannot be
reached or cannot serve this now, but may later; 130 interrupted.
"""

import argparse
import asyncio
import difflib
import errno
import importlib
import io
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dht.checkpoints.hub import HubId, local_path
from dht.errors import MachineError, NetworkError, SwarmError, UserError
from dht.networks.connecting import chosen_transport
from dht.process.supervision import Watchdog, WatchdogConfig, run_by_service
from dht.process.terminal import StderrHandler, printable
from dht.transport.config import TransportKind

EXIT_DONE = 0
EXIT_MACHINE = 1
EXIT_USER = 2
EXIT_SWARM = 3
EXIT_INTERRUPTED = 130
"""Fixed by shells: 128 and the number of SIGINT."""
BEYOND_CLIENT = frozenset(
    {
        *("accelerate", "gguf", "llguidance", "numpy", "ortools", "safetensors", "torch"),
        "transformers",
    }
)
"""Packages that peers, planning and some models' tokenizers need, and no client else."""
DESCRIPTORS_MAX = 65_536
"""Descriptors that a command asks the system for."""
OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EMFILE, errno.ENFILE,
     errno.ENOMEM, errno.EIO, *((errno.EDQUOT,) if hasattr(errno, "EDQUOT") else ())}
)  # fmt: skip
"""Faults of disks, rights and limits, which may meet a command anywhere."""
COMMAND = "anabranch"
HOME = Path(__file__).resolve().parents[1]
"""The directory that holds this package and the others."""

UNITS = {
    "GIB": "GiB",
    "GB": "GB",
    "MBIT": "megabits per second",
    "W": "watts",
    "S": "seconds",
}
"""What the numbers count that a command takes, by how its help names them."""
_FLAG = re.compile(r"--?[a-zA-Z]")
_EXTRA = re.compile("unrecognized arguments: (.*)")


class _HelpAll(argparse.Action):
    """The action of ``--help-all``: print every option and exit."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named, nargs=0, default=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)  # noqa: S101  only it makes this action
        sys.stdout.write(parser.format_help_all())
        parser.exit()


_OF_HELP = (_HelpAll, argparse._HelpAction)


class _Words(argparse.HelpFormatter):
    """Ends no line within a word that has a hyphen: options and their values are such words."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _RawWords(_Words, argparse.RawDescriptionHelpFormatter):
    """The same, with lines of the description and the epilog as they are."""


class Parser(argparse.ArgumentParser):
    """An argument parser with errors in one plain line and a ``--help`` that fits a screen.

    Rare options are shown by ``--help-all`` only, which the last line of ``--help`` names.
    """

    def __init__(
        self,
        *,
        exit_codes: str = "",
        may_be_empty: Sequence[str] = (),
        raw: bool = False,
        **named: Any,
    ) -> None:
        """``prog`` is what starts the command where :data:`COMMAND` did not. ``may_be_empty`` are
        the destinations of options to which an empty value means something. With ``raw`` the lines
        of the description and the epilog stay as they are."""
        self._may_be_empty = may_be_empty
        self._exit_codes = f"exit codes: {exit_codes}\n" if exit_codes else ""
        if sys.argv[0].startswith(f"{COMMAND} "):
            named["prog"] = sys.argv[0]
        named["formatter_class"] = partial(_RawWords if raw else _Words, max_help_position=36)
        super().__init__(**named, allow_abbrev=False)  # a new flag would change what they mean
        self._positionals = self._optionals  # one list of what can be typed
        self._rare: dict[argparse.Action, str] = {}
        if self.add_help:
            self._all = self.add_argument("--help-all", action=_HelpAll, help=argparse.SUPPRESS)

    def add_rare(self, *flags: str, help: str, **named: Any) -> None:
        """``add_argument`` for an option that only ``--help-all`` shows."""
        self._rare[self.add_argument(*flags, **named, help=argparse.SUPPRESS)] = help
        self._all.help = "show every option and exit"

    def format_help(self) -> str:
        """The help with common options, and a hint to ``--help-all``."""
        if not self._rare:
            return super().format_help() + self._exit_codes
        of_help = [each for each in self._actions if isinstance(each, _OF_HELP)]
        said = {action: action.help for action in of_help}
        for action in of_help:  # the last line says it
            action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action in of_help:
                action.help = said[action]
        return f"{text}{self._exit_codes}--help-all shows {len(self._rare)} more options\n"

    def format_help_all(self) -> str:
        for action, text in self._rare.items():
            action.help = text
        try:
            return super().format_help() + self._exit_codes
        finally:
            for action in self._rare:
                action.help = argparse.SUPPRESS

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; raises UserError first for a flag that this command does not have.

        argparse would take the flag's value for the invitation, and complain of that.
        """
        words = sys.argv[1:] if args is None else list(args)
        if self.add_help:  # else it parses for another parser, which says so
            self._check_flags(words)
        return super().parse_known_args(words, namespace)

    def _check_flags(self, words: Sequence[str]) -> None:
        known = self._option_string_actions
        for word in words:
            flag = word.partition("=")[0]
            if word == "--":
                return
            if not _FLAG.match(word) or flag in known:
                continue
            meant = _meant(flag, [each for each in known if each.startswith("--")])
            self.error(f"{flag[:80]} is no flag of this command{meant}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As argparse does, with words for what is no number and not one of a few values.

        An empty value is refused unless it is the default: it mostly is a variable of a shell that
        was never set, and without it the command would do something else.
        """
        means_something = action.default == "" or action.dest in self._may_be_empty
        if not arg_string and action.option_strings and not means_something:
            raise argparse.ArgumentError(action, "it is empty; leave it out or give a value")
        if not _may_travel(arg_string) and action.type is not Path:
            raise argparse.ArgumentError(action, "it is not valid UTF-8 text")
        if isinstance(action.type, type) and issubclass(action.type, Enum):
            known = {str(each.value): each for each in action.type}
            return known.get(arg_string, arg_string)  # which _check_value refuses
        if action.type not in {int, float}:
            try:
                return super()._get_value(action, arg_string)
            except argparse.ArgumentError as error:
                if not error.message.startswith("invalid "):
                    raise
                reason = f"{arg_string[:80]!r} is not known here"  # without a function's name
                raise argparse.ArgumentError(action, reason) from None
        with suppress(ValueError):
            return action.type(arg_string)
        whole = "whole " if action.type is int else ""
        unit = UNITS.get(str(action.metavar), "")
        counts = f" of {unit}" if unit else ""
        raise argparse.ArgumentError(
            action,
            f"{arg_string[:80]!r} is no {whole}number{counts}; give the number alone, such as 8",
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = ", ".join(str(getattr(each, "value", each)) for each in action.choices)
        raise argparse.ArgumentError(
            action, f"{str(value)[:80]!r} is not known: give one of {known}"
        )

    def error(self, message: str) -> NoReturn:
        found = _EXTRA.match(message)
        if found:
            message = f"{found[1][:80]!r} is one word too many{place_of(self, found[1])}"
        raise UserError(f"{message} (--help lists what {self.prog} takes)")


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def number_in(
    low: float, high: float, wanted: str, *, above: bool = False
) -> Callable[[str], float]:
    """The type of an option that is a number from ``low``, or ``above`` it, to ``high``; of any
    other, ``wanted`` says what to give."""

    def read(text: str) -> float:
        value = float(text)
        if not low <= value <= high or (above and value == low):  # NaN is neither
            raise argparse.ArgumentTypeError(f"give {wanted}")
        return value

    return read


def place_of(parser: argparse.ArgumentParser, word: str) -> str:
    """Where a word belongs that stands where an invitation may, as the end of a sentence."""
    known = parser._option_string_actions
    if word.startswith("/ip") or word.startswith("/dns"):
        return "; an address goes behind --initial-peers"
    is_model = HubId.parse(word) is not None or local_path(word) is not None
    if "--prompt" in known and not is_model:
        return f"; a prompt goes behind --prompt: --prompt {shlex.quote(word[:80])}"
    if "--model" in known:
        return f"; a model goes behind --model: --model {shlex.quote(word[:80])}"
    takes_one = any(each.dest == "invitation" for each in parser._actions)
    return "; an invitation begins with anabranch:" if takes_one else ""


def _may_travel(value: str) -> bool:
    """Whether a value is text, or names a file that is here, whose name may be of any bytes."""
    text = value.encode(errors="ignore").decode() == value
    return text or os.path.exists(value)


def _meant(flag: str, known: Sequence[str]) -> str:
    """Which of ``known`` a flag stands for that is none, as the end of a sentence: what it
    abbreviates, or else the one that looks most like it."""
    found = [each for each in known if each.startswith(flag)]
    if not found:  # compared without dashes, which make any two of them alike
        near = nearest(flag[2:], [each[2:] for each in known])
        found = [f"--{near}"] if near else []
    return f"; did you mean {' or '.join(found[:3])}?" if found else ""


def nearest(word: str, known: Sequence[str]) -> str:
    """The one of ``known`` that looks most like ``word``; empty where none does."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), "")


def command_of(
    parse: Callable[[], argparse.Namespace],
    main: Callable[[argparse.Namespace], Coroutine[Any, Any, int]],
) -> Callable[[], int]:
    """A function that runs a command: it parses, runs ``main`` in an event loop and returns its
    exit code; errors go to stderr."""

    def work() -> int:
        level = logging.DEBUG if os.environ.get("ANABRANCH_DEBUG") else logging.WARNING
        logging.basicConfig(level=level, handlers=[StderrHandler()])
        raise_descriptor_limit()
        arguments = parse()
        if getattr(arguments, "verbose", False):
            logging.getLogger().setLevel(min(level, logging.INFO))
        kind = getattr(arguments, "transport", TransportKind.AUTO)
        with asyncio.Runner(loop_factory=loop_factory(kind)) as runner:
            try:
                return runner.run(_watched(main(arguments)))
            except KeyboardInterrupt:
                # Nobody can interrupt threads, and what they read or wait for may take hours.
                last = threading.Timer(1.0, os._exit, (EXIT_INTERRUPTED,))
                last.daemon = True
                last.start()
                raise

    return partial(exit_code_of, work)


async def _watched(work: Coroutine[Any, Any, int]) -> int:
    config = WatchdogConfig(ends_process=run_by_service())
    async with Watchdog(config).watching():
        return await work


def exit_code_of(work: Callable[[], int], *, of_swarm: int = EXIT_SWARM) -> int:
    """What ``work`` returns; errors are told in a line each, those of a swarm with ``of_swarm``."""
    prepare_streams()
    try:
        return work()
    except UserError as error:
        return _say(error, EXIT_USER)
    except SwarmError as error:
        return _say(error, of_swarm)
    except NetworkError as error:
        return _say(error, EXIT_SWARM)
    except MachineError as error:
        return _say(error, EXIT_MACHINE)
    except ModuleNotFoundError as error:
        return say_missing(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        logging.getLogger(__name__).debug("this ended the command", exc_info=True)
        told = f"this machine does not allow it: {error}"
        if error.filename is None or _is_temporary(error.filename):
            told += "; temporary files go where TMPDIR says"
        return _say(MachineError(told), EXIT_MACHINE)


def _is_temporary(name: object) -> bool:
    """Whether a file named by an error is among the temporary ones."""
    text = os.fsdecode(name) if isinstance(name, str | bytes) else ""
    try:
        return Path(text).is_relative_to(tempfile.gettempdir())
    except OSError:  # there is no place for them at all
        return False


def prepare_streams() -> None:
    """What ``anabranch`` does, too, before it imports anything, for a module that is run by itself.

    A standard stream that was closed is that of ``/dev/null``: else the event loop gets its number
    and ends the process. A question mark is printed for what a stream has no character for: not
    every system writes UTF-8, and no answer should end for that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # in this order: the lowest free number is taken
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def own_process(module: str = COMMAND) -> list[str]:
    """What starts a module in a process of its own, in the directory where this one was started.

    That may be a model's, whose files may have names of modules: none of them is imported.
    """
    safe = [] if Path.cwd() == HOME else ["-P"]  # a clone finds its packages where it is
    return [sys.executable, *safe, "-m", module]


def pip_install(package: str) -> str:
    """The command that adds a package to this installation, which may be in an environment of its
    own."""
    return shlex.join((sys.executable, "-m", "pip", "install", package))


def say_missing(error: ModuleNotFoundError) -> int:
    """Say which package an installation of a client alone lacks; returns the exit code.

    Raises ``error`` for any other module.
    """
    name = (error.name or "").partition(".")[0]
    if name not in BEYOND_CLIENT:
        raise error
    text = (
        f"{name} is not installed: this is a client's installation; `pip install .` adds the rest"
    )
    return _say(UserError(text), EXIT_USER)


def raise_descriptor_limit() -> None:
    """Let this process and its daemon have as many descriptors as the system allows, up to
    ``DESCRIPTORS_MAX``: usual limits are 256 or 1024, and each stream takes one in both."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with suppress(OSError, ValueError):  # macOS may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say(error: Exception, code: int) -> int:
    text = " ".join(str(error).split())
    sys.stderr.write(f"error: {printable(text)}\n")
    return code


@contextmanager
def on_interrupt(
    call: Callable[[], object],
    numbers: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[None]:
    """Within the context, these signals call ``call`` in the running loop instead of raising.

    Where SIGTERM is among them, the end of the terminal does as well, once: a shell and the system
    may both tell of it, and a second call means more. ``nohup`` has it ignored, and it stays so.
    """
    loop = asyncio.get_running_loop()
    hang_up: Any = getattr(signal, "SIGHUP", None)  # Windows has none
    minds = signal.SIGTERM in numbers and hang_up and signal.getsignal(hang_up) is signal.SIG_DFL
    if minds:
        calls = iter((call,))
        loop.add_signal_handler(hang_up, lambda: [each() for each in calls])
    for number in numbers:
        try:
            loop.add_signal_handler(number, call)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))
    try:
        yield
    finally:
        for number in numbers:
            try:
                loop.remove_signal_handler(number)
            except NotImplementedError:
                signal.signal(number, signal.default_int_handler)
        if minds:
            loop.remove_signal_handler(hang_up)


def loop_factory(
    kind: TransportKind = TransportKind.AUTO,
) -> Callable[[], asyncio.AbstractEventLoop]:
    """The event loop of all commands: uvloop's with the daemon transport, if installed."""
    if chosen_transport(kind) is TransportKind.LIGHT:
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop

    class PreciseLoop(uvloop.Loop):  # type: ignore[misc]  # uvloop says no types
        """uvloop with a precise clock: its own counts whole milliseconds since its last
        iteration, so round trips of a local network would be 0."""

        def time(self) -> float:
            return time.monotonic()

    return PreciseLoop
