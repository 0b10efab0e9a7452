"""What every result file says of where it comes from."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.local_swarm import ROOT


def provenance(seed: int) -> dict[str, Any]:
    """Commit, machine, versions and seed."""
    commit = _git("rev-parse", "--short", "HEAD")
    dirty = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit + ("+changes" if dirty else ""),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "seed": seed,
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _module() -> str:
    return "bench." + Path(sys.argv[0]).stem


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((li.split(":", 1)[1].strip() for li in lines if li.startswith("model name")), "?")


def write(path: Path, result: dict[str, Any]) -> None:
    """Write ``result`` as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
