"""The network that was used last is remembered; whatever is wrong with the file, commands go on."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from dht.errors import UserError
from dht.networks.remembered import (
    FILE_BYTES_MAX,
    Remembered,
    UnreadableError,
    forget,
    is_remembered,
    recall,
    remember,
    user_directory,
)

ONE = Remembered(
    network="anabranch",
    initial_peers=("/ip4/1.2.3.4/tcp/1/p2p/x",),
    model="brook",
    model_name="brook",
    fingerprint="a" * 64,
)
OTHER = Remembered(network="lab", initial_peers=("/ip4/1.2.3.5/tcp/1/p2p/y",))


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "network.json"
    monkeypatch.setenv("ANABRANCH_MEMORY", str(path))
    return path


def remembered(new: Remembered) -> list[str]:
    said: list[str] = []
    remember(new, said.append)
    return said


def test_what_is_remembered_is_recalled_until_it_is_forgotten(file: Path) -> None:
    assert recall() is None
    assert not is_remembered("anabranch", "brook")
    (line,) = remembered(ONE)
    assert is_remembered("anabranch", "brook")
    assert "network anabranch is remembered in" in line
    assert recall() == ONE
    assert remembered(ONE) == []
    (line,) = remembered(OTHER)
    assert "in the place of network anabranch" in line
    assert recall() == OTHER
    assert not is_remembered("anabranch", "brook")
    assert forget() == file
    assert recall() is None
    assert forget() is None


def test_other_weights_are_said_loudly_and_do_not_stay() -> None:
    remembered(ONE)
    changed = Remembered(
        network="anabranch",
        initial_peers=("/ip4/6.6.6.6/tcp/1/p2p/z",),
        model="brook",
        model_name="brook",
        fingerprint="b" * 64,
    )
    (line,) = remembered(changed)
    assert line.startswith("WARNING: brook in network anabranch has OTHER WEIGHTS")
    assert "b" * 16 in line
    assert "a" * 16 in line
    assert recall() == ONE
    forget()
    remembered(changed)
    assert recall() == changed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"format": 1}',
        b'{"format": 1, "network": "a\\u001b[2J", "initial_peers": ["x"]}',
        b'{"format": 1, "network": "a", "initial_peers": []}',
        b'{"format": 1, "network": "a", "initial_peers": ["x"], "fingerprint": "zz"}',
        b'{"format": 1, "network": "a", "initial_peers": ["x"], "more": 1}',
        b" " * (FILE_BYTES_MAX + 1),
    ],
)
def test_a_damaged_file_is_left_aside_and_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(UnreadableError, match="anabranch forget"):
        recall()
    remembered(ONE)
    assert recall() == ONE


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_any_content_is_a_network_or_unreadable(file: Path, content: bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    with pytest.raises(UserError):
        recall()


def test_a_file_of_another_version_stays(file: Path) -> None:
    remembered(ONE)
    content = json.dumps({**json.loads(file.read_bytes()), "format": 2, "new": True})
    file.write_text(content)
    with pytest.raises(UnreadableError, match="format 2"):
        recall()
    (line,) = remembered(OTHER)
    assert line.startswith("not remembered: ")
    assert file.read_text() == content


def test_where_nothing_can_be_written_that_is_said_and_no_error(file: Path, tmp_path: Path) -> None:
    file.parent.write_text("a file where the directory would be")
    (line,) = remembered(ONE)
    assert line.startswith("not remembered: ")


def test_a_model_whose_path_is_no_text_is_said_not_to_be_remembered(file: Path) -> None:
    (line,) = remembered(structs.replace(ONE, model="/models/caf\udce9"))
    assert line.startswith("not remembered: ")
    assert not file.exists()


def test_nothing_is_remembered_where_it_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_MEMORY", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert remembered(ONE) == []
    assert recall() is None
    assert not (tmp_path / "xdg").exists()


@pytest.mark.parametrize(
    ("platform", "environment", "directory"),
    [
        ("linux", {}, "/home/me/.config/anabranch"),
        ("linux", {"XDG_CONFIG_HOME": "/etc/mine"}, "/etc/mine/anabranch"),
        ("linux", {"XDG_CONFIG_HOME": "relative"}, "/home/me/.config/anabranch"),
        ("darwin", {}, "/home/me/Library/Application Support/anabranch"),
        ("win32", {"APPDATA": "/roaming"}, "/roaming/anabranch"),
    ],
)
def test_the_usual_places(platform: str, environment: dict[str, str], directory: str) -> None:
    assert user_directory(platform, environment, Path("/home/me")) == Path(directory)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may read all")
def test_a_file_that_may_not_be_read(file: Path) -> None:
    remembered(ONE)
    file.chmod(0)
    with pytest.raises(UnreadableError, match="cannot be read"):
        recall()


def test_a_network_whose_addresses_are_all_new_takes_no_other_ones_place() -> None:
    remembered(ONE)
    (line,) = remembered(structs.replace(ONE, initial_peers=("/ip4/1.2.3.9/tcp/1/p2p/x",)))
    assert "network anabranch is remembered in" in line
    assert "in the place of" not in line
