"""Chooses routes over pipelines with exact accounts of KV, as stages keep them. Pure.

A stage promises KV for a session's whole length or refuses (:mod:`node.kv.block_manager`), and
keeps a share free for urgent sessions (:mod:`coordinator.admission.rules`). Dispatch ``turns`` is
the project's own: weighted turns over the routes with room. ``freest`` is Llumnix's (OSDI'24,
§4.4): the route with the most room per session, which real clients do not do.
"""

from collections.abc import Collection, Sequence

from coordinator.evaluation.max_flow import paths
from coordinator.routing.balance import freeness
from coordinator.routing.routes import NoRoute, Wheel, replacement
from coordinator.simulator.clients import record_of
from coordinator.simulator.core.parts import SimulatedSession, Stage
from coordinator.simulator.core.profiles import Profiles
from dht.messages.types import Plan, Problem, RouteStage

DISPATCHES = ("turns", "freest")


class Pipelines:
    """Chooses among a plan's routes, and accounts for the KV that every peer has promised."""

    def __init__(
        self, problem: Problem, profiles: Profiles, plan: Plan, *, dispatch: str, headroom: float
    ) -> None:
        """``headroom`` is the share of a peer's KV that only urgent sessions may take."""
        if dispatch not in DISPATCHES:
            raise ValueError(f"dispatch {dispatch!r}; there are {DISPATCHES}")
        held = {a.peer_id: a for a in plan.assignments}
        nodes = {node.peer_id: node for node in problem.nodes}
        found = paths(plan.edges)
        self.layers = problem.model.layers
        self.routes: tuple[tuple[Stage, ...], ...] = tuple(
            tuple((name, held[name].start, held[name].end) for name in peers) for peers, _ in found
        )
        self._wheel = Wheel({str(index): flow for index, (_, flow) in enumerate(found)})
        self._by_turns = dispatch == "turns"
        self._records = {
            name: record_of(problem, nodes[name], a.start, a.end) for name, a in held.items()
        }
        self.capacity = {
            name: profiles.peers[name].kv_of(a.end - a.start) for name, a in held.items()
        }
        self._kept = {name: int(headroom * size) for name, size in self.capacity.items()}
        self.room = dict(self.capacity)
        self.count = dict.fromkeys(held, 0)
        self.leaving: set[str] = set()
        self._taken: dict[int, list[tuple[Stage, ...]]] = {}

    def need(self, session: SimulatedSession) -> int:
        """KV that a stage must promise, in tokens: the whole session."""
        return session.input_tokens + session.output_tokens

    def fits(self, stages: Sequence[Stage], tokens: int, *, urgent: bool = False) -> bool:
        """Whether every stage has room for ``tokens`` tokens."""
        for name, start, end in stages:
            if name in self.leaving:
                return False
            left = self.room[name] - tokens * (end - start)
            # An idle peer takes any session that fits: one may need more than the unreserved room.
            least = 0 if urgent or self.count[name] == 0 else self._kept[name]
            if left < least:
                return False
        return True

    def free_tokens(self, stages: Sequence[Stage]) -> float:
        """Least free room of the stages, in tokens."""
        return min(self.room[name] / (end - start) for name, start, end in stages)

    def freeness(self, stages: Sequence[Stage], sessions: int = 0, tokens: int = 0) -> float:
        """Least freeness of the stages, with ``sessions`` and ``tokens`` more at each."""
        return min(
            freeness(self.room[name] / (end - start) - tokens, self.count[name] + sessions)
            if name not in self.leaving
            else float("-inf")
            for name, start, end in stages
        )

    def route(self, session: SimulatedSession) -> list[Stage] | None:
        tokens = self.need(session)
        able = [
            index
            for index, stages in enumerate(self.routes)
            if self.fits(stages, tokens, urgent=session.urgent)
        ]
        if not able:
            return None
        if self._by_turns:
            names = [str(index) for index in able]
            first = next(name for name in self._wheel.order() if name in names)
            self._wheel.draw(first, names)
            chosen = int(first)
        else:
            chosen = max(able, key=lambda index: (self.freeness(self.routes[index]), -index))
        self.take(session, self.routes[chosen])
        return list(self.routes[chosen])

    def take(self, session: SimulatedSession, stages: Sequence[Stage]) -> None:
        """Promise the session room at ``stages``, in addition to what it has."""
        for name, start, end in stages:
            self.room[name] -= self.need(session) * (end - start)
            self.count[name] += 1
        self._taken.setdefault(session.number, []).append(tuple(stages))

    def keep_only(self, session: SimulatedSession, route: Collection[Stage]) -> None:
        """Release what the session was promised at stages that are not on ``route``."""
        kept: list[tuple[Stage, ...]] = []
        for stages in self._taken.pop(session.number, ()):
            for stage in stages:
                if stage in route:
                    kept.append((stage,))
                    continue
                name, start, end = stage
                self.room[name] += self.need(session) * (end - start)
                self.count[name] -= 1
        if kept:
            self._taken[session.number] = kept

    def decode(self, session: SimulatedSession) -> None:
        """Do nothing: accounts are kept by whole sessions."""

    def ended(self, session: SimulatedSession) -> None:
        self.keep_only(session, ())

    def mended(self, session: SimulatedSession, lost: str) -> tuple[Stage, ...] | None:
        """The session's route with ``lost`` replaced; None: no peer has room for its layers."""
        tokens = self.need(session)
        on_route = {name for name, _, _ in session.stages}
        usable = {
            name: record
            for name, record in self._records.items()
            if name != lost
            and name not in on_route
            and self.fits([(name, record.start, record.end)], tokens, urgent=True)
        }
        old = tuple(RouteStage(peer_id=n, start=s, end=e) for n, s, e in session.stages)
        found = replacement(old, {lost}, usable, self.layers)
        if isinstance(found, NoRoute):
            return None
        return tuple((stage.peer_id, stage.start, stage.end) for stage in found)
