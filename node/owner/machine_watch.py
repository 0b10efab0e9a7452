"""Looks at this machine for :mod:`node.owner.idle_policy`: other programs, keyboards, the clock.

Input is seen by the access times of terminals (as ``who`` does), so a desktop's mouse counts only
if it shows up there; ``--pause-on-process`` is the surer sign of a game. What its owner may count
on and cannot be seen is told (:func:`unseen`).
"""

import csv
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

import psutil

from node.owner.idle_policy import Seen, UseConfig, names_of

NVIDIA_SMI = ("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
BESIDE = "ANABRANCH_BESIDE"
"""Environment variable of peers whose starter runs others beside them: all of them are no others'
programs."""
TERMINALS = ("/dev/tty[0-9]*", "/dev/pts/[0-9]*")
DESKTOPS = ("/tmp/.X11-unix/X[0-9]*", "/run/user/*/wayland-[0-9]*")  # noqa: S108  as desktops have it
"""Sockets of desktops."""
TASKLIST = ("tasklist.exe", "/mnt/c/Windows/System32/tasklist.exe")
"""The command that lists the programs of Windows: by its name, and where no path has it, as in
services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LooksConfig:
    """Time that other programs have to tell what they see, in seconds."""

    smi_s: float = 2.0
    tasklist_s: float = 10.0
    """And the interval between two lists of Windows' programs: each takes up to a second of a
    core."""


LOOKS = LooksConfig()


class MachineWatch:
    """Looks at the machine repeatedly; CPU shares are means over the time between two looks."""

    def __init__(self, config: UseConfig, *, gpu: str | None) -> None:
        """``gpu`` is the driver's name of the GPU that is lent; empty where it is not known, which
        has all GPUs looked at; None: no GPU is lent."""
        self._config = config
        smi = None if gpu is None else shutil.which(NVIDIA_SMI[0])
        self._smi = smi and (smi, *NVIDIA_SMI[1:], *([f"--id={gpu}"] if gpu else []))
        self._tasklist = _tasklist()
        self._listed: frozenset[str] = frozenset()
        """The programs of Windows that were listed last."""
        self._listed_s: float | None = None
        self._total_s: float | None = None
        self._own_s = 0.0
        self._looked_s = 0.0

    def look(self) -> Seen:
        """Look at the machine now. Takes some milliseconds, more with a GPU."""
        clock = time.localtime()
        minute = 60 * clock.tm_hour + clock.tm_min
        config = self._config
        processes: frozenset[str] = frozenset()
        if config.processes:
            processes = names_of(_programs()) | self._of_windows()
        on_battery = config.mains_only and is_on_battery()
        if not config.idle_only:
            return Seen(minute=minute, processes=processes, on_battery=on_battery)
        own = _own()
        return Seen(
            minute=minute,
            on_battery=on_battery,
            others_share=self._others_share(own),
            others_on_gpu=self._others_on_gpu({process.pid for process in own}),
            input_ago_s=_input_ago_s(config.ahead_s),
            processes=processes,
        )

    def _of_windows(self) -> frozenset[str]:
        """The programs of the Windows that this WSL runs in, as they were listed a short while
        ago."""
        now_s = time.monotonic()
        recent = self._listed_s is not None and now_s - self._listed_s < LOOKS.tasklist_s
        if self._tasklist is None or recent:
            return self._listed
        self._listed_s = now_s
        command = [self._tasklist, "/FO", "CSV", "/NH"]
        if (told := _output(command, LOOKS.tasklist_s)) is not None:
            self._listed = names_of(row[0] for row in csv.reader(told.splitlines()) if row)
        return self._listed

    def _others_share(self, own: Iterable[psutil.Process]) -> float:
        times = psutil.cpu_times()
        total_s = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        total_s -= getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        own_s = 0.0
        for process in own:
            try:
                used = process.cpu_times()
            except psutil.Error:
                continue
            own_s += used.user + used.system
        now_s = time.monotonic()
        before, self._total_s = self._total_s, total_s
        own_before, self._own_s = self._own_s, own_s
        since_s, self._looked_s = now_s - self._looked_s, now_s
        if before is None or since_s <= 0:
            return 0.0
        others_s = (total_s - before) - (own_s - own_before)
        return min(1.0, max(0.0, float(others_s) / (since_s * (psutil.cpu_count() or 1))))

    def _others_on_gpu(self, own: set[int]) -> bool:
        told = _output(self._smi, LOOKS.smi_s) if self._smi else None
        return told is not None and bool(gpu_programs(told) - own)


def _output(command: Sequence[str], limit_s: float) -> str | None:
    """What a command writes; None where it does not start, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace")


def is_wsl() -> bool:
    """Whether this is Linux within Windows."""
    return "microsoft" in platform.release().lower()


def _tasklist() -> str | None:
    found = (shutil.which(name) for name in TASKLIST) if is_wsl() else ()
    return next(filter(None, found), None)


def is_on_battery() -> bool:
    """Whether this machine runs on a battery, as far as it tells."""
    look = getattr(psutil, "sensors_battery", None)  # not every system has it
    battery = None if look is None else look()
    return battery is not None and battery.power_plugged is False


def has_desktop() -> bool:
    """Whether somebody may sit at a desktop of this machine."""
    if sys.platform in {"darwin", "win32"} or is_wsl():
        return True
    return any(True for pattern in DESKTOPS for _ in Path("/").glob(pattern.lstrip("/")))


def unseen(config: UseConfig) -> str:
    """What the owner may count on to be seen and is not; empty: nothing."""
    found = []
    if config.idle_only and has_desktop():
        found.append(
            "--idle-only sees programs that compute, and typing in terminals. It does not see a"
            " desktop's mouse and keyboard, nor games: name these with --pause-on-process"
        )
    if config.processes and is_wsl() and _tasklist() is None:
        found.append(
            "--pause-on-process sees programs of WSL alone: tasklist.exe, which lists those of"
            " Windows, is not to be found"
        )
    return ". ".join(found)


def _programs() -> Iterator[str]:
    """The names of running programs, each as its file is called, and as it was started: what Wine
    starts has a long path of Windows, of which the system keeps the beginning alone."""
    for process in psutil.process_iter(["name", "cmdline"]):
        yield process.info["name"] or ""
        yield PureWindowsPath((process.info["cmdline"] or [""])[0]).name


def gpu_programs(listed: str) -> set[int]:
    """Process ids in the output of ``nvidia-smi``; other lines are skipped."""
    return {int(line) for line in map(str.strip, listed.splitlines()) if line.isdecimal()}


def _own() -> list[psutil.Process]:
    first = psutil.Process(os.getppid() if BESIDE in os.environ else None)
    return [first, *first.children(recursive=True)]


def _input_ago_s(ahead_s: float) -> float | None:
    """Seconds since somebody typed at a terminal; None where no terminal tells.

    A time that is more than ``ahead_s`` still to come was written under another clock, which was
    set since: it would seem to be now for as long as that clock was ahead.
    """
    now_s, newest_s = time.time(), 0.0
    for pattern in TERMINALS:
        for terminal in Path("/").glob(pattern.lstrip("/")):
            try:
                typed_s = terminal.stat().st_atime
            except OSError:
                continue
            if typed_s <= now_s + ahead_s:
                newest_s = max(newest_s, typed_s)
    return max(0.0, now_s - newest_s) if newest_s else None
