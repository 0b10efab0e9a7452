"""Which results are older than the code they measured, in a repository made for it."""

from pathlib import Path

import pytest

from bench import report
from bench.results_stale import UNKNOWN, by_reasons, stale
from bench.sources import closure, sources

FILES = {
    "bench/__init__.py": "",
    "bench/speed/__init__.py": "",
    "bench/speed/measure.py": (
        "import os\nfrom testing import kit\nCOMMAND = ['python', '-m', 'node.join']\n"
    ),
    "bench/speed/other.py": "import coordinator.plan\n",
    "testing/kit.py": "def start():\n    from dht.records import signed\n",
    "dht/records/signed.py": "SIZE = 1\n",
    "dht/records/unused.py": "SIZE = 1\n",
    "node/join.py": "import node.stage.server\n",
    "node/stage/server.py": "import bench.report\n",
    "bench/report.py": "x = 1\n",
    "coordinator/plan.py": "x = 1\n",
    "bench/results/measure.json": "{}",
}
MODULE = "bench.speed.measure"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        change(tmp_path, name, text)
    return tmp_path


def change(root: Path, name: str, text: str = "x = 2\n") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_benchmark_runs_what_it_imports_and_what_it_starts(root: Path) -> None:
    found = {path.relative_to(root).as_posix() for path in closure(MODULE, root)}
    unused = {"bench/speed/other.py", "coordinator/plan.py", "dht/records/unused.py"}
    assert found == {name for name in FILES if name.endswith(".py")} - unused


def test_a_result_of_the_present_code_is_not_listed(root: Path) -> None:
    stamp = report.code(root, MODULE)
    folders = ("bench", "bench/speed", "dht/records", "node", "node/stage", "testing")
    assert tuple(stamp["sources"]) == folders
    assert stale({"new": stamp}, root) == {}


@pytest.mark.parametrize(
    "name",
    [
        "bench/report.py",
        "bench/results/measure.json",
        "bench/speed/other.py",
        "coordinator/plan.py",
        "dht/records/unused.py",
        "README.md",
    ],
)
def test_files_that_a_benchmark_does_not_run_make_no_result_old(root: Path, name: str) -> None:
    stamp = report.code(root, MODULE)
    change(root, name)
    assert stale({"new": stamp}, root) == {}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dht/records/signed.py", "1 of 6 folders, in dht"),
        ("node/stage/server.py", "1 of 6 folders, in node"),
        ("testing/kit.py", "2 of 6 folders, in dht, testing"),
    ],
)
def test_folders_whose_files_changed_are_counted(root: Path, name: str, said: str) -> None:
    stamp = report.code(root, MODULE)
    change(root, name)
    assert stale({"old": stamp}, root) == {"old": [f"changed since: {said}"]}


def test_a_result_without_a_stamp_is_unknown(root: Path) -> None:
    assert stale({"old": {"commit": "abc"}, "none": {"figure": 1}}, root) == {
        "old": [UNKNOWN],
        "none": [UNKNOWN],
    }


def test_every_part_of_a_result_counts(root: Path) -> None:
    first = report.code(root, MODULE)
    change(root, "dht/records/signed.py", "SIZE = 2\n")
    result = {"provenance": report.code(root, MODULE), "rounds": [{**first, "took_s": 1.0}]}
    assert stale({"grown": result}, root) == {"grown": ["changed since: 1 of 6 folders, in dht"]}


def test_every_benchmark_of_this_project_is_found() -> None:
    found = sources("bench.speed.local")
    assert {"bench/speed", "testing", "node/stage", "client/session", "dht/records"} <= set(found)


def test_lines_of_a_recipe_are_known_by_their_sources() -> None:
    row = {"commit": "abc", "fingerprint": "of other sources"}
    ((reasons, names),) = by_reasons({"papers/x": {"recipe": "search", "rows": [row]}})
    assert reasons.startswith("made by other")
    assert names == ["papers/x"]
