"""What happens to a session at a stage, in every state, and what follows from it."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from dht.messages.session import (
    MigrationReady,
    RefusalCode,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
)
from dht.transport.frame_sender import FrameSender
from node.sessions import life
from node.sessions.life import (
    TRANSITIONS,
    Count,
    Do,
    Down,
    Effect,
    End,
    Event,
    Resend,
    Rewind,
    ToOwner,
    Up,
    close_of,
    failed_of,
    kind_of,
    refused_of,
    step,
)
from node.sessions.session import HOLDING, Migration, StageSession, StageState
from tests.unit.node.sessions.test_session import make_open, view

ASKS = cast(FrameSender, object())
"""Who asked for a move."""


def accepted(open_: SessionOpen, position: int = 0, *, rows: bool = True) -> SessionAccepted:
    return SessionAccepted(
        session=open_.session, attempt=open_.attempt, position=position, rows=rows
    )


def events(session: StageSession) -> Iterator[Event]:
    """All that may happen to a session, each kind at least once."""
    open_, named = session.open, {"session": session.key, "attempt": session.open.attempt}
    refused = refused_of(open_, "p9", RefusalCode.NO_KV, "full")
    failed = failed_of(open_, "p9", "p9", "lost")
    yield life.Accepted()
    for position, logged in itertools.product((0, 3, 9), (False, True)):
        yield life.Accepted(position=position, logged=logged)
    yield from (refused, failed, SessionLeaving(**named, peer_id="p9"), MigrationReady(**named))
    yield from (SessionClose(**named, tokens=3), life.Completed(), life.Expired())
    yield from (life.GivenUp(reason="late"), life.Leaves(), life.Leaves(to="p9"))
    for peer_id in ("p0", "p1", "p2", "new", "stranger"):
        yield life.Lost(peer_id=peer_id, reason="silent")
        yield life.HopLost(peer_id=peer_id, reason="silent")
    yield life.MoveAsked(open=moving(open_), upstream=ASKS, logged=True)
    for message, logged in itertools.product((accepted(open_), refused, failed), (False, True)):
        yield life.MoveReplied(message=message, logged=logged)
    yield life.MoveDropped()


def moving(open_: SessionOpen) -> SessionOpen:
    """The open of a move of the stage behind, or of the same route at a last stage."""
    stages = list(open_.route)
    if open_.hop + 1 < len(stages):
        stages[open_.hop + 1] = replace(stages[open_.hop + 1], peer_id="new")
    else:
        stages.append(replace(stages[0], peer_id="new"))
    return replace(open_, attempt=open_.attempt + 1, route=tuple(stages), migrate_until=1)


def sessions(state: StageState) -> Iterator[StageSession]:
    """Sessions in a state, at each place of routes, with and without a move."""
    for stages, moves in itertools.product((1, 2, 3), (None, False, True)):
        for hop in range(stages):
            session = StageSession(open=make_open(hop=hop, stages=stages), state=state)
            session.taken_over = state is not StageState.OPENING
            session.next_position = session.done_position = 5
            if moves is not None:
                session.move = Migration(
                    open=moving(session.open), upstream=ASKS, copies=True, ready=moves
                )
            yield session


def cases() -> Iterator[tuple[StageSession, Event]]:
    for state in StageState:
        for at in range(sum(1 for _ in sessions(state))):
            (sample,) = itertools.islice(sessions(state), at, at + 1)
            for number in range(sum(1 for _ in events(sample))):
                (session,) = itertools.islice(sessions(state), at, at + 1)
                yield session, next(itertools.islice(events(session), number, None))


def told(effects: list[Effect]) -> Iterator[Any]:
    """Messages that go up, to whomever."""
    yield from (each.message for each in effects if isinstance(each, Up | ToOwner))


def test_every_event_in_every_state_leads_where_the_table_says() -> None:
    seen = set()
    for session, event in cases():
        before, me = session.state, session.stage.peer_id
        effects = step(session, event)
        after = TRANSITIONS[type(event)].get(before)
        seen.add(type(event))
        if after is None:
            assert (session.state, effects) == (before, []), (before, event)
            continue
        if isinstance(event, life.HopLost):
            follows = (TRANSITIONS[each].get(before) for each in (SessionRefused, life.Lost))
            assert session.state in {before, *follows}
        else:
            assert session.state is after, (before, event)
        ends = [each for each in effects if isinstance(each, End)]
        gone = (before in HOLDING and not session.holds_kv) or session.state is StageState.CLOSED
        assert len(ends) == gone, "it is freed once, when it ends"
        assert all(each.keeps == (session.state is StageState.FINISHED) for each in ends)
        assert (Do.ACCEPT in effects) == isinstance(event, life.Accepted)
        paused = session.state is StageState.PAUSED and before is not StageState.PAUSED
        if paused or session.state is StageState.CLOSED is not before:
            silent = isinstance(event, SessionClose | life.Expired)
            assert silent or any(True for _ in told(effects)), "the owner hears why"
        for message in told(effects):
            if isinstance(message, SessionRefused | SessionFailed) and message.by != "p9":
                assert message.by == me, "it speaks for itself alone"
    assert seen == set(TRANSITIONS), "every kind of event"


def test_no_session_is_kept_for_ever() -> None:
    for state in StageState:
        for session in sessions(state):
            step(session, life.Expired())
            assert session.state is StageState.CLOSED


@pytest.mark.parametrize(
    ("asked", "logged", "effects"),
    [
        (7, False, []),
        (5, False, []),
        (2, True, [Resend(2, 5)]),
        (2, False, [Count("rerun_rows", 3), Rewind(2)]),
    ],
)
def test_the_next_stage_is_served_from_where_it_asks(
    asked: int, logged: bool, effects: list[Effect]
) -> None:
    session = StageSession(open=make_open(), state=StageState.REOPENING, taken_over=True)
    session.next_position = 5
    event = life.Accepted(position=asked, logged=logged)
    assert step(session, event) == [*effects, Do.ACCEPT]
    assert session.send_position == asked
    assert session.state is StageState.ACTIVE


def test_a_move_is_passed_on_copied_and_ended() -> None:
    session = StageSession(open=make_open(stages=3), state=StageState.ACTIVE)
    session.done_position = 5
    open_ = moving(session.open)
    assert kind_of(open_, session, "p0", view()) == "move"
    (down,) = step(session, life.MoveAsked(open=open_, upstream=ASKS, logged=False))
    assert down == Down("new", replace(open_, hop=1, rows_logged=False), dials=True)
    assert session.move is not None
    answer = accepted(open_, position=2)
    effects = step(session, life.MoveReplied(message=answer, logged=True))
    assert effects == [Count("copied_rows", 3), Up(answer, ASKS)]
    assert (session.move.ready, session.move.copied_position) == (True, 2)
    close = close_of(session.open)
    assert step(session, close) == [
        Down("p1", close),
        Down("new", close_of(open_)),
        Count("closed"),
        End(0),
    ]


@pytest.mark.parametrize("copies", [False, True])
def test_a_move_that_is_given_up_leaves_nothing_at_the_stages_that_serve_on(copies: bool) -> None:
    session = StageSession(open=make_open(stages=3), state=StageState.ACTIVE)
    open_ = moving(session.open)
    if not copies:
        open_ = replace(open_, route=(*session.open.route[:2], open_.route[2]))
    step(session, life.MoveAsked(open=open_, upstream=ASKS, logged=True))
    behind = open_.route[1].peer_id
    assert step(session, life.MoveDropped()) == [Down(behind, close_of(open_))]
    assert (session.move, session.state) == (None, StageState.ACTIVE)
    assert step(session, life.MoveDropped()) == []


def test_what_is_not_logged_ends_the_move_and_not_the_session() -> None:
    session = StageSession(open=make_open(stages=3), state=StageState.ACTIVE)
    open_ = moving(session.open)
    step(session, life.MoveAsked(open=open_, upstream=ASKS, logged=True))
    (up,) = step(session, life.MoveReplied(message=accepted(open_), logged=False))
    assert isinstance(up, Up)
    assert up.over is ASKS
    assert isinstance(up.message, SessionRefused)
    assert up.message.code is RefusalCode.NOT_HELD
    assert session.move is None
    assert session.state is StageState.ACTIVE


def test_what_an_open_asks_of_a_stage() -> None:
    open_ = make_open()
    here = StageSession(open=open_, state=StageState.PAUSED)
    again = replace(open_, attempt=1)
    assert kind_of(open_, None, "p0", view()) == "new"
    assert kind_of(again, here, "p0", view(serving=False)) == "take over"
    for changed, code in (
        (open_, RefusalCode.BAD_REQUEST),
        (replace(again, client="other"), RefusalCode.BAD_REQUEST),
        (moving(open_), RefusalCode.BAD_REQUEST),
    ):
        refused = kind_of(changed, here, "p0", view())
        assert not isinstance(refused, str)
        assert refused[0] is code
    assert kind_of(replace(again, prompt_tokens=4), here, "p0", view()) == "new", "less than ran"
