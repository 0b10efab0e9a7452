"""``anabranch update`` runs what the installers ran, or says why it cannot."""

import sys
from pathlib import Path

import pytest

from anabranch.update import SOURCE, run, source_of, steps
from dht.errors import UserError


def test_it_installs_from_where_it_was_installed(tmp_path: Path) -> None:
    (tmp_path / SOURCE).write_text("﻿/x/anabranch.whl\n", encoding="utf-8")  # as Windows writes it
    assert source_of(tmp_path) == "/x/anabranch.whl"
    (pip,) = steps("/x/anabranch.whl", ["python", "-m", "pip"])
    assert pip == ["python", "-m", "pip", "install", "--upgrade", "/x/anabranch.whl"]
    (tmp_path / ".git").mkdir()
    pull, pip = steps(str(tmp_path), ["pip"])
    assert pull == ["git", "-C", str(tmp_path), "pull", "--ff-only"]
    assert pip[-1] == str(tmp_path)


@pytest.mark.parametrize("text", [None, "", " \n", b"\xff\xfe"])
def test_what_was_installed_otherwise_is_left_alone(
    text: str | bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / SOURCE).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match="not installed by install"):
        source_of(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["anabranch update"])
    assert run() == 2
