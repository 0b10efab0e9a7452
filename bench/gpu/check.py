"""Everything that only a GPU can show, in one JSON, in parts.

Each part is a process of its own with a time limit; what it found is written before the next one
begins. Run again, it goes on with the parts that are missing or were made by other code. The parts
that say most come first. ``--device cpu --tiny`` only proves that this runs.
"""

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import ROOT, code, earlier, provenance, write
from dht.command_line import EXIT_DONE

TAIL_CHARACTERS = 4000
"""Characters kept of what a part wrote when it failed."""
KERNEL_TESTS = ("tests/unit/node/kernels", "tests/unit/node/model/execution/test_cuda_graphs.py")
PACKED = ("llama-3-8b-int4", "llama-3-8b-fp8", "qwen3-30b-a3b-fp8", "gpt-oss-20b-mxfp4")
"""Shapes in packed formats."""

Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process. ``{out}`` in ``command`` is the file that it writes."""

    command: tuple[str, ...]
    limit_s: float
    read: Callable[[Path], Found]
    missing: str = ""
    """Why it cannot run here, if it cannot."""


def read_json(path: Path) -> Found:
    """A part that writes JSON."""
    found: Found = json.loads(path.read_text())
    return found


def read_tests(path: Path) -> Found:
    """Counts, and the names of the tests that failed or were skipped, of a JUnit file."""
    cases = list(ET.parse(path).getroot().iter("testcase"))  # noqa: S314 - pytest wrote it
    found: Found = {"tests": len(cases)}
    for what in ("failure", "error", "skipped"):
        found[what] = [
            {"test": case.get("name"), "said": (said.get("message") or "")[:300]}
            for case in cases
            if (said := case.find(what)) is not None
        ]
    return found


def parts(device: str, *, tiny: bool) -> dict[str, Part]:
    """What is run, in order."""
    python = (sys.executable, "-m")
    on = ("--device", device, *(("--tiny",) if tiny else ()))
    tests = (*python, "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
    here = ("tests/unit/node",)
    sanitizer = shutil.which("compute-sanitizer")
    shapes = ("tiny",) if tiny else ("llama-3-8b", "qwen3-30b-a3b", "llama-3-70b", "gpt-oss-20b")
    packed = ("tiny-int4",) if tiny else PACKED
    engine = (*python, "bench.gpu.engine_gpu", *on, "--out", "{out}")
    these = ("--shapes", *shapes, *packed)
    return {
        "environment": Part(
            command=(*python, "bench.gpu.check", *on, "--part", "environment", "--out", "{out}"),
            limit_s=60,
            read=read_json,
        ),
        "compiled": Part(command=(*engine, "--compile", *these), limit_s=120, read=read_json),
        "engine": Part(command=(*engine, *these), limit_s=400, read=read_json),
        "tests": Part(
            command=(*tests, "-m", "gpu", "-n", "8", "--junitxml={out}", *here),
            limit_s=180,
            read=read_tests,
        ),
        "kernels": Part(
            command=(*tests, "-n", "8", "-k", "not compile", "--junitxml={out}", *KERNEL_TESTS),
            limit_s=240,
            read=read_tests,
        ),
        "engine without kernels": Part(
            command=(*engine, "--no-kernels", "--shapes", *shapes[:2]), limit_s=120, read=read_json
        ),
        "drift": Part(
            command=(
                *(*python, "bench.gpu.drift", *on, "--out", "{out}"),
                *(() if tiny else ("--shapes", "llama-3-8b", "qwen3-30b-a3b")),
            ),
            limit_s=180,
            read=read_json,
        ),
        "trials": Part(
            command=(*python, "bench.gpu.check", *on, "--part", "trials", "--out", "{out}"),
            limit_s=120,
            read=read_json,
        ),
        "sanitizer": Part(
            command=(
                *(sanitizer or "compute-sanitizer", "--error-exitcode", "3", "--tool", "memcheck"),
                *(*tests, "--timeout=0", "-k", "not compile and not answers"),
                *("--junitxml={out}", "tests/unit/node/kernels"),
            ),
            limit_s=300,
            read=read_tests,
            missing="" if sanitizer else "compute-sanitizer is not installed",
        ),
        "tiles": Part(
            command=(*python, "bench.gpu.kernels", *on, "--out", "{out}"),
            limit_s=120,
            read=read_json,
        ),
    }


def run_part(part: Part, limit_s: float) -> Found:
    """What a part found, or how it failed."""
    if part.missing:
        return {"ok": False, "skipped": part.missing}
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "out"
        command = [word.replace("{out}", str(out)) for word in part.command]
        try:
            ran = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=min(limit_s, part.limit_s),
                check=False,
            )
            said, ended = ran.stdout.decode(errors="replace"), f"exit code {ran.returncode}"
            failed = ran.returncode != 0
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace")
            ended, failed = f"stopped after {error.timeout:.0f} s", True
        found = part.read(out) if out.exists() else {}
        found.pop("command", None)  # it names a file that is gone
    told: Found = {"ok": not failed, "seconds": round(time.monotonic() - started_s, 1), **code()}
    if failed:
        told |= {"ended": ended, "said": said[-TAIL_CHARACTERS:]}
    return told | {"found": found}


def environment(device: str) -> Found:
    """The device, the libraries, and what the driver says."""
    import torch

    from bench.gpu.engine_gpu import device_facts

    found: Found = {**device_facts(device), "arch": torch.cuda.get_arch_list()}
    for library in ("triton", "vllm", "bitsandbytes", "torchao"):
        try:
            found[library] = __import__(library).__version__
        except (ImportError, AttributeError):
            found[library] = None
    if (smi := shutil.which("nvidia-smi")) is not None:
        asked = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,pstate"
        command = [smi, f"--query-gpu={asked}", "--format=csv"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        found["nvidia_smi"] = said.stdout.splitlines()
    return found


def trials(device: str, *, tiny: bool) -> Found:
    """What the engine says of its kernels on one layer of each shape, by dtype."""
    from bench.gpu.engine_gpu import FULL, TINY, fast_directory, make_layers
    from node.engine.engine import Engine, EngineConfig
    from node.weights.store import WeightStore

    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage()[:500])

    logging.getLogger("node").setLevel(logging.INFO)
    logging.getLogger("node").addHandler(Keep())
    plan = TINY if tiny else FULL
    found: Found = {}
    for name, shape in plan.shapes.items():
        with tempfile.TemporaryDirectory(dir=fast_directory()) as made:
            made_of = make_layers(Path(made), shape, 1, 4096, plan.drawn_on(device))
            store = WeightStore.open(str(made_of))
            for dtype in ("bfloat16", "float16"):
                said.clear()
                config = EngineConfig(
                    store=store, name=name, device=device, dtype=dtype, memory_bytes=8 << 30
                )
                engine = Engine(config)
                engine.load(0, 1)
                found[f"{name} {dtype}"] = {"in_place": engine.reads_in_place, "said": list(said)}
                del engine
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check", description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda:0", help="with its number (cuda:0)")
    add("--tiny", action="store_true", help="shapes that prove nothing")
    add("--minutes", type=float, default=9.5, help="no part goes on for longer, in all (9.5)")
    add("--only", nargs="+", metavar="PART", help="these parts, also if they are there")
    add("--out", type=Path, default=ROOT / "bench" / "results" / "gpu_check.json", metavar="FILE")
    add("--part", choices=("environment", "trials"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Run what is missing; 1 where a part failed, 2 where there is no such device or part."""
    arguments = parse()
    if arguments.part is not None:
        of = environment if arguments.part == "environment" else trials
        told = {} if of is environment else {"tiny": arguments.tiny}
        write(arguments.out, of(arguments.device, **told))
        return EXIT_DONE
    todo = parts(arguments.device, tiny=arguments.tiny)
    if unknown := set(arguments.only or ()) - todo.keys():
        sys.exit(f"error: no such part: {', '.join(sorted(unknown))}; known: {', '.join(todo)}")
    if arguments.device.startswith("cuda") and not _has_cuda():
        print("error: there is no CUDA device here; bench.gpu.check needs one", file=sys.stderr)
        return 2
    console, ends_s = Console(stderr=True), time.monotonic() + 60 * arguments.minutes
    result: Found = {**provenance(0), "device": arguments.device}
    result["parts"] = earlier(arguments.out).get("parts", {})
    files = code()["sources"]
    for name, part in todo.items():
        known = result["parts"].get(name, {})
        there = known.get("ok") and known.get("sources") == files
        wanted = name in arguments.only if arguments.only else not there
        left_s = ends_s - time.monotonic()
        if not wanted or left_s < 5:
            console.print(f"{name}: {'known' if not wanted else 'no time left'}")
            continue
        result["parts"][name] = found = run_part(part, left_s)
        write(arguments.out, result)
        console.print(f"{name}: {found.get('ended', found.get('skipped', 'ok'))}")
    failed = [n for n, each in result["parts"].items() if not each["ok"] and "said" in each]
    return 1 if failed else EXIT_DONE


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
