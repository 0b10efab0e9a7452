"""Which results are older than the code they measured, in a repository made for it."""

from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.results_stale import DIRTY, UNKNOWN, stale, warning


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (*report.PACKAGES, "bench/papers", "bench/results"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "module.py").write_text("before = 1\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    report.git(root, *who, *arguments)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "all")


def change(root: Path, *files: str) -> None:
    for file in files:
        (root / file).write_text("after = 2\n")


def test_a_result_of_the_present_code_is_not_listed(root: Path) -> None:
    stamp = report.code(root)
    assert set(stamp["trees"]) == {*report.PACKAGES, "bench"}
    assert stale({"new": stamp}, root) == {}


def test_figures_and_what_writes_of_them_measure_nothing(root: Path) -> None:
    stamp = report.code(root)
    writers = ("bench/results_table.py", "bench/report.py", "bench/papers/report.py", "README.md")
    change(root, "bench/results/module.py", *writers)
    commit(root)
    assert stale({"new": stamp}, root) == {}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("node/module.py",), "node"),
        (("bench/papers/module.py",), "bench"),
        (("node/added.py", "client/module.py"), "client, node"),
    ],
)
def test_packages_that_changed_are_named(root: Path, files: tuple[str, ...], said: str) -> None:
    stamp = report.code(root)
    change(root, *files)
    commit(root)
    assert stale({"old": stamp}, root) == {"old": [f"changed since: {said}"]}


def test_a_rebase_makes_no_result_old(root: Path) -> None:
    stamp = report.code(root)
    git(root, "commit", "--quiet", "--amend", "--message", "the same in other words")
    assert report.code(root)["commit"] != stamp["commit"]
    assert stale({"new": stamp}, root) == {}


@pytest.mark.parametrize("file", ["dht/module.py", "dht/added.py"])
def test_changes_that_were_not_committed_are_said(root: Path, file: str) -> None:
    change(root, file)
    assert stale({"dirty": report.code(root)}, root) == {"dirty": [DIRTY]}


def test_figures_that_were_just_written_are_no_such_change(root: Path) -> None:
    change(root, "bench/results/module.py")
    assert stale({"new": report.code(root)}, root) == {}


def without_trees(root: Path) -> dict[str, Any]:
    return {"commit": report.code(root)["commit"]}


def test_an_old_stamp_is_looked_up_while_its_commit_is_in_the_history(root: Path) -> None:
    stamp = without_trees(root)
    assert stale({"old": stamp}, root) == {}
    change(root, "dht/module.py")
    commit(root)
    assert stale({"old": stamp}, root) == {"old": ["changed since: dht"]}


def test_an_old_stamp_whose_commit_is_gone_is_unknown(root: Path) -> None:
    stamp = without_trees(root)
    git(root, "commit", "--quiet", "--amend", "--message", "the same in other words")
    found = stale({"old": stamp, "none": {"figure": 1}}, root)
    assert found == {"old": [UNKNOWN], "none": [UNKNOWN]}


def test_every_part_of_a_result_counts(root: Path) -> None:
    first = report.code(root)
    change(root, "coordinator/module.py")
    commit(root)
    result = {"provenance": report.code(root), "rounds": [{**first, "took_s": 1.0}]}
    assert stale({"grown": result}, root) == {"grown": ["changed since: coordinator"]}


def test_lines_of_a_recipe_are_known_by_their_sources() -> None:
    row = {"commit": "abc", "fingerprint": "of other sources"}
    assert "- papers/x: made by other" in warning({"papers/x": {"recipe": "search", "rows": [row]}})
