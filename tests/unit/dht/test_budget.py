"""What strangers may take: amounts and rates, per peer and in all, as the documents say."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dht.budget import (
    FORGOTTEN,
    FRAME_BYTES,
    LIMITS,
    NAMES_MAX,
    SHARES,
    STREAMS,
    Amount,
    Buckets,
    Budget,
    Limit,
    Parties,
    RateLimit,
    Taken,
    prefix_of,
)
from dht.errors import NetworkError
from dht.messages.codec import FRAME_BOUNDS

THREATS = Path(__file__).parents[3] / "docs" / "threat-model.md"
UNITS = {"": 1, "KiB": 1 << 10, "MB": 1e6, "MiB": 1 << 20}
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


def test_a_peer_may_have_two_of_the_largest_frames_unfinished() -> None:
    assert FRAME_BYTES.per_peer >= 2 * FRAME_BOUNDS.bytes_max


ADDRESSED = {"dials_back_to"}
"""Limits whose names are addresses; what peers ask for is bounded by `dials_back`."""
OVER_ALL = [limit for limit in LIMITS if limit.name not in ADDRESSED]
CROWD = [f"free-{number}" for number in range(64)]


class OneLimit:
    """Takes of one limit in a budget, at one time."""

    def __init__(self, limit: Limit) -> None:
        self.budget, self.limit = Budget(), limit
        self.meter = (
            self.budget.held(limit) if isinstance(limit, Amount) else self.budget.rate(limit)
        )
        one, all_ = (
            (limit.per_peer, limit.in_all)
            if isinstance(limit, Amount)
            else (limit.burst, limit.all_burst)
        )
        self.step = 1 if all_ <= 4096 else min(one, all_) // 32
        self.of_one, self.of_all = min(one, all_), all_

    def drain(self, peer_id: str) -> float:
        """What one peer gets that takes as much as it may."""
        got = 0.0
        while self.take(peer_id):
            got += self.step
        return got

    def take(self, peer_id: str) -> bool:
        if isinstance(self.meter, Taken):
            return self.meter.take(peer_id, self.step, 0.0)
        return self.meter.take(peer_id, int(self.step))


@pytest.mark.parametrize("limit", OVER_ALL, ids=lambda limit: limit.name)
def test_free_identities_leave_half_of_everything_to_peers_that_are_known(limit: Limit) -> None:
    for known in ("client", "neighbour"):
        one = OneLimit(limit)
        one.budget.parties.work = lambda peer_id: peer_id == "client"
        one.budget.parties.before = lambda peer_id: peer_id == "neighbour"
        assert 0 < sum(map(one.drain, CROWD)) <= one.of_all / 2
        share = getattr(limit, "when_crowded", 0) or min(one.of_one, one.of_all / 2)
        assert one.drain(known) >= share - one.step


@pytest.mark.parametrize("limit", OVER_ALL, ids=lambda limit: limit.name)
def test_free_identities_of_one_prefix_count_as_a_few_peers(limit: Limit) -> None:
    one = OneLimit(limit)
    one.budget.parties.work = lambda peer_id: False
    for number, each in enumerate(CROWD):
        one.budget.parties.met(each, f"198.51.100.{number}")
    elsewhere = OneLimit(limit)
    elsewhere.budget.parties.work = lambda peer_id: False
    assert sum(map(one.drain, CROWD)) <= SHARES.prefix_peers * one.of_one
    if SHARES.prefix_peers * one.of_one < one.of_all / 2:
        one.budget.parties.met("honest", "203.0.113.1")
        assert one.take("honest"), "a newcomer from elsewhere"


def test_a_prefix_is_what_one_party_has() -> None:
    assert prefix_of("198.51.100.7") == prefix_of("::ffff:198.51.100.9") == "198.51.100.0/24"
    assert prefix_of("2001:db8:1:2::3") == prefix_of("2001:db8:1:ffff::1") == "2001:db8:1::/48"
    assert prefix_of("127.0.0.1") == prefix_of("::1") == prefix_of("") == prefix_of("name") == ""


def test_what_a_peer_held_is_given_back_to_the_prefix_that_had_it() -> None:
    budget = Budget(SMALL)
    held, parties = budget.held(STREAMS), budget.parties
    parties.work = lambda peer_id: False
    parties.met("a", "198.51.100.1")
    assert held.take("a", 2)
    parties.met("a", "203.0.113.1")  # it came back from elsewhere
    held.give_back("a", 2)
    assert not held.by_peer
    assert not held._by_prefix
    assert held.take("a")
    assert held._by_prefix == {"203.0.113.0/24": 1}


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
    budget = Budget(replace(SMALL, per_stranger=2, crowded=None))
    held = budget.held(STREAMS)
    budget.parties.work = {"friend"}.__contains__
    assert [held.take("a") for _ in range(3)] == [True, True, False]
    assert held.take("friend", 3)
    assert not held.take("friend"), "not more than a peer's share"
    assert held.take("b", 1)
    assert not held.take("c", 1), "half of all is for peers that are known"


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
                stranger = f"; {number(limit.per_stranger)} for strangers"
            return [
                f"`{limit.name}`",
                number(limit.per_peer) + stranger,
                number(limit.in_all) + crowded,
            ]
        case RateLimit():
            stranger = ""
            if limit.stranger_burst is not None:
                stranger = f"; {number(limit.stranger_burst)} at once for strangers"
            return [
                f"`{limit.name}`",
                rate(limit.per_s, limit.burst) + stranger,
                rate(limit.all_per_s, limit.all_burst),
            ]


def test_the_threat_model_lists_every_limit_as_it_is() -> None:
    section = THREATS.read_text().split("## Limits\n")[1].split("\n### ")[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if "`" in line]
    listed = [row[:3] for row in rows if row[0].startswith("`")]
    assert listed == [told(limit) for limit in LIMITS]
    assert all(row[3] for row in rows if row[0].startswith("`")), "each says what it is"
    assert len({limit.name for limit in LIMITS}) == len(LIMITS)


def test_a_crowd_of_one_prefix_pushes_only_its_own_out_of_memory() -> None:
    parties = Parties()
    parties.met("honest", "203.0.113.7")
    for number in range(2 * NAMES_MAX):
        parties.met(f"crowd {number}", f"198.51.100.{number % 256}")
    assert parties.prefix("honest") == "203.0.113.0/24"
    assert parties.prefix(f"crowd {2 * NAMES_MAX - 1}") == "198.51.100.0/24"
    forgotten = {parties.prefix(f"crowd {number}") for number in range(NAMES_MAX)}
    assert forgotten == {FORGOTTEN}, "nobody escapes a limit by being forgotten"


def test_what_passes_between_two_peers_is_charged_to_both_and_once_to_all() -> None:
    limit = RateLimit(name="x", unit="", per_s=1, burst=100, all_per_s=1, all_burst=1000)
    meter = Taken(limit)
    assert meter.take_between(("caller", "called"), 60, 0.0)
    assert not meter.take_between(("caller", "another"), 60, 0.0), "the caller has taken its share"
    assert not meter.take_between(("another", "called"), 60, 0.0)
    assert meter.take_between(("another", "third"), 60, 0.0)
    assert meter._all.left("", 0.0) == 1000 - 2 * 60
    assert meter.refused == 2
