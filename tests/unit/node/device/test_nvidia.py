"""The GPU's driver, played by a script in the place of nvidia-smi."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dht.errors import UserError
from node.device.nvidia import held_to, parse_answer, sensors

GPU = "GPU-11111111-2222-3333-4444-555555555555"
Driver = Callable[..., Path]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Makes an nvidia-smi that tells ``told``, keeps a limit in a file and may refuse to set it."""

    def make(told: str = "350.00, 100.00, 450.00", *, refuses: bool = False) -> Path:
        limits = tmp_path / "limits"
        limits.write_text("")
        script = tmp_path / "nvidia-smi"
        script.write_text(
            "#!/bin/sh\n"
            f'[ "$1" = "--id={GPU}" ] || {{ echo "no such GPU: $1"; exit 6; }}\n'
            'case "$2" in\n'
            f"--query-gpu=*) echo '{told}';;\n"
            + (
                "--power-limit=*) echo 'Insufficient Permissions'; exit 4;;\n"
                if refuses
                else f'--power-limit=*) echo "$2" >> {limits};;\n'
            )
            + "esac\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return limits

    return make


def test_the_limit_is_set_and_given_back(driver: Driver) -> None:
    limits = driver()
    with held_to(GPU, 220):
        assert limits.read_text().split() == ["--power-limit=220"]
    assert limits.read_text().split() == ["--power-limit=220", "--power-limit=350"]


def test_the_limit_is_given_back_after_a_failure(driver: Driver) -> None:
    limits = driver()
    with pytest.raises(RuntimeError), held_to(GPU, 220):
        raise RuntimeError
    assert limits.read_text().split()[-1] == "--power-limit=350"


@pytest.mark.parametrize("limit_w", [None, 350.0])
def test_what_is_so_already_is_left_alone(driver: Driver, limit_w: float | None) -> None:
    limits = driver()
    with held_to(GPU, limit_w):
        pass
    assert limits.read_text() == ""


@pytest.mark.parametrize("limit_w", [-1.0, 0.0, 99.0, 451.0])
def test_a_limit_out_of_range_is_refused_with_the_range(driver: Driver, limit_w: float) -> None:
    limits = driver()
    with pytest.raises(UserError, match="this GPU takes 100 to 450 W"), held_to(GPU, limit_w):
        pass
    assert limits.read_text() == ""


def test_without_the_right_to_set_it_the_user_is_told_how(driver: Driver) -> None:
    driver(refuses=True)
    wanted = r"Insufficient Permissions.*sudo nvidia-smi --id=GPU-1.* --power-limit=220"
    with pytest.raises(UserError, match=wanted), held_to(GPU, 220):
        pass


def test_a_driver_without_limits_or_none_at_all(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver("[N/A], [N/A], [N/A]")
    with pytest.raises(UserError, match="tells no power limits"), held_to(GPU, 220):
        pass
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="there is no nvidia-smi"), held_to(GPU, 220):
        pass


def test_sensors(driver: Driver) -> None:
    driver("61, 143.20")
    assert sensors(GPU) == (61.0, 143.2)
    driver("61, [N/A]")
    assert sensors(GPU) == (61.0, None)
    assert sensors("GPU-other") == (None, None)


def test_parse_takes_anything() -> None:
    assert parse_answer("") == [None]
    assert parse_answer("1, x, 3") == [1.0, None, 3.0]
