"""Which tests ``make quick`` runs, and which subjects of commits are taken."""

from pathlib import Path

import pytest

from tests.commit_subject import complaint
from tests.quick import LAWS, ROOT, chosen

POOL = ROOT / "tests/unit/node/kv/test_pool.py"
SESSIONS = ROOT / "tests/sim/test_sessions.py"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("node/kv/pool.py", [POOL]),
        ("testing/clock.py", [SESSIONS]),
        ("tests/sim/test_sessions.py", [SESSIONS]),
        ("docs/ask.md", []),
    ],
)
def test_tests_that_mirror_or_import_a_changed_module_are_run(
    changed: str, said: list[Path]
) -> None:
    assert chosen([changed], [POOL, SESSIONS]) == [str(each.relative_to(ROOT)) for each in said]


def test_the_laws_exist() -> None:
    assert all((ROOT / name).exists() for name in LAWS)


@pytest.mark.parametrize("message", ["x" * 73, "", "# only a comment\n"])
def test_a_commit_without_a_short_subject_is_refused(message: str) -> None:
    assert complaint(message)


@pytest.mark.parametrize("message", ["x" * 72, "# a comment\nnode: say it\n\n" + "x" * 100])
def test_a_short_subject_is_taken(message: str) -> None:
    assert complaint(message) is None
