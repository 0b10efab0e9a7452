"""What was lost and when it was back, and what SQLite keeps of the time behind the page."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from client.health.history import INCIDENTS_KEPT_MAX, History
from client.health.past import INCIDENTS_SHOWN_MAX, SWARM, Incident, IncidentWatch
from client.health.state import Probe, percentile
from dht.process.json_file import Json

NOW_S = 1_800_000_000.0


def state(at_s: float, *, reasons: tuple[str, ...] = (), **peers: str) -> Json:
    """A state with peers in these states."""
    rows = [
        {"id": name, "name": name, "state": is_, "counts": is_ == "serving"}
        for name, is_ in peers.items()
    ]
    verdict = "not healthy" if reasons else "healthy"
    swarm = {"healthy": not reasons, "verdict": verdict, "reasons": list(reasons)}
    return {"generated_unix_s": NOW_S + at_s, "swarm": swarm, "peers": rows}


def told(changes: list[Incident]) -> list[tuple[str, str, float | None]]:
    return [
        (each.name, each.what, each.until_unix_s and each.until_unix_s - each.since_unix_s)
        for each in changes
    ]


def test_a_peer_that_falls_silent_is_lost_until_it_serves_again() -> None:
    watch = IncidentWatch()
    assert watch.look(state(0, a="serving", b="serving")) == []
    assert told(watch.look(state(10, a="silent", b="serving"))) == [("a", "lost", None)]
    assert watch.look(state(11, a="silent", b="serving")) == []
    assert watch.look(state(12, a="gone", b="serving")) == []
    assert watch.look(state(13, a="unknown", b="serving")) == []
    assert told(watch.look(state(14, a="serving", b="serving"))) == [("a", "lost", 4.0)]
    assert watch.open == {}


def test_who_never_served_or_says_goodbye_is_not_lost() -> None:
    watch = IncidentWatch()
    watch.look(state(0, a="serving", stranger="unknown"))
    assert watch.look(state(1, a="draining", stranger="silent")) == []
    assert watch.look(state(2, a="gone", stranger="silent")) == []


def test_after_a_pause_of_the_machine_nobody_is_lost_before_the_page_asked_again() -> None:
    watch = IncidentWatch()
    watch.look(state(0, a="serving", b="serving"))
    reasons = ("layer 3 is held by nobody",)
    assert watch.look(state(3600, reasons=reasons, a="silent", b="silent")) == []
    assert told(watch.look(state(3610, a="silent", b="serving"))) == [("a", "lost", None)]


def test_a_swarm_that_is_not_healthy_is_an_incident_with_its_reasons() -> None:
    watch = IncidentWatch()
    watch.look(state(0))
    began = watch.look(state(1, reasons=("layer 3 is held by nobody",)))
    assert told(began) == [("the swarm", "not healthy: layer 3 is held by nobody", None)]
    assert watch.look(state(2, reasons=("layers 3-4 are held by nobody",))) == []
    assert [each.key for each in watch.look(state(9))] == [SWARM]


async def test_an_open_incident_ends_although_the_page_was_started_again(tmp_path: Path) -> None:
    history = History(tmp_path / "health.sqlite")
    watch = IncidentWatch()
    watch.look(state(0, a="serving"))
    await history.add_incidents(watch.look(state(1, a="silent")))
    history.close()
    history = History(tmp_path / "health.sqlite")
    watch = IncidentWatch(open=await history.open_incidents())
    await history.add_incidents(watch.look(state(61, a="serving")))
    assert told(list(await history.incidents(NOW_S + 61))) == [("a", "lost", 60.0)]
    assert await history.open_incidents() == {}
    assert await history.incidents(NOW_S + 8 * 86_400) == ()
    history.close()


async def test_peers_that_come_and_go_neither_fill_the_disk_nor_the_list() -> None:
    history = History(None)
    own = Incident(key=SWARM, name="the swarm", what="not healthy", since_unix_s=NOW_S)
    one = replace(own, key="a", name="a", what="lost")
    await history.add_incidents([own])
    await history.add_incidents(
        [replace(one, since_unix_s=NOW_S + 1 + at) for at in range(INCIDENTS_KEPT_MAX - 1)]
    )
    shown = await history.incidents(NOW_S)
    assert len(shown) == INCIDENTS_SHOWN_MAX // 2 + 1
    assert shown[-1] == own
    await history.add_incidents([replace(one, since_unix_s=NOW_S + 9999)])
    assert own not in await history.incidents(NOW_S), "the oldest is forgotten beyond the bound"
    history.close()


async def test_percentiles_of_a_step_are_those_of_its_answered_requests() -> None:
    drawn, history = random.Random(7), History(None)
    first_s = NOW_S // 3600 * 3600
    probes = [
        Probe(
            at_unix_s=first_s + 13 * at,
            reason="" if drawn.random() < 0.8 else "no free peer",
            ttft_s=drawn.random(),
            tokens=8,
        )
        for at in range(200)
    ]
    for probe in probes:
        await history.add(probe)
    for past in await history.past(first_s + 13 * 199):
        assert sum(step["requests"] for step in past.probes) == 200
        for step in past.probes:
            begin_s = step["start_unix_s"]
            own = [p for p in probes if begin_s <= p.at_unix_s < begin_s + past.span.step_s]
            good = [probe.ttft_s for probe in own if probe.ok]
            assert (step["requests"], step["answered"]) == (len(own), len(good))
            assert step["ttft_p50_s"] == percentile(good, 50)
            assert step["ttft_p95_s"] == percentile(good, 95)
    history.close()


async def test_a_full_disk_leaves_the_page_without_a_past_and_no_older_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(tmp_path / "health.sqlite")
    probe = Probe(at_unix_s=NOW_S, reason="")
    await history.add(probe)
    (used,) = history._db.execute("PRAGMA page_count").fetchone()
    history._db.execute(f"PRAGMA max_page_count = {used}")
    incident = Incident(key=SWARM, name="x" * 9999, what="x", since_unix_s=NOW_S)
    await history.add_incidents([incident])
    await history.add_given({"x" * 9999: 1.0}, NOW_S)
    assert "past cannot be kept: database or disk is full" in caplog.text
    assert await history.recent(NOW_S) == (probe,)
    assert await history.incidents(NOW_S) == ()
    history.close()
