"""Which tests ``make quick`` runs, and which subjects of commits are taken."""

from pathlib import Path

import pytest

from tests.commit_subject import complaint
from tests.quick import LAWS, ROOT, chosen

FILES = ("unit/node/kv/test_pool.py", "unit/node/stage/test_kv.py", "sim/test_sessions.py")
TESTS = [ROOT / "tests" / name for name in FILES]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("node/kv/pool.py", {"unit/node/kv/test_pool.py", "unit/node/stage/test_kv.py"}),
        ("tests/sim/test_sessions.py", {"sim/test_sessions.py"}),
        ("docs/ask.md", set()),
        ("client/text/stops.py", set()),
    ],
)
def test_tests_that_mirror_or_import_a_changed_module_are_run(
    changed: str, said: set[str], tmp_path: Path
) -> None:
    kv = ROOT / "tests/unit/node/kv/test_pool.py"
    assert kv.exists()
    found = set(chosen([changed], [path for path in TESTS if path.exists()]))
    assert found == {f"tests/{name}" for name in said if (ROOT / "tests" / name).exists()}


def test_the_laws_exist() -> None:
    assert all((ROOT / name).exists() for name in LAWS)


@pytest.mark.parametrize("message", ["x" * 73, "", "# only a comment\n"])
def test_a_commit_without_a_short_subject_is_refused(message: str) -> None:
    assert complaint(message)


@pytest.mark.parametrize("message", ["x" * 72, "# a comment\nnode: say it\n\n" + "x" * 100])
def test_a_short_subject_is_taken(message: str) -> None:
    assert complaint(message) is None
