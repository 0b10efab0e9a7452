"""What clients and stages decide on a session: its route, its room, and who gives way.

Clients draw routes by :mod:`coordinator.policies.routing.routes`, each for itself; stages let
sessions in, give them pages and take pages back by :mod:`coordinator.policies.admission`. A client
that a stage refuses draws again without it, and comes back later where all refuse. Left out is that
who has many sessions is held back before others: ``SIMULATED_CLIENTS.clients`` have equal shares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.lengths import AnswerLengths
from coordinator.policies.admission.room import KvAsk, KvRoom
from coordinator.policies.admission.rules import (
    Claim,
    Demand,
    PromptRate,
    StageLoad,
    may_wait_s,
    queue_is_long,
)
from coordinator.policies.routing.balance import round_trips
from coordinator.policies.routing.quickest import RingTimes, quicker
from coordinator.policies.routing.routes import NoRoute, Router
from coordinator.simulator.core.parts import SimulatedPeer, SimulatedSession, Stage
from coordinator.simulator.core.profiles import Points, Profiles
from coordinator.simulator.core.trace import Request
from dht.messages.types import (
    DeviceSpec,
    LayerTimes,
    NodeRecord,
    NodeState,
    Plan,
    PlannerNode,
    Problem,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsConfig:
    """What simulated clients and stages are like."""

    clients: int = 64
    """Number of clients that take turns; each draws its own routes."""
    most_new_tokens: int = 1024
    """Longest answer that a client asks for: the bound within which the papers keep a trace's."""
    answers_known: int = 512
    """Number of answers that stages have seen in a run that begins in the middle."""


SIMULATED_CLIENTS = ClientsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a session's next token costs others, or itself."""

    victims: tuple[int, ...] = ()
    """Numbers of the sessions that gave way."""
    waits: bool = False
    """Whether the session waits until some KV is freed."""


GROWN = Growth()


class RequestScheduler(Protocol):
    """Chooses routes and keeps accounts of them."""

    def route(self, session: SimulatedSession, now_s: float) -> list[Stage] | None:
        """Stages from the first layer to the last; None: no route has room now."""

    def decode(self, session: SimulatedSession, now_s: float) -> Growth:
        """Account for a decode token of the session that starts its turn."""

    def ended(self, session: SimulatedSession) -> None:
        """Release a session that has ended or left its route."""


class Clients:
    """Draws routes as clients do, and decides for the stages whom they let in."""

    def __init__(
        self,
        problem: Problem,
        profiles: Profiles,
        plan: Plan,
        peers: Mapping[str, SimulatedPeer],
        answered: Sequence[Request] = (),
        *,
        in_turn: bool = False,
    ) -> None:
        """``peers`` are those of the swarm, whose steps tell how long a decode waits; ``answered``
        are requests by which the stages know how long answers are. With ``in_turn``, routes are
        taken in turn alone, the quickest never out of it."""
        self._in_turn = in_turn
        self._rtt_s = round_trips(problem.links)
        self._answered = answered[: SIMULATED_CLIENTS.answers_known]
        self._nodes = {node.peer_id: node for node in problem.nodes}
        self._problem = problem
        self._profiles = profiles
        self._peers = peers
        self.rooms: dict[str, KvRoom] = {}
        self.records: dict[str, NodeRecord] = {}
        self._on: dict[int, tuple[Stage, ...]] = {}
        """The stages that hold KV for a session, by its number."""
        self._full: dict[str, tuple[int, int]] = {}
        """Peers that refused a session for room: what was free then, and its prompt's tokens."""
        self._demands: dict[str, Demand] = {}
        """By peer, the KV that it refused last."""
        self._ungrown: set[int] = set()
        """Sessions that have taken no pages yet."""
        self._untried: dict[str, dict[int, tuple[SimulatedSession, float]]] = {}
        """By peer, the sessions without a token yet, and when they came."""
        self._prompts: dict[str, PromptRate] = {}
        """By peer, how fast sessions got their first tokens."""
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Follow another plan from now on; open sessions keep their routes."""
        self._plan = plan
        self._routers: dict[int, Router] = {}
        held = {a.peer_id: a for a in plan.assignments if a.start < a.end}
        for name in [name for name in self.rooms if name not in held]:
            self.lost(name)
        for name, a in held.items():
            room = self.rooms.get(name)
            if room is not None and (room.start, room.end) == (a.start, a.end):
                continue
            layers, capacity = a.end - a.start, self._profiles.peers[name].kv
            room_tokens = capacity.of(a.start, a.end, self._problem.model.layers)
            self.rooms[name] = KvRoom(
                start=a.start,
                end=a.end,
                pages=int(room_tokens / layers) // ADMISSION.page_tokens,
                lengths=self._lengths(),
            )
            self._untried[name], self._prompts[name] = {}, PromptRate()
            record = record_of(self._problem, self._nodes[name], a.start, a.end)
            profile = self._profiles.peers[name]
            self.records[name] = replace(
                record,
                decode_layer_ns=_announced(profile.decode),
                prompt_layer_ns=_announced(profile.prefill),
            )

    def _lengths(self) -> AnswerLengths:
        lengths = AnswerLengths()
        for number, request in enumerate(self._answered):
            lengths.ended(str(number % SIMULATED_CLIENTS.clients), request.output_tokens)
        return lengths

    def lost(self, name: str) -> None:
        """Draw no more routes over a lost peer, whose KV is gone."""
        for kept in (self.rooms, self.records, self._untried, self._prompts, self._full):
            kept.pop(name, None)

    # Routes and room

    def route(self, session: SimulatedSession, now_s: float) -> list[Stage] | None:
        usable = {name: each for name, each in self.records.items() if self._may_fit(name, session)}
        while (stages := self.draw(session, usable)) is not None:
            refused = self.admit(session, stages, now_s)
            if refused is None:
                return stages
            del usable[refused]
        return None

    def _may_fit(self, name: str, session: SimulatedSession) -> bool:
        """Whether a client would ask: not where a session like this was just refused for room."""
        known = self._full.get(name)
        if known is None or session.urgent or session.replays:
            return True
        free_tokens, asked_tokens = known
        return self.rooms[name].free_tokens > free_tokens or session.input_tokens < asked_tokens

    def draw(
        self, session: SimulatedSession, usable: Mapping[str, NodeRecord]
    ) -> list[Stage] | None:
        """The next route of the session's client over ``usable`` peers."""
        client = session.number % SIMULATED_CLIENTS.clients
        router = self._routers.get(client)
        if router is None:
            router = self._routers[client] = Router(self._plan)
        found = router.next_route(usable)
        if isinstance(found, NoRoute):
            return None
        if not self._in_turn:
            sessions = {name: self._peers[name].sessions for name in usable}
            times = RingTimes(usable, sessions, self._rtt_s)
            found = quicker(found, times, router.quickest)
        return [(stage.peer_id, stage.start, stage.end) for stage in found]

    def admit(
        self, session: SimulatedSession, stages: list[Stage] | tuple[Stage, ...], now_s: float
    ) -> str | None:
        """Let a session in at ``stages``, beside those that it is on; the peer that refuses, or
        None."""
        let_in: list[Stage] = []
        for stage in stages:
            name, start, end = stage
            ask = _ask_of(session, start, end)
            crowded = self._is_crowded(name, session, now_s)
            if crowded or self.rooms[name].admit(ask, now_s) is not None:
                if not crowded:
                    self._full[name] = self.rooms[name].free_tokens, session.input_tokens
                    self._demands[name] = Demand(
                        tokens=self.rooms[name].expected_tokens(ask), at_s=now_s
                    )
                for other, _, _ in let_in:
                    self.rooms[other].free(ask.session)
                return name
            let_in.append(stage)
            self._full.pop(name, None)
        for name, _, _ in stages:
            self._untried[name][session.number] = session, now_s
        self._on[session.number] = (*self._on.get(session.number, ()), *stages)
        self._ungrown.add(session.number)
        return None

    def wanted(self, name: str, now_s: float) -> int:
        """KV tokens that a peer wants free for those that it refused."""
        demand = self._demands.get(name)
        return 0 if demand is None else demand.wanted(now_s)

    def _is_crowded(self, name: str, session: SimulatedSession, now_s: float) -> bool:
        """Whether the stage sends ordinary sessions away although there is KV for them."""
        if session.urgent or session.replays:
            return False
        sessions = self._peers[name].sessions
        if sessions < min(ADMISSION.queue_sessions_least, ADMISSION.untried_sessions):
            return False  # whatever they wait for
        untried = self._untried[name].values()
        waiting = [other for other, came_s in untried if self._waits(name, other, came_s, now_s)]
        tokens = sum(other.input_tokens for other in waiting) / max(1, len(waiting))
        load = StageLoad(
            sessions=sessions,
            seen=sessions,
            untried=len(waiting),
            prompts_per_s=self._prompts[name].per_s(tokens, now_s),
        )
        return queue_is_long(load, self._peers[name].decode_waits.p95_s)

    def _waits(self, name: str, session: SimulatedSession, came_s: float, now_s: float) -> bool:
        """Whether rows of a session's prompt wait at a stage, or it has only just come."""
        peer = self._peers[name]
        names = [stage[0] for stage in session.stages]
        ran = session.tokens_in_kv
        if names[-1:] != [name]:
            ran = sum(piece.tokens for piece in session.prompt if piece.hop.start >= peer.end)
        return (
            may_wait_s(ran) > now_s - came_s
            or (session.unfed_tokens > 0 and names[:1] == [name])
            or peer.scheduler.has(session)
            or any(piece.session is session for piece in peer.running)
        )

    # Growth

    def decode(self, session: SimulatedSession, now_s: float) -> Growth:
        tokens = session.tokens_in_kv + 1
        if tokens % ADMISSION.page_tokens != 1 and session.number not in self._ungrown:
            return GROWN
        return self.grow(session, tokens, now_s)

    def grow(self, session: SimulatedSession, tokens: int, now_s: float) -> Growth:
        """Take pages for a session's first ``tokens`` tokens at all its stages."""
        key = str(session.number)
        victims: list[int] = []
        for name, _, _ in self._on.get(session.number, ()):
            room = self.rooms.get(name)
            if room is None or key not in room:
                continue
            if session.number in self._untried[name]:
                _, came_s = self._untried[name].pop(session.number)
                if tokens <= session.input_tokens + 1:  # else it came with an answer begun
                    self._prompts[name].add(session.input_tokens, came_s, now_s)
            while not room.grow(key, tokens):
                victim = room.who_gives_way(key, tokens)
                if victim is None:
                    return Growth(victims=tuple(victims), waits=True)
                self.give_way(int(victim), now_s)
                victims.append(int(victim))
        self._ungrown.discard(session.number)
        return Growth(victims=tuple(victims)) if victims else GROWN

    def give_way(self, number: int, now_s: float) -> None:
        """Free what a session holds everywhere; room is left for its return."""
        for name, _, _ in self._on.pop(number, ()):
            if (room := self.rooms.get(name)) is not None:
                room.give_way(str(number), now_s)
                self._untried[name].pop(number, None)

    def keep_only(self, session: SimulatedSession, stages: list[Stage] | tuple[Stage, ...]) -> None:
        """Release what the session holds at stages that are not among ``stages``."""
        kept = tuple(stage for stage in self._on.get(session.number, ()) if stage in stages)
        self._free([s for s in self._on.pop(session.number, ()) if s not in kept], session, None)
        if kept:
            self._on[session.number] = kept

    def ended(self, session: SimulatedSession) -> None:
        self._ungrown.discard(session.number)
        answered = None if session.left_tokens else session.output_tokens
        self._free(self._on.pop(session.number, ()), session, answered)

    def _free(
        self,
        stages: list[Stage] | tuple[Stage, ...],
        session: SimulatedSession,
        answered_tokens: int | None,
    ) -> None:
        for name, _, _ in stages:
            if (room := self.rooms.get(name)) is not None:
                room.free(str(session.number), answered_tokens)
                self._untried[name].pop(session.number, None)


def most_tokens(session: SimulatedSession) -> int:
    """Most tokens that its client let the session have: only the trace knows an answer's length."""
    return session.input_tokens + max(SIMULATED_CLIENTS.most_new_tokens, session.output_tokens)


def _ask_of(session: SimulatedSession, start: int, end: int) -> KvAsk:
    """The session's open at a stage; one that moves or was lost comes with its answer so far."""
    claim = Claim.HIGH if session.urgent else None
    if session.left_tokens < session.output_tokens:
        claim = Claim.BEGUN
    return KvAsk(
        session=str(session.number),
        client=str(session.number % SIMULATED_CLIENTS.clients),
        start=start,
        end=end,
        tokens=session.input_tokens + session.output_tokens - session.left_tokens,
        most_tokens=most_tokens(session),
        claim=claim,
        name=str(session.number),
    )


def _announced(points: Points) -> LayerTimes:
    return tuple((rows, round(s * 1e9), round(s * 1e9)) for rows, s in points if rows)


def record_of(problem: Problem, node: PlannerNode, start: int, end: int) -> NodeRecord:
    """The record that a peer would announce while it serves ``[start, end)``."""
    return NodeRecord(
        peer_id=node.peer_id,
        name=node.peer_id,
        software_version="simulated",
        device=DeviceSpec(kind="simulated", name="simulated", memory_bytes=node.memory_bytes),
        model=problem.model,
        memory_bytes=node.memory_bytes,
        kv_tokens_min=node.kv_tokens_min,
        tokens_per_s=node.tokens_per_s,
        state=NodeState.SERVING,
        start=start,
        end=end,
    )
