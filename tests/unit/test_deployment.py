"""What is ready-made to deploy, as far as it can be checked without running it."""

import configparser
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import client.gateway.__main__ as gateway
import client.health.__main__ as health
from dht.command_line import EXIT_DONE, EXIT_MACHINE, EXIT_USER
from node.peer import join_options
from node.peer.join_file import as_flags

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
PARSERS: dict[str, Callable[[], Any]] = {
    "client.gateway": gateway.parse,
    "client.health": health.parse,
}
VALUES = {"MODEL": "org/name", "PEERS": "/ip4/10.0.0.1/tcp/1/p2p/x", "NAME": "me"}


def words(command: list[str]) -> list[str]:
    return [re.sub(r"\$\{(\w+)[^}]*\}", lambda m: VALUES[m.group(1)], word) for word in command]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_nobody_special_and_its_command_is_ours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["user"].split(":")[0] not in {"0", "root"}
    assert service["cap_drop"] == ["ALL"]
    assert service["healthcheck"]["test"][0] == "CMD"
    dockerfile = ROOT / "docker" / service["build"]["dockerfile"].removeprefix("docker/")
    assert dockerfile.is_file()
    python, dash_m, module, *flags = words(service["command"])
    assert (python, dash_m) == ("python", "-m")
    if module == "node.join":
        read = join_options.join_parser().parse_args(flags)
        assert f"{read.port}:{read.port}/tcp" in service["ports"]
    else:
        monkeypatch.setattr("sys.argv", [module, *flags])
        read = PARSERS[module]()
    assert read.model == "org/name"
    assert read.initial_peers == [VALUES["PEERS"]]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_runs_as_a_user_and_copies_what_exists(name: str) -> None:
    text = (ROOT / "docker" / name).read_text()
    users = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    assert users == ["anabranch"]
    assert text.index("USER anabranch") > text.rindex("RUN ")
    for line in re.findall(r"^COPY (.+)", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


def test_the_unit_drains_with_the_signal_that_join_drains_on() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "systemd/anabranch.service")
    service = unit["Service"]
    assert service["KillSignal"] == "SIGINT"
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(EXIT_USER)
    assert EXIT_MACHINE not in {EXIT_DONE, EXIT_USER}, "a part that keeps failing is started anew"
    assert "-m node.join --config %h/.anabranch/join.toml" in service["ExecStart"]
    assert ".anabranch" in service["ReadWritePaths"]


def test_the_windows_script_is_balanced_and_uses_flags_that_exist() -> None:
    text = (ROOT / "windows/join-wsl2.ps1").read_text()
    bare = re.sub(r"<#.*?#>|#[^\n]*|\"[^\"\n]*\"|'[^'\n]*'", "", text, flags=re.DOTALL)
    for opening, closing in ("{}", "()", "[]"):
        assert bare.count(opening) == bare.count(closing)
    (command,) = re.findall(r"-m node\.join ([^\"]+)\"", text)
    read = join_options.join_parser().parse_args(re.sub(r"\$\w+", "1", command).split())
    assert read.port == 1


def test_the_guides_files_flags_and_links_exist() -> None:
    parser = join_options.join_parser()
    guides = [ROOT / "docs" / f"{name}.md" for name in
              ("lend-a-gpu", "ask", "private-swarm", "public-page", "how-it-works")]  # fmt: skip
    for guide in guides:
        text = guide.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (guide.parent / link).exists(), (guide.name, link)
        if guide.name != "public-page.md":
            assert re.search(r"\*\*[^*]*(visible|can\s+read|see)[^*]*\*\*", text), guide.name
    (toml,) = re.findall(r"```toml\n(.*?)```", guides[0].read_text(), re.DOTALL)
    assert parser.parse_args(as_flags(toml, parser)).idle_only is True
    options = {option for action in parser._actions for option in action.option_strings}
    for flag in re.findall(r"`(--[a-z0-9-]+)", guides[0].read_text()):
        assert flag in options, flag
