"""Laws of passing peers over."""

from client.view.avoidance import Avoidance, AvoidConfig
from dht.messages.types import NodeRecord
from tests.unit.records import record_of

CONFIG = AvoidConfig()


def record(peer_id: str = "a", joined_unix_s: float = 100.0) -> NodeRecord:
    return record_of(peer_id, 0, 2, joined_unix_s=joined_unix_s)


def test_a_peer_that_fails_again_is_avoided_for_longer() -> None:
    avoidance = Avoidance()
    avoidance.add("a", 10.0, 0.0, joined_unix_s=100.0)
    assert avoidance.avoids(record(), 9.9)
    assert not avoidance.avoids(record(), 10.0)
    avoidance.add("a", 10.0, 10.0, joined_unix_s=100.0)
    assert avoidance.avoids(record(), 29.9)
    assert not avoidance.avoids(record("b"), 0.0)
    avoidance.worked(["a"])
    assert not avoidance.avoids(record(), 10.0)


def test_one_that_joined_anew_is_not_held_to_its_past() -> None:
    avoidance = Avoidance()
    avoidance.add("a", 10.0, 0.0, joined_unix_s=100.0)
    assert not avoidance.avoids(record(joined_unix_s=101.0), 1.0)


def test_a_peer_that_fails_all_the_time_gains_nothing_by_saying_that_it_joined_anew() -> None:
    avoidance = Avoidance()
    asked = 0
    for second in range(240):
        told = record(joined_unix_s=float(second))
        if not avoidance.avoids(told, second):
            asked += 1
            avoidance.add("a", 15.0, second, joined_unix_s=told.joined_unix_s)
    assert asked == 5  # at once, forgiven, then after 30, 60 and 120 s


def test_where_there_is_no_other_a_failed_peer_is_tried_by_one_request_at_a_time() -> None:
    avoidance = Avoidance()
    avoidance.add("a", 15.0, 0.0, joined_unix_s=100.0)
    assert avoidance.avoids(record(), CONFIG.second_chance_s - 0.1, second_chance=True)
    assert not avoidance.avoids(record(), CONFIG.second_chance_s, second_chance=True)
    assert avoidance.avoids(record(), CONFIG.second_chance_s), (
        "where there is another, it is avoided"
    )
    avoidance.trying(["a"], CONFIG.second_chance_s)
    assert avoidance.avoids(record(), CONFIG.second_chance_s + 0.1, second_chance=True)
    avoidance.add("a", 15.0, 3.0, joined_unix_s=100.0)
    assert avoidance.avoids(record(), 3.0 + 1.9 * CONFIG.second_chance_s, second_chance=True)


def test_a_full_peer_is_asked_again_when_it_said_and_by_one_request_first() -> None:
    avoidance = Avoidance()
    avoidance.add("a", 4.0, 0.0, joined_unix_s=100.0, full=True)
    avoidance.add("b", 6.0, 0.0, joined_unix_s=100.0, full=True, urgent=True)
    assert avoidance.room_after_s("ab", 1.0) == 3.0
    assert avoidance.room_after_s("bc", 1.0) == 5.0
    assert avoidance.room_after_s("c", 1.0) == 0.0
    assert avoidance.avoids(record(), 1.0)
    assert avoidance.avoids(record(), 3.0, second_chance=True), "it is well, there is no room"
    assert not avoidance.avoids(record(), 1.0, full=True)
    assert not avoidance.avoids(record(), 1.0, urgent=True)
    assert avoidance.avoids(record("b"), 1.0, urgent=True)
    avoidance.worked(["a"])
    assert avoidance.avoids(record(), 1.0), "it works, for those whom it had room for"
    avoidance.trying("a", 4.0)
    assert avoidance.avoids(record(), 4.0 + CONFIG.try_s / 2)
    assert not avoidance.avoids(record(), 4.0 + CONFIG.try_s)
    avoidance.answered(["a"], had_room=True)
    assert not avoidance.avoids(record(), 4.0)
    avoidance.add("a", 10.0, 4.0, joined_unix_s=100.0)
    avoidance.answered(["a"], had_room=True)
    assert avoidance.avoids(record(), 5.0), "it failed, and has not delivered since"


def test_one_request_at_a_time_waits_for_what_a_peer_says_that_was_full() -> None:
    avoidance = Avoidance()
    for _ in range(CONFIG.asking_first + 1):
        avoidance.asked(["a", "b"])
    assert not avoidance.avoids(record(), 0.0), "nobody said that it was full"
    avoidance.add("a", 1.0, 0.0, joined_unix_s=100.0, full=True)
    assert avoidance.avoids(record(), 1.0), "its time is over, but others ask"
    assert not avoidance.avoids(record(), 1.0, urgent=True)
    assert not avoidance.avoids(record(), 1.0, full=True)
    assert avoidance.room_after_s("a", 1.0) == CONFIG.try_s
    avoidance.answered(["a", "b"])
    assert avoidance.avoids(record(), 1.0)
    avoidance.answered(["a", "b"])
    assert not avoidance.avoids(record(), 1.0)
    avoidance.asked(["a"])
    assert avoidance.avoids(record(), 1.0)
    assert not avoidance.avoids(record(), CONFIG.crowded_s), "that was long ago"


def test_each_request_that_a_peer_takes_lets_one_more_ask_until_it_refuses_one() -> None:
    avoidance = Avoidance()

    def ask_all() -> int:
        """How many ask before the others take the peer as full."""
        asking = 0
        while asking < 100 and not avoidance.avoids(record(), 1.0):
            avoidance.asked(["a"])
            asking += 1
        return asking

    def refuse(at_s: float) -> None:
        avoidance.add("a", at_s, 0.0, joined_unix_s=100.0, full=True)

    refuse(1.0)
    for turn in range(4):
        asking = ask_all()
        assert asking == CONFIG.asking_first * 2**turn
        for _ in range(asking):
            avoidance.answered(["a"], had_room=True)
    asking = ask_all()
    refuse(1.0)
    for _ in range(asking):
        avoidance.answered(["a"])
    assert ask_all() == CONFIG.asking_first


def test_failures_under_one_new_name_after_the_other_take_a_bounded_memory() -> None:
    avoidance = Avoidance()
    for number in range(CONFIG.avoided_max + 9):
        avoidance.add(f"p{number}", 15.0, float(number), joined_unix_s=0.0)
        avoidance.add("known", 15.0, float(number), joined_unix_s=0.0)
    assert len(avoidance._peers) == CONFIG.avoided_max
    assert avoidance.avoids(record("known"), CONFIG.avoided_max + 9.0), "who fails again stays"
