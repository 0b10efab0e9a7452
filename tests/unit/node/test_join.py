"""What a joining peer says: of what takes it long, and of files that it cannot serve."""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from node import join
from node.owner.reporter import Reporter
from testing.forked import run


def truncated(file: Path) -> str:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.write_bytes(file.read_bytes()[:-64])
    return "its header promises"


def of_no_known_architecture(file: Path) -> str:
    writer = gguf.GGUFWriter(file, "starlight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return "does not read its architecture 'starlight'"


@pytest.mark.parametrize("write", [truncated, of_no_known_architecture])
def test_a_gguf_file_that_cannot_be_served_is_the_users_mistake_in_a_line(
    write: Callable[[Path], str], tmp_path: Path
) -> None:
    words = write(tmp_path / "m.gguf")
    given = ("--model", str(tmp_path / "m.gguf"), "--identity", str(tmp_path / "identity.key"))
    done = run("node.join", *given, "--network", "nobody-is-there")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (tmp_path / "identity.key").exists()


def test_what_takes_seconds_to_import_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    out, said = io.StringIO(), []
    monkeypatch.setattr(join, "SLOW_MODULES", ("slow_one", "slow_two"))
    monkeypatch.setattr(join, "import_module", lambda name: said.append((name, out.getvalue())))
    asyncio.run(join._import_slow_modules(Reporter(json_log=False, out=out)))
    line = "Loading what computes (torch, transformers) …\n"
    assert said == [(name, line) for name in join.SLOW_MODULES]
