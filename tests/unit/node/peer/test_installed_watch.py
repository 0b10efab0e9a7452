"""An upgrade under a running process is seen, and nothing else is taken for one."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from dht.process.whole_file import write_whole
from node.peer import installed_watch
from node.peer.installed_watch import Stamp, have_changed, loaded_files


@pytest.mark.parametrize("how", ["replaced", "removed", "another", ""])
def test_files_that_change_under_a_process_are_seen(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_watch, "ROOT", tmp_path)
    path, other = tmp_path / "a.py", tmp_path / "b.py"
    for each, name in ((path, "dht.a"), (other, "elsewhere")):
        each.write_text("")
        module = ModuleType(name)
        module.__file__ = str(each)
        monkeypatch.setitem(sys.modules, name, module)
    assert list(loaded_files()) == [path]
    seen: dict[Path, Stamp | None] = {}
    assert not have_changed(seen)
    assert not have_changed(seen)
    match how:
        case "replaced":
            write_whole(path, b"")
        case "removed":
            path.unlink()
        case "another":
            write_whole(other, b"x")
    assert have_changed(seen) is (how in {"replaced", "removed"})


def test_the_files_of_this_process_are_known() -> None:
    assert Path(installed_watch.__file__) in loaded_files()
