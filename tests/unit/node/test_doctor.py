"""What ``doctor`` says of a machine: a line for each thing, and what to do where it is not well."""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from huggingface_hub import constants

from dht.errors import UserError
from dht.messages.types import DeviceSpec
from dht.networks.remembered import VARIABLE
from node import doctor
from node.device import hardware
from node.device.hardware import Machine
from node.doctor import Finding, Level, clock, hub, package, port_free
from node.peer import join_options
from node.peer.join_options import DEFAULT_IDENTITY

ROOT = Path(__file__).parents[3]
DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
NOW_S = 1_700_000_000.0


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "node.doctor", *words],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("off_s", "level"),
    [
        (0.4, Level.OK),
        (-4.9, Level.OK),
        (6, Level.WARNING),
        (-29, Level.WARNING),
        (31, Level.PROBLEM),
    ],
)
def test_a_clock_that_is_off(off_s: float, level: Level) -> None:
    found = clock(NOW_S, NOW_S + off_s)
    assert found.level is level
    assert ("ahead of" if off_s > 0 else "behind") in found.text
    assert ("NTP" in found.text) == (level is not Level.OK)


@pytest.mark.parametrize(("count", "lines"), [(0, 1), (1, 1), (3, 3)])
def test_every_gpu_has_a_line(count: int, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lends two of different size looks at both first; of one that does not work, its line
    says so."""

    def machine_of(index: int | None, memory_gib: float | None) -> Machine:
        if index == 0 and count != 1:
            raise UserError("GPU 0 does not compute")
        device = DeviceSpec(kind="cuda", name=f"Card {index}", memory_bytes=1 << 34)
        size = (index or 0) << 32
        return Machine(device=device, torch_device="", free_bytes=size, lend_bytes=size)

    monkeypatch.setattr(join_options, "has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "gpu_count", lambda: count)
    monkeypatch.setattr(hardware, "machine_of", machine_of)
    *gpus, cpu = doctor.devices()
    assert len(gpus) == lines
    assert "Card None" in cpu.text
    problems = [found.text for found in gpus if found.level is Level.PROBLEM]
    assert problems == ["GPU 0 does not compute"] * (count != 1)
    if count > 1:
        assert gpus[2].text.startswith("GPU 2, Card 2: 8.0 GiB free")


async def test_a_mirror_that_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "hf-mirror.com")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "HF_ENDPOINT is 'hf-mirror.com'" in str(await doctor.hub_says())


def test_the_hub() -> None:
    assert hub(NOW_S) == Finding(level=Level.OK, text="the hub answers")
    assert hub(None).level is Level.OK
    unreachable = hub("https://hub.invalid (no such host)")
    assert unreachable.level is Level.WARNING
    assert "https://hub.invalid" in unreachable.text
    assert clock("https://hub.invalid", NOW_S).level is Level.OK


def test_one_transport_is_enough() -> None:
    def only(*names: str) -> object:
        def version_of(name: str) -> str:
            if name not in names:
                raise PackageNotFoundError(name)
            return "1.0"

        return version_of

    for there, missing in (("hivemind", "libp2p"), ("libp2p", "hivemind")):
        assert package(there, only(there)) == Finding(level=Level.OK, text=f"{there} 1.0")
        assert package(missing, only(there)).level is Level.OK
        assert package(missing, only()).level is Level.PROBLEM
    assert package("torch", only()).level is Level.PROBLEM


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = port_free("127.0.0.1", port)
        assert found.level is Level.PROBLEM
        assert str(port) in found.text
        assert "--port" in found.text
    assert port_free("127.0.0.1", 0).level is Level.OK


def test_a_machine_that_is_well() -> None:
    done = ran("--host", "127.0.0.1")
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        assert line.split()[0] in set(Level)
    for word in ("Python 3", "torch", "free", "TCP port", "hub", "clock", "no network is known"):
        assert word in done.stdout


def test_a_network_that_does_not_answer_is_a_problem() -> None:
    done = ran("--host", "127.0.0.1", "--initial-peers", DEAD)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(f"problem  nobody answers at {DEAD}")


def test_mistakes() -> None:
    done = ran("--port", "99999")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--port" in done.stderr


def test_the_port_is_the_one_that_join_would_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def asked(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["doctor", "--host", "127.0.0.1", *words])
        port: int = doctor.parse().port
        return port

    assert asked() == 0, "where nothing is remembered it takes any"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "network.json"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    lent = tmp_path / DEFAULT_IDENTITY.expanduser().relative_to(tmp_path)
    lent.parent.mkdir()
    lent.with_suffix(".lent.json").write_text(f'{{"port": {number}}}')
    assert asked() == number
    assert asked("--port", "31400") == 31400


def test_what_others_are_asked_is_shown_while_they_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    asked: list[str] = []

    @contextmanager
    def saying(text: str) -> Iterator[None]:
        shown.append(text)
        yield
        shown.pop()

    async def hub_says() -> None:
        asked.extend(shown)

    async def network(*_: object, **__: object) -> Finding:
        asked.extend(shown)
        return Finding(level=Level.OK, text="it answers")

    for name, other in (("saying", saying), ("hub_says", hub_says), ("network", network)):
        monkeypatch.setattr(doctor, name, other)
    arguments = argparse.Namespace(host="127.0.0.1", port=0, network="home")
    assert asyncio.run(doctor.main(arguments)) == 0
    assert asked == ["asking the hub", "asking network home whether it reaches this machine"]
