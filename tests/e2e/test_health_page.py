"""The health page before a swarm of real peers."""

import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dht.command_line import EXIT_SWARM
from testing.forked import forked
from testing.local_swarm import LocalSwarm, Process, ServedProcess, end_group
from tests.e2e.conftest import start_swarm

pytestmark = pytest.mark.e2e
WAIT_S = 90.0


@contextmanager
def health_page(swarm: LocalSwarm, *more: str) -> Iterator[tuple[str, Process]]:
    """A page for the swarm: its URL and its process."""
    words = ("client.health", "--port", "0", *more, "--initial-peers", *swarm.addresses)
    page = ServedProcess(*words, start=forked)
    try:
        yield page.url, page.process
    finally:
        end_group(page.process.pid)
        page.process.wait()


def read(url: str) -> str:
    with urllib.request.urlopen(url) as response:  # noqa: S310
        return str(response.read().decode())


def wait_for(url: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first state of which that is so; the last one seen where none is in time."""
    until_s = time.monotonic() + WAIT_S
    while True:
        state: dict[str, Any] = json.loads(read(url + "api/v1/state"))
        if is_so(state) or time.monotonic() > until_s:
            return state
        time.sleep(0.1)


def children_of(pid: int) -> list[psutil.Process]:
    """The living children of a process; those that end meanwhile are left out."""
    alive = psutil.process_iter(["ppid", "name", "status"])
    return [
        each
        for each in alive
        if each.info["ppid"] == pid and each.info["status"] != psutil.STATUS_ZOMBIE
    ]


def served(state: dict[str, Any]) -> float:
    return sum(hour["tokens"] for hour in state["served"]["hours"])


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalSwarm]:
    started = start_swarm((0.62, 0.5))
    yield started
    started.stop()


def test_the_page_measures_a_real_swarm_itself(pair: LocalSwarm, tmp_path: Path) -> None:
    more = ("--every", "1", "--data", str(tmp_path / "h.sqlite"))
    with health_page(pair, *more) as (url, process):
        state = wait_for(
            url,
            lambda seen: seen["swarm"]["healthy"] and served(seen) >= 8 and bool(seen["models"]),
        )
        assert state["swarm"]["healthy"], state["swarm"]
        assert served(state) >= 8, "the peers count the page's own requests"
        assert state["probes"]["ttft_p50_s"] > 0
        assert [each["watched"] for each in state["models"]] == [True]
        assert [peer["flags"] for peer in state["peers"]] == [[], []]
        assert all(peer["rtt_s"] > 0 for peer in state["peers"])
        page = read(url)
        assert "very layer is on" in page
        assert "127.0.0.1" not in page + json.dumps(state)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_a_page_whose_daemon_is_killed_ends_for_a_service_to_start_it_again(
    pair: LocalSwarm,
) -> None:
    with health_page(pair) as (_, process):
        (daemon,) = (each for each in children_of(process.pid) if each.info["name"] == "p2pd")
        daemon.kill()
        assert process.wait(WAIT_S) == EXIT_SWARM


def test_a_killed_peer_is_said_not_to_answer_long_before_its_record_is_gone(
    pair: LocalSwarm,
) -> None:
    """Last in this file: it takes a peer away."""
    with health_page(pair) as (url, _):
        state = wait_for(url, lambda seen: bool(seen["swarm"]["healthy"]))
        assert {peer["state"] for peer in state["peers"]} == {"serving"}, state["swarm"]
        killed = pair.peers[1]
        peer_id = killed.peer_id
        killed.kill()
        killed_s = time.monotonic()

        def of_killed(seen: dict[str, Any]) -> dict[str, Any]:
            return next(dict(each) for each in seen["peers"] if each["id"] == peer_id)

        state = wait_for(url, lambda seen: of_killed(seen)["state"] != "serving")
        print(f"silent on the page {time.monotonic() - killed_s:.1f} s after SIGKILL")
        shown = of_killed(state)
        # Its record is still there: had it expired, the state would be another one.
        assert (shown["state"], shown["flags"], shown["counts"]) == ("silent", ["ghost"], False)
        assert not state["swarm"]["healthy"]
        assert f"not answering: {shown['name']}" in state["swarm"]["sentence"]
        lost = [each for each in state["incidents"] if each["name"] == shown["name"]]
        assert [(each["what"], each["until_unix_s"]) for each in lost] == [("lost", None)]
        page = read(url)
        assert "<h1>Not healthy</h1>" in page
        assert page.count('data-label="State">not answering<') == 1
