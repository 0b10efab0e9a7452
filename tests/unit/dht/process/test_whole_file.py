"""A file is there whole, or as it was, and nothing is left beside it."""

import os
from pathlib import Path
from typing import Any

import pytest

from dht.process.whole_file import stamp_of, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 200)
    for content in (b"first", b"second"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [path.name]


def test_what_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "note"
    write_whole(path, b"kept")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"lost")
    assert path.read_bytes() == b"kept"
    assert os.listdir(tmp_path) == ["note"]


@pytest.mark.parametrize("lasting", [True, False])
def test_a_file_has_its_content_on_the_disk_before_its_name(
    lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power leaves a file without content on some file systems."""
    done: list[str] = []
    for name in ("fsync", "replace"):
        works = getattr(os, name)

        def noted(*given: Any, name: str = name, works: Any = works) -> None:
            done.append(name)
            works(*given)

        monkeypatch.setattr(os, name, noted)
    write_whole(tmp_path / "note", b"kept", lasting=lasting)
    assert done == (["fsync", "replace"] if lasting else ["replace"])


def test_a_file_that_was_written_or_replaced_has_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "note"
    write_whole(path, b"a")
    first = stamp_of(path)
    assert stamp_of(path) == first
    write_whole(path, b"b")
    os.utime(path, ns=(first[2], first[2]))
    assert stamp_of(path) != first, "it is another file"
