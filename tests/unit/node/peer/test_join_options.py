"""From what an owner writes to the limits that hold: units are checked by what they do."""

import sys
from pathlib import Path

import pytest

from node.links import lent_traffic
from node.links.lent_traffic import LentTraffic
from node.peer import join_options

SECOND_US = 1_000_000


@pytest.fixture
def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The traffic that words on a command line lend, at second 0 of a clock that stands."""
    monkeypatch.setenv("ANABRANCH_MEMORY", "")
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)
    monkeypatch.setattr(lent_traffic, "loop_us", lambda: 0)

    def lent_(*words: str) -> LentTraffic:
        identity = ("--identity", str(tmp_path / "peer.key"))
        monkeypatch.setattr(sys, "argv", ["join", "--model", "models/brook", *identity, *words])
        return join_options.lent_traffic(join_options.parse())

    return lent_


@pytest.mark.parametrize("mbit", [8, 20])
def test_max_up_is_megabits_per_second(lent, mbit: float) -> None:
    """Ten seconds' worth of bytes takes ten seconds, but for the burst."""
    traffic = lent("--max-up", str(mbit))
    traffic.sent(int(10 * mbit * 125_000))
    assert traffic.up.wait_us(0) == pytest.approx(10 * SECOND_US, rel=0.02)
    traffic.received(10**12)
    assert not traffic.down_exceeded


def test_max_down_is_megabits_per_second_of_what_arrives(lent) -> None:
    traffic = lent("--max-down", "16")
    traffic.received(int(10 * 2e6))
    assert traffic.down_exceeded
    assert traffic.down.wait_us(0) == pytest.approx(10 * SECOND_US, rel=0.02)
    traffic.sent(10**12)
    assert traffic.up.wait_us(0) == 0


@pytest.mark.parametrize("gigabytes", [1, 300])
def test_monthly_cap_is_gigabytes_in_both_directions(lent, gigabytes: int) -> None:
    traffic = lent("--monthly-cap", str(gigabytes))
    traffic.sent(int(0.5 * gigabytes * 1e9))
    traffic.received(int(0.49 * gigabytes * 1e9))
    assert traffic.exhausted() is None
    traffic.received(int(0.01 * gigabytes * 1e9))
    assert f"of this month's {gigabytes} GB are used" in (traffic.exhausted() or "")


def test_without_limits_nothing_waits(lent) -> None:
    traffic = lent()
    traffic.sent(10**12)
    traffic.received(10**12)
    assert traffic.up.wait_us(0) == 0
    assert not traffic.down_exceeded
    assert traffic.exhausted() is None
