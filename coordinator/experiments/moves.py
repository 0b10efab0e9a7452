"""Simulates moves of sessions between routes while they decode. Pure.

A stage is rebuilt from tokens or logged rows, as in the project: the new stages run the session's
tokens so far while it goes on decoding on the old ones; at the next token the route is switched,
and the few rows since then go along with that token. A draining peer hands its sessions over in
this way. After a loss, the session waits until the stage is rebuilt.

Moves for balance follow Llumnix's rule (OSDI'24, §4.4), applied to routes: from the least free to
the freest while that evens them out, and to make room for a request that fits nowhere. Real peers
use the same measure and test (:mod:`coordinator.routing.balance`), but there one stage moves at a
time, each peer decides for itself, and a larger gap is needed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from coordinator.experiments.pipelines import Pipelines
from coordinator.routing.balance import evens_out
from coordinator.simulator.core.parts import SimulatedSession, Stage
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.core.trace import Request
from coordinator.simulator.runs.runs import Arrivals
from dht.messages.types import SOURCE


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRules:
    """Which moves are made. Times in seconds."""

    balance: bool = False
    """Whether to move sessions for balance (Llumnix's rule), and to make room for requests."""
    check_s: float = 1.0
    moves_max: int = 4
    """Maximum moves under way."""
    again_s: float = 10.0
    """Minimum time between two moves of a session."""
    noticed_s: float = 2.0
    """Time from a loss to the repair of its sessions."""
    drain_s: float = 30.0
    """Maximum time that a peer drains; then it is gone with its remaining sessions."""


@dataclass(slots=True)
class _Move:
    """A move under way: a shadow session fills the new stages."""

    shadow: SimulatedSession
    route: tuple[Stage, ...]
    waits: bool
    """Whether the session has lost a stage and waits until the new one is filled."""
    ready: bool = False


class Moving(Arrivals):
    """Requests at their arrival times, urgent ones first, whose sessions may move."""

    def __init__(
        self,
        engine: LiveSwarm,
        pipelines: Pipelines,
        requests: Sequence[Request],
        rules: MoveRules,
        *,
        start_s: float,
        end_s: float,
    ) -> None:
        super().__init__(engine, pipelines, requests, start_s=start_s, end_s=end_s)
        self._swarm = engine
        self._pipelines = pipelines
        self._rules = rules
        self._urgent: deque[Request] = deque()
        self._moves: dict[int, _Move] = {}
        self._moved_s: dict[int, float] = {}
        self._awaiting: dict[int, float] = {}
        self.moves = self.losses = 0
        self.urgent_prompt_s: list[float] = []
        self.moved_gaps_s: list[float] = []
        """Time of the token under way at each move or repair of a session, in seconds."""
        if rules.balance:
            engine.call_at(rules.check_s, self._check)

    # The waiting line

    def _arrive(self, request: Request) -> None:
        if not request.urgent:
            super()._arrive(request)
            return
        self.to_come -= 1
        self._urgent.append(request)
        self.serve_line()

    def serve_line(self) -> None:
        """Open lost sessions, then urgent requests, then the others in order."""
        while self._urgent and not self.lost:
            if not self.open(self._urgent[0], self._urgent[0].arrival_s):
                return
            self._urgent.popleft()
        super().serve_line()

    @property
    def all_done(self) -> bool:
        return super().all_done and not self._urgent

    # Called by the engine

    def prompt_done(self, session: SimulatedSession, now_s: float) -> None:
        if session.number >= 0:
            if session.urgent and session.replays == 0 and self.start_s <= now_s <= self.end_s:
                self.urgent_prompt_s.append(now_s - session.arrival_s)
            super().prompt_done(session, now_s)
            return
        session.decode.dead = True  # a shadow decodes nothing
        owner = -1 - session.number
        move = self._moves[owner]
        move.ready = True
        if move.waits:
            self._go_on(self.live[owner], move)

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None:
        super().token_done(session, now_s, issued_s)
        number = session.number
        if number in self._awaiting and issued_s >= self._awaiting[number]:
            del self._awaiting[number]
            self.moved_gaps_s.append(now_s - issued_s)
        move = self._moves.get(number)
        if move is not None and move.ready and session.left_tokens:
            self._switch(session, move)

    def session_done(self, session: SimulatedSession, now_s: float) -> None:
        self._forget_move(session)
        super().session_done(session, now_s)

    # Moves

    def begin(
        self,
        session: SimulatedSession,
        route: Sequence[Stage],
        *,
        source: str = SOURCE,
        waits: bool = False,
    ) -> None:
        """Fill the stages of ``route`` that the session does not have yet, from ``source`` on."""
        new = [stage for stage in route if stage not in session.stages]
        self._pipelines.take(session, new)
        tokens = max(1, session.tokens_in_kv)
        lengths = Request(arrival_s=0.0, input_tokens=tokens, output_tokens=1)
        shadow = SimulatedSession(-1 - session.number, lengths, self.engine.now_s)
        self._moves[session.number] = _Move(shadow, tuple(route), waits)
        shadow.warming = not waits
        self._swarm.open(shadow, new, source=source)
        self.moves += 1

    def _switch(self, session: SimulatedSession, move: _Move) -> None:
        """At a token's end, send the next one over the new route, with the rows since the copy."""
        del self._moves[session.number]
        since = session.tokens_in_kv - move.shadow.tokens_in_kv
        self._swarm.switch(session, move.route, since_tokens=since)
        self._settled(session, move)

    def _go_on(self, session: SimulatedSession, move: _Move) -> None:
        """After a loss, with the stage rebuilt, run the lost token again over the new route."""
        del self._moves[session.number]
        self._settled(session, move)
        self._swarm.resume(session, move.route)

    def _settled(self, session: SimulatedSession, move: _Move) -> None:
        self._pipelines.keep_only(session, move.route)
        now_s = self.engine.now_s
        self._moved_s[session.number] = now_s
        self._awaiting[session.number] = session.issued_s if move.waits else now_s
        self.serve_line()

    def _forget_move(self, session: SimulatedSession) -> None:
        move = self._moves.pop(session.number, None)
        self._awaiting.pop(session.number, None)
        if move is not None:
            self._swarm.cancel(move.shadow)
            self._pipelines.keep_only(session, session.stages)

    def _movable(self) -> list[SimulatedSession]:
        """Sessions that decode and have not moved lately: urgent ones last, short ones first."""
        now_s, again_s = self.engine.now_s, self._rules.again_s
        found = [
            s
            for s in self.live.values()
            if not s.prompting
            and s.number not in self._moves
            and now_s - self._moved_s.get(s.number, -again_s) >= again_s
        ]
        return sorted(found, key=lambda s: (s.urgent, s.tokens_in_kv, s.number))

    # For balance

    def _check(self) -> None:
        if len(self._moves) < self._rules.moves_max:
            waiting = self._urgent or self.line
            if waiting:
                self._make_room(waiting[0])
            else:
                self._even_out()
        self.engine.call_at(self.engine.now_s + self._rules.check_s, self._check)

    def _make_room(self, head: Request) -> None:
        """Move a session away from the route that lacks the least room for the line's head."""
        pipes = self._pipelines
        route = max(pipes.routes, key=pipes.free_tokens)
        for session in self._movable():
            if not set(session.stages) & set(route):
                continue
            for other in sorted(pipes.routes, key=lambda stages: -pipes.freeness(stages)):
                if other != route and pipes.fits(other, pipes.need(session), urgent=True):
                    self.begin(session, other)
                    return

    def _even_out(self) -> None:
        """Move one session from the least free route to the freest, if that evens them out."""
        pipes = self._pipelines
        ordered = sorted(pipes.routes, key=pipes.freeness)
        full, free = ordered[0], ordered[-1]
        for session in self._movable():
            need = pipes.need(session)
            if (
                set(session.stages) <= set(full)
                and pipes.fits(free, need)
                and evens_out(pipes.freeness(full, -1, -need), pipes.freeness(free, 1, need))
            ):
                self.begin(session, free)
                return

    # Peers that leave

    def drain_at(self, name: str, at_s: float) -> None:
        """Let a peer drain from a time on: it hands its sessions over, then leaves."""
        self.engine.call_at(at_s, partial(self._drain, name, at_s + self._rules.drain_s))

    def lose_at(self, name: str, at_s: float) -> None:
        """Let a peer vanish at a time."""
        self.engine.call_at(at_s, partial(self._vanish, name))

    def _on(self, name: str) -> list[SimulatedSession]:
        return [s for s in self.live.values() if any(stage[0] == name for stage in s.stages)]

    def _drain(self, name: str, until_s: float) -> None:
        self._pipelines.leaving.add(name)
        here = self._on(name)
        if not here or self.engine.now_s >= until_s:
            self._vanish(name)
            return
        for session in here:
            if session.number not in self._moves and not session.prompting:
                self._mend(session, name, waits=False)
        self.engine.call_at(self.engine.now_s + 0.25, partial(self._drain, name, until_s))

    def _vanish(self, name: str) -> None:
        self._pipelines.leaving.add(name)
        hit = self._on(name)
        onto = [n for n, m in self._moves.items() if any(stage[0] == name for stage in m.route)]
        self._swarm.fail(name)
        for session in hit:
            self._forget_move(session)
            unfinished = session.prompting
            self.losses += 1
            self._swarm.cancel(session)
            mend = partial(self._open_again, session) if unfinished else None
            self._soon(mend or partial(self._repair, name, session))
        for number in onto:  # stages that were being filled there are filled elsewhere
            if (move := self._moves.get(number)) is not None:
                session = self.live[number]
                self._forget_move(session)
                if move.waits:
                    self._soon(partial(self._repair, name, session))

    def _soon(self, call: Callable[[], None]) -> None:
        self.engine.call_at(self.engine.now_s + self._rules.noticed_s, call)

    def _open_again(self, session: SimulatedSession) -> None:
        """Run a session whose prompt was lost from the start, over another route."""
        self.lost.append(session)
        self.serve_line()

    def _repair(self, name: str, session: SimulatedSession) -> None:
        if not self._mend(session, name, waits=True):
            self.engine.call_at(self.engine.now_s + 1.0, partial(self._repair, name, session))

    def _mend(self, session: SimulatedSession, name: str, *, waits: bool) -> bool:
        """Begin to replace ``name`` in the session's route; returns False if nobody can."""
        route = self._pipelines.mended(session, name)
        if route is None:
            return False
        first = next(at for at, stage in enumerate(route) if stage not in session.stages)
        source = route[first - 1][0] if first else SOURCE
        self.begin(session, route, source=source, waits=waits)
        return True
