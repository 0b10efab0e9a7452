"""Turns by client: nobody waits for what another asks for more, and the queue has an end."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from dht.grammars.trials import Lane
from dht.grammars.turns import Turn, Turns


def turns(at_once: int = 3, queued_s_max: float = 100.0) -> Turns:
    return Turns(at_once=at_once, work_s=1.0, queued_s_max=queued_s_max)


def order(found: Turns) -> list[str]:
    """Whose turns begin, one after the other."""
    begun: list[str] = []
    while (turn := found.begin()) is not None:
        begun.append(turn.client)
        found.leave(turn, 1.0)
    return begun


def test_a_client_that_asks_for_more_waits_behind_its_own() -> None:
    found = turns()
    for client in ("a", "a", "a", "a", "b"):
        found.ask(client)
    assert order(found) == ["a", "b", "a", "a", "a"]


def test_work_that_took_little_counts_little() -> None:
    found = turns()
    found.ask("cheap")
    first = found.begin()
    assert first is not None
    found.leave(first, 0.1)
    for client in ("dear", "dear", "cheap"):
        found.ask(client)
    assert order(found) == ["dear", "cheap", "dear"]


def test_new_names_do_not_go_before_who_has_a_standing() -> None:
    found = turns()
    for at in range(10):
        found.ask(f"new {at}")
    found.ask("served", 1)
    found.ask("served often", 2)
    assert order(found)[:2] == ["served often", "served"]


def test_slots_are_kept_for_those_with_a_standing() -> None:
    found = turns()
    for standing, begins in ((-1, True), (-1, False), (0, True), (0, False), (1, True), (2, False)):
        turn, _ = found.ask(f"client {standing}", standing)
        assert (found.begin() is turn) is begins
    assert found.waiting == 3


def test_who_took_too_long_goes_after_those_that_never_did() -> None:
    found = turns()
    for client in ("dear", "dear", "dear", "new"):
        found.ask(client)
    first = found.begin()
    assert first is not None
    assert first.client == "dear"
    found.leave(first, 1.0)
    found.lower("dear")
    assert order(found) == ["new", "dear", "dear"]


def test_the_last_of_a_full_queue_is_refused() -> None:
    found = turns(queued_s_max=1.5)
    for client in ("a", "b", "c", "d"):
        assert found.ask(client)[1] is None
    turn, refused = found.ask("e")
    assert refused is turn
    turn, refused = found.ask("served", 1)
    assert refused is not None
    assert refused.client == "d"
    assert found.waiting == 4


def test_what_is_given_up_runs_no_more() -> None:
    found = turns()
    turn, _ = found.ask("a")
    found.leave(turn)
    found.leave(turn)
    assert order(found) == []


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-1, 2), st.booleans())))
def test_never_more_than_the_slots_and_the_queue(asked: list[tuple[str, int, bool]]) -> None:
    found, running, waiting = turns(queued_s_max=3.0), set[Turn](), set[Turn]()
    for client, standing, ends in asked:
        turn, refused = found.ask(client, standing)
        waiting.add(turn)
        waiting.discard(turn if refused is None else refused) if refused else None
        if (begun := found.begin()) is not None:
            waiting.discard(begun)
            running.add(begun)
        if ends and running:
            found.leave(running.pop(), 0.5)
        assert len(running) <= 3
        assert found.waiting == len(waiting) <= 9


async def test_a_turn_that_is_given_up_as_another_takes_its_place_costs_no_slot() -> None:
    lane, release = Lane(3, work_s=1.0, queued_s_max=1.0), asyncio.Event()

    async def work(client: str, standing: int = 0) -> None:
        async with lane.turn(client, standing):
            await release.wait()

    waiting = [asyncio.create_task(work(str(number))) for number in range(5)]
    await asyncio.sleep(0)
    known = asyncio.create_task(work("known", standing=1))
    waiting[-1].cancel()  # before the newcomer runs, to which it loses its place
    release.set()
    await known
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in ended] == [type(None)] * 4 + [asyncio.CancelledError]
    assert lane.turns.waiting == 0
    async with asyncio.timeout(60), lane.turn("a", 1), lane.turn("b", 1), lane.turn("c", 1):
        """All slots are free."""
