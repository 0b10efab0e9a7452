"""Looks at this machine for :mod:`node.owner.idle_policy`: other programs, keyboards, the clock.

Input is seen by the access times of terminals (as ``who`` does), so a desktop's mouse counts only
if it shows up there; ``--pause-on-process`` is the surer sign of a game.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from node.owner.idle_policy import Seen, UseConfig, names_of

NVIDIA_SMI = ("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
SMI_S = 2.0
BESIDE = "ANABRANCH_BESIDE"
"""Environment variable of peers whose starter runs others beside them: all of them are no others'
programs."""
TERMINALS = ("/dev/tty[0-9]*", "/dev/pts/[0-9]*")


class MachineWatch:
    """Looks at the machine repeatedly; CPU shares are means over the time between two looks."""

    def __init__(self, config: UseConfig, *, gpu: bool) -> None:
        self._config = config
        self._smi = shutil.which(NVIDIA_SMI[0]) if gpu else None
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
            processes = names_of(str(p.info["name"]) for p in psutil.process_iter(["name"]))
        if not config.idle_only:
            return Seen(minute=minute, processes=processes)
        own = _own()
        return Seen(
            minute=minute,
            others_share=self._others_share(own),
            others_on_gpu=self._others_on_gpu({process.pid for process in own}),
            input_ago_s=_input_ago_s(config.ahead_s),
            processes=processes,
        )

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
        if self._smi is None:
            return False
        try:
            done = subprocess.run(
                [self._smi, *NVIDIA_SMI[1:]],
                capture_output=True,
                text=True,
                timeout=SMI_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return bool(gpu_programs(done.stdout) - own)


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
