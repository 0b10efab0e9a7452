"""A file is there whole, or as it was, and nothing is left beside it."""

import os
from pathlib import Path

import pytest

from dht.process.whole_file import write_whole


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
