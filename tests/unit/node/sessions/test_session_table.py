"""What a stage keeps of sessions, and what it lets go."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.rules import PromptRate, StageLoad
from dht.budget import Parties
from dht.messages.session import SESSION_BOUNDS, Priority
from dht.messages.types import RouteStage
from dht.transport.frame_sender import FrameSender
from node.sessions import session_table
from node.sessions.session import StageSession, StageState
from node.sessions.session_table import KNOWN_S, Live, SessionTable
from tests.unit.node.sessions.test_session import make_open


class Table:
    """A table with sessions that run."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.table = SessionTable(now_s)

    def add(self, name: str, client: str, priority: Priority = Priority.NORMAL) -> Live:
        open_ = replace(make_open(), session=name, client=client, priority=priority)
        urgent = priority is Priority.HIGH
        session = StageSession(open=open_, state=StageState.ACTIVE, urgent=urgent)
        live = Live(session=session, upstream=cast(FrameSender, None), touched_s=0.0)
        self.table.add(live)
        return live


def test_a_finished_answer_holds_nothing_and_counts_against_nobody() -> None:
    side = Table()
    one, other = side.add("one", "a"), side.add("other", "a", Priority.HIGH)
    load = StageLoad(sessions=2, seen=2, own=2, own_urgent=1, urgent=1, untried=2)
    assert side.table.load("a", now_s=0.0) == load
    seen_by_another = replace(load, seen=1, own=0, own_urgent=0, untried=1)
    assert side.table.load("b", now_s=0.0) == seen_by_another
    assert side.table.load("a", now_s=ADMISSION.untried_s) == replace(load, untried=0)
    one.session.done_position = 1
    assert side.table.load("a", now_s=ADMISSION.untried_s) == replace(load, untried=1), (
        "its prompt runs"
    )
    assert side.table.load("a", now_s=ADMISSION.rest_s) == replace(load, untried=0), (
        "it is sent slowly"
    )
    prompt_tokens = one.session.open.prompt_tokens
    for done, untried in ((prompt_tokens, 1), (prompt_tokens + 1, 0)):
        one.session.done_position = done
        known = side.table.load("a", now_s=ADMISSION.untried_s)
        assert known.untried == untried, "the first token comes with the row behind the prompt"
    one.session.done_position = 1
    assert side.table.load(
        "a", now_s=ADMISSION.rest_s, busy=lambda key: key == one.session.kv_key
    ) == (replace(load, untried=1)), "its rows wait for the engine"
    assert side.table.load("a", 0.0, without=[one]) == StageLoad(
        sessions=1, seen=1, own=1, own_urgent=1, urgent=1, untried=1
    )
    assert side.table.keep(other) is None
    left = StageLoad(sessions=1, seen=1, own=1, untried=1)
    assert side.table.load("a", now_s=0.0) == left
    assert side.table.get("other") is other, "its client may attach late"
    assert not side.table.forget(other), "it held nothing any more"
    assert side.table.forget(one)
    assert list(side.table) == []
    assert side.table.holding == 0


@pytest.mark.parametrize("announced", [False, True])
def test_free_identities_of_one_address_have_one_client_s_share(announced: bool) -> None:
    """Though each has announced itself for long, as a peer that lends: that costs a record a
    minute."""
    side, parties = Table(), Parties()
    parties.before = lambda peer_id: announced
    side.table.account = parties.account
    for number in range(64):
        parties.met(f"free{number}", f"198.51.100.{number}")
        side.add(f"session{number}", f"free{number}")
    parties.met("honest", "203.0.113.1")
    for_honest = side.table.load("honest", now_s=0.0)
    assert (for_honest.sessions, for_honest.seen, for_honest.untried) == (64, 1, 1)
    parties.met("free64", "198.51.100.200")
    crowded = side.table.load("free64", now_s=0.0)
    assert (crowded.seen, crowded.own) == (64, 64)


def test_a_session_waits_for_stages_and_links_and_not_for_a_slow_client() -> None:
    live = Table().add("one", "a")
    session, prompt_tokens = live.session, live.session.open.prompt_tokens
    assert live.waits(ADMISSION.untried_s - 0.1), "it has just come"
    assert not live.waits(ADMISSION.untried_s)
    live.backlog.append((0, b""))
    assert live.waits(ADMISSION.rest_s), "its rows wait for the link"
    live.backlog.clear()
    session.inputs = [7]
    assert live.waits(ADMISSION.rest_s), "as does its prompt"
    session.start_at(1)
    assert not live.waits(ADMISSION.untried_s), "what was kept has not run here"
    session.done_position = prompt_tokens
    assert live.waits(ADMISSION.untried_s), "its last row may wait for other stages"
    session.open = replace(session.open, max_new_tokens=1)
    assert not live.waits(ADMISSION.untried_s), "no row comes behind this prompt"


def test_the_rate_of_prompts_that_end_is_part_of_the_load() -> None:
    """That of prompts as long as those that wait, without what was kept of them."""
    side, rate = Table(), PromptRate()
    ended, waiting = side.add("ended", "a"), side.add("waiting", "a")
    for live in (ended, waiting):
        live.session.open = replace(live.session.open, prompt_tokens=100)
    ended.session.start_at(60)
    side.table.prompt_ended(ended, 2.0)
    ended.session.done_position = 101
    rate.add(40, ended.opened_s, 2.0)
    load = side.table.load("a", now_s=2.0)
    assert load.untried == 1
    assert load.prompts_per_s == rate.per_s(100, 2.0) != rate.per_s(40, 2.0)


def test_sessions_without_progress_rest_unless_the_engine_has_work_of_them() -> None:
    side = Table()
    for name, client in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("busy", "b"), ("fresh", "c")):
        side.add(name, client)
    fresh, busy = side.table.get("fresh"), side.table.get("busy")
    assert fresh is not None
    assert busy is not None
    fresh.touched_s = 1.0
    side.table.keep(side.add("finished", "a"))

    def resting(now_s: float, client: str = "a") -> list[str]:
        found = side.table.resting(now_s, lambda key: key == busy.session.kv_key, client)
        return [live.session.key for live in found]

    assert resting(ADMISSION.rest_s - 0.1) == []
    assert resting(ADMISSION.rest_s) == ["a1", "a0", "b0"]
    assert resting(ADMISSION.rest_s + 1.0) == ["a1", "a0", "b0", "fresh"]


def test_of_who_has_more_sessions_that_have_run_nothing_they_rest_sooner() -> None:
    side = Table()
    for number in range(3):
        side.add(f"crowd {number}", "crowd")
    begun = side.add("begun", "crowd")
    begun.session.done_position = 5
    side.add("one", "other")

    def resting(now_s: float, client: str) -> list[str]:
        return [live.session.key for live in side.table.resting(now_s, lambda _: False, client)]

    assert resting(ADMISSION.crowd_rest_s - 0.1, "new") == []
    assert resting(ADMISSION.crowd_rest_s, "new") == ["crowd 2", "crowd 1", "crowd 0"]
    assert resting(ADMISSION.crowd_rest_s, "other") == ["crowd 2", "crowd 1", "crowd 0"]
    assert resting(ADMISSION.crowd_rest_s, "crowd") == [], "not before its own"
    waits = side.table.holdings(0.2, lambda _: 1, "new")
    assert sorted(each.left_s for each in waits if not each.ran_tokens) == pytest.approx(
        [ADMISSION.crowd_rest_s - 0.2] * 3 + [ADMISSION.rest_s - 0.2]
    )


def test_of_one_client_only_the_newest_finished_answers_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_table, "FINISHED_PER_CLIENT_MAX", 2)
    side = Table()
    serving = side.add("serving", "a")
    oldest = [side.table.keep(side.add(f"a{number}", "a")) for number in range(3)]
    assert [each and each.session.key for each in oldest] == [None, None, "a0"]
    assert side.table.keep(side.add("b0", "b")) is None
    side.table.forget(oldest[2])
    assert side.table.load("a", now_s=0.0).own == 1
    assert side.table.holding == 1
    oldest.append(side.table.keep(serving))
    assert oldest[-1] is side.table.get("a1")


@pytest.mark.virtual(limit_s=600)
async def test_peers_of_a_session_are_known_until_a_while_after_it() -> None:
    side = Table(asyncio.get_running_loop().time)
    live = side.add("one", "a")
    neighbour = live.session.open.route[1].peer_id
    assert side.table.knows("a")
    live.accepted = True
    assert side.table.knows(neighbour)
    assert not side.table.knows("stranger")
    await asyncio.sleep(2 * KNOWN_S)
    live.touch()
    side.table.forget(live)
    await asyncio.sleep(KNOWN_S - 1)
    assert side.table.knows("a")
    assert side.table.knows(neighbour)
    await asyncio.sleep(1)
    assert not side.table.knows("a")
    assert not side.table.knows(neighbour)


async def test_who_is_only_named_in_an_open_is_not_known() -> None:
    """A client may name 128 stages and a peer that copies KV, all of them itself: known peers have
    the second half of all limits, and no limit by address."""
    side = Table()
    names = [f"free {number}" for number in range(SESSION_BOUNDS.stages_max)]
    for hop, before in ((0, "client"), (5, names[4])):
        live = side.add(f"at {hop}", "client")
        route = tuple(
            RouteStage(peer_id=name, start=at, end=at + 1) for at, name in enumerate(names)
        )
        live.session.open = replace(
            live.session.open, client="client", route=route, hop=hop, copy_from="copies"
        )
        assert {each for each in (*names, "copies") if side.table.knows(each)} <= {before}
        assert side.table.knows("client")
        live.accepted = True
        ring = {names[hop - 1], names[hop + 1]}
        assert {each for each in (*names, "copies") if side.table.knows(each)} == ring
        live.session.importing = True
        assert side.table.knows("copies")
        side.table.take_over(live, live.session, live.upstream)
        assert not live.accepted, "each attempt's route is another"
        assert live.peers == {"client", before}
        side.table.forget(live)
        side.table._known.clear()


async def test_who_is_known_is_told_in_any_thread() -> None:
    side = Table()
    assert not await asyncio.to_thread(side.table.knows, "a")
    live = side.add("one", "a")
    assert await asyncio.to_thread(side.table.knows, "a")
    live.touch()
    side.table.forget(live)
    assert await asyncio.to_thread(side.table.knows, "a")
    assert not await asyncio.to_thread(side.table.knows, "stranger")
