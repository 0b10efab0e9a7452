"""The loop that commands run on tells short times apart; what others say steers no terminal."""

import argparse
import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dht.command_line import (
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    command_of,
    exit_code_of,
    loop_factory,
    on_interrupt,
    own_process,
)
from dht.errors import SwarmError
from dht.process.terminal import StderrHandler, cut_between_words, print_lines, printable
from testing.paths import ROOT

TITLE = "no room\x1b]0;owned\x07\x9b2J\u202eback\r"


def test_the_loops_clock_moves_within_a_millisecond() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        seen = {loop.time() for _ in range(1000)}
        assert len(seen) > 2, "the clock stands still between two looks of the loop"
        started_s = loop.time()
        await asyncio.sleep(0.02)
        assert loop.time() - started_s >= 0.019
        done = loop.create_future()
        loop.call_at(loop.time() + 0.02, done.set_result, None)
        await done
        assert loop.time() - started_s >= 0.038

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def test_what_others_say_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    async def refused(arguments: argparse.Namespace) -> int:
        logging.getLogger("test").warning("a peer says: %s", TITLE)
        raise SwarmError(TITLE)

    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        assert command_of(argparse.Namespace, refused)() == 3
    finally:
        root.handlers = before
    said = capsys.readouterr().err
    assert said.count("owned") == 2
    assert not set(said) & set("\x1b\x07\x9b\u202e\r")
    assert printable("Ünïcode\tand\nlines, 日本") == "Ünïcode\tand\nlines, 日本"


def test_what_others_say_makes_no_line_of_a_log_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.Logger("test")
    log.addHandler(StderrHandler())
    log.warning("a peer says: %s", "no\nERROR dht: your key was stolen; go to evil.example")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "WARNING test: a peer says: no"
    assert all(line.startswith("  ") for line in rest)
    assert rest


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on descriptors")
@pytest.mark.parametrize(("soft", "hard", "allowed"), [(200, 900, 900), (200, 100_000, 65_536)])
def test_a_command_raises_its_limit_on_descriptors(soft: int, hard: int, allowed: int) -> None:
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most not in (resource.RLIM_INFINITY,) and most < hard:
        pytest.skip(f"this system allows {most} descriptors")
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from dht.command_line import raise_descriptor_limit\n"
        "raise_descriptor_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(allowed), str(hard)]


@pytest.mark.parametrize("named", ["anabranch", "msgspec", "pip"])
def test_no_file_of_the_directory_is_imported_by_what_is_started(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cd MODEL; anabranch join --gpu 0,1` ran what a model's repository calls `msgspec.py`."""
    (tmp_path / f"{named}.py").write_text("print('theirs')\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    module, word = ("pip", "--version") if named == "pip" else ("anabranch", "models")
    done = subprocess.run(
        [*own_process(module), word, *(["--help"] if word == "models" else [])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "theirs" in done.stdout) == (0, False), done.stderr


def test_lines_are_cut_between_words_and_what_is_to_be_copied_is_whole() -> None:
    word = "anabranch:" + "x" * 90
    text = f"  a table    row\n{'several words ' * 8}\n{word} --model FILES"
    cut = cut_between_words(text, 40).split("\n")
    assert cut[0] == "  a table    row"
    assert word in cut
    assert max(len(line) for line in cut if line != word) <= 40
    assert "".join("".join(cut).split()) == "".join(text.split())


def test_what_is_piped_is_cut_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines("word " * 40 + "\x1b[2J")
    assert capsys.readouterr().out == "word " * 40 + "\N{REPLACEMENT CHARACTER}[2J\n"


def _refused() -> int:
    raise PermissionError(errno.EACCES, "Permission denied", "/home/somebody/key")


def test_a_machine_that_allows_nothing_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert exit_code_of(lambda: len(tempfile.mkdtemp())) == EXIT_MACHINE
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert str(tmp_path / "gone") in told
    assert "TMPDIR" in told
    assert exit_code_of(_refused) == EXIT_MACHINE
    assert "TMPDIR" not in capsys.readouterr().err, "no temporary file"

    def fault() -> int:
        raise OSError(errno.EBADF, "a fault of this software")

    with pytest.raises(OSError, match="of this software"):
        exit_code_of(fault)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_leaves_once_and_nohup_stays(ignored: bool) -> None:
    called: list[str] = []
    left = asyncio.Event()

    def leave() -> None:
        called.append("left")
        left.set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    async def run() -> None:
        with on_interrupt(leave):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                if not ignored:
                    await left.wait()
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert called == ([] if ignored else ["left"])


WAITS_IN_A_THREAD = """
import argparse, asyncio, time
from dht.command_line import command_of

async def main(arguments):
    print("begun", flush=True)
    await asyncio.to_thread(time.sleep, 3600)

raise SystemExit(command_of(argparse.Namespace, main)())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_ends_a_command_whose_thread_waits() -> None:
    command = [sys.executable, "-c", WAITS_IN_A_THREAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == EXIT_INTERRUPTED
        finally:
            process.kill()


def test_who_reads_the_first_lines_alone_ends_no_table_as_a_fault() -> None:
    code = """
import sys
from dht.command_line import exit_code_of
from dht.process.terminal import console_of_rich
console = console_of_rich()
sys.exit(exit_code_of(lambda: [console.print(sys.stdin.read()) for _ in range(2)] and 9))
"""
    table = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert table.stdin is not None
    assert table.stdout is not None
    assert table.stderr is not None
    table.stdout.close()
    table.stdin.write(b"row" * 1000)
    table.stdin.close()
    assert (table.wait(), table.stderr.read()) == (0, b"")
    table.stderr.close()
