"""One answer's session: performs what a ``client.session.controller.SessionController`` decides."""

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType

from client.answer.answer import AnswerLog, AnswerRequest, PrefixCache
from client.errors import (
    RequestRefusedError,
    StatusCallback,
    UnavailableError,
    no_route_text,
)
from client.session.attempt import Attempt
from client.session.config import SessionConfig
from client.session.controller import ControllerState, RouteStatus, SessionController
from client.session.events import (
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
    Lost,
    MigrationRouteFound,
    Open,
    OpenMigration,
    Refused,
    RouteFound,
    TellWait,
)
from client.view.prefixes import NamedPrompt
from client.view.view import SwarmView
from client.view.waiting import Waiting
from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.failure.pinger import BY_CLIENTS, answering
from coordinator.policies.routing.affinity import KnownPrefix, Route
from coordinator.policies.routing.routes import NoRoute
from dht.errors import NetworkError, SwarmError
from dht.identity.grant import NONCE_DIGITS, session_name
from dht.identity.peer_id import short_name
from dht.messages import codec
from dht.messages.session import SESSION_BOUNDS, Priority, SessionClose, SessionOpen
from dht.messages.types import looks_within
from dht.process.supervision import end_all, loop_s
from dht.transport.interface import SESSION_PROTOCOL, Transport

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TokenPace:
    """Times of the tokens that came over one route: when they came, not when they were taken."""

    route: Route = ()
    expected_s: float = math.inf
    """Expected seconds per token when the route was taken."""
    tokens: int = 0
    """Number of tokens behind the first ones."""
    _first_s: float | None = None
    _last_s: float = 0.0

    def came(self, tokens: int, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
        else:
            self.tokens += tokens
        self._last_s = now_s

    @property
    def has_begun(self) -> bool:
        """Whether a token has come over the route."""
        return self._first_s is not None

    @property
    def token_s(self) -> float:
        """Mean seconds per token; a median would not see pauses between bursts."""
        return (self._last_s - (self._first_s or 0.0)) / self.tokens


async def turn_or(most_s: float, waiting: Waiting) -> None:
    """Wait until it is a request's turn to look for a route again, for ``most_s`` at most."""
    woken = asyncio.Event()
    with waiting.listed(woken.set), suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await woken.wait()


class SessionDriver:
    """Runs one session. Iterate :meth:`tokens` once."""

    def __init__(
        self,
        transport: Transport,
        view: SwarmView,
        request: AnswerRequest,
        *,
        wait_s: float,
        look: Callable[[], Awaitable[None]],
        on_status: StatusCallback,
    ) -> None:
        """``look`` reads the swarm's records into ``view`` anew; ``wait_s`` bounds how long an
        answer waits for a route or a token."""
        self._config = SessionConfig()
        self._transport = transport
        self._view = view
        self._request = request
        self._look = look
        self._on_status = on_status
        self.controller = SessionController(
            log=AnswerLog(request=request), wait_s=wait_s, config=self._config
        )
        """The state machine that decides; it holds the log, the route and the failovers."""
        self.waits_for = self._told_wait = ""
        """What the answer waits for since it lost its route, and what of it the caller was told."""
        self._no_route: NoRoute | None = None
        """Why there is no route, while there is none."""
        self.on_route: Callable[[RouteStatus], None] | None = None
        """Hears how it stands with the route, whenever that changes."""
        self._told: RouteStatus | None = None
        nonce = secrets.token_hex(NONCE_DIGITS // 2)
        self._session = session_name(transport.peer_id, nonce)
        use = request.prefix_cache
        self._named: NamedPrompt | None = None
        """The prompt's blocks, unless their KV is not to be kept."""
        if use is not PrefixCache.OFF:
            shared = use is PrefixCache.SHARED
            salt = request.cache_salt
            self._named = view.prefixes.named(request.prompt_ids, salt, shared=shared)
        self._events: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()
        """What happened, and when."""
        self._came_s = 0.0
        """When the event came that is dealt with."""
        self._attempts: list[Attempt] = []
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._warm: Attempt | None = None
        self._searches: list[asyncio.Task[None]] = []
        """The search for a route of a planned move, if one was begun."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._asked: set[str] = set()
        self._pace = TokenPace()
        self._so_far: tuple[object, ...] = ()
        """How far the answer had come when an event was last waited for."""
        self._since_s = 0.0
        """When it was first seen to be as far."""

    async def tokens(self) -> AsyncGenerator[tuple[int, ...], None]:
        """New tokens as they arrive, until the answer is whole.

        Raises:
            UnavailableError: no route was found, or peers refused, for too long.
            RequestRefusedError: all peers that were asked call the request unsound.
            SwarmError: no peer can do what it asks.
            ClosedError: this client has left the network.
        """
        controller = self.controller
        self._view.check()
        ordinary = not self._urgent
        todo = deque(controller.start(loop_s()))
        try:
            while controller.state is not ControllerState.DONE or todo:
                self._tell_route()
                if not todo:
                    event = await self._next_event()
                    self._view.check()
                    event = await self._judged(event)
                    todo += controller.step(event, loop_s())
                    if controller.state is not ControllerState.OPENING:
                        is_taken = controller.state is ControllerState.RUNNING
                        self._was_answered(had_room=ordinary and is_taken)
                    continue
                effect = todo.popleft()
                if isinstance(effect, Deliver):
                    self.waits_for = self._told_wait = ""
                    self._no_route = None
                    self._view.avoidance.worked(stage.peer_id for stage in controller.route)
                    self._pace.came(len(effect.token_ids), self._came_s)
                    yield effect.token_ids
                elif isinstance(effect, FindRoute):
                    todo += controller.step(await self._find(effect), loop_s())
                else:
                    await self._perform(effect)
        finally:
            self._was_answered()
            self._compare_times()
            self._view.own.ends(self._session)
            await self._end()

    def _compare_times(self) -> None:
        """Let the view know what a token took over the present route."""
        pace = self._pace
        if pace.tokens >= self._config.pace_tokens_least:
            now_s = loop_s()
            self._view.took(pace.route, pace.expected_s, pace.token_s, now_s)

    def _tell_route(self) -> None:
        if self.on_route is None or self.controller.state is ControllerState.DONE:
            return
        status = self.controller.status(self._no_route)
        if status != self._told:
            self._told = status
            self.on_route(status)

    def _was_answered(self, *, had_room: bool = False) -> None:
        if self._asked:
            self._view.answered(self._asked, had_room=had_room)
            self._asked = set()

    async def _next_event(self) -> Event:
        """What happens next; a loss when the route stalls although both its ends answer.

        Only what brings the answer on counts: a stage may go on saying other things for ever, or
        have the session moved to and fro.
        """
        controller, limit_s = self.controller, self._config.stall_s
        if not self._pace.has_begun:  # all that is known may have to run again first
            limit_s += self._config.watch.known_token_s * len(controller.log.replay_ids)
        so_far = controller.progress
        if so_far != self._so_far:
            self._so_far, self._since_s = so_far, loop_s()
        try:
            # asyncio.wait_for loses a cancellation that comes with an event, until Python 3.12.
            async with asyncio.timeout_at(self._since_s + limit_s):
                self._came_s, event = await self._events.get()
                return event
        except TimeoutError:
            self._so_far = ()
            reason = f"no token for {limit_s:.0f} s although it answers"
            last, *others = [stage.peer_id for stage in reversed(controller.route)]
            return Lost(
                attempt=controller.attempt, peer_id=last, reason=reason, suspects=tuple(others)
            )

    async def _judged(self, event: Event) -> Event:
        """``event``, with the one peer that is taken to be at fault where several may be.

        All are asked: the only one that does not answer is at fault, whatever happened before.
        """
        controller = self.controller
        if not isinstance(event, Lost | Refused) or not event.suspects:
            return event
        if event.attempt not in {controller.attempt, controller.spent_attempt}:
            return event  # the route was given up already, for the same reason or another
        suspects = (event.peer_id, *event.suspects)
        asked = {peer_id: self._view.addresses_of(peer_id) for peer_id in suspects}
        there = await answering(
            self._transport, BY_CLIENTS, asked, self._config.ask_s, self._config.ask_grace_s
        )
        silent = set(suspects) - there
        at_fault = silent.pop() if len(silent) == 1 else self._view.at_fault(suspects, loop_s())
        return replace(event, peer_id=at_fault, suspects=())

    @property
    def _kv_tokens(self) -> int:
        """KV tokens that a new stage needs: stages admit by what they expect of answers."""
        log = self.controller.log
        return len(log.replay_ids) + min(log.remaining_tokens, ADMISSION.answer_tokens) - 1

    async def _find(self, wanted: FindRoute) -> Event:
        """The route that is wanted; records are read anew after a wait."""
        view, kv_tokens = self._view, self._kv_tokens
        if wanted.after_s:
            await turn_or(wanted.after_s, view.waiting)
            await self._look()
        route = view.draw(
            wanted.mend,
            wanted.lost,
            kv_tokens,
            loop_s(),
            urgent=self._urgent,
            without=wanted.without,
            known=self._known(kv_tokens),
        )
        return RouteFound(route=route, doubts_count=view.believes(wanted.without))

    async def _find_move(self, wanted: FindMigrationRoute) -> None:
        """Post a route for a planned move by records read anew; tokens come on meanwhile."""
        await self._look()
        view, mend, leaving = self._view, wanted.mend, wanted.leaving
        now_s = loop_s()
        if wanted.to:
            route = view.swap(mend, leaving, wanted.to, self._kv_tokens, now_s)
        else:
            lost = frozenset({leaving})
            route = view.draw(mend, lost, self._kv_tokens, now_s, urgent=self._urgent)
        self._post(MigrationRouteFound(route=route, mend=mend))

    def _known(self, kv_tokens: int) -> KnownPrefix | None:
        named, prompt = self._named, len(self.controller.log.replay_ids)
        if named is None or not named.route:
            return None
        return KnownPrefix(
            route=named.route,
            cached_tokens=named.known_tokens,
            prompt_tokens=prompt,
            answer_tokens=kv_tokens + 1 - prompt,
        )

    @property
    def _urgent(self) -> bool:
        """Whether peers grant the session room that they keep from ordinary ones."""
        return self._request.priority is Priority.HIGH or bool(self.controller.log.token_ids)

    async def _perform(self, effect: Effect) -> None:
        log = self.controller.log
        match effect:
            case Open(attempt=number, route=route):
                attempt = self._attempt_of(self._open_of(number, route))
                self._attempts.append(attempt)
                self._compare_times()
                expected_s = self._view.goes_over(self._session, route)
                self._pace = TokenPace(route=route, expected_s=expected_s)
                if not self.controller.accepted:
                    self._asked = {stage.peer_id for stage in route}
                    self._view.avoidance.asked(self._asked)
                attempt.open()
            case FindMigrationRoute():
                await end_all(self._searches)
                self._searches = [asyncio.create_task(self._find_move(effect))]
            case OpenMigration() | FeedMigration() | CopyKv() | DropMigration():
                await self._perform_move(effect)
            case Feed(position=position, behind=behind):
                await self._drop_warm()
                # Earlier attempts' streams kept the first stage's share alive until now.
                for old in self._attempts[:-1]:
                    await old.close(ends_session=False)
                del self._attempts[:-1]
                self._attempts[-1].feed(position, log.replay_ids, behind=behind)
            case Leave(attempt=attempt, stages=stages):
                self._leave(attempt, [stage.peer_id for stage in stages])
            case Avoid(peer_id=peer_id, code=code, retry_after_s=after_s):
                logger.info("peer %s: %s", short_name(peer_id), effect.reason)
                if code is None:
                    self._on_status(
                        f"{self._view.name_of(peer_id)} left; going on over another route"
                    )
                now_s = loop_s()
                self._view.avoid(
                    peer_id, code, after_s, now_s, urgent=self._urgent, reason=effect.reason
                )
            case TellWait(no_route=no_route):
                self._tell(no_route)
            case GiveUp() as end:
                raise self._final(end)

    def _final(self, end: GiveUp) -> SwarmError | RequestRefusedError:
        """What the client is told of an answer that is given up."""
        if end.no_route is None:
            return RequestRefusedError(end.reason) if end.is_unsound else SwarmError(end.reason)
        text, after_s = self.waits_for or end.reason, end.retry_after_s
        if after_s:
            text += f"; try again in about {max(1, round(after_s))} s"
        return UnavailableError(text, end.no_route.missing, retry_after_s=after_s)

    def _tell(self, no_route: NoRoute) -> None:
        """Tell the caller what the answer waits for, where that is news."""
        self._no_route = no_route
        text = no_route_text(no_route)
        now_s = loop_s()
        why = self._view.passed_over(no_route.missing, now_s)
        most = self._config.why_max
        more = (f"{len(why) - most} more",) if len(why) > most else ()
        self.waits_for = f"{text} ({'; '.join((*why[:most], *more))})" if why else text
        if text != self._told_wait:  # the same loss, in other words, is no news
            self._told_wait = text
            self._on_status(f"waiting: {text}")

    async def _drop_warm(self) -> None:
        if self._warm is not None:
            await self._warm.close(ends_session=False)
            self._warm = None

    async def _perform_move(
        self, effect: OpenMigration | FeedMigration | CopyKv | DropMigration
    ) -> None:
        match effect:
            case OpenMigration(attempt=number, route=route, until=until, copy_from=source):
                open_ = replace(self._open_of(number, route), migrate_until=until, copy_from=source)
                self._warm = self._attempt_of(open_)
                self._warm.open()
                if route[-1] not in self.controller.accepted:
                    self._warm.meet_last()
            case CopyKv(source=source, to=to):
                if self._warm is not None:
                    self._warm.copy_kv(source, to)
            case FeedMigration():
                if self._warm is not None:
                    self._warm.feed_copy(self.controller.log.replay_ids[: self._warm.prompt_tokens])
            case DropMigration():
                await self._drop_warm()

    def _post(self, event: Event) -> None:
        self._events.put_nowait((loop_s(), event))

    def _attempt_of(self, open_: SessionOpen) -> Attempt:
        vocab = self._request.model.vocab
        return Attempt(
            self._transport, open_, self._addresses, self._post, vocab=vocab, config=self._config
        )

    def _open_of(self, attempt: int, route: Route) -> SessionOpen:
        log, request = self.controller.log, self._request
        addresses: Mapping[str, tuple[str, ...]] = {
            stage.peer_id: self._view.addresses_of(stage.peer_id) for stage in route
        }
        for peer_id, known in addresses.items():
            if known:  # the record of a stage that goes on may have expired meanwhile
                self._addresses[peer_id] = known
        return SessionOpen(
            session=self._session,
            attempt=attempt,
            client=self._transport.peer_id,
            fingerprint=request.model.fingerprint,
            route=route,
            hop=0,
            prompt_tokens=len(log.replay_ids),
            max_new_tokens=log.remaining_tokens,
            sampling=request.sampling,
            answered=len(log.token_ids),
            history=log.history,
            scores_from=1 + len(log.prompt_scores),
            priority=request.priority,
            draft_tokens=request.draft_tokens,
            prompt_ids=self._told_to(route),
            feature_layers=self._seen_by(route),
            blocks=b"" if self._named is None else b"".join(self._named.names),
            shares_prefix=self._named is not None and self._named.is_shared,
        )

    def _seen_by(self, route: Route) -> tuple[int, ...] | UnsetType:
        """Layers in front of which the last stage's head looks, if it has one that does and says
        what can be."""
        request, last = self._request, self._view.nodes.get(route[-1].peer_id)
        if last is None or not last.foretells or not request.draft_tokens:
            return UNSET
        sound = looks_within(last.feature_layers, request.model.layers)
        return last.feature_layers if last.feature_layers and sound else UNSET

    def _told_to(self, route: Route) -> tuple[int, ...]:
        """The tokens so far, where the last stage foretells and has them from nowhere else."""
        log, last = self.controller.log, self._view.nodes.get(route[-1].peer_id)
        if last is None or not last.foretells or not self._request.draft_tokens:
            return ()
        so_far, told = log.replay_ids, len(log.history)
        known = len(route) == 1 or told == len(so_far)
        return () if known or told + len(so_far) > SESSION_BOUNDS.history_tokens_max else so_far

    def _leave(self, attempt: int, peers: list[str]) -> None:
        for peer_id in dict.fromkeys(peers):
            task = asyncio.create_task(self._close_at(peer_id, attempt))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _close_at(self, peer_id: str, attempt: int) -> None:
        """Free one stage's share directly; a stage that is dead has freed it anyway."""
        with suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(self._config.leave_s):
                stream = await self._transport.open_stream(
                    peer_id, SESSION_PROTOCOL, addresses=self._addresses.get(peer_id, ())
                )
                close = SessionClose(session=self._session, attempt=attempt)
                try:
                    await codec.send_frame(stream, close)
                finally:
                    await stream.close()

    async def _end(self) -> None:
        """Free the route, and what is left of earlier ones; remember what it keeps."""
        controller = self.controller
        if self._named is not None and controller.accepted:
            ran = controller.log.replay_ids[:-1]
            self._view.prefixes.remember(self._named, ran, self._session, controller.accepted)
        await end_all(self._searches)
        await self._drop_warm()
        if controller.move is not None and controller.move.attempt:
            new = [s.peer_id for s in controller.move.route if s not in controller.accepted]
            self._leave(controller.move.attempt, new)
        for attempt in self._attempts:
            await attempt.close(ends_session=True)
        if (
            controller.state is not ControllerState.DONE
            and controller.state is not ControllerState.RUNNING
        ):
            left = (*controller.accepted, *controller.touched, *controller.route)
            self._leave(controller.attempt, [stage.peer_id for stage in left])
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=self._config.leave_s)
