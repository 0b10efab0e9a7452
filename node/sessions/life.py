"""A session's life at one stage: opened, taken over, paused, moved, ended. Events in, effects out.

:func:`step` takes what happened to a session and returns what follows, in order;
:mod:`node.stage.shell` performs it. Which rows run is in :mod:`node.sessions.session`.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, get_args

from dht.messages.kv import KvCopy
from dht.messages.session import (
    FinishReason,
    MigrationReady,
    Reason,
    RefusalCode,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
    TokensAttach,
)
from dht.transport.frame_sender import FrameSender
from node.sessions.open_checks import StageView, refusal_of
from node.sessions.session import HOLDING, Migration, StageSession, StageState

REASON_CHARACTERS_MAX = get_args(Reason)[1].max_length
"""Length of a reason in a message; longer ones are cut."""

# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """All stages behind have reserved KV. ``position``: the first row that the next one needs;
    None at the last stage that the open is for."""

    position: int | None = None
    logged: bool = False
    """Whether the log has all rows from there to the next one that runs here."""
    importing: bool = False
    """Whether the session gets copies of the KV instead of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A neighbour on the route was lost, or sends what cannot be right."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HopLost:
    """The link to a peer was lost that this stage sends to."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Completed:
    """At the last stage: the answer's last token was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """This stage ends its part; other stages keep theirs for the next attempt."""

    reason: str
    retry_after_s: float = 0.0
    """Seconds until a session that gave way to others should find KV here again; 0: it failed."""


@dataclass(frozen=True, slots=True)
class Expired:
    """Nobody needs what is left of the session here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The stage asks to be replaced, by ``to`` if that is not empty; it serves on meanwhile."""

    to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveAsked:
    """A planned move of later stages begins; the answers to ``open`` go up by ``upstream``."""

    open: SessionOpen
    upstream: FrameSender
    logged: bool
    """Whether the log has all rows that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReplied:
    """The next stage of a move answers, or this one refuses to go on with it."""

    message: "SessionAccepted | NextSays"
    logged: bool
    """Whether the log has all rows that ran, from the position that an accept asks for."""


@dataclass(frozen=True, slots=True)
class MoveDropped:
    """Who asked for a planned move gave it up; the session stays where it is."""


NextSays = SessionRefused | SessionFailed | SessionLeaving | MigrationReady
"""What the next stage says, beside that it accepts; a refusal may be this stage's own."""
Event = (
    Accepted
    | NextSays
    | SessionClose
    | Lost
    | HopLost
    | Completed
    | GivenUp
    | Expired
    | Leaves
    | MoveAsked
    | MoveReplied
    | MoveDropped
)

# Effects


@dataclass(frozen=True, slots=True)
class Up:
    """Send a message to the stage before, or over ``over`` to who asked for a move."""

    message: object
    over: FrameSender | None = None


@dataclass(frozen=True, slots=True)
class ToOwner:
    """Send a message to the stage before and, at the last stage, to the client itself."""

    message: SessionFailed | SessionLeaving


@dataclass(frozen=True, slots=True)
class Down:
    """Send a message to ``peer_id``, if there is a link to it; ``dials``: open one otherwise."""

    peer_id: str
    message: SessionOpen | SessionClose
    dials: bool = False


@dataclass(frozen=True, slots=True)
class Rewind:
    """Run rows from ``position`` on again, or from the last one before that is possible."""

    position: int


@dataclass(frozen=True, slots=True)
class Resend:
    """Send the logged rows of positions ``[start, end)`` to the next stage."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Count:
    """Add ``times`` to a counter."""

    name: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class End:
    """Free the session's KV and log, and forget it. The first ``tokens`` tokens that ran are right,
    for who shares their KV."""

    tokens: int = 0
    keeps: bool = False
    """Keep the answer's tokens: a client may ask for them late."""


class Do(StrEnum):
    """Effects that take no argument."""

    ACCEPT = "accept"
    """Tell the stage before from which position on this one needs rows."""
    MEET = "meet"
    """Connect to the next stage in the ring: rows need not wait for that then."""
    TOUCH = "touch"
    """The session's time limit begins anew."""
    SEND_TOKENS = "send_tokens"


Effect = Up | ToOwner | Down | Rewind | Resend | Count | End | Do

_OPENING, _REOPENING, _ACTIVE, _PAUSED, _FINISHED, _CLOSED = StageState
_STAYS = {state: state for state in HOLDING}
_ENDS = dict.fromkeys(HOLDING, _CLOSED)

TRANSITIONS: dict[type[Event], dict[StageState, StageState]] = {
    Accepted: {_OPENING: _ACTIVE, _REOPENING: _ACTIVE},
    SessionRefused: {**_STAYS, _OPENING: _CLOSED, _REOPENING: _PAUSED},
    SessionFailed: dict.fromkeys(HOLDING, _PAUSED),
    SessionLeaving: _STAYS,
    MigrationReady: _STAYS,
    SessionClose: _ENDS,
    Lost: {_OPENING: _PAUSED, _REOPENING: _PAUSED, _ACTIVE: _PAUSED},
    HopLost: _STAYS,  # or as of a refusal or a loss, which follow from it
    Completed: {_ACTIVE: _FINISHED, _PAUSED: _FINISHED},
    GivenUp: _ENDS,
    Expired: {**_ENDS, _FINISHED: _CLOSED},
    Leaves: {_ACTIVE: _ACTIVE},
    MoveAsked: {_ACTIVE: _ACTIVE},
    MoveReplied: _STAYS,
    MoveDropped: _STAYS,
}
"""The state after each event, by the state before it; in other states the event does nothing."""


def step(session: StageSession, event: Event) -> list[Effect]:
    """Take an event; returns what follows from it, in order."""
    before = session.state
    following = TRANSITIONS[type(event)].get(before)
    if following is None:
        return []
    session.state = following
    me, open_ = session.stage.peer_id, session.open
    match event:
        case Accepted():
            return _accepted(session, event)
        case SessionRefused() if following is not before:
            return [Up(event), Do.TOUCH if following is _PAUSED else End()]
        case SessionRefused() | SessionFailed() | SessionLeaving() | MigrationReady():
            return [Up(event)]
        case SessionClose(tokens=tokens):
            return _closed(session, tokens)
        case Lost(peer_id=peer_id, reason=reason):
            return [Count("paused"), Do.TOUCH, ToOwner(failed_of(open_, peer_id, me, reason))]
        case HopLost():
            return _hop_lost(session, event)
        case Completed():
            rows, ring = open_.prompt_tokens + len(session.sampled) - 1, session.ring_peer
            told = [] if ring is None else [Down(ring, close_of(open_, rows), dials=True)]
            return [Count("finished"), End(rows, keeps=True), *told]
        case GivenUp(reason=reason, retry_after_s=after_s):
            return [ToOwner(failed_of(open_, me, me, reason, after_s)), End()]
        case Expired():
            return [End()]
        case Leaves(to=to):
            leaving = SessionLeaving(session=session.key, attempt=open_.attempt, peer_id=me, to=to)
            return [ToOwner(leaving)]
        case _:
            return _moves(session, event)


def _accepted(session: StageSession, event: Accepted) -> list[Effect]:
    """Serve the next stage from the position that it asks for, and accept.

    One that is ahead gets nothing until this stage has caught up. One that is behind gets logged
    rows or, if the log does not reach back so far, rows that are run again.
    """
    asked, own = event.position, session.next_position
    if asked is None:
        session.importing = event.importing
        return [Do.ACCEPT, Do.MEET] if len(session.open.route) > 1 else [Do.ACCEPT]
    session.send_position = asked
    if asked >= own:
        return [Do.ACCEPT]
    if event.logged:
        return [Resend(asked, own), Do.ACCEPT]
    return [Count("rerun_rows", (own - asked) * session.taken_over), Rewind(asked), Do.ACCEPT]


def _hop_lost(session: StageSession, event: HopLost) -> list[Effect]:
    """End a move to that peer; refuse what is being opened, and pause what runs."""
    peer_id, reason, effects = event.peer_id, event.reason, list[Effect]()
    if session.move is not None and session.move.next_peer == peer_id:
        effects = _end_move(session, peer_id, RefusalCode.UNREACHABLE, reason)
    if peer_id not in session.hop_peers:
        return effects
    if session.state not in TRANSITIONS[Accepted]:
        return effects + step(session, Lost(peer_id=peer_id, reason=reason))
    me = session.stage.peer_id
    refused = refused_of(session.open, me, RefusalCode.UNREACHABLE, reason, peer_id=peer_id)
    return effects + step(session, refused)


def _closed(session: StageSession, tokens: int) -> list[Effect]:
    """Tell the stages behind, those of a move, and a client that waits for tokens."""
    effects: list[Effect] = []
    if session.next_peer is not None:  # beyond a lost link, it ends by its own time limit
        effects.append(Down(session.next_peer, close_of(session.open, tokens)))
    if session.move is not None and session.move.copies:
        effects.append(Down(session.move.next_peer, close_of(session.move.open)))
    if session.is_last:
        session.finish_reason = FinishReason.CANCELLED
        effects.append(Do.SEND_TOKENS)
    return [*effects, Count("closed"), End(tokens)]


def _moves(session: StageSession, event: MoveAsked | MoveReplied | MoveDropped) -> list[Effect]:
    """Take part in a planned move of later stages, while this one serves on."""
    if isinstance(event, MoveAsked):
        session.move = new = Migration(open=event.open, upstream=event.upstream)
        new.copies = new.next_peer != session.next_peer
        logged = event.logged or not new.copies
        open_ = replace(event.open, hop=event.open.hop + 1, rows_logged=logged)
        return [Down(new.next_peer, open_, dials=True)]
    move = session.move
    if move is None:
        return []
    if isinstance(event, MoveDropped):
        session.move = None
        return [Down(move.next_peer, close_of(move.open))]
    message = event.message
    if isinstance(message, SessionRefused | SessionFailed):
        session.move = None
    waits = move.copies and not move.ready
    if not (waits and isinstance(message, SessionAccepted) and message.rows):
        return [Up(message, move.upstream)]
    if not event.logged:
        reason = "the rows so far are not logged here"
        return _end_move(session, session.stage.peer_id, RefusalCode.NOT_HELD, reason)
    move.ready, move.copied_position = True, message.position
    rows = max(0, session.done_position - message.position)
    return [Count("copied_rows", rows), Up(message, move.upstream)]


def _end_move(session: StageSession, peer_id: str, code: RefusalCode, reason: str) -> list[Effect]:
    """End a move, because of ``peer_id``; the session stays where it is."""
    move, session.move = session.move, None
    if move is None:
        return []
    refused = refused_of(move.open, session.stage.peer_id, code, reason, peer_id=peer_id)
    return [Up(refused, move.upstream)]


# What an open is

OpenKind = Literal["new", "take over", "move"]
"""What an open asks of a stage: a session that is not here, or whose attempt here is of no use; the
next attempt, over the KV of the one before; to serve on, and pass on that later stages move."""


def kind_of(
    open_: SessionOpen, before: StageSession | None, me: str, view: StageView
) -> OpenKind | tuple[RefusalCode, str]:
    """What ``open_`` asks of peer ``me``, which has the attempt ``before``; or why it is refused,
    whatever room there is."""
    kept = before is not None and before.can_take_over(open_)
    if before is not None and open_.migrate_until is not None:
        serves = kept and before.state is _ACTIVE and not before.is_warming
        sound = refusal_of(open_, me, view, taken_over=True) is None
        if serves and sound and open_.hop + 1 < len(open_.route):
            return "move"
        return RefusalCode.BAD_REQUEST, "this stage cannot take part in the move"
    if before is not None and open_.client != before.open.client:
        return RefusalCode.BAD_REQUEST, "this session belongs to another client"
    if before is not None and open_.attempt <= before.open.attempt:
        return RefusalCode.BAD_REQUEST, "this session is open already"
    refusal = refusal_of(open_, me, view, taken_over=kept)
    return refusal or ("take over" if kept else "new")


# Messages


def refused_of(
    of: SessionOpen | KvCopy,
    me: str,
    code: RefusalCode,
    reason: str,
    wait_s: float = 0.0,
    *,
    peer_id: str | None = None,
) -> SessionRefused:
    """The word of ``me``, not signed yet: it, or the peer ``peer_id``, cannot take part."""
    return SessionRefused(
        session=of.session,
        attempt=of.attempt,
        peer_id=peer_id or me,
        by=me,
        code=code,
        reason=reason[:REASON_CHARACTERS_MAX],
        retry_after_s=wait_s,
    )


def failed_of(
    of: SessionOpen | TokensAttach, peer_id: str, me: str, reason: str, wait_s: float = 0.0
) -> SessionFailed:
    """The word of ``me``, not signed yet: ``peer_id`` was lost, or gave its KV to others."""
    return SessionFailed(
        session=of.session,
        attempt=of.attempt,
        peer_id=peer_id,
        by=me,
        reason=reason[:REASON_CHARACTERS_MAX],
        retry_after_s=wait_s,
    )


def close_of(open_: SessionOpen, tokens: int = 0) -> SessionClose:
    """A close for the attempt of ``open_``; ``tokens``: see :class:`SessionClose`."""
    return SessionClose(session=open_.session, attempt=open_.attempt, tokens=tokens)
