"""Simulates churn: lengths of volunteers' stays, and a run that loses and regains peers.

Stays are heavy-tailed (Pareto): most volunteers leave soon, some stay for days. When a peer leaves,
its sessions' KV is lost; once the loss is noticed, each session is replayed over another route
(prompt and answer so far). A peer that comes back first loads its old span or, with re-planning,
the least served one. With re-planning, layers without a holder are given to the fewest peers that
must move (:func:`coordinator.planning.heuristics.repair.repair`, as the coordinator does it), in
the order of :func:`coordinator.planning.waves.waves`; a peer that moves loses its sessions and
loads first.

Flow, spans and repairs stay inside the cells that a plan's flow falls into, so thousands of peers
cost no more than their cells.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from coordinator.evaluation.max_flow import flow_parts, solve_flow
from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.heuristics.heuristics import fill
from coordinator.planning.heuristics.repair import repair
from coordinator.planning.placement import PLACEMENT
from coordinator.planning.waves import waves
from coordinator.simulator.clients import Clients
from coordinator.simulator.core.parts import SimulatedSession
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.core.report import SimulationReport
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.core.trace import Request
from coordinator.simulator.links.closed_form_wire import FramedWire
from coordinator.simulator.runs.runs import Arrivals
from dht.messages.types import SINK, SOURCE, Assignment, Plan, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Peers that are cut off together and come back together with their old layers."""

    peers: tuple[str, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnConfig:
    """Options of a run with churn. Times in seconds."""

    seed: int = 0
    stay_mean_s: float = 4 * 3600.0
    """Mean stay of a peer; 0: peers leave only by ``cuts``."""
    stay_shape: float = 1.5
    """Shape of the Pareto distribution: smaller is a heavier tail; above 1, or it has no mean."""
    absence_mean_s: float = 1800.0
    cuts: tuple[Cut, ...] = ()
    noticed_s: float = 2.0
    """Time from a loss to the replay of its sessions (dead after max(2 s, 5 x p95 of a step))."""
    load_s: float = 60.0
    """Time from a peer's return or move to its serving."""
    replan: bool = True
    plan_s: float = 10.0
    """Time from the loss of a layer to the plan that places it again."""
    duration_s: float = 3600.0
    cells_above: int = PLACEMENT.cells_above
    """Number of peers above which each part of the flow is planned by itself."""


def stays(draw: random.Random, mean_s: float, shape: float) -> Iterator[float]:
    """An endless series of Pareto-distributed durations with mean ``mean_s``, in seconds."""
    least_s = mean_s * (shape - 1) / shape
    while True:
        yield least_s * draw.paretovariate(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnReport:
    """A run's report, with its losses, returns and moves."""

    served: SimulationReport
    losses: int
    returns: int
    moves: int
    """Number of moves of peers to layers that had no holder."""
    uncovered_s: float
    """Time for which some layer had no holder (summed over the cells)."""


class _Cell:
    """Peers whose flow stays among them, with their layers and flow."""

    def __init__(self, problem: Problem, plan: Plan, part: frozenset[str]) -> None:
        nodes = tuple(node for node in problem.nodes if node.peer_id in part)
        links = tuple(k for k in problem.links if k.source in part and k.target in part)
        self.problem = replace(problem, nodes=nodes, links=links)
        self.nodes = {node.peer_id: node for node in nodes}
        self.held = {a.peer_id: a for a in plan.assignments if a.peer_id in part}
        self.old = dict(self.held)
        self.edges = tuple(e for e in plan.edges if e.tail in part or e.head in part)
        self.uncovered_since_s: float | None = None
        self.moving: set[str] = set()
        """Peers that load the layers they were given."""
        self.waves: deque[list[Assignment]] = deque()
        """Moves that wait for those before them."""

    def covered(self) -> bool:
        return not uncovered(tuple(self.held.values()), self.problem.model.layers)

    def follow(self) -> None:
        """Recompute the flow over the layers held now."""
        self.edges = solve_flow(self.problem, tuple(self.held.values())).edges

    def repaired(self) -> tuple[Assignment, ...]:
        """New spans of the fewest peers that must move to cover all layers; empty: impossible."""
        nodes = tuple(
            replace(node, current=self.held[name])
            for name, node in self.nodes.items()
            if name in self.held
        )
        found = repair(replace(self.problem, nodes=nodes)) or ()
        return tuple(a for a in found if a != self.held.get(a.peer_id))


class _Churn:
    """Removes peers and brings them back, on the engine's clock."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        swarm: LiveSwarm,
        run: Arrivals,
        scheduler: Clients,
        c: ChurnConfig,
    ) -> None:
        self.swarm, self.run, self.scheduler, self.config = swarm, run, scheduler, c
        self.plan = plan
        parts = [frozenset(node.peer_id for node in problem.nodes)]
        if len(problem.nodes) > c.cells_above:
            parts = [part - {SOURCE, SINK} for part in flow_parts(plan.edges)]
        served = frozenset[str]().union(*parts)
        spare = {a.peer_id for a in plan.assignments if a.start < a.end} - served
        if spare:
            parts[0] |= spare  # spare replicas may be needed: add them to a cell
        self.cells = [_Cell(problem, plan, part) for part in parts]
        self.cell_of = {name: cell for cell in self.cells for name in cell.nodes}
        self.away: set[str] = set()
        self.losses = self.returns = self.moves = 0
        self.uncovered_s = 0.0
        for cut in c.cuts:
            swarm.call_at(cut.start_s, partial(self._cut, cut))
        for name in self.cell_of if c.stay_mean_s > 0 else ():
            draw = random.Random(f"{c.seed} {name}")
            here = stays(draw, c.stay_mean_s, c.stay_shape)
            away = stays(draw, c.absence_mean_s, c.stay_shape)
            # The swarm has run for a long time: a first stay began before the simulation.
            self._leave_at(name, next(here) * draw.random(), here, away)

    def _leave_at(
        self, name: str, after_s: float, here: Iterator[float], away: Iterator[float]
    ) -> None:
        self._after(after_s, partial(self._leave, name, here, away))

    def _after(self, after_s: float, call: Callable[[], None]) -> None:
        engine = self.swarm
        engine.call_at(engine.now_s + after_s, call)

    def _leave(self, name: str, here: Iterator[float], away: Iterator[float]) -> None:
        self.away.add(name)
        self._lose(name)
        back_s = next(away) + self.config.load_s
        self._after(back_s, partial(self._come_to_stay, name, here, away))

    def _come_to_stay(self, name: str, here: Iterator[float], away: Iterator[float]) -> None:
        self.away.discard(name)
        self._come(name, self._span_for(name))
        self._leave_at(name, next(here), here, away)

    def _cut(self, cut: Cut) -> None:
        spans = [
            self.cell_of[name].held[name] for name in cut.peers if name in self.cell_of[name].held
        ]
        for span in spans:
            self.away.add(span.peer_id)
            self._lose(span.peer_id)
        self._after(cut.end_s - cut.start_s, partial(self._return, spans))

    def _return(self, spans: Sequence[Assignment]) -> None:
        """Bring back peers that were cut off, with their old spans."""
        for span in spans:
            self.away.discard(span.peer_id)
            self._come(span.peer_id, span)

    def _lose(self, name: str) -> None:
        """Lose a peer and its sessions' KV; does nothing while the peer is away or loads."""
        cell = self.cell_of[name]
        if name not in cell.held:
            return
        self.losses += 1
        self._drop(name)
        self._watch_cover(cell)
        self._plan_soon(cell)

    def _plan_soon(self, cell: _Cell) -> None:
        if self.config.replan and not cell.moving and not cell.covered():
            self._after(self.config.plan_s, partial(self._replan, cell))

    def _drop(self, name: str) -> None:
        run = self.run
        self.swarm.fail(name)
        del self.cell_of[name].held[name]
        self.scheduler.lost(name)
        hit = [s for s in run.live.values() if any(hop.peer.name == name for hop in s.hops)]
        for session in hit:
            self.swarm.cancel(session)
            run.waiting.pop(session.number, None)
        self._after(self.config.noticed_s, partial(self._noticed, hit))

    def _noticed(self, hit: list[SimulatedSession]) -> None:
        lost = set(self.run.lost)
        for session in hit:
            if session not in lost and not session.hops:
                self.run.lose(session)
        self.run.serve_line()

    def _replan(self, cell: _Cell) -> None:
        """Move the fewest peers to the layers without a holder, in the plan's waves."""
        if cell.moving or cell.covered():
            return
        new = cell.repaired()
        targets = {a.peer_id: a for a in new}
        order = waves(tuple(cell.held.values()), new)
        cell.waves = deque([targets[name] for name in wave.peers] for wave in order)
        self._next_wave(cell)

    def _next_wave(self, cell: _Cell) -> None:
        for moved in cell.waves.popleft() if cell.waves else ():
            if moved.peer_id not in cell.held:
                continue  # it has left meanwhile
            self.moves += 1
            cell.moving.add(moved.peer_id)
            self._drop(moved.peer_id)
            self._after(self.config.load_s, partial(self._moved, cell, moved))
        self._watch_cover(cell)

    def _moved(self, cell: _Cell, span: Assignment) -> None:
        """Let a moved peer serve its new span, unless it has left meanwhile."""
        cell.moving.discard(span.peer_id)
        if span.peer_id not in self.away:
            self._come(span.peer_id, span)
        if not cell.moving:
            self._next_wave(cell)
        self._plan_soon(cell)

    def _come(self, name: str, span: Assignment) -> None:
        cell = self.cell_of[name]
        if name in cell.held:
            return
        self.returns += 1
        cell.held[name] = replace(span, peer_id=name)
        self.swarm.add(cell.held[name])
        cell.follow()
        self._adopt()
        self._watch_cover(cell)
        self._plan_soon(cell)
        self.run.serve_line()

    def _span_for(self, name: str) -> Assignment:
        """The span for a returned peer: with re-planning the least served one, else its old one."""
        cell = self.cell_of[name]
        if not self.config.replan:
            return cell.old[name]
        nodes = tuple(replace(cell.nodes[peer], current=None) for peer in (*cell.held, name))
        found = fill(replace(cell.problem, nodes=nodes), tuple(cell.held.values()))
        return next((a for a in found if a.peer_id == name and a.start < a.end), cell.old[name])

    def _adopt(self) -> None:
        """Give the scheduler the layers and flows of all cells."""
        self.scheduler.adopt(
            replace(
                self.plan,
                assignments=tuple(a for cell in self.cells for a in cell.held.values()),
                edges=tuple(edge for cell in self.cells for edge in cell.edges),
            )
        )

    def _watch_cover(self, cell: _Cell) -> None:
        now_s = self.swarm.now_s
        whole = cell.covered()
        if whole and cell.uncovered_since_s is not None:
            self.uncovered_s += now_s - cell.uncovered_since_s
            cell.uncovered_since_s = None
        elif not whole and cell.uncovered_since_s is None:
            cell.uncovered_since_s = now_s

    def end(self) -> None:
        """Add the time of layers that still have no holder."""
        for cell in self.cells:
            if cell.uncovered_since_s is not None:
                self.uncovered_s += self.swarm.now_s - cell.uncovered_since_s


def with_churn(
    problem: Problem,
    profiles: Profiles,
    plan: Plan,
    arrivals: Sequence[Request],
    config: ChurnConfig,
) -> ChurnReport:
    """Simulate ``arrivals`` with the project's router while peers come and go."""
    swarm = LiveSwarm(problem, profiles, plan.assignments, FramedWire)
    scheduler = Clients(problem, profiles, plan, swarm.peers)
    run = Arrivals(swarm, scheduler, arrivals, start_s=0.0, end_s=config.duration_s)
    churn = _Churn(problem, plan, swarm, run, scheduler, config)
    run.sample()
    events = swarm.run(config.duration_s, run)
    churn.end()
    return ChurnReport(
        served=run.report(events),
        losses=churn.losses,
        returns=churn.returns,
        moves=churn.moves,
        uncovered_s=churn.uncovered_s,
    )
