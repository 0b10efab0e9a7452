"""Whose clock counts: this machine's, unless those of its peers differ."""

import pytest

from dht.records.network_clock import CLOCK_S, HELPERS_MAX, NetworkClock


class Clocks:
    """This machine's clock, which may jump, and time since it began."""

    def __init__(self) -> None:
        self.past_s = 0.0
        self.jumped_s = 0.0
        self.network = NetworkClock(lambda: 1e9 + self.past_s + self.jumped_s, lambda: self.past_s)

    @property
    def right_s(self) -> float:
        return 1e9 + self.past_s


def test_a_clock_that_agrees_is_its_own() -> None:
    clocks = Clocks()
    assert clocks.network.now() == clocks.right_s
    clocks.network.heard("a", clocks.right_s + CLOCK_S / 2)
    assert (clocks.network.now(), clocks.network.note) == (clocks.right_s, "")


@pytest.mark.parametrize("jumped_s", [-8 * 3600.0, -100.0, 20.0, 8 * 3600.0])
def test_a_jump_moves_nothing_once_peers_were_heard(jumped_s: float) -> None:
    clocks = Clocks()
    clocks.network.heard("a", clocks.right_s)
    clocks.past_s, clocks.jumped_s = 50.0, jumped_s
    assert clocks.network.now() == clocks.right_s
    assert "set it" in clocks.network.note
    clocks.jumped_s = 0.0
    assert clocks.network.note == ""


def test_one_helper_that_lies_moves_no_clock_that_is_right() -> None:
    clocks = Clocks()
    clocks.network.heard("liar", clocks.right_s - 1e6)
    clocks.network.heard("honest", clocks.right_s + 1)
    assert clocks.network.now() == clocks.right_s


def test_a_helper_that_lies_keeps_no_clock_wrong_that_others_correct() -> None:
    clocks = Clocks()
    clocks.jumped_s = -100.0
    clocks.network.heard("liar", clocks.right_s - 100.0, "192.0.2.1")
    for number in range(2):
        clocks.network.heard(f"honest {number}", clocks.right_s, f"203.0.{number}.1")
    assert clocks.network.now() == clocks.right_s


def test_names_of_one_prefix_are_one_party_and_push_nobody_out() -> None:
    clocks = Clocks()
    clocks.network.heard("honest", clocks.right_s, "203.0.113.1")
    for number in range(10 * HELPERS_MAX):
        clocks.network.heard(f"liar {number}", clocks.right_s + 3600, f"192.0.2.{number}")
    assert clocks.network.now() == clocks.right_s
    clocks.network.heard("another", clocks.right_s + 1, "198.51.100.1")
    assert clocks.network.now() == clocks.right_s


def test_whom_the_owner_did_not_name_are_one_party_wherever_they_say_they_are() -> None:
    clocks = Clocks()
    clocks.network.heard("named", clocks.right_s, "203.0.113.1")
    for number in range(10 * HELPERS_MAX):
        clocks.network.heard(f"liar {number}", clocks.right_s + 3600, None)
    assert clocks.network.now() == clocks.right_s
    clocks.jumped_s = -100.0
    assert clocks.network.now() == clocks.right_s, "who was named is nearer"


def test_one_party_alone_moves_a_clock_by_a_day_at_most_and_is_told() -> None:
    clocks = Clocks()
    clocks.network.heard("only", clocks.right_s + NetworkClock.ALONE_S_MAX)
    assert clocks.network.now() == clocks.right_s + NetworkClock.ALONE_S_MAX
    clocks.network.heard("only", clocks.right_s + NetworkClock.ALONE_S_MAX + 1)
    assert clocks.network.now() == clocks.right_s
    assert "set it" in clocks.network.note


def test_what_many_helpers_say_is_bounded_and_the_newest_counts() -> None:
    clocks = Clocks()
    for number in range(10 * HELPERS_MAX):
        clocks.network.heard(f"peer {number}", clocks.right_s + 1e4)
    assert clocks.network.now() == clocks.right_s + 1e4
    for number in range(HELPERS_MAX):
        clocks.network.heard(f"other {number}", clocks.right_s + 200)
    assert clocks.network.now() == clocks.right_s + 200
