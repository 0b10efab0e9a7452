"""What is ready-made to deploy, as far as it can be checked without running it."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import client.gateway.__main__ as gateway
import client.health.__main__ as health
from dht.command_line import EXIT_DONE, EXIT_MACHINE, EXIT_USER
from locks import client as client_lock
from node.peer import join_options
from node.peer.join_file import as_flags

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
UNIT = (ROOT / "systemd/anabranch.service").read_text()
PARSERS: dict[str, Callable[[], Any]] = {
    "node.join": join_options.parse,
    "client.gateway": gateway.parse,
    "client.health": health.parse,
}
ADDRESSES = ["/ip4/10.0.0.1/tcp/1/p2p/x", "/ip4/10.0.0.2/tcp/1/p2p/y"]
VALUES = {"MODEL": "org/name", "PEERS": ",".join(ADDRESSES), "NAME": "me"}


def interpolated(text: str, values: dict[str, str]) -> str:
    """``text`` as compose fills it in: ``${A}``, ``${A:-else}``, ``${A:+then}``."""
    pattern = r"\$\{(\w+)(?::([-+])((?:[^${}]|\$\{\w+\})*))?\}"

    def filled(found: re.Match[str]) -> str:
        value, kind, other = values.get(found[1], ""), found[2], found[3]
        if kind == "+":
            return interpolated(other, values) if value else ""
        return value or (other if kind == "-" else "")

    return re.sub(pattern, filled, text)


def words(command: str, values: dict[str, str]) -> list[str]:
    return shlex.split(interpolated(command, values))


def parsed(name: str, values: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """What the service's command reads from its command line and environment."""
    service = COMPOSE["services"][name]
    for variable, text in service["environment"].items():
        if text is not None:  # else it is as it is where compose runs
            monkeypatch.setenv(variable, interpolated(text, values))
    python, dash_m, module, *flags = words(service["command"], values)
    assert (python, dash_m) == ("python", "-m")
    if module == "node.join":
        (mounted,) = [each for each in service["volumes"] if each.endswith(":/etc/join.toml:ro")]
        file = interpolated(mounted, values).removesuffix(":/etc/join.toml:ro")
        assert flags[0] == "--config=/etc/join.toml"
        flags[0] = f"--config={file}"
    monkeypatch.setattr("sys.argv", [module, *flags])
    return PARSERS[module]()


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_nobody_special_and_its_command_is_ours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = COMPOSE["services"][name]
    assert service["restart"] == "unless-stopped", "also after the machine was restarted"
    assert service["read_only"] is True
    assert service["user"].split(":")[0] not in {"0", "root"}
    assert service["cap_drop"] == ["ALL"]
    assert service["healthcheck"]["test"][0] == "CMD"
    passed_on = {name for name, text in service["environment"].items() if text is None}
    assert passed_on == {"HF_ENDPOINT"}, "an empty one is none"
    assert re.fullmatch(r"\$\{MEM_LIMIT:-\d+g\}", service["mem_limit"])
    assert service["memswap_limit"] == service["mem_limit"]
    assert 0 < service["pids_limit"] <= 4096
    assert service["ulimits"]["nofile"] == {"soft": 65536, "hard": 65536}
    dockerfile = ROOT / "docker" / service["build"]["dockerfile"].removeprefix("docker/")
    assert dockerfile.is_file()
    read = parsed(name, VALUES, monkeypatch)
    if name.startswith("peer"):
        assert f"{read.port}:{read.port}/tcp" in service["ports"]
    assert read.model == "org/name"
    assert read.initial_peers == ADDRESSES


@pytest.mark.parametrize("name", ["peer-cpu", "peer-cuda"])
def test_a_peer_founds_a_swarm_and_takes_a_file_of_flags(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    founder = parsed(name, {"MODEL": "org/name"}, monkeypatch)
    assert (founder.model, founder.initial_peers) == ("org/name", [])
    file = tmp_path / "join.toml"
    file.write_text('model = "org/other"\nname = "box"\nidle-only = true\n')
    read = parsed(name, {"JOIN_TOML": str(file), "PEERS": ADDRESSES[0]}, monkeypatch)
    assert (read.model, read.name, read.idle_only) == ("org/other", "box", True)
    assert read.initial_peers == [ADDRESSES[0]]


def test_secrets_come_from_the_environment_and_stand_on_no_command_line() -> None:
    gateway = COMPOSE["services"]["gateway"]
    assert gateway["environment"]["ANABRANCH_API_KEYS"] == "${ANABRANCH_API_KEYS:-}"
    for service in COMPOSE["services"].values():
        assert ("HF_TOKEN", "${HF_TOKEN:-}") in service["environment"].items()
        assert not re.search("KEY|TOKEN", service["command"])
    (path,) = re.findall(r"^EnvironmentFile=-%h/(.+)$", UNIT, re.MULTILINE)
    assert path == ".anabranch/environment"


def pins() -> list[tuple[Requirement, int]]:
    """Each line of the lock and its number of hashes."""
    found = []
    for name in ("torch-cpu", "product"):
        text = (ROOT / f"locks/{name}.txt").read_text()
        assert not re.search(r"://|--index|--find-links|--extra|^[./]| @ ", text, re.MULTILINE)
        text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
        for line in text.splitlines():
            pin, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
            assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in hashes), pin
            found.append((Requirement(pin), len(hashes)))
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_lock_has_a_hash_for_all_that_is_required(python: str, machine: str) -> None:
    here = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.7",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
    }
    pinned = {}
    for pin, hashes in pins():
        if pin.marker is None or pin.marker.evaluate(here):
            assert canonicalize_name(pin.name) not in pinned, f"{pin.name} is there twice"
            (version,) = pin.specifier
            assert version.operator == "=="
            assert hashes
            pinned[canonicalize_name(pin.name)] = version.version
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = read["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["quantize"],
        *read["build-system"]["requires"],
    ]
    for each in map(Requirement, wanted):
        if each.marker is None or each.marker.evaluate(here):
            name = canonicalize_name(each.name)
            assert name in pinned, f"{each} is not in the lock: `make lock`"
            assert each.specifier.contains(pinned[name]), f"{each}: `make lock`"
    assert (ROOT / "locks/build.txt").read_text().split("\n", 1)[1] in (
        ROOT / "locks/product.txt"
    ).read_text(), "what builds is what is installed"


def test_a_clients_lock_is_a_part_of_the_products() -> None:
    def pinned(file: str) -> dict[str, list[str]]:
        """Names and versions with their hashes."""
        found = re.split(r"^(?=[^\s#])", (ROOT / file).read_text(), flags=re.MULTILINE)[1:]
        return {re.split(r"\s", each)[0]: re.findall(r"sha256:\w+", each) for each in found}

    part = pinned("locks/client.txt")
    assert part.items() <= pinned("locks/product.txt").items(), "`make lock`"
    names = {each.partition("==")[0] for each in part}
    assert names >= set(client_lock.NEEDED)
    assert not names & client_lock.WITHOUT


def test_tests_run_with_the_versions_that_are_installed_for_good() -> None:
    lines = (ROOT / "locks/dev.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if not line.startswith("#")]
    versions: dict[str, set[str]] = {}
    for each in tested:
        versions.setdefault(canonicalize_name(each.name), set()).add(str(each.specifier))
    for pin, _ in pins():
        name = canonicalize_name(pin.name)
        if name in versions:  # what no test needs is not there
            assert str(pin.specifier).split("+")[0] in versions[name], f"{pin}: `make lock`"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for each in map(Requirement, (*project["dependencies"], *extras["dev"], *extras["light"])):
        found = versions[canonicalize_name(each.name)]
        assert any(each.specifier.contains(v.removeprefix("==")) for v in found), each


def test_no_version_is_allowed_whose_sandbox_has_known_ways_out() -> None:
    """`pip install` keeps what is there where it is allowed, as on a rented machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [jinja] = [each for each in map(Requirement, project["dependencies"]) if each.name == "jinja2"]
    assert not jinja.specifier.contains("3.1.5")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_installs_by_hashes_upon_a_base_that_can_be_named(name: str) -> None:
    text = (ROOT / "docker" / name).read_text()
    assert re.findall(r"^(?:ARG BASE|FROM .+)", text, re.MULTILINE) == ["ARG BASE", "FROM ${BASE}"]
    installs = [line.strip() for line in re.findall(r"pip install (.+)", text)]
    by_index = '"torch>=2.6,<2.14" --index-url "${TORCH_INDEX}"'
    for install in installs:
        if name == "Dockerfile.cuda" and install == by_index:
            continue  # said to be so
        if install == "--no-deps --no-build-isolation .":
            continue  # this project
        assert install.startswith("--require-hashes --no-deps "), install
        (file,) = re.findall(r"-r (locks/\S+)", install)
        assert (ROOT / file).is_file()
    assert any("locks/product.txt" in install for install in installs)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_runs_as_a_user_and_copies_what_exists(name: str) -> None:
    text = (ROOT / "docker" / name).read_text()
    users = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    assert users == ["anabranch"]
    assert text.index("USER anabranch") > text.rindex("RUN ")
    for line in re.findall(r"^COPY (.+)", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


def test_the_unit_bounds_what_a_peer_takes_and_leaves_it_its_gpu() -> None:
    for line in ("MemoryMax=80%", "TasksMax=1024", "LimitNOFILE=65536", "NoNewPrivileges=true"):
        assert f"\n{line}\n" in UNIT
    breaks = "PrivateDevices|DevicePolicy|DeviceAllow|ProtectClock|MemoryDenyWriteExecute"
    assert not re.search(f"^({breaks}|ProtectKernelTunables)=", UNIT, re.MULTILINE)


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
    assert service["ReadWritePaths"].split() == [
        *("%h/.anabranch", "-%h/.cache", "-%h/.triton"),
        "-%h/.config/anabranch",
    ]


def test_the_units_paths_are_made_by_it_or_by_its_guide_or_may_be_missing() -> None:
    guide = UNIT.partition("[Unit]")[0]
    for path in re.findall(r"^ReadWritePaths=(.+)$", UNIT, re.MULTILINE)[0].split():
        assert path.startswith("-") or path.replace("%h", "~") in guide
    made = re.findall(r"^CacheDirectory=(.+)$", UNIT, re.MULTILINE)[0].split()
    for kept in re.findall(r"^Environment=\w+=%C/(\S+)$", UNIT, re.MULTILINE):
        assert kept in made, "a cache that cannot be written is one WARN, and slow"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_itself_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    home = tmp_path / "anabranch" / ".venv" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)
    unit = tmp_path / "anabranch.service"
    unit.write_text(UNIT.replace("%h", str(tmp_path)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "anabranch.service" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


WSL = re.findall(r'-- bash -c "([^"]+)"', (ROOT / "windows/join-wsl2.ps1").read_text())
"""What the script for Windows runs in a shell inside WSL2."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("missing", ["", "git", "make", "gcc", "python3"])
def test_what_one_tool_is_missing_is_installed(missing: str, tmp_path: Path) -> None:
    for name in {"git", "make", "gcc", "python3"} - {missing}:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "sudo").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "sudo").chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", WSL[0]], env={"PATH": str(tmp_path)}, check=False)
    assert done.returncode == 0
    asked = tmp_path / "asked"
    assert asked.exists() == bool(missing)
    if missing:
        assert missing in asked.read_text()


@pytest.mark.parametrize("command", WSL)
def test_the_shells_that_the_script_runs_are_sound(command: str) -> None:
    bash, linter = shutil.which("bash"), shutil.which("shellcheck")
    if bash is None:
        pytest.skip("bash is not installed")
    assert subprocess.run([bash, "-n", "-c", command], check=False).returncode == 0
    assert not re.search(r"command -v \S+ [^>&|;}\s]", command), "one of several is enough for bash"
    plain = re.sub(r"\$[A-Z]\w+", "value", command)  # of PowerShell, checked there
    if linter is not None:
        subprocess.run([linter, "-s", "bash", "-"], input=plain.encode(), check=True)


def test_the_windows_script_stops_where_a_step_fails() -> None:
    text = (ROOT / "windows/join-wsl2.ps1").read_text()
    steps = re.findall(r"^wsl\.exe .*\n(.*)$", text, re.MULTILINE)
    assert len(steps) >= len(WSL)
    assert all("$LASTEXITCODE" in after for after in steps)


POWERSHELL = ("windows/join-wsl2.ps1", "install.ps1")


@pytest.mark.parametrize("name", POWERSHELL)
def test_the_windows_scripts_are_balanced_and_of_ascii(name: str) -> None:
    text = (ROOT / name).read_text()
    bare = re.sub(r"<#.*?#>|#[^\n]*|\"[^\"\n]*\"|'[^'\n]*'", "", text, flags=re.DOTALL)
    for opening, closing in ("{}", "()", "[]"):
        assert bare.count(opening) == bare.count(closing)
    assert text.isascii(), "Windows PowerShell 5.1 reads other characters as its own code page"


@pytest.mark.skipif(shutil.which("pwsh") is None, reason="no PowerShell (pwsh) is installed")
@pytest.mark.parametrize("name", POWERSHELL)
def test_powershell_parses_the_windows_scripts(name: str) -> None:
    read = f"[scriptblock]::Create((Get-Content -Raw '{ROOT / name}')) | Out-Null"
    subprocess.run(["pwsh", "-NoProfile", "-Command", read], check=True)


def test_install_ps1_stops_where_a_step_fails() -> None:
    text = (ROOT / "install.ps1").read_text()
    steps = re.findall(r"^& .*\n(.*)$", text, re.MULTILINE)
    assert len(steps) == 4
    assert all("$LASTEXITCODE" in after for after in steps)


def test_the_windows_script_uses_flags_that_exist() -> None:
    text = (ROOT / "windows/join-wsl2.ps1").read_text()
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


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_linter_finds_no_fault_in_our_own_shell_scripts() -> None:
    scripts = [ROOT / ".ci" / "run", ROOT / "install.sh", *ROOT.glob("docker/*.sh")]
    done = subprocess.run(["shellcheck", *map(str, scripts)], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()
