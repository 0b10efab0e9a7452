"""Which full peers a light peer asks."""

import random

from dht.records.helper_choice import CHOOSING, Helpers


def helpers(given: str = "", learnt: str = "", seed: int = 1) -> Helpers:
    found = Helpers(rng=random.Random(seed))
    for name in given:
        found.give(name, (f"at {name}",))
    found.learn({name: (f"at {name}",) for name in learnt})
    return found


def test_one_of_the_owners_is_always_asked() -> None:
    known = helpers(given="ab", learnt="".join(chr(65 + i) for i in range(26)))
    for round_ in range(20):
        first, second = known.pair(round_ * 2 * CHOOSING.rotate_s)
        assert first == "a"
        assert second != "a"


def test_the_second_stays_for_a_while_and_then_changes() -> None:
    known = helpers(given="a", learnt="bcdefgh")
    seconds = [known.pair(now_s)[1] for now_s in range(0, int(CHOOSING.rotate_s), 10)]
    assert len(set(seconds)) == 1
    later = {known.pair(n * (CHOOSING.rotate_s + 1))[1] for n in range(1, 40)}
    assert later == set("bcdefgh")


def test_who_failed_is_left_alone_for_longer_each_time() -> None:
    known = helpers(given="ab")
    assert known.pair(0.0)[0] == "a"
    known.failed("a", 0.0)
    assert known.pair(1.0) == ("b",)
    assert known.pair(2.5)[0] == "a"
    known.failed("a", 2.5)
    assert known.pair(5.0) == ("b",)
    known.answered("a")
    known.failed("a", 10.0)
    assert known.pair(12.5)[0] == "a"


def test_who_failed_for_a_night_is_asked_again_within_a_minute() -> None:
    """A peer that is cut off asks its helpers on: the pause is bounded, however often they fail."""
    known = helpers(given="ab")
    for second in range(10 * 3600):
        known.failed("a", float(second))
    assert known.pair(10 * 3600 + CHOOSING.avoid_s_max)[0] == "a"


def test_when_all_failed_all_are_asked_again() -> None:
    known = helpers(given="ab")
    known.failed("a", 0.0)
    known.failed("b", 0.0)
    assert set(known.pair(0.5)) == {"a", "b"}
    assert known.pair(0.5, tried={"a", "b"}) == ()


def test_a_flood_of_records_does_not_push_out_those_that_are_known() -> None:
    known = helpers(given="a", learnt="b")
    known.learn({"b": ("at b",)} | {f"sybil{i}": ("x",) for i in range(5000)})
    assert known.addresses("b") == ("at b",)
    assert len(known._known) == 1 + CHOOSING.known_max


def test_where_nobody_is_spoken_of_any_more_those_named_last_stay() -> None:
    """A light peer whose cable was out knows nobody else to ask, where the one given has left."""
    known = helpers(given="a", learnt="bc")
    known.learn({})
    assert known.addresses("b") == ("at b",)
    known.learn({"c": ("moved",)})
    assert known.addresses("b") == ()


def test_who_is_not_spoken_of_any_more_is_forgotten() -> None:
    known = helpers(given="a", learnt="bc")
    known.learn({"c": ("moved",)})
    assert known.addresses("b") == ()
    assert known.addresses("c") == ("moved",)
    assert known.addresses("a") == ("at a",), "but for those that the owner gave"
