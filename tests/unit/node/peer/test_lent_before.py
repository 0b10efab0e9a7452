"""A peer comes back with the same port and lends no more than was said."""

import os
import shlex
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from dht.command_line import flag_of
from dht.errors import UserError
from node.peer import join_options, lent_before
from node.peer.gpu_peers import flags_of
from node.peer.lent_before import LENT_BEFORE, LIMITS, keep_lent, port_of
from node.peer.naming import machine_name, settle_name

Parse = Callable[[str], Namespace]


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parses flags of ``join`` with one identity."""
    monkeypatch.setenv("ANABRANCH_MEMORY", str(tmp_path / "network.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def parsed(flags: str) -> Namespace:
        identity = ["--identity", str(tmp_path / "id.key")]
        words = ["join", "--model", "models/brook", *identity, *shlex.split(flags)]
        monkeypatch.setattr(sys, "argv", words)
        return join_options.parse()

    return parsed


SAID = (
    "--cpu --memory 0.012 --max-up 20 --max-down 5 --monthly-cap 300 --schedule 22:00-07:30"
    " --idle-only --pause-on-process steam"
)


def test_what_was_said_holds_until_something_else_is_said(parse: Parse) -> None:
    first = parse(SAID)
    assert first.as_last == ""
    keep_lent(first)
    again = parse("--cpu")
    for name in LIMITS:
        assert getattr(again, name) == getattr(first, name), name
    for words in ("0.012 GiB", "300 GB a month", "22:00-07:30", "steam", "--memory", "--anew"):
        assert words in again.as_last
    keep_lent(parse("--cpu --memory 0.02"))
    third = parse("--cpu")
    assert (third.memory, third.monthly_cap) == (0.02, 300)
    keep_lent(parse("--cpu --anew --max-up 3"))
    assert parse("--cpu").as_last.startswith("As last time: at most 3 Mbit/s up; change with")


def test_a_limit_of_one_kind_of_device_is_none_of_another(parse: Parse) -> None:
    keep_lent(parse("--gpu 0 --max-vram 8 --power-limit 180 --monthly-cap 5"))
    on_cpu = parse("--cpu")
    assert (on_cpu.max_vram, on_cpu.power_limit, on_cpu.monthly_cap) == (None, None, 5)
    assert parse("--gpu 0").power_limit == 180


def test_a_file_of_flags_says_all(parse: Parse, tmp_path: Path) -> None:
    keep_lent(parse(SAID))
    (tmp_path / "join.toml").write_text("cpu = true\nmax-up = 7\n")
    by_file = parse(f"--config {tmp_path}/join.toml")
    assert (by_file.max_up, by_file.memory, by_file.as_last) == (7, None, "")
    keep_lent(by_file)
    assert parse("--cpu").max_up == 20, "what was typed is not forgotten for it"


def test_peers_on_several_gpus_share_what_was_said_once(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_lent(parse("--gpu 0,1 --memory 6 --monthly-cap 300 --schedule 22:00-07:30 --idle-only"))
    again = parse("--gpu 0,1")
    for place in (0, 1):
        flags = flags_of(again, place)
        monkeypatch.setenv(lent_before.BESIDE, "1")
        child = parse(shlex.join(flags).replace(f"--identity={again.identity}", ""))
        monkeypatch.delenv(lent_before.BESIDE)
        assert (child.memory, child.monthly_cap) == (6, 150)
        assert (child.schedule, child.idle_only) == (["22:00-07:30"], True)


def test_every_limit_is_remembered_and_told(parse: Parse) -> None:
    said = {"{:g}": "7", "{}": "22:00-07:30"}
    for name, limit in LIMITS.items():
        value = next((said[hole] for hole in said if hole in limit.words), "")
        flag = f"{flag_of(name)} {value}"
        keep_lent(parse(f"--gpu 0 --anew {flag}"))
        again = parse("--gpu 0")
        assert getattr(again, name) == getattr(parse(f"--gpu 0 --anew {flag}"), name)
        assert flag_of(name) in again.as_last
        assert value in again.as_last


def test_what_another_version_remembers_is_no_trouble(parse: Parse, tmp_path: Path) -> None:
    (tmp_path / "id.lent.json").write_text('{"limits": {"max_celsius": 80, "max_up": null}}')
    assert parse("--cpu").as_last == ""


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", '{"port": 99999}', "[]"),
        *('{"limits": {"memory": -1}}', '{"limits": {"memory": true}}'),
        *('{"limits": {"schedule": [1]}}', '{"limits": {"idle_only": "yes"}}'),
    ],
)
def test_a_damaged_file_is_said_and_lends_nothing(text: str, parse: Parse, tmp_path: Path) -> None:
    (tmp_path / "id.lent.json").write_text(text)
    with pytest.raises(UserError, match=r"id\.lent\.json, which says what was lent last"):
        parse("--cpu")
    anew = parse("--cpu --anew --max-up 3")
    assert anew.memory is None
    keep_lent(anew)
    assert parse("--cpu").max_up == 3


def test_nothing_is_kept_where_nothing_is_to_be_remembered(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_MEMORY", "")
    keep_lent(parse(SAID))
    monkeypatch.setenv("ANABRANCH_MEMORY", "x.json")
    assert parse("--cpu").as_last == ""


def test_the_port_stays_and_peers_of_one_machine_have_one_each(
    parse: Parse, tmp_path: Path
) -> None:
    arguments = parse("--cpu --host 127.0.0.1")
    assert arguments.port is None
    port = port_of(arguments)
    assert (
        LENT_BEFORE.port_default
        <= port.number
        < LENT_BEFORE.port_default + lent_before.LENT_BEFORE.ports_tried
    )
    other = port_of(Namespace(**{**vars(arguments), "identity": tmp_path / "other.key"}))
    assert other.number > port.number, "it starts at the same time"
    arguments.port = other.number
    keep_lent(arguments)
    assert other.claim is not None
    other.claim.close()
    again = port_of(parse("--cpu --host 127.0.0.1"))
    assert (again.number, again.said) == (other.number, "")


def test_a_port_that_is_taken_is_told(parse: Parse) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        arguments = parse("--cpu --host 127.0.0.1")
        arguments.port = taken.getsockname()[1]
        keep_lent(arguments)
        port = port_of(parse("--cpu --host 127.0.0.1"))
    assert port.number not in {0, arguments.port}
    assert f"Port {arguments.port}, which this peer had last time, is in use" in port.said


def test_any_free_port_may_be_asked_for(parse: Parse) -> None:
    assert parse("--cpu --port 0").port == 0
    assert os.environ["ANABRANCH_MEMORY"]


def test_a_peer_is_named_after_its_machine_unless_its_owner_says_otherwise(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: "gaming-pc.home.lan")
    first = parse("--cpu")
    said = settle_name(first)
    assert first.name == "gaming-pc"
    assert said.startswith("Others see this peer as gaming-pc; change with --name")
    keep_lent(first)
    again = parse("--cpu")
    assert (settle_name(again), again.name) == ("", "gaming-pc"), "it is told once"
    keep_lent(parse("--cpu --name="))
    third = parse("--cpu")
    assert (settle_name(third), third.name) == ("", ""), "no name stays no name"
    assert parse("--cpu --name tower").name == "tower"
    assert "--name=" in flags_of(parse("--gpu 0,1"), 1)


@pytest.mark.parametrize(
    ("node", "name"), [("büro-rechner.lan", "büro-rechner"), ("b\udcfcro", "bro")]
)
def test_a_name_of_other_letters_can_be_sent(
    node: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: node)
    assert machine_name() == name


@pytest.mark.parametrize("node", ["localhost", "3f2a9c01d4be", "", "LOCALHOST.localdomain"])
def test_a_machine_without_a_name_gives_none(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: node)
    assert machine_name() == ""


@pytest.mark.parametrize("cache", ["file/below", "file"])
def test_a_cache_that_cannot_be_written_keeps_no_peer_from_its_port(
    cache: str, parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    assert port_of(parse("--cpu --host 127.0.0.1")).number
