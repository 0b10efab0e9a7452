"""What a process may use is what its cgroups, its rlimits and the machine leave it."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from node.device.hardware import LENDING, machine_of
from node.device.limits import cores, cpu_quota, memory_limit

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712
V2 = "31 24 0:27 {mounted} /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "33 24 0:29 {mounted} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=20 * GIB, total=32 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def system(root: Path, cgroup: str, mounts: str, files: dict[str, object]) -> Path:
    """A root folder with ``/proc/self`` and the files of cgroups."""
    for name, text in {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mounts,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def v1(root: Path, path: str, mounted: str, files: dict[str, object]) -> Path:
    cgroup = f"4:memory:{path}\n2:cpu,cpuacct:{path}\n0::/"
    mounts = "\n".join(V1.format(name=name, mounted=mounted) for name in ("memory", "cpu"))
    return system(root, cgroup, mounts, files)


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": int(1.2 * GIB), "memory.current": GIB // 5},
        {"memory.max": "max", "memory.high": int(1.2 * GIB), "memory.current": GIB // 5},
        {
            "memory.max": int(1.2 * GIB),
            "memory.current": GIB,
            "memory.stat": f"anon 5\ninactive_file {GIB - GIB // 5}\nactive_file 3",
        },
        {  # of a slice above its own
            "memory.max": int(1.2 * GIB),
            "memory.current": GIB // 5,
            "a.slice/memory.max": 4 * GIB,
            "a.slice/memory.current": 0,
            "a.slice/b.service/memory.max": "max",
            "a.slice/b.service/memory.current": 0,
        },
    ],
)
def test_version_2_limits_memory(tmp_path: Path, files: dict[str, object]) -> None:
    own = "0::/a.slice/b.service" if "a.slice/memory.max" in files else "0::/"
    limit = memory_limit(system(tmp_path, own, V2.format(mounted="/"), files))
    assert limit.free_bytes == pytest.approx(GIB, abs=2)
    assert limit.total_bytes == int(1.2 * GIB)
    assert "cgroup" in limit.by


@pytest.mark.parametrize(
    ("path", "mounted", "folder"),
    [
        ("/docker/abc", "/", "memory/docker/abc"),
        ("/docker/abc", "/docker/abc", "memory"),
        ("/docker/abc", "/../elsewhere", "memory"),
        ("/", "/", "memory"),
    ],
)
def test_version_1_limits_memory(tmp_path: Path, path: str, mounted: str, folder: str) -> None:
    files: dict[str, object] = {
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "memory/memory.usage_in_bytes": 0,
    }
    files[f"{folder}/memory.limit_in_bytes"] = 2 * GIB
    files[f"{folder}/memory.usage_in_bytes"] = 3 * GIB // 2
    files[f"{folder}/memory.stat"] = f"inactive_file 1\ntotal_inactive_file {GIB // 2}"
    limit = memory_limit(v1(tmp_path, path, mounted, files))
    assert (limit.free_bytes, limit.total_bytes) == (GIB, 2 * GIB)


def test_mounts_of_others_hide_no_limit(tmp_path: Path) -> None:
    """One without a source, one with a name of other bytes, and one with a space in its name."""
    path = "/\u016bber all.slice"
    files: dict[str, object] = {"memory.max": GIB, "memory.current": 0}
    files = {f"{path[1:]}/{name}": value for name, value in files.items()}
    system(tmp_path, f"0::{path}", "", files)
    mounts = "40 24 0:9 / /tmp/x rw - tmpfs  rw\n41 24 0:9 / /mnt/\udcfc rw - ext4 /dev/x rw\n"
    mounts += V2.format(mounted="/") + "\n"
    mountinfo = tmp_path / "proc/self/mountinfo"
    mountinfo.write_bytes(mounts.encode("utf-8", "surrogateescape"))
    assert memory_limit(tmp_path).total_bytes == GIB
    inner = V2.format(mounted=path.replace(" ", "\\040"))
    system(tmp_path, f"0::{path}", inner, {"memory.max": GIB // 2, "memory.current": 0})
    assert memory_limit(tmp_path).total_bytes == GIB // 2


@pytest.mark.parametrize("cgroup", ["", "0::/", "not a line", "4:memory:/x\n0::/"])
def test_without_a_limit_the_machine_counts(tmp_path: Path, cgroup: str) -> None:
    files = {"memory.max": "max", "memory.current": 5 * GIB, "cpu.max": "max 100000"}
    root = system(tmp_path, cgroup, V2.format(mounted="/"), files)
    limit = memory_limit(root)
    assert (limit.free_bytes, limit.total_bytes, limit.by) == (20 * GIB, 32 * GIB, "")
    assert cpu_quota(root) is None
    assert memory_limit(tmp_path / "nothing").free_bytes == 20 * GIB


@pytest.mark.parametrize(
    ("quota", "threads"), [("150000 100000", 1), ("400000 100000", 4), ("20000 100000", 1)]
)
def test_a_quota_bounds_the_threads(tmp_path: Path, quota: str, threads: int) -> None:
    files: dict[str, object] = {"cpu.max": quota}
    assert cpu_quota(system(tmp_path / "2", "0::/", V2.format(mounted="/"), files)) == threads
    used, period = quota.split()
    files = {"cpu/cpu.cfs_quota_us": used, "cpu/cpu.cfs_period_us": period}
    assert cpu_quota(v1(tmp_path / "1", "/", "/", files)) == threads
    files = {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": period}
    assert cpu_quota(v1(tmp_path / "0", "/", "/", files)) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux tells processes apart")
def test_processors_that_it_may_not_use_do_not_count() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
    code += "from node.device.limits import cores; print(cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert cores() >= 1


def test_an_rlimit_bounds_what_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    used = SimpleNamespace(vms=GIB, rss=GIB // 4, data=GIB // 2)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: used))
    limits = {resource.RLIMIT_AS: 3 * GIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], 0))
    machine = machine_of(None, None)
    assert machine.free_bytes == 2 * GIB
    assert machine.lend_bytes == int(2 * GIB * LENDING.cpu_share)
    assert "ulimit" in machine.limited_by
