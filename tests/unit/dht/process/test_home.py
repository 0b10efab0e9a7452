"""Users without a home directory, and outputs that cannot take every character."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.swarm.peer_texts import texts_folder
from dht.checkpoints.hub import local_path
from dht.errors import UserError
from dht.networks.remembered import memory_file, recall, shown
from node.peer import join_options
from node.profiling.profile_cache import default_folder

ROOT = Path(__file__).parents[4]


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    pwd = pytest.importorskip("pwd")

    def unknown(*_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "ANABRANCH_MEMORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
def test_join_says_which_flag_takes_the_place_of_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["join", "--model", "models/brook", "--cpu"])
    with pytest.raises(UserError, match=r"no home directory; .* --identity FILE"):
        join_options.parse()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--identity", "/tmp/a.key"])  # noqa: S108
    assert join_options.parse().identity == Path("/tmp/a.key")  # noqa: S108


@pytest.mark.usefixtures("homeless")
def test_what_is_only_kept_for_later_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_file() is None
    assert recall() is None
    assert shown(Path("/a/b")) == "/a/b"
    assert local_path("~somebody/model") is None
    folders = default_folder(), texts_folder()
    assert all(folder.parents[1].stat().st_mode & 0o077 == 0 for folder in folders), "its own"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert (default_folder(), texts_folder()) == (
        Path("/cache/anabranch/profiles"),
        Path("/cache/anabranch/texts"),
    )


@pytest.mark.parametrize("command", ["anabranch", "client.forget", "client.invite"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_help_is_printed_in_any_encoding(command: str, encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", command, "--help"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": f"{encoding}:strict"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"usage: " in done.stdout
    done.stdout.decode(encoding)
