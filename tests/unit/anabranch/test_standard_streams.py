"""Commands whose standard streams are closed or full."""

import subprocess
import sys

import pytest

from testing.paths import ROOT


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize(
    ("typed", "code", "told"),
    [
        ("anabranch --help >&-", 0, ""),
        ("anabranch networks --json >&-", 0, ""),
        ("anabranch jion 2>&-", 2, ""),
        ("anabranch --help <&- >&- 2>&-", 0, ""),
        ("anabranch --help >/dev/full", 1, "error: this machine does not allow it"),
        ("client.networks --json <&-", 0, ""),  # a command's module by itself
        ("client.networks --json 2>&-", 0, ""),
    ],
)
def test_a_closed_or_full_stream_is_no_traceback(typed: str, code: int, told: str) -> None:
    ended = subprocess.run(
        ["sh", "-c", f'"$0" -m {typed}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (ended.returncode, ended.stderr[: len(told) or None].strip()) == (code, told)
