"""What a health check is told of a peer: what that knows itself, while it goes on saying so."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from dht.command_line import EXIT_DONE, EXIT_MACHINE
from node import alive
from node.owner import own_health
from node.owner.own_health import HEALTH, HealthKeeper, health_file, why_unwell
from testing.clock import run_virtual


def alive_code(identity: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["alive", f"--identity={identity}"])
    return alive.run()


@pytest.mark.virtual(limit_s=60)
async def test_it_follows_what_the_peer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = tmp_path / "identity.key"
    path = health_file(identity)
    troubles = [""]

    assert alive_code(identity, monkeypatch) == EXIT_MACHINE, "there is no peer"
    keeping = asyncio.create_task(HealthKeeper(path, lambda: troubles[0]).run())
    await asyncio.sleep(HEALTH.write_s / 2)
    assert alive_code(identity, monkeypatch) == EXIT_DONE
    troubles[0] = "others do not see it"
    await asyncio.sleep(HEALTH.write_s)
    assert why_unwell(path, time.monotonic()) == "others do not see it"
    assert alive_code(identity, monkeypatch) == EXIT_MACHINE
    troubles[0] = ""
    await asyncio.sleep(HEALTH.write_s)
    assert alive_code(identity, monkeypatch) == EXIT_DONE
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert not path.exists()


def test_a_peer_that_stands_still_is_not_well(tmp_path: Path) -> None:
    path = health_file(tmp_path / "identity.key")
    HealthKeeper(path)._write()
    now_s = time.monotonic()
    assert not why_unwell(path, now_s)
    assert "said nothing" in why_unwell(path, now_s + HEALTH.stale_s + 1)
    assert "said nothing" in why_unwell(path, now_s - 60), "the machine has started since"
    path.write_bytes(b"no JSON")
    assert why_unwell(path, now_s)


def test_all_peers_of_several_gpus_must_be_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = tmp_path / "identity.key"
    HealthKeeper(health_file(identity))._write()
    HealthKeeper(health_file(tmp_path / "identity-gpu1.key"), lambda: "deaf")._write()
    assert alive_code(identity, monkeypatch) == EXIT_MACHINE


def test_a_second_process_with_one_identity_leaves_the_file_to_the_peer_that_runs(
    tmp_path: Path,
) -> None:
    path = health_file(tmp_path / "identity.key")
    HealthKeeper(path, lambda: "cut off")._write()

    async def scenario() -> None:
        second = asyncio.create_task(HealthKeeper(path).run())
        await asyncio.sleep(HEALTH.write_s)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)

    run_virtual(scenario(), limit_s=60)
    assert why_unwell(path, time.monotonic()) == "cut off"


def test_a_full_disk_is_no_peer_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the peer says goes in the place of what it said before, longer or shorter."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    troubles = ["", "others do not see it", ""]
    keeper = HealthKeeper(health_file(tmp_path / "identity.key"), lambda: troubles[0])
    keeper._write()
    monkeypatch.setattr(own_health, "write_whole", full)
    while troubles:
        before_s = time.monotonic()
        keeper._write()
        now_s = before_s + HEALTH.stale_s
        assert why_unwell(keeper.path, now_s) == troubles.pop(0)


def test_who_can_never_write_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = health_file(tmp_path / "identity.key")
    path.mkdir()  # where the file would be
    HealthKeeper(path)._write()
    assert "`anabranch alive` cannot tell that this peer runs" in caplog.text


def test_before_there_is_an_identity_nothing_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    HealthKeeper(health_file(tmp_path / "new" / "identity.key"))._write()
    assert not caplog.text
