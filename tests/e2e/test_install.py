"""The wheel, and the scripts that install it where nothing is."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from node import VERSION
from testing.paths import ROOT
from testing.wheel import built_wheel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform == "win32", reason="a script for Unix"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"), with_own_tools=True)


def test_the_wheel_has_all_parts_the_bundled_model_and_whole_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = email.message_from_bytes(file.read(metadata))
    for room in ("anabranch", "client", "coordinator", "dht", "node"):
        code = {str(path.relative_to(ROOT)) for path in (ROOT / room).rglob("*.py")}
        assert code <= names
    assert {f"anabranch/brook/{name}" for name in os.listdir(ROOT / "models" / "brook")} - {
        "anabranch/brook/draft"
    } <= names
    assert "anabranch/brook/draft/model.safetensors" in names
    assert "client/networks.toml" in names
    assert not [n for n in names if n.startswith(("tests/", "bench/", "testing/", "models/"))]
    assert told["Version"] == VERSION
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.11"
    assert told["Summary"]
    extras = set(told.get_all("Provides-Extra") or ())
    assert {"lend", "qr", "quantize", "light", "dev", "docs"} <= extras
    for each in told.get_all("Requires-Dist") or ():
        tests_alone = ("pytest", "hypothesis", "mypy", "ruff")
        assert not each.startswith(tests_alone) or "extra ==" in each


def test_install_sh_puts_the_command_on_the_path_of_an_empty_home(
    wheel: Path, tmp_path: Path
) -> None:
    """With the wheel alone: what it needs takes gigabytes, and help and version need none of it."""
    home = tmp_path / "home"
    home.mkdir()
    variables = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "ANABRANCH_PYTHON": sys.executable,
        "ANABRANCH_SOURCE": str(wheel),
        "ANABRANCH_TORCH_INDEX": "",
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
    }
    box = _box(tmp_path)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*box, *command],
            env=variables,
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("sh", str(ROOT / "install.sh"))
    assert done.returncode == 0, done.stderr
    assert f"anabranch {VERSION} is installed as" in done.stdout
    shell = run("sh", "-lc", "anabranch --version")
    assert shell.stdout == f"anabranch {VERSION}\n", shell.stderr
    again = run("sh", str(ROOT / "install.sh"))
    assert again.returncode == 0, again.stderr
    assert (home / ".profile").read_text().count("# anabranch") == 1
    source = home / ".local/share/anabranch/venv/anabranch-source"
    assert source.read_text().strip() == str(wheel)
    changed = {path.name for path in home.iterdir()}
    assert changed <= {".local", ".profile", ".cache"}


def _box(tmp_path: Path) -> list[str]:
    """A namespace in which only ``tmp_path`` can be written, where such can be made."""
    bind = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    box = ["bwrap", *bind, "--bind", str(tmp_path), str(tmp_path), "--unshare-net"]
    if shutil.which("bwrap") is None:
        return []
    tried = subprocess.run([*box, "true"], capture_output=True, check=False)
    return box if tried.returncode == 0 else []


def test_install_sh_guesses_no_package_and_says_what_it_lacks(tmp_path: Path) -> None:
    alone = shutil.copy(ROOT / "install.sh", tmp_path / "install.sh")
    for variables, said in (
        ({}, "nothing to install"),
        ({"ANABRANCH_SOURCE": "x.whl", "PATH": str(tmp_path)}, "Python 3.11 or newer"),
    ):
        done = subprocess.run(
            ["/bin/sh", alone],
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert said in done.stderr
    assert os.listdir(tmp_path) == ["install.sh"]
