"""Simulates moves of sessions between holders of their layers while they decode.

A stage is rebuilt from tokens or logged rows: the new stages run the session's tokens so far while
it goes on decoding on the old ones; at the next token the route is switched, and the few rows since
then go along with that token. A draining peer hands its sessions over in this way. After a loss,
the session waits until the stage is rebuilt. What moves for balance is decided by every peer for
itself, as in a living swarm (:class:`coordinator.policies.routing.balance.Balance`); who replaces a
peer, by :func:`coordinator.policies.routing.routes.replacement`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from coordinator.policies.admission.rules import headroom
from coordinator.policies.routing.balance import Balance, BalanceConfig, Movable, PeerLoad, swapped
from coordinator.policies.routing.routes import NoRoute, replacement
from coordinator.simulator.clients import Clients, most_tokens
from coordinator.simulator.core.parts import SimulatedSession, Stage
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.core.trace import Request
from coordinator.simulator.runs.runs import Arrivals
from dht.messages.types import SOURCE, RouteStage


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRules:
    """Which moves are made. Times in seconds."""

    balance: BalanceConfig | None = None
    """When peers ask for moves; None: never."""
    check_s: float = 1.0
    """Interval at which every peer looks."""
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
        swarm: LiveSwarm,
        clients: Clients,
        requests: Sequence[Request],
        rules: MoveRules,
        *,
        start_s: float,
        end_s: float,
    ) -> None:
        super().__init__(swarm, clients, requests, start_s=start_s, end_s=end_s)
        self._swarm = swarm
        self._clients = clients
        self._balances: dict[str, Balance] = {}
        self._leaving: set[str] = set()
        self._rules = rules
        self._urgent: deque[Request] = deque()
        self._moves: dict[int, _Move] = {}
        self._moved_s: dict[int, float] = {}
        self._awaiting: dict[int, float] = {}
        self._rtt_s = _round_trips_s(swarm)
        self.moves = self.losses = 0
        self.urgent_prompt_s: list[float] = []
        self.moved_gaps_s: list[float] = []
        """Time of the token under way at each move or repair of a session, in seconds."""
        if rules.balance is not None:
            swarm.call_at(rules.check_s, self._check)

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
        while self.replay_lost() and self._urgent:
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
        self._swarm.cancel(session)  # a shadow decodes nothing
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

    def lose(self, session: SimulatedSession) -> None:
        self._forget_move(session)
        super().lose(session)

    # Moves

    def begin(
        self,
        session: SimulatedSession,
        route: Sequence[Stage],
        *,
        source: str = SOURCE,
        waits: bool = False,
    ) -> bool:
        """Fill the stages of ``route`` that the session does not have yet, from ``source`` on;
        returns False where one of them has no room."""
        new = [stage for stage in route if stage not in session.stages]
        if self._clients.admit(session, new, self.engine.now_s) is not None:
            return False
        tokens = max(1, session.tokens_in_kv)
        lengths = Request(arrival_s=0.0, input_tokens=tokens, output_tokens=1)
        shadow = SimulatedSession(-1 - session.number, lengths, self.engine.now_s)
        shadow.warming = not waits
        self._moves[session.number] = _Move(shadow, tuple(route), waits)
        self._swarm.open(shadow, new, source=source)
        self.moves += 1
        return True

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
        self._clients.keep_only(session, move.route)
        now_s = self.engine.now_s
        self._moved_s[session.number] = now_s
        self._awaiting[session.number] = session.issued_s if move.waits else now_s
        self.serve_line()

    def _forget_move(self, session: SimulatedSession) -> None:
        move = self._moves.pop(session.number, None)
        self._awaiting.pop(session.number, None)
        if move is not None:
            self._swarm.cancel(move.shadow)
            self._clients.keep_only(session, session.stages)

    # For balance

    def _check(self) -> None:
        """Let every peer ask for the moves that it wants."""
        now_s = self.engine.now_s
        config = self._rules.balance or BalanceConfig()
        loads = {name: self._load(name) for name in self._clients.rooms}
        on: dict[str, list[SimulatedSession]] = {}
        for session in self.live.values():
            for name, _, _ in session.stages:
                on.setdefault(name, []).append(session)
        for name, mine in loads.items():
            balance = self._balances.setdefault(name, Balance(me=name, config=config))
            others = {other: load for other, load in loads.items() if other != name}
            here = [each for s in on.get(name, ()) for each in self._movable(s, name)]
            present = {str(s.number) for s in on.get(name, ())}
            asked = set(balance.under_way)
            for order in balance.step(now_s, mine, others, here, present, self._rtt_s):
                session = self.live[int(order.session)]
                if order.to not in asked and session.number not in self._moves:
                    self._swap(session, name, order.to)
        self.engine.call_at(now_s + self._rules.check_s, self._check)

    def _load(self, name: str) -> PeerLoad:
        """What the peer would announce of its load."""
        room, away = self._clients.rooms[name], name in self._leaving
        urgent = any(s.urgent for s in self.live.values() if s.stages and name in _peers(s))
        wanted = headroom(room.capacity_tokens) if urgent else 0
        return PeerLoad(
            start=0 if away else room.start,
            end=0 if away else room.end,
            free_tokens=room.free_tokens,
            wanted_tokens=wanted + self._clients.wanted(name, self.engine.now_s),
            sessions=self._swarm.peers[name].sessions,
        )

    def _movable(self, session: SimulatedSession, name: str) -> list[Movable]:
        if session.prompting or session.number in self._moves or not session.hops:
            return []
        peers = _peers(session)
        at = peers.index(name)
        _, start, end = session.stages[at]
        moved_s = self.engine.now_s - self._moved_s.get(session.number, float("-inf"))
        return [
            Movable(
                session=str(session.number),
                start=start,
                end=end,
                route=frozenset(peers),
                neighbours=frozenset((peers[at - 1], peers[(at + 1) % len(peers)])),
                kv_tokens=self._clients.rooms[name].charged_of(str(session.number)),
                left_tokens=most_tokens(session) - session.tokens_in_kv,
                ran_tokens=session.tokens_in_kv,
                moved_s=moved_s,
                urgent=session.urgent,
            )
        ]

    def _swap(self, session: SimulatedSession, leaving: str, to: str) -> None:
        """Move a stage of a session to another holder of its layers, as its owner would."""
        record = self._clients.records.get(to)
        if record is None:
            return
        route = swapped(_route(session), leaving, record)
        if not isinstance(route, NoRoute):
            stages = tuple((stage.peer_id, stage.start, stage.end) for stage in route)
            self._begin_from(session, stages, waits=False)

    def _begin_from(
        self, session: SimulatedSession, stages: tuple[Stage, ...], *, waits: bool
    ) -> bool:
        """Begin a move, with rows from the stage before the first new one."""
        first = next(at for at, stage in enumerate(stages) if stage not in session.stages)
        source = stages[first - 1][0] if first else SOURCE
        return self.begin(session, stages, source=source, waits=waits)

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
        self._leaving.add(name)
        self._clients.records.pop(name, None)
        here = self._on(name)
        if not here or self.engine.now_s >= until_s:
            self._vanish(name)
            return
        for session in here:
            if session.number not in self._moves and not session.prompting:
                self._mend(session, name, waits=False)
        self.engine.call_at(self.engine.now_s + 0.25, partial(self._drain, name, until_s))

    def _vanish(self, name: str) -> None:
        self._leaving.add(name)
        hit = self._on(name)
        onto = [n for n, m in self._moves.items() if any(stage[0] == name for stage in m.route)]
        self._swarm.fail(name)
        self._clients.lost(name)
        for session in hit:
            self._forget_move(session)
            unfinished = session.prompting
            self.losses += 1
            self._swarm.cancel(session)
            self.waiting.pop(session.number, None)
            again = partial(self.lose, session) if unfinished else None
            self._soon(again or partial(self._repair, name, session))
        for number in onto:  # stages that were being filled there are filled elsewhere
            if (move := self._moves.get(number)) is not None:
                session = self.live[number]
                self._forget_move(session)
                if move.waits:
                    self._soon(partial(self._repair, name, session))

    def _soon(self, call: Callable[[], None]) -> None:
        self.engine.call_at(self.engine.now_s + self._rules.noticed_s, call)

    def _repair(self, name: str, session: SimulatedSession) -> None:
        if session.hops or session in self.lost:
            return  # it gave way meanwhile, and is replayed
        if not self._mend(session, name, waits=True):
            self.engine.call_at(self.engine.now_s + 1.0, partial(self._repair, name, session))

    def _mend(self, session: SimulatedSession, name: str, *, waits: bool) -> bool:
        """Begin to replace ``name`` in the session's route; returns False if nobody can."""
        usable = dict(self._clients.records)
        while True:
            route = replacement(_route(session), {name}, usable, self._swarm.layers)
            if isinstance(route, NoRoute):
                return False
            stages = tuple((stage.peer_id, stage.start, stage.end) for stage in route)
            if self._begin_from(session, stages, waits=waits):
                return True
            for peer, _, _ in stages:
                if peer not in _peers(session):
                    usable.pop(peer, None)


def _round_trips_s(swarm: LiveSwarm) -> dict[frozenset[str], float]:
    """The round trip of every pair of peers, in seconds: what they would have measured."""
    return {
        frozenset((a, b)): swarm.one_way_s(a, b) + swarm.one_way_s(b, a)
        for a, b in combinations(swarm.peers, 2)
    }


def _peers(session: SimulatedSession) -> list[str]:
    return [name for name, _, _ in session.stages]


def _route(session: SimulatedSession) -> tuple[RouteStage, ...]:
    return tuple(RouteStage(peer_id=n, start=a, end=b) for n, a, b in session.stages)
