"""What volunteers gave, as the page saw it: counted, kept, and named where that was asked for."""

import asyncio
from pathlib import Path

import pytest

from client.health.badge import badge_svg, badge_words
from client.health.given import ALL, GIVEN, GivenTally, given_json, thanked_of
from client.health.history import DAY_S, History
from client.health.state import aged
from dht.errors import UserError
from dht.process.json_file import Json
from testing import paper_health

NOW_S = 1_800_000_000.0


def state_at(at_s: float, *, counts: bool = True) -> Json:
    peers = [
        {"id": "a", "start": 0, "end": 4, "counts": counts},
        {"id": "b", "start": 4, "end": 8, "counts": True},
        {"id": "c", "start": 0, "end": 8, "counts": False},
    ]
    return {"generated_unix_s": NOW_S + at_s, "peers": peers}


def test_layers_count_while_their_holder_answers_the_page() -> None:
    tally = GivenTally(named=frozenset({"a"}))
    tally.look(state_at(0))
    assert tally.take() == {}, "there is no before"
    tally.look(state_at(10))
    tally.look(state_at(20, counts=False))
    assert tally.take() == {ALL: 120.0, "a": 40.0}, "only who asked for it is counted by itself"
    tally.look(state_at(21 + GIVEN.step_s_max))
    tally.look(state_at(20))
    assert tally.take() == {}, "nothing for a time in which the page did not look"


def test_the_sums_of_the_last_days_are_kept(tmp_path: Path) -> None:
    async def scenario() -> dict[str, float]:
        history = History(tmp_path / "health.sqlite")
        for days_ago in (100, 29, 1, 1):
            await history.add_given({ALL: 3600.0, "a": 1800.0}, NOW_S - days_ago * DAY_S)
        history.close()
        again = History(tmp_path / "health.sqlite")
        try:
            return await again.given(NOW_S)
        finally:
            again.close()

    kept = asyncio.run(scenario())
    assert kept == {ALL: 3 * 3600.0, "a": 3 * 1800.0}
    shown = given_json(kept, thanked_of(["b=<b>Zoe", "a=Aino"]))
    assert shown["layer_hours"] == 3.0
    assert shown["named"] == [
        {"name": "<b>Zoe", "layer_hours": 0.0},
        {"name": "Aino", "layer_hours": 1.5},
    ]


@pytest.mark.parametrize("word", ["Aino", "=Aino", "12D3=", ""])
def test_who_is_thanked_has_an_id_and_a_name(word: str) -> None:
    with pytest.raises(UserError, match="ID=NAME"):
        thanked_of([word])


def test_the_badge_says_no_more_than_the_page() -> None:
    healthy = paper_health.healthy()
    verdict, words = badge_words(healthy)
    assert verdict == "healthy"
    assert words.endswith("tokens/s · 7 peers")
    stale = aged(healthy, healthy["generated_unix_s"] + 3600, 60.0)
    assert badge_words(stale) == ("unknown", "unknown")
    assert badge_words(paper_health.layer_lost()) == ("not healthy", "not healthy")
    hostile = badge_svg(paper_health.hostile(("<script>x()</script>",)))
    assert hostile.count("<script") == 0
    assert "style" not in badge_svg(healthy)
