"""When a peer steps aside for its owner, and when it comes back."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.owner import machine_watch
from node.owner.idle_policy import (
    ComeBack,
    OwnerUse,
    Seen,
    StepAside,
    UseConfig,
    Window,
    names_of,
    why_aside,
    window_of,
)
from node.owner.machine_watch import MachineWatch, gpu_programs, unseen

NOON = 12 * 60


def test_a_program_by_name_counts_at_once_and_for_a_minute_after() -> None:
    use = OwnerUse(config=UseConfig(processes=names_of(["Game.exe"])))
    game = Seen(minute=NOON, processes=frozenset({"game", "bash"}))
    calm = Seen(minute=NOON, processes=frozenset({"bash"}))
    assert use.step(calm, 0.0) is None
    assert use.step(game, 2.0) == StepAside(reason="game runs")
    assert use.step(game, 4.0) is None, "told once"
    assert use.step(calm, 6.0) is None
    assert use.step(calm, 65.0) is None
    assert use.step(game, 65.5) is None, "the minute begins again"
    assert use.step(calm, 66.0) is None
    assert use.step(calm, 126.0) == ComeBack()


def test_a_short_burst_of_work_is_no_owner() -> None:
    use = OwnerUse(config=UseConfig(idle_only=True))
    busy, calm = Seen(minute=0, others_share=0.9), Seen(minute=0, others_share=0.1)
    assert use.step(busy, 0.0) is None
    assert use.step(busy, 4.0) is None
    assert use.step(calm, 5.0) is None
    assert use.step(busy, 6.0) is None
    assert use.step(busy, 12.0) == StepAside(reason="other programs use 90% of the CPU")


@pytest.mark.parametrize(
    ("seen", "aside"),
    [
        (Seen(minute=0, input_ago_s=5.0), True),
        (Seen(minute=0, input_ago_s=500.0), False),
        (Seen(minute=0, others_on_gpu=True), True),
        (Seen(minute=0), False),
    ],
)
def test_what_idle_only_looks_at(seen: Seen, aside: bool) -> None:
    assert (why_aside(UseConfig(idle_only=True), seen) is not None) is aside
    assert why_aside(UseConfig(), seen) is None


@pytest.mark.parametrize(
    ("plugged", "aside"), [(False, True), (True, False), (None, False), ("none", False)]
)
def test_a_laptop_on_its_battery_lends_nothing(
    plugged: bool | str | None, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = None if plugged == "none" else SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: told, raising=False)
    config = UseConfig(mains_only=True)
    seen = MachineWatch(config, gpu=None).look()
    assert (why_aside(config, seen) is not None) is aside
    assert why_aside(UseConfig(idle_only=True), Seen(minute=0, on_battery=True)) is None
    assert config.watches


def test_a_schedule_may_go_past_midnight() -> None:
    config = UseConfig(windows=(window_of("22:00-07:30"), window_of("12:00-13:00")))
    served = [m for m in range(24 * 60) if why_aside(config, Seen(minute=m)) is None]
    assert served == [*range(7 * 60 + 30), *range(NOON, NOON + 60), *range(22 * 60, 24 * 60)]


@pytest.mark.parametrize("text", ["", "8-9", "25:00-26:00", "24:00-08:00", "08:00-08:00", "a"])
def test_what_is_no_time_of_day_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        window_of(text)


@given(start=st.integers(0, 1439), end=st.integers(0, 1440), minute=st.integers(0, 1439))
def test_a_window_and_the_rest_of_the_day_are_the_day(start: int, end: int, minute: int) -> None:
    if start != end % 1440:
        inside = Window(start=start, end=end).holds(minute)
        assert inside != Window(start=end % 1440, end=start or 1440).holds(minute)


@given(looks=st.lists(st.tuples(st.floats(0.1, 50.0), st.booleans()), max_size=40))
def test_asides_and_returns_take_turns(looks: list[tuple[float, bool]]) -> None:
    use = OwnerUse(config=UseConfig(idle_only=True))
    now_s, told = 0.0, []
    for after_s, busy in looks:
        now_s += after_s
        said = use.step(Seen(minute=0, others_share=0.9 if busy else 0.0), now_s)
        told += [] if said is None else [type(said)]
    assert told == [StepAside, ComeBack] * (len(told) // 2) + [StepAside] * (len(told) % 2)


def test_this_machine_can_be_looked_at() -> None:
    mine = psutil.Process(os.getpid()).name()
    watch = MachineWatch(UseConfig(idle_only=True, processes=names_of([mine])), gpu=None)
    watch.look()
    seen = watch.look()
    assert 0.0 <= seen.others_share <= 1.0
    assert names_of([mine]) <= seen.processes
    assert not seen.others_on_gpu


def test_programs_on_a_gpu_are_read_from_the_drivers_list() -> None:
    assert gpu_programs("123\n 77\n[N/A]\n\n") == {123, 77}


def command(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a command of this name in front of all others."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(sys.platform == "win32", reason="its commands are shell scripts")
@pytest.mark.parametrize(
    ("gpu", "used"), [("GPU-lent", False), ("GPU-other", True), ("", True), (None, False)]
)
def test_only_programs_on_the_lent_gpu_count(
    gpu: str | None, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody computes on one GPU of this machine, and lends the other."""
    script = 'case "$*" in *--id=GPU-lent*) ;; *) echo 1 ;; esac'
    command(tmp_path, monkeypatch, "nvidia-smi", script)
    assert MachineWatch(UseConfig(idle_only=True), gpu=gpu).look().others_on_gpu is used


@pytest.mark.skipif(sys.platform == "win32", reason="its commands are shell scripts")
def test_within_windows_its_programs_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = UseConfig(processes=names_of(["Some Game.exe"]))
    command(tmp_path, monkeypatch, "tasklist.exe", 'printf \'"Some Game.exe","7"\\r\\n\'')
    assert not config.processes <= MachineWatch(config, gpu=None).look().processes
    monkeypatch.setattr(machine_watch, "is_wsl", lambda: True)
    assert config.processes <= MachineWatch(config, gpu=None).look().processes
    assert unseen(config) == ""
    monkeypatch.setattr(machine_watch, "TASKLIST", (f"{tmp_path}/none.exe",))
    assert "--pause-on-process sees programs of WSL alone" in unseen(config)


@pytest.mark.skipif(sys.platform == "win32", reason="Wine runs elsewhere")
def test_a_game_that_wine_started_is_known_by_its_file(tmp_path: Path) -> None:
    """Of its name the system keeps fifteen bytes, and none of them may be its own."""
    started = [r"Z:\Games\A Long Name of a Game.exe", "60"]
    with subprocess.Popen(started, executable=shutil.which("sleep")) as game:
        try:
            config = UseConfig(processes=names_of(["a long name of a game.exe"]))
            assert config.processes <= MachineWatch(config, gpu=None).look().processes
        finally:
            game.kill()


@pytest.mark.parametrize("desktop", [True, False])
def test_the_owner_hears_what_is_not_seen(desktop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_watch, "has_desktop", lambda: desktop)
    told = unseen(UseConfig(idle_only=True))
    assert ("--pause-on-process" in told) is desktop
    assert unseen(UseConfig(windows=(window_of("22:00-07:30"),))) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such terminals")
def test_a_clock_that_was_ahead_leaves_nobody_typing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody typed while the clock was hours ahead; it was set since, and others typed before."""
    monkeypatch.setattr(machine_watch, "TERMINALS", (f"{tmp_path}/tty[0-9]*",))
    now_s = time.time()
    assert machine_watch._input_ago_s(UseConfig().ahead_s) is None
    for number, ago_s in enumerate((300, 900, -8 * 3600)):
        (tmp_path / f"tty{number}").touch()
        os.utime(tmp_path / f"tty{number}", (now_s - ago_s, now_s))
    assert machine_watch._input_ago_s(UseConfig().ahead_s) == pytest.approx(300, abs=60)
    (tmp_path / "tty2").write_text("")
    os.utime(tmp_path / "tty2")
    assert machine_watch._input_ago_s(UseConfig().ahead_s) == pytest.approx(0, abs=60)
