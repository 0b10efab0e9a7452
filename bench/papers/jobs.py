"""Jobs that are run side by side, each once: what a recipe has already measured is kept.

A result is kept while the code and the data that it depends on are the same (a hash over their
files); so a run that was stopped goes on where it was, and a change of the code runs all again,
unless results of any age are asked for. Each line says its commit.
"""

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench import report
from testing.paths import ROOT

RESULTS = ROOT / "bench" / "results" / "papers"
SIMULATED = ("coordinator", "dht/messages/types.py", "bench/papers", "bench/data")
PLANS = "bench/results/placement.json"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One line of a recipe's table; ``call(**arguments)`` makes it in a process of its own."""

    key: str
    call: Callable[..., Row]
    arguments: Mapping[str, Any]
    cost_s: float = 10.0
    """About how long it takes; the long ones go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A named experiment."""

    name: str
    title: str
    jobs: Callable[[], Sequence[Job]]
    sources: tuple[str, ...] = (*SIMULATED, PLANS)
    """Files and folders whose change makes its results old."""


@cache
def fingerprint(sources: tuple[str, ...]) -> str:
    """A hash over the files under ``sources`` that make figures."""
    digest = hashlib.sha256()
    for source in sources:
        path = ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in {".py", ".json", ".csv"} and not file.name.startswith("report"):
                digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def measured(job: Job) -> Row:
    """The job's line, with its key and the seconds of one core that it took."""
    started_s = time.process_time()
    row = job.call(**job.arguments)
    return {"key": job.key, **row, "took_s": round(time.process_time() - started_s, 2)}


class Results:
    """A recipe's JSON file."""

    def __init__(self, recipe: Recipe, *, again: bool = False, any_age: bool = False) -> None:
        self.recipe = recipe
        self.jobs = tuple(recipe.jobs())
        self.path = RESULTS / f"{recipe.name}.json"
        self.fingerprint = fingerprint(recipe.sources)
        self.provenance = report.provenance(seed=0)
        self.rows: dict[str, Row] = {}
        if self.path.exists() and not again:
            wanted = {job.key for job in self.jobs}
            self.rows = {
                row["key"]: row
                for row in json.loads(self.path.read_text())["rows"]
                if row["key"] in wanted and (any_age or row.get("fingerprint") == self.fingerprint)
            }

    def missing(self) -> list[Job]:
        """Jobs without a result."""
        return [job for job in self.jobs if job.key not in self.rows]

    @property
    def complete(self) -> bool:
        """Whether every job has a result."""
        return not self.missing()

    def add(self, row: Row) -> None:
        """Keep a line and write the file."""
        commit = self.provenance["commit"]
        self.rows[row["key"]] = {**row, "commit": commit, "fingerprint": self.fingerprint}
        rows = [self.rows[job.key] for job in self.jobs if job.key in self.rows]
        result = {
            "recipe": self.recipe.name,
            "title": self.recipe.title,
            **self.provenance,
            "command": f"python -m bench.papers {self.recipe.name}",
            "complete": self.complete,
            "took_s": round(sum(line["took_s"] for line in rows), 1),
            "rows": rows,
        }
        RESULTS.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def run(
    recipes: Sequence[Recipe], processes: int, *, again: bool = False, any_age: bool = False
) -> int:
    """Run what is missing of the recipes, the longest jobs first; returns how many failed.

    A job that fails leaves its line out and the others running.
    """
    results = [Results(recipe, again=again, any_age=any_age) for recipe in recipes]
    todo = [(job, found) for found in results for job in found.missing()]
    todo.sort(key=lambda item: -item[0].cost_s)
    known = sum(len(found.rows) for found in results)
    print(f"{known} results kept, {len(todo)} jobs to run", file=sys.stderr, flush=True)
    started_s = time.monotonic()
    failed = 0
    with ProcessPoolExecutor(processes) as pool:
        owners = {pool.submit(measured, job): (job, found) for job, found in todo}
        try:
            for count, done in enumerate(as_completed(owners), start=1):
                job, found = owners[done]
                said = _kept(done, found)
                failed += said is None
                print(
                    f"{time.monotonic() - started_s:5.0f} s  {count}/{len(todo)}"
                    f"  {found.recipe.name}: {job.key} ({said or 'FAILED'})",
                    file=sys.stderr,
                    flush=True,
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def _kept(done: "Future[Row]", found: Results) -> str | None:
    """Keep a job's line; says how long it took, or prints why there is none."""
    error = done.exception()
    if error is not None:
        traceback.print_exception(error)
        return None
    row = done.result()
    found.add(row)
    return f"{row['took_s']:.0f} s"
