"""One answer's session: performs what a ``client.session.failover.SessionController`` decides."""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from client.errors import UnavailableError
from client.session.attempt import Attempt, AttemptConfig
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
    Route,
    RouteFound,
    TellWait,
)
from client.session.failover import ControllerState, SessionController
from client.session.progress import Progress, Waiting
from coordinator.routing.routes import NoRoute
from dht.errors import NetworkError, SwarmError
from dht.identity.peer_id import short_name
from dht.messages import codec
from dht.messages.session import Priority, SessionClose, SessionOpen
from dht.transport.interface import SESSION_PROTOCOL, Transport

LEAVE_S = 4.0
"""For telling a stage that left the route to free its share."""


class RouteSource(Protocol):
    """What a session needs of its swarm."""

    def draw(
        self, mend: Route, lost: frozenset[str], kv_tokens: int, *, urgent: bool
    ) -> Route | NoRoute:
        """A route for ``kv_tokens`` tokens; with ``mend``, one that keeps its survivors.

        An ``urgent`` one may go over peers that only had no room for ordinary sessions.
        """
        ...

    def swap(self, mend: Route, leaving: str, to: str, kv_tokens: int) -> Route | NoRoute:
        """``mend`` with ``to`` in the place of ``leaving``, where that one has room to spare."""
        ...

    def addresses_of(self, peer_id: str) -> tuple[str, ...]: ...

    def avoid(self, avoid: Avoid, *, urgent: bool) -> None: ...

    def worked(self, route: Route, *, had_room: bool) -> None:
        """Peers delivered tokens; ``had_room`` to an ordinary session that was new to them."""
        ...

    def asked(self, route: Route) -> None:
        """A session that is new to these peers waits for what they say."""
        ...

    def answered(self, route: Route) -> None:
        """It does not wait for that any more."""
        ...

    async def look(self) -> None:
        """Read the DHT anew."""
        ...


class SessionDriver:
    """Runs one session. Iterate :meth:`tokens` once."""

    def __init__(
        self,
        transport: Transport,
        config: AttemptConfig,
        source: RouteSource,
        owner: SessionController,
        progress: Progress,
        waiting: Waiting,
        *,
        fingerprint: str,
    ) -> None:
        self._transport = transport
        self._config = config
        self._source = source
        self._owner = owner
        self._progress = progress
        self._waiting = waiting
        self._fingerprint = fingerprint
        self._session = secrets.token_hex(16)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._attempts: list[Attempt] = []
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._warm: Attempt | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._asked: Route = ()

    async def tokens(self) -> AsyncGenerator[tuple[int, ...], None]:
        """New tokens as they arrive, until the answer is whole.

        Raises:
            UnavailableError: no route was found, or peers refused, for too long.
            SwarmError: the request itself is refused.
        """
        owner, loop = self._owner, asyncio.get_running_loop()
        ordinary = not self._urgent
        todo = deque(owner.start(loop.time()))
        try:
            while owner.state is not ControllerState.DONE or todo:
                if not todo:
                    event = await self._next_event()
                    todo += owner.step(event, loop.time())
                    if owner.state is not ControllerState.OPENING:
                        self._was_answered()
                    continue
                effect = todo.popleft()
                if isinstance(effect, Deliver):
                    self._waiting.over()
                    begins = len(effect.token_ids) == len(owner.log.token_ids)
                    self._source.worked(owner.route, had_room=begins and ordinary)
                    yield effect.token_ids
                elif isinstance(effect, FindMigrationRoute):
                    await self._source.look()
                    todo += owner.step(
                        MigrationRouteFound(route=self._draw_move(effect)), loop.time()
                    )
                elif isinstance(effect, FindRoute):
                    todo += owner.step(RouteFound(route=await self._draw(effect)), loop.time())
                else:
                    await self._perform(effect)
        finally:
            self._was_answered()
            await self._end()

    def _was_answered(self) -> None:
        if self._asked:
            self._source.answered(self._asked)
            self._asked = ()

    async def _next_event(self) -> Event:
        """What happens next; a loss when the route stalls although both its ends answer."""
        config, owner = self._config, self._owner
        limit_s = config.stall_s
        if not owner.log.token_ids:
            prompt_tokens = len(owner.log.request.prompt_ids)
            limit_s += config.stall_per_prompt_token_s * prompt_tokens
        try:
            # Not wait_for: until Python 3.12 it loses a cancellation that comes with an event.
            async with asyncio.timeout(limit_s):
                return await self._events.get()
        except TimeoutError:
            reason = f"no token for {limit_s:.0f} s although it answers"
            return Lost(attempt=owner.attempt, peer_id=owner.route[-1].peer_id, reason=reason)

    async def _draw(self, draw: FindRoute) -> Route | NoRoute:
        if draw.after_s:
            await asyncio.sleep(draw.after_s)
            await self._source.look()
        return self._source.draw(draw.mend, draw.lost, self._kv_tokens, urgent=self._urgent)

    def _draw_move(self, move: FindMigrationRoute) -> Route | NoRoute:
        if move.to:
            return self._source.swap(move.mend, move.leaving, move.to, self._kv_tokens)
        lost = frozenset({move.leaving})
        return self._source.draw(move.mend, lost, self._kv_tokens, urgent=self._urgent)

    @property
    def _kv_tokens(self) -> int:
        request = self._owner.log.request
        return len(request.prompt_ids) + request.max_new_tokens - 1

    @property
    def _urgent(self) -> bool:
        """Whether peers grant it the room that they keep from ordinary sessions."""
        log = self._owner.log
        return log.request.priority is Priority.HIGH or bool(log.token_ids)

    async def _perform(self, effect: Effect) -> None:
        log = self._owner.log
        match effect:
            case Open(attempt=number, route=route):
                self._progress.route = route
                attempt = Attempt(
                    self._transport,
                    self._config,
                    self._open_of(number, route),
                    self._post,
                    vocab=log.request.vocab,
                )
                self._attempts.append(attempt)
                if not self._owner.accepted:
                    self._asked = route
                    self._source.asked(route)
                attempt.open()
            case OpenMigration() | FeedMigration() | CopyKv() | DropMigration():
                await self._perform_move(effect)
            case Feed(position=position):
                await self._drop_warm()
                # Earlier attempts' streams kept the first stage's share alive until now.
                for old in self._attempts[:-1]:
                    await old.close(ends_session=False)
                del self._attempts[:-1]
                known = log.replay_ids
                self._attempts[-1].feed(position, known[position:], from_position=len(known))
            case Leave(attempt=attempt, stages=stages):
                self._leave(attempt, [stage.peer_id for stage in stages])
            case Avoid() as avoid:
                self._progress.failovers = self._owner.failovers
                self._waiting.heard(f"peer {short_name(avoid.peer_id)}: {avoid.reason}")
                self._source.avoid(avoid, urgent=self._urgent)
            case TellWait(no_route=no_route):
                self._waiting.say(no_route)
            case GiveUp(no_route=None, reason=reason):
                raise SwarmError(reason)
            case GiveUp(no_route=no_route, reason=reason, retry_after_s=after_s):
                text = self._waiting.text or reason
                if after_s:
                    text += f"; try again in about {after_s:.0f} s"
                missing = () if no_route is None else no_route.missing
                raise UnavailableError(text, missing, retry_after_s=after_s)

    async def _drop_warm(self) -> None:
        if self._warm is not None:
            await self._warm.close(ends_session=False)
            self._warm = None

    async def _perform_move(
        self, effect: OpenMigration | FeedMigration | CopyKv | DropMigration
    ) -> None:
        log = self._owner.log
        match effect:
            case OpenMigration(attempt=number, route=route, until=until, copy_from=source):
                open_ = replace(self._open_of(number, route), migrate_until=until, copy_from=source)
                vocab = log.request.vocab
                self._warm = Attempt(self._transport, self._config, open_, self._post, vocab=vocab)
                self._warm.open()
                if route[-1] not in self._owner.accepted:
                    self._warm.meet_last()
            case CopyKv(source=source, to=to):
                if self._warm is not None:
                    addresses = self._addresses.get(source, ())
                    self._warm.copy_kv(source, addresses, to, self._addresses.get(to, ()))
            case FeedMigration():
                if self._warm is not None:
                    self._warm.feed_copy(log.replay_ids[: self._warm.prompt_tokens])
            case DropMigration():
                await self._drop_warm()

    def _post(self, event: Event) -> None:
        self._events.put_nowait(event)

    def _open_of(self, attempt: int, route: Route) -> SessionOpen:
        log = self._owner.log
        addresses: Mapping[str, tuple[str, ...]] = {
            stage.peer_id: self._source.addresses_of(stage.peer_id) for stage in route
        }
        for peer_id, known in addresses.items():
            if known:  # the record of a stage that goes on may have expired meanwhile
                self._addresses[peer_id] = known
        return SessionOpen(
            session=self._session,
            attempt=attempt,
            client=self._transport.peer_id,
            fingerprint=self._fingerprint,
            route=route,
            addresses=tuple(self._addresses.get(stage.peer_id, ()) for stage in route),
            hop=0,
            prompt_tokens=len(log.replay_ids),
            max_new_tokens=log.remaining_tokens,
            sampling=log.request.sampling,
            answered=len(log.token_ids),
            history=log.history,
            scores_from=1 + len(log.prompt_scores),
            priority=log.request.priority,
        )

    def _leave(self, attempt: int, peers: list[str]) -> None:
        for peer_id in dict.fromkeys(peers):
            task = asyncio.create_task(self._close_at(peer_id, attempt))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _close_at(self, peer_id: str, attempt: int) -> None:
        """Free one stage's share directly; a stage that is dead has freed it anyway."""
        with suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                stream = await self._transport.open_stream(
                    peer_id, SESSION_PROTOCOL, addresses=self._addresses.get(peer_id, ())
                )
                close = SessionClose(session=self._session, attempt=attempt)
                try:
                    await codec.send_frame(stream, close)
                finally:
                    await stream.close()

    async def _end(self) -> None:
        """Free the route, and what is left of earlier ones."""
        owner = self._owner
        await self._drop_warm()
        if owner.move is not None and owner.move.attempt:
            new = [s.peer_id for s in owner.move.route if s not in owner.accepted]
            self._leave(owner.move.attempt, new)
        for attempt in self._attempts:
            await attempt.close(ends_session=True)
        if owner.state is not ControllerState.DONE and owner.state is not ControllerState.RUNNING:
            left = (*owner.accepted, *owner.touched, *owner.route)
            self._leave(owner.attempt, [stage.peer_id for stage in left])
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=LEAVE_S)
