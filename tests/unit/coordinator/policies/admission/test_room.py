"""Laws of a stage's KV: who is let in, who grows, who gives way, and that all end."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.room import KvAsk, KvRoom
from coordinator.policies.admission.rules import Claim
from tests.examples import examples
from tests.unit.coordinator.policies.admission.accounts import check_room

LAYERS = 4


def ask_of(
    session: str,
    tokens: int = 10,
    most_tokens: int = 1000,
    *,
    client: str = "",
    layers: tuple[int, int] = (0, LAYERS),
    claim: Claim | None = None,
) -> KvAsk:
    return KvAsk(
        session=session,
        client=client or session,
        start=layers[0],
        end=layers[1],
        tokens=tokens,
        most_tokens=most_tokens,
        claim=claim,
        name=session,
    )


def room_of(pages: int, page_tokens: int = 1) -> KvRoom:
    return KvRoom(start=0, end=LAYERS, pages=pages, page_tokens=page_tokens)


def made_to_grow(room: KvRoom, session: str, tokens: int, now_s: float = 0.0) -> list[str] | None:
    """Who gave way so that a session could grow; None if it has to wait."""
    gone: list[str] = []
    while not room.grow(session, tokens):
        victim = room.who_gives_way(session, tokens)
        if victim is None:
            return None
        room.give_way(victim, now_s)
        gone.append(victim)
    return gone


def learn(room: KvRoom, tokens: int) -> None:
    """Let a stage expect answers of about ``tokens`` tokens."""
    for _ in range(10_000):
        room.lengths.ended("", tokens)


def let_in(room: KvRoom, *names: str, tokens: int) -> None:
    """Let sessions in, and let each then take pages for ``tokens`` tokens."""
    for name in names:
        assert room.admit(ask_of(name), 0.0) is None
    for name in names:
        assert room.grow(name, tokens)


def test_sessions_are_let_in_by_their_expected_length_up_to_the_high_water_mark() -> None:
    room = room_of(10 * (10 + ADMISSION.answer_tokens))
    came = 0
    while room.admit(ask_of(f"s{came}"), 0.0) is None:
        came += 1
    assert came == 9, "of ten; by their whole lengths it would be two"
    assert room.charged_tokens <= (1 - ADMISSION.headroom_share) * room.capacity_tokens


def test_one_that_exceeds_the_pool_alone_is_refused_and_one_that_fills_it_is_not() -> None:
    room = room_of(100)
    refused = room.admit(ask_of("s", 10, 101), 0.0)
    assert refused == "101 tokens asked, 100 is all there is"
    assert room.admit(ask_of("s", 10, 100), 0.0) is None
    assert room.grow("s", 100)


def test_a_session_is_charged_on_the_layers_that_it_runs() -> None:
    room = room_of(1000)
    for name, layers in (("low", (0, 2)), ("high", (2, 4))):
        assert room.admit(ask_of(name, layers=layers), 0.0) is None
        assert room.grow(name, 900)
    assert room.free_tokens == 100, "both in the room of one"
    assert room.admit(ask_of("across", layers=(1, 3)), 0.0) is not None


def test_borrowers_give_back_to_those_within_their_promise_the_newest_first() -> None:
    room = room_of(1000)
    for name in ("oldest", "second", "third"):
        assert room.admit(ask_of(name), 0.0) is None
    assert made_to_grow(room, "second", 400) == []
    assert made_to_grow(room, "third", 500) == []
    assert made_to_grow(room, "oldest", 300) == ["third"]
    assert made_to_grow(room, "second", 700) == []
    assert made_to_grow(room, "second", 701) is None, "the oldest gives way to nobody"
    assert made_to_grow(room, "oldest", 301) == ["second"]


def test_what_the_oldest_borrowed_the_newest_waits_for() -> None:
    room = room_of(1000)
    for name in ("oldest", "second", "third"):
        assert room.admit(ask_of(name), 0.0) is None
    assert room.grow("third", 50)
    assert made_to_grow(room, "oldest", 750) == []
    assert made_to_grow(room, "second", 200) == []
    assert made_to_grow(room, "third", 100) is None, "it is within its promise"
    assert made_to_grow(room, "second", 250) == ["third"]


def test_who_borrows_pushes_out_nobody_within_its_promise() -> None:
    """A crowd of strangers, each with one long answer, against one with a usual answer."""
    room = room_of(5000)
    assert room.admit(ask_of("oldest stranger"), 0.0) is None
    crowd = [f"stranger {n}" for n in range(20)]
    crowd = [name for name in crowd[:16] if room.admit(ask_of(name), 0.0) is None]
    assert room.admit(ask_of("usual", 10, 250), 0.0) is None, "the newest"
    assert room.grow("usual", 100)
    for tokens in range(300, 1001, 50):
        for name in crowd:
            if name in room:
                gone = made_to_grow(room, name, tokens)
                assert "usual" not in (gone or ())
    assert made_to_grow(room, "usual", 250) is not None


def test_a_client_that_borrows_with_many_sessions_gives_way_before_others() -> None:
    room = room_of(2000)
    assert room.admit(ask_of("oldest"), 0.0) is None
    for n in range(4):
        assert room.admit(ask_of(f"greedy {n}", client="greedy"), 0.0) is None
    assert room.admit(ask_of("honest"), 0.0) is None
    assert made_to_grow(room, "honest", 300) == []
    for n in range(4):
        assert made_to_grow(room, f"greedy {n}", 425) == []
    assert made_to_grow(room, "honest", 350) == ["greedy 3"]
    assert made_to_grow(room, "honest", 725) == []
    assert made_to_grow(room, "greedy 2", 450) is None, "its own newest waits"


def test_what_gave_way_comes_back_before_those_who_came_later() -> None:
    room = room_of(1100)
    let_in(room, "a", "b", "c", tokens=366)
    assert made_to_grow(room, "a", 370, now_s=1.0) == ["c"]
    room.free("b")
    assert room.admit(ask_of("new"), 2.0) is not None, "the room is left for c"
    assert room.admit(ask_of("c", 367), 2.0) is None
    room.free("c")
    assert room.admit(ask_of("new"), 2.0) is None


def test_room_is_left_for_a_while_only() -> None:
    room = room_of(1100)
    let_in(room, "a", "b", "c", tokens=366)
    room.give_way("c", 1.0)
    room.free("b")
    assert room.admit(ask_of("new"), 1.0 + ADMISSION.return_s) is None


def test_two_that_gave_way_do_not_keep_each_other_out() -> None:
    room = room_of(1100)
    let_in(room, "a", "b", "c", tokens=366)
    for name in ("c", "b"):
        room.give_way(name, 0.0)
    assert room.admit(ask_of("b", 367), 0.0) is not None
    assert room.admit(ask_of("c", 367), 0.0) is None


def test_urgent_sessions_take_the_headroom_and_no_more_than_their_share() -> None:
    room = room_of(2000)
    let_in(room, *(f"s{n}" for n in range(7)), tokens=285)
    assert room.untaken_tokens < 10, "they borrow the headroom"
    assert room.admit(ask_of("more"), 0.0) is not None
    kept = ADMISSION.headroom_share * 2000
    assert room.admit(ask_of("high", 10, 140, claim=Claim.HIGH), 0.0) is None
    assert made_to_grow(room, "high", 140) == ["s6"]
    over = int((1 + ADMISSION.claim_share) * kept)
    assert room.admit(ask_of("again", 10, over, claim=Claim.HIGH), 0.0) is not None


def room_of_crowd(sessions: int, most_tokens: int = 1000) -> KvRoom:
    """A full stage: one client's sessions after somebody's oldest one."""
    room = room_of(10 * (10 + ADMISSION.answer_tokens))
    assert room.admit(ask_of("oldest"), 0.0) is None
    for n in range(sessions):
        assert room.admit(ask_of(f"crowd {n}", 10, most_tokens, client="crowd"), 0.0) is None
    return room


def test_the_newest_of_who_has_much_more_makes_room_until_it_has_not() -> None:
    room = room_of_crowd(8)
    for n in range(4):
        come = ask_of(f"other {n}", client="other")
        assert room.admit(come, 1.0) is not None
        makes_room = room.who_makes_room(come, 1.0)
        if n == 2:
            assert makes_room == [], "the crowd keeps twice what the other has"
            break
        assert makes_room == [f"crowd {7 - n}"]
        room.give_way(makes_room[0], 1.0)
        assert room.admit(come, 1.0) is None, "nothing is left for the return of the crowd's"
    fresh = ask_of("fresh")
    assert room.who_makes_room(fresh, 1.0) == ["crowd 5"]


def test_a_client_that_is_gone_leaves_little_room_to_its_returns() -> None:
    room = room_of_crowd(8)
    for name in list(room):
        room.give_way(name, 0.0)
    come = ask_of("other")
    assert room.admit(come, 1.0) is None, "nobody is there, and nobody comes back"


def test_who_has_about_as_much_makes_no_room() -> None:
    room = room_of(10 * (10 + ADMISSION.answer_tokens))
    for n in range(9):
        assert room.admit(ask_of(f"s{n}", client=f"client {n // 2}"), 0.0) is None
    assert room.admit(ask_of("new"), 0.0) is not None
    assert room.who_makes_room(ask_of("new"), 0.0) == [], "each keeps its part of the stage"


def test_neither_the_oldest_nor_an_urgent_session_makes_room() -> None:
    room = room_of(10 * (10 + ADMISSION.answer_tokens))
    for n in range(9):
        assert room.admit(ask_of(f"crowd {n}", client="crowd"), 0.0) is None
    high = ask_of("crowd high", 10, 140, client="crowd", claim=Claim.HIGH)
    assert room.admit(high, 0.0) is None
    wide = ask_of(
        "wide", 10 * ADMISSION.answer_tokens, 10 * ADMISSION.answer_tokens, client="other"
    )
    assert room.who_makes_room(wide, 0.0) == [], "all of the crowd's would not do"
    two = ask_of("two", 20, client="other")
    assert room.who_makes_room(two, 0.0) == ["crowd 8", "crowd 7"]


def test_sessions_on_other_layers_make_no_room() -> None:
    room = room_of(20 * (10 + ADMISSION.answer_tokens))
    assert room.admit(ask_of("oldest"), 0.0) is None
    for n in range(17):
        for layers in ((0, 2), (2, 4)):
            name = f"crowd {n} of {layers}"
            assert room.admit(ask_of(name, client="crowd", layers=layers), 0.0) is None
    two = ask_of("two", 20, layers=(0, 2))
    makes_room = room.who_makes_room(two, 0.0)
    assert makes_room == ["crowd 16 of (0, 2)", "crowd 15 of (0, 2)"]


@given(data=st.data())
@examples(60)
def test_every_session_ends_whatever_they_ask_for(data: st.DataObject) -> None:
    """No livelock: all decode in turns, who gives way comes back, and all come to their ends."""
    pages = data.draw(st.integers(8, 60))
    page_tokens = data.draw(st.sampled_from((1, 4)))
    room = room_of(pages, page_tokens)
    learn(room, data.draw(st.integers(1, pages)))
    sessions: dict[str, KvAsk] = {}
    known: dict[str, int] = {}
    for n in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.integers(0, LAYERS - 1))
        end = data.draw(st.integers(start + 1, LAYERS))
        most = data.draw(st.integers(2, pages * page_tokens))
        tokens = data.draw(st.integers(1, most - 1))
        client = data.draw(st.sampled_from("abc"))
        sessions[f"s{n}"] = ask_of(f"s{n}", tokens, most, client=client, layers=(start, end))
        known[f"s{n}"] = tokens
    turns = 0
    while sessions:
        turns += 1
        assert turns < 200 * pages * page_tokens, "nothing gets on"
        for name, ask in list(sessions.items()):
            now_s = float(turns)
            if name not in room:
                again = replace(ask, tokens=min(known[name], ask.most_tokens))
                if room.admit(again, now_s) is not None:
                    for victim in room.who_makes_room(again, now_s):
                        room.give_way(victim, now_s)
                    if room.admit(again, now_s) is not None:
                        continue
            if made_to_grow(room, name, known[name], now_s) is None:
                continue
            known[name] += 1
            if known[name] > ask.most_tokens:
                room.free(name, ask.most_tokens)
                del sessions[name]
            check_room(room)
    assert room.free_tokens == room.untaken_tokens == room.capacity_tokens


class Stage(RuleBasedStateMachine):
    """Sessions come, grow, give way and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.room = room_of(40, 2)
        learn(self.room, 8)
        self.asks: dict[str, KvAsk] = {}
        self.tokens: dict[str, int] = {}
        self.promised: dict[str, int] = {}
        self.now_s = 0.0
        self.came = 0

    @rule(
        tokens=st.integers(1, 12),
        more=st.integers(30, 60),
        start=st.integers(0, LAYERS - 1),
        layers=st.integers(2, LAYERS),
        client=st.sampled_from("xyz"),
        claim=st.sampled_from((None, None, Claim.HIGH, Claim.BEGUN)),
    )
    def come(
        self,
        tokens: int,
        more: int,
        start: int,
        layers: int,
        client: str,
        claim: Claim | None,
    ) -> None:
        self.came += 1
        name = f"s{self.came}"
        span = (start, min(LAYERS, start + layers))
        ask = ask_of(name, tokens, tokens + more, client=client, layers=span, claim=claim)
        refused = self.room.admit(ask, self.now_s)
        if refused is not None and (leaving := self.room.who_makes_room(ask, self.now_s)):
            first = next(each for each in self.room if not self.is_urgent(each))
            for each in leaving:
                assert self.asks[each].client != client
                assert each != first
                assert not self.is_urgent(each)
                self.room.give_way(each, self.now_s)
                del self.asks[each], self.tokens[each]
            refused = self.room.admit(ask, self.now_s)
            assert refused is None, "others gave way for nothing"
        if tokens + more > self.room.capacity_tokens:
            assert refused is not None
        if refused is None:
            self.asks[name], self.tokens[name] = ask, 0
            self.promised[name] = self.room.charged_of(name)

    @precondition(lambda self: self.asks)
    @rule(which=st.integers(0, 9), tokens=st.integers(15, 60))
    def grow(self, which: int, tokens: int) -> None:
        name = list(self.asks)[which % len(self.asks)]
        asked = min(self.asks[name].most_tokens, self.tokens[name] + tokens)
        held = {each: self.room.held_of(each) for each in self.asks}
        within = {each for each in self.asks if held[each] <= self.promised[each]}
        ordinary = [each for each in self.room if not self.is_urgent(each)]
        oldest = ordinary[0] if ordinary else ""
        gone = made_to_grow(self.room, name, asked, self.now_s)
        if gone is None:
            gone = [each for each in self.asks if each not in self.room]
        else:
            self.tokens[name] = asked
        assert name not in gone
        assert oldest not in gone or name == oldest
        if name != oldest and asked > self.promised[name]:
            assert not set(gone) & within, "who borrows took pages that were promised"
        for each in gone:
            assert not self.is_urgent(each)
            del self.asks[each], self.tokens[each]

    def is_urgent(self, name: str) -> bool:
        """Whether a session was let in by its whole length for its claim."""
        whole = -(-self.asks[name].most_tokens // 2) * 2
        return self.asks[name].claim is not None and self.promised[name] == whole

    @precondition(lambda self: len(self.asks) > 3)
    @rule(which=st.integers(0, 9), answered=st.integers(0, 30))
    def end(self, which: int, answered: int) -> None:
        name = list(self.asks)[which % len(self.asks)]
        self.room.free(name, answered)
        del self.asks[name], self.tokens[name]

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def nothing_is_held_twice_or_lost(self) -> None:
        check_room(self.room)
        for name, tokens in self.tokens.items():
            assert self.room.held_of(name) >= tokens
        if not self.asks:
            assert self.room.free_tokens == self.room.untaken_tokens == self.room.capacity_tokens


TestStage = Stage.TestCase
TestStage.settings = examples(60, stateful_step_count=40)
