"""What this process may use of its machine: the tightest of cgroups, rlimits and the host.

A container, a service with ``MemoryMax=`` or a batch system gives a process less than the machine
has; who takes the host's figures for its own is killed. Sources: ``cgroups(7)``, the kernel's
``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Memory that this process may still take, and what sets that limit."""

    free_bytes: int
    total_bytes: int
    by: str
    """What sets it, for people; empty for the machine itself."""


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The tightest limit of memory for this process; ``root`` is where ``/proc`` and ``/sys`` are
    looked for."""
    host = psutil.virtual_memory()
    found = [MemoryLimit(free_bytes=host.available, total_bytes=host.total, by="")]
    with suppress(OSError, ValueError):
        found += _of_cgroups(root)
    found += _of_rlimits()
    free = min(found, key=lambda each: each.free_bytes)
    total_bytes = min(each.total_bytes for each in found)
    return MemoryLimit(free_bytes=max(0, free.free_bytes), total_bytes=total_bytes, by=free.by)


def cores() -> int:
    """Number of processors that this process may use; hyperthreads of one core count once."""
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = psutil.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Number of threads for which this process's cgroups give time, at least 1; None: no quota.

    It is rounded down: a process that is over its quota stops, all threads of it.
    """
    quotas = []
    with suppress(OSError, ValueError):
        for folder in _cgroup_folders(root, "cpu"):
            quota = _numbers(folder / "cpu.max") or [
                *_numbers(folder / "cpu.cfs_quota_us"),
                *_numbers(folder / "cpu.cfs_period_us"),
            ]
            match quota:
                case [used_us, period_us] if used_us > 0 and period_us > 0:
                    quotas.append(used_us / period_us)
    return max(1, int(min(quotas))) if quotas else None


def _of_cgroups(root: Path) -> Iterator[MemoryLimit]:
    """The limits of this process's cgroups, its own and those above it, of either version."""
    for folder in _cgroup_folders(root, "memory"):
        limits = [
            limit
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            for limit in _numbers(folder / name)
        ]
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        if limits and used:
            limit = int(min(limits))
            # Files that nobody reads now are dropped before anybody is killed.
            free_bytes = limit - int(used[0]) + _dropped_first(folder / "memory.stat")
            yield MemoryLimit(
                free_bytes=min(free_bytes, limit), total_bytes=limit, by="its cgroup's limit"
            )


def _dropped_first(stat: Path) -> int:
    """Bytes of a cgroup's file pages that are not in use."""
    with suppress(OSError, ValueError):
        counts = dict(line.split() for line in stat.read_text().splitlines())
        return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return 0


def _numbers(file: Path) -> list[float]:
    """The numbers of a cgroup's file; none where it is not there or says ``max``."""
    with suppress(OSError, ValueError):
        return [float(word) for word in file.read_text().split()]
    return []


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups of this process that may limit it, from its own up, of both versions.

    Where its own is not to be seen, as in a container without a namespace of its own, what is
    mounted counts. Raises OSError where there are no cgroups.
    """
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)  # version 2 has the empty name
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mounted, point = map(_unescaped, before.split(" ")[3:5])
        kind, _, options = after.split(" ")[:3]  # a source may be empty
        name = "" if kind == "cgroup2" else controller
        if name not in own or not (
            kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))
        ):
            continue
        top = root / point.lstrip("/")
        within = os.path.relpath(own[name], mounted)
        folder = top if within.startswith("..") else top / within
        for each in (folder, *folder.parents):
            yield each
            if each == top:
                break


def _lines(file: Path) -> list[str]:
    """Lines of a file of the kernel, in which others' names may be of any bytes."""
    return file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]


def _unescaped(word: str) -> str:
    """A path as the kernel writes it, with its octal escapes resolved."""
    return word.encode("latin-1", "backslashreplace").decode("unicode_escape")


def _of_rlimits() -> Iterator[MemoryLimit]:
    if sys.platform == "win32":
        return
    import resource

    used = psutil.Process().memory_info()
    data_bytes = getattr(used, "data", used.rss)  # Linux tells what counts
    for kind, used_bytes in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, data_bytes)):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield MemoryLimit(
                free_bytes=soft - used_bytes, total_bytes=soft, by="its limit by ulimit"
            )
