"""What strangers may take: amounts and rates, per peer and in all, as the documents say."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dht.budget import LIMITS, STREAMS, Amount, Buckets, Budget, Limit, RateLimit, Taken
from dht.errors import NetworkError

THREATS = Path(__file__).parents[3] / "docs" / "threat-model.md"
UNITS = {"": 1, "MB": 1e6, "MiB": 1 << 20}
SMALL = replace(STREAMS, per_peer=3, in_all=12, crowded=6, when_crowded=1)


def test_a_burst_is_followed_by_the_steady_rate() -> None:
    buckets = Buckets(per_s=2.0, burst=3.0)
    assert [buckets.take("a", 1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert not buckets.take("a", 1, 0.4)
    assert buckets.take("a", 1, 0.5)
    assert buckets.take("b", 3, 0.5), "each name by itself"


def test_a_debt_is_worked_off() -> None:
    buckets = Buckets(per_s=1.0, burst=10.0)
    buckets.charge("a", 25, 0.0)
    assert not buckets.take("a", 1, 15.0)
    assert buckets.take("a", 1, 16.0)


def test_names_are_bounded_and_the_silent_are_forgotten_first() -> None:
    buckets = Buckets(per_s=0.0, burst=1.0, names_max=2)
    assert buckets.take("a", 1, 0.0)
    assert buckets.take("b", 1, 0.0)
    assert not buckets.take("a", 1, 1.0)
    assert buckets.take("c", 1, 2.0)  # b, which was silent, makes room
    assert not buckets.take("a", 1, 3.0)
    assert buckets.take("b", 1, 3.0)
    assert len(buckets._buckets) == 2


def test_what_is_above_a_peers_own_rate_takes_nothing_from_the_others() -> None:
    taken = Taken(RateLimit(name="x", unit="", per_s=0, burst=2, all_per_s=0, all_burst=5))
    assert [taken.take("greedy", 1, 0.0) for _ in range(10)] == [*[True] * 2, *[False] * 8]
    assert [taken.take(name, 1, 0.0) for name in "abcd"] == [True, True, True, False]
    assert taken.refused == 9


def test_a_peer_has_its_share_and_others_come_in_where_it_is_crowded() -> None:
    budget = Budget(SMALL)
    held = budget.held(STREAMS)
    assert [held.take("a") for _ in range(4)] == [True, True, True, False]
    assert [held.take("b") for _ in range(4)] == [True, True, True, False]
    assert not held.take("a")
    assert [held.take("c") for _ in range(2)] == [True, False], "crowded: one each"
    assert [held.take(str(number)) for number in range(6)] == [*[True] * 5, False], "12 in all"
    assert held.total == 12
    held.give_back("a", 3)
    assert held.take("a")
    assert budget.refused == {"streams": 5}


def test_a_stranger_holds_less_than_a_peer_that_is_known() -> None:
    held = Budget(replace(SMALL, per_stranger=2)).held(STREAMS)
    held.knows = {"friend"}.__contains__
    assert [held.take("a") for _ in range(3)] == [True, True, False]
    assert held.take("friend", 3)
    assert not held.take("friend"), "not more than a peer's share"
    assert held.take("b", 2)
    assert not held.take("c", 2), "where it is crowded, one each"


def test_a_refusal_has_a_reason_and_leaves_nothing_behind() -> None:
    held = Budget(SMALL).held(STREAMS)
    with pytest.raises(NetworkError, match="no room for more streams of this peer"):
        held.of("a").take(4)
    assert not held.by_peer
    held.of("a").take(3)
    held.of("a").give_back(3)
    assert not held.by_peer
    assert held.total == 0


def told(limit: Limit) -> list[str]:
    """The row of a limit in the document."""

    def number(value: float | None) -> str:
        if value is None or value == float("inf"):
            return "–"
        return f"{value / UNITS[limit.unit]:,g} {limit.unit}".strip()

    def rate(per_s: float, burst: float) -> str:
        return "–" if burst == float("inf") else f"{number(per_s)}/s, {number(burst)} at once"

    match limit:
        case Amount():
            crowded = ""
            if limit.crowded is not None:
                crowded = f"; from {number(limit.crowded)} on {number(limit.when_crowded)} each"
            stranger = ""
            if limit.per_stranger is not None:
                stranger = f"; {number(limit.per_stranger)} without a session here"
            return [
                f"`{limit.name}`",
                number(limit.per_peer) + stranger,
                number(limit.in_all) + crowded,
            ]
        case RateLimit():
            return [
                f"`{limit.name}`",
                rate(limit.per_s, limit.burst),
                rate(limit.all_per_s, limit.all_burst),
            ]


def test_the_threat_model_lists_every_limit_as_it_is() -> None:
    section = THREATS.read_text().split("## Limits\n")[1].split("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if "`" in line]
    listed = [row[:3] for row in rows if row[0].startswith("`")]
    assert listed == [told(limit) for limit in LIMITS]
    assert all(row[3] for row in rows if row[0].startswith("`")), "each says what it is"
    assert len({limit.name for limit in LIMITS}) == len(LIMITS)
