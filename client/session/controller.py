"""The client's side of one session: which route it takes, when it is mended, when it is given up.

Pure: events with the time go in, effects come out in the order in which they are to be performed
(:mod:`client.session.driver` does that). The client alone decides on routes, so it is never in
question who replaces a stage; stages only keep what they hold until the next attempt reaches them.

An attempt is one route that was tried. It ends when a stage refuses or is lost; the next one keeps
the survivors of the last route *that was accepted* and replaces the rest.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from client.answer.answer import AnswerLog
from client.session.config import SessionConfig
from client.session.events import (
    Accepted,
    Arrived,
    Avoid,
    CopyKv,
    Deliver,
    DropMigration,
    Effect,
    Event,
    Feed,
    FeedMigration,
    FindMigrationRoute,
    FindRoute,
    GiveUp,
    Leave,
    Leaving,
    Lost,
    MigrationCaughtUp,
    MigrationRouteFound,
    Open,
    OpenMigration,
    PromptScored,
    Refused,
    RouteFound,
    TellWait,
)
from coordinator.policies.routing.affinity import Route
from coordinator.policies.routing.balance import BALANCE
from coordinator.policies.routing.routes import NoRoute
from dht.messages.session import NO_ROOM, OVERFLOWS, RefusalCode
from dht.messages.types import RouteStage


class ControllerState(StrEnum):
    DRAWING = "drawing"
    """A route is wanted."""
    OPENING = "opening"
    """An open is on its way down the route."""
    RUNNING = "running"
    """Every stage has accepted; tokens come."""
    DONE = "done"
    """The answer is whole."""
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStatus:
    """How it stands with an answer's route."""

    state: ControllerState
    route: Route
    """The present attempt's route; while none is drawn, the last one; empty before the first."""
    lost: frozenset[str]
    """Peers that failed or refused since every stage accepted a route."""
    failovers: int
    no_route: NoRoute | None = None
    """Why there was no route when one was drawn last; None once tokens come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A planned move in the making, while the present attempt serves on."""

    leaving: str
    to: str = ""
    """The freer peer that should take over; empty where ``leaving`` does leave."""
    attempt: int = 0
    """Route attempt of the copies; 0 while a route is being drawn."""
    route: Route = ()
    until_s: float = 0.0
    copy_from: str | None = None
    """Peer that could send the new stage its KV: the one that leaves, where one takes its place."""


@dataclass(slots=True, kw_only=True)
class SessionController:
    """The state machine. Begin with :meth:`start`, then :meth:`step` for every event."""

    log: AnswerLog
    wait_s: float
    """Time without a route or a token after which the client gives up."""
    config: SessionConfig = field(default_factory=SessionConfig)
    poll_s: float = 0.25
    """Time between two looks for a route."""
    state: ControllerState = ControllerState.DRAWING
    route: Route = ()
    """Route of the present attempt; empty after a refusal that left nothing there."""
    accepted: Route = ()
    """The last route that every stage accepted: its survivors hold the session's KV."""
    doubted: set[str] = field(default_factory=set)
    """Peers that called the request unsound."""
    lost: set[str] = field(default_factory=set)
    """Peers that failed or refused since ``accepted``."""
    touched: list[RouteStage] = field(default_factory=list)
    """Stages that may hold KV although they are not on ``accepted``."""
    deadline_s: float = 0.0
    cached_tokens: int = 0
    """Number of leading tokens of the prompt whose KV the first route had kept."""
    failovers: int = 0
    is_paused: bool = False
    """Whether no token has come since the answer had to give way."""
    move: Migration | None = None
    relieved_s: dict[str, float] = field(default_factory=dict)
    """When the wishes of stages for relief were heard, of late."""
    move_s: float = BALANCE.move_s
    """How long the new stages of a move may take to catch up."""
    copies: bool = True
    """Whether KV may be copied; not any more once a stage could not."""
    spent_attempt: int = 0
    """The largest attempt that was used, by a route or by copies."""
    overflows: bool = False
    """Whether a stage's numbers overflowed: where no other route is, none will do."""
    last_reason: str = ""
    retry_after_s: float = 0.0
    without_room: int = 0
    """Refusals for want of room so far."""
    fruitless: int = 0
    """Attempts that ended since the last token; planned moves end none."""

    @property
    def attempt(self) -> int:
        return self.log.attempt

    @property
    def progress(self) -> tuple[object, ...]:
        """Changes when the answer comes on, and when a route took the place of one that failed.

        A planned move changes nothing of it: stages may ask for one after the other for ever.
        """
        log = self.log
        is_accepted = bool(self.accepted) and not self.lost
        return is_accepted, self.fruitless, len(log.token_ids), len(log.prompt_scores)

    def status(self, no_route: NoRoute | None) -> RouteStatus:
        """How it stands with the route now."""
        return RouteStatus(
            state=self.state,
            route=self.route or self.accepted,
            lost=frozenset(self.lost),
            failovers=self.failovers,
            no_route=no_route,
        )

    def start(self, now_s: float) -> list[Effect]:
        """The first effects of a new session."""
        self.deadline_s = now_s + self.wait_s
        return [self._draw()]

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event. What does not fit the state or comes from an old attempt does nothing."""
        match (self.state, event):
            case (ControllerState.DRAWING, RouteFound(route=route, doubts_count=doubts_count)):
                return self._drawn(route, now_s, doubts_count=doubts_count)
            case (ControllerState.OPENING, Accepted(attempt=self.attempt, position=position)):
                return self._accepted(position)
            case (ControllerState.OPENING, Refused(attempt=self.attempt) as refused):
                return self._refused(refused, now_s)
            case (
                ControllerState.OPENING | ControllerState.RUNNING,
                Lost(attempt=self.attempt) as lost,
            ):
                return [*self._drop_move(), *self._lost(lost, now_s)]
            case (ControllerState.OPENING, Lost(watched=True, peer_id=peer_id) as lost) if (
                peer_id in {stage.peer_id for stage in self.route}
            ):
                # Of an earlier route: who noticed this loss first was taken for the lost one.
                return self._lost(lost, now_s)
            case (ControllerState.RUNNING, Arrived() as arrived):
                return self._arrived(arrived, now_s)
            case (ControllerState.RUNNING, Leaving(attempt=self.attempt) as leaving):
                return self._leaving(leaving, now_s)
            case (
                ControllerState.RUNNING,
                MigrationRouteFound(route=route, mend=self.accepted),
            ) if self.move is not None and not self.move.attempt:
                return self._move_drawn(route, self.move, now_s)
            case (
                ControllerState.RUNNING,
                (Accepted() | Refused() | Lost() | MigrationCaughtUp()) as told,
            ) if self.move is not None and 0 < self.move.attempt == told.attempt:
                return self._moved_on(told, self.move)
            case (
                ControllerState.RUNNING,
                PromptScored(attempt=attempt, position=position, scores=scores),
            ):
                self.log.accept_prompt_scores(attempt=attempt, position=position, scores=scores)
                return []
            case _:
                return []

    def _draw(self, after_s: float = 0.0) -> FindRoute:
        self.state = ControllerState.DRAWING
        return FindRoute(
            mend=self.accepted,
            lost=frozenset(self.lost),
            after_s=after_s,
            without=frozenset(self.doubted),
        )

    def _drawn(
        self, route: Route | NoRoute, now_s: float, *, doubts_count: bool = True
    ) -> list[Effect]:
        nobody = isinstance(route, NoRoute)
        all_say = nobody or len(self.doubted) >= self.config.unsound_tries
        is_unsound = bool(self.doubted) and not self.accepted and all_say and doubts_count
        if is_unsound or (nobody and self.overflows):
            self.state = ControllerState.GAVE_UP
            # What overflows is no mistake of the request.
            return [GiveUp(reason=self.last_reason, is_unsound=not self.overflows)]
        is_late = now_s >= self.deadline_s
        if not isinstance(route, NoRoute):
            if is_late and self.fruitless >= self.config.fruitless_max:
                self.state = ControllerState.GAVE_UP
                return [GiveUp(reason=f"{self.fruitless} routes in a row brought no token")]
            self.state, self.route = ControllerState.OPENING, route
            return [Open(attempt=self.attempt, route=route)]
        if is_late:
            self.state = ControllerState.GAVE_UP
            return [
                TellWait(no_route=route),
                GiveUp(
                    reason=self.last_reason or route.reason,
                    no_route=route,
                    retry_after_s=self.retry_after_s or route.retry_after_s,
                ),
            ]
        return [TellWait(no_route=route), self._draw(self.poll_s)]

    def _accepted(self, position: int) -> list[Effect]:
        self.state = ControllerState.RUNNING
        if not self.accepted:
            self.cached_tokens = position
        behind = position > 0 and self.route[0] not in self.accepted
        self.move = None
        on_route = set(self.route)
        left = [s for s in (*self.accepted, *self.touched) if s not in on_route]
        self.accepted, self.touched = self.route, []
        self.lost.clear()
        effects: list[Effect] = [Feed(attempt=self.attempt, position=position, behind=behind)]
        reason = "refused a request that others take"
        effects += [Avoid(peer_id=each, code=None, reason=reason) for each in self.doubted]
        self.doubted = set()
        # A peer that serves other layers now has dropped its old attempt by itself.
        here = {stage.peer_id for stage in self.route}
        gone = tuple(dict.fromkeys(s for s in left if s.peer_id not in here))
        return [*effects, Leave(attempt=self.attempt, stages=gone)] if gone else effects

    def _refused(self, refused: Refused, now_s: float) -> list[Effect]:
        if refused.code == RefusalCode.BAD_REQUEST and not self.accepted:
            return self._called_unsound(refused)
        moved = self.move
        self.move = None
        # Another route may have room: the client gives up when none is left to try.
        self.last_reason, self.retry_after_s = refused.reason, refused.retry_after_s
        if refused.code in NO_ROOM:
            self.without_room += 1
            if moved is None:  # the new stages of a move hold their copies still
                self.route = ()  # to free it once more would cost the busiest a stream each
        self._next_attempt(refused.peer_id)
        avoid = Avoid(
            peer_id=refused.peer_id,
            code=refused.code,
            reason=refused.reason,
            retry_after_s=refused.retry_after_s,
        )
        drop = [DropMigration(attempt=moved.attempt)] if moved is not None and moved.attempt else []
        if (
            now_s >= self.deadline_s
            and self.without_room >= self.config.room_tries
            and not self.accepted
        ):
            # Who does not wait is told soon, and a crowd of them keeps nobody from work.
            self.state = ControllerState.GAVE_UP
            full = NoRoute(reason="the peers that were asked are full")
            after_s = self.retry_after_s
            give_up = GiveUp(reason=full.reason, no_route=full, retry_after_s=after_s)
            return [avoid, TellWait(no_route=full), give_up]
        return [avoid, *drop, self._draw()]

    def _called_unsound(self, refused: Refused) -> list[Effect]:
        """Ask other peers, and give up when they say the same: some may lie.

        Those that told do not count as failed for other sessions: the request may be wrong.
        """
        self.doubted.add(refused.peer_id)
        self.last_reason = refused.reason
        self._next_attempt(refused.peer_id)
        return [self._draw()]

    def _lost(self, lost: Lost, now_s: float) -> list[Effect]:
        if lost.retry_after_s:
            return self._gave_way(lost, now_s)
        self.failovers += self.state is ControllerState.RUNNING
        if OVERFLOWS in lost.reason:  # waiting helps nobody: the same rows do so again
            self.overflows, self.last_reason = True, lost.reason
        self._next_attempt(lost.peer_id)
        return [Avoid(peer_id=lost.peer_id, code=None, reason=lost.reason), self._draw()]

    def _gave_way(self, lost: Lost, now_s: float) -> list[Effect]:
        """A stage needed the KV for other sessions: go on over another, or there later."""
        if not self.is_paused:  # once between two tokens: a stage may say so for ever
            self.is_paused = True
            self.deadline_s = max(self.deadline_s, now_s + self.config.paused_s)
        self._next_attempt(lost.peer_id)
        avoid = Avoid(
            peer_id=lost.peer_id,
            code=RefusalCode.NO_KV,
            reason=lost.reason,
            retry_after_s=lost.retry_after_s,
        )
        return [avoid, self._draw()]

    def _next_attempt(self, lost_peer: str) -> None:
        self.lost.add(lost_peer)
        self.fruitless += 1
        self.touched += [s for s in self.route if s not in self.accepted]
        self._new_attempt()

    def _new_attempt(self) -> None:
        self.log.attempt = self.spent_attempt = max(self.log.attempt, self.spent_attempt) + 1

    # Planned moves

    def _leaving(self, leaving: Leaving, now_s: float) -> list[Effect]:
        """A stage will leave, or asks for relief: look for another, unless that is under way."""
        peer_id, to = leaving.peer_id, leaving.to
        if peer_id not in {stage.peer_id for stage in self.route}:
            return []
        dropped: list[Effect] = []
        if self.move is not None:
            if self.move.attempt and now_s > self.move.until_s:
                return self._drop_move()
            if to or not self.move.to or self.move.leaving == peer_id:
                return []
            dropped = self._drop_move()  # who leaves goes before who would have it easier
        if to:
            self.relieved_s = {
                peer: at_s
                for peer, at_s in self.relieved_s.items()
                if now_s < at_s + self.config.relief_every_s
            }
            soon = any(now_s < at_s + self.config.relief_gap_s for at_s in self.relieved_s.values())
            if soon or peer_id in self.relieved_s or self._scores_prompt:
                return []
            self.relieved_s[peer_id] = now_s
            self.move = Migration(leaving=peer_id, to=to)
            return [FindMigrationRoute(mend=self.accepted, leaving=peer_id, to=to)]
        self.move = Migration(leaving=peer_id)
        avoid = Avoid(peer_id=peer_id, code=RefusalCode.DRAINING, reason="leaves")
        return [*dropped, avoid, FindMigrationRoute(mend=self.accepted, leaving=peer_id)]

    @property
    def _scores_prompt(self) -> bool:
        """Whether a new last stage would have to run the whole prompt again."""
        return self.log.request.sampling.prompt_logprobs is not None

    def _move_drawn(self, route: Route | NoRoute, move: Migration, now_s: float) -> list[Effect]:
        if isinstance(route, NoRoute) or move.leaving in {stage.peer_id for stage in route}:
            self.move = None  # the stage asks again while it has not left
            return []
        new = [at for at, stage in enumerate(route) if stage not in self.accepted]
        if self._scores_prompt or new != list(range(new[0], new[-1] + 1)):
            return self._commit(route)
        self.spent_attempt = max(self.attempt, self.spent_attempt) + 1
        self.move = Migration(
            leaving=move.leaving,
            to=move.to,
            attempt=self.spent_attempt,
            route=route,
            until_s=now_s + self.move_s,
            copy_from=self._copy_from(move.leaving, [route[at] for at in new]),
        )
        return [
            OpenMigration(
                attempt=self.spent_attempt,
                route=route,
                until=new[-1],
                copy_from=self.move.copy_from,
            )
        ]

    def _copy_from(self, leaving: str, new: list[RouteStage]) -> str | None:
        """``leaving`` where one new stage runs just its layers, so that its KV fits there."""
        spans = {(s.start, s.end) for s in self.accepted if s.peer_id == leaving}
        fits = len(new) == 1 and spans == {(new[0].start, new[0].end)}
        return leaving if fits and self.copies else None

    def _moved_on(self, event: Event, move: Migration) -> list[Effect]:
        """Effects of what the new stages say. A fault of theirs leaves the session where it is."""
        serving = {stage.peer_id for stage in self.accepted}
        new = [stage.peer_id for stage in move.route if stage not in self.accepted]
        match event:
            case Accepted(rows=rows):
                effects: list[Effect] = []
                if not rows and move.copy_from is not None:
                    effects.append(CopyKv(attempt=move.attempt, source=move.copy_from, to=new[0]))
                if move.route[0].peer_id in new:
                    effects.append(FeedMigration(attempt=move.attempt))
                return effects
            case MigrationCaughtUp():
                return self._commit(move.route)
            case Refused(peer_id=peer_id, code=code, reason=reason, retry_after_s=after_s):
                if code == RefusalCode.NO_COPY:
                    self.copies = False
                    return self._drop_move()  # the stage asks again while it has not left
                if peer_id in serving and move.to:
                    return self._drop_move()  # relief is not worth a replay
                if peer_id in serving:
                    # One that serves on cannot help, as its log is too short: replay in one go.
                    return [*self._drop_move(), *self._commit(move.route)]
                avoid = Avoid(peer_id=peer_id, code=code, reason=reason, retry_after_s=after_s)
                return [avoid, *self._drop_move()]
            case Lost(peer_id=peer_id, reason=reason):
                # A stage that serves on does so; it is the new one that it cannot talk to.
                blamed = new[-1] if peer_id in serving and new else peer_id
                avoid = Avoid(peer_id=blamed, code=RefusalCode.UNREACHABLE, reason=reason)
                return [avoid, *self._drop_move()]
            case _:
                return []

    def _drop_move(self) -> list[Effect]:
        move, self.move = self.move, None
        if move is None or not move.attempt:
            return []
        new = tuple(stage for stage in move.route if stage not in self.accepted)
        return [DropMigration(attempt=move.attempt), Leave(attempt=move.attempt, stages=new)]

    def _commit(self, route: Route) -> list[Effect]:
        """Hand over at the token that is known now: the next attempt goes over the new stages."""
        self._new_attempt()
        self.state, self.route = ControllerState.OPENING, route
        return [Open(attempt=self.attempt, route=route)]

    def _arrived(self, arrived: Arrived, now_s: float) -> list[Effect]:
        if arrived.attempt == self.attempt and arrived.token_ids and not self.log.prompt_is_scored:
            last = self.route[-1].peer_id
            reason = "left out scores of the prompt"
            return self._lost(Lost(attempt=self.attempt, peer_id=last, reason=reason), now_s)
        fresh = self.log.accept(
            attempt=arrived.attempt,
            position=arrived.position,
            token_ids=arrived.token_ids,
            scores=arrived.scores,
        )
        if not fresh:
            return []
        self.log.computed_s += arrived.computed_s
        self.log.waited_s += arrived.waited_s
        self.deadline_s = now_s + self.wait_s
        self.is_paused = False
        self.fruitless = 0
        self.last_reason, self.retry_after_s = "", 0.0
        if self.log.finish_reason is not None:
            self.state = ControllerState.DONE
        return [Deliver(token_ids=fresh)]
