"""Commands whose standard streams are closed or full."""

import subprocess
import sys

import pytest

from testing.paths import ROOT


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize(
    ("typed", "code", "told"),
    [
        ("--help >&-", 0, ""),
        ("networks --json >&-", 0, ""),
        ("jion 2>&-", 2, ""),
        ("--help <&- >&- 2>&-", 0, ""),
        ("--help >/dev/full", 1, "error: this machine does not allow it"),
    ],
)
def test_a_closed_or_full_stream_is_no_traceback(typed: str, code: int, told: str) -> None:
    ended = subprocess.run(
        ["sh", "-c", f'"$0" -m anabranch {typed}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (ended.returncode, ended.stderr[: len(told) or None].strip()) == (code, told)
