"""Volunteers that come and go: lengths of stays, and a run that loses and regains peers.

Stays are heavy-tailed (Pareto): most volunteers leave soon, some stay for days. A peer that goes
takes its sessions' KV with it; each is replayed over another route (prompt and answer so far) once
the loss is noticed. A peer that comes back holds layers after it has loaded them: its old span, or
with re-planning the span that the peers here serve the least.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from coordinator.flow import solve_flow
from coordinator.simulator.engine import Engine
from coordinator.simulator.parts import Session
from coordinator.simulator.profiles import Profiles
from coordinator.simulator.report import SimulationReport
from coordinator.simulator.runs import Arrivals
from coordinator.simulator.schedulers import OurScheduler
from coordinator.simulator.trace import Request
from dht.types import Assignment, Plan, PlannerNode, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnConfig:
    """How peers come and go."""

    seed: int = 0
    stay_mean_s: float = 4 * 3600.0
    stay_shape: float = 1.5
    """Pareto's shape; the smaller, the heavier the tail. Above 1, so that there is a mean."""
    absence_mean_s: float = 1800.0
    noticed_s: float = 2.0
    """From a loss to the replay of its sessions (dead after max(2 s, 5 x p95 of a step))."""
    load_s: float = 60.0
    """From coming back to serving."""
    replan: bool = True
    duration_s: float = 3600.0
    chunk_tokens: int | None = 256


def stays(draw: random.Random, mean_s: float, shape: float) -> Iterator[float]:
    """Heavy-tailed lengths with a mean, in seconds, for ever."""
    least_s = mean_s * (shape - 1) / shape
    while True:
        yield least_s * draw.paretovariate(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnReport:
    """What churn did to a run."""

    served: SimulationReport
    losses: int
    returns: int
    uncovered_s: float
    """How long some layer had no holder."""


class _Churn:
    """Takes peers away and brings them back, on the engine's clock."""

    def __init__(
        self, problem: Problem, plan: Plan, run: Arrivals, scheduler: OurScheduler, c: ChurnConfig
    ) -> None:
        self.problem, self.run, self.scheduler, self.config = problem, run, scheduler, c
        self.plan = plan
        self.nodes = {node.peer_id: node for node in problem.nodes}
        self.held = {a.peer_id: a for a in plan.assignments if a.start < a.end}
        self.spans = sorted({(a.start, a.end) for a in self.held.values()})
        self.ends = {end for _, end in self.spans}
        self.old = dict(self.held)
        self.losses = self.returns = 0
        self.uncovered_s = 0.0
        self._uncovered_since_s: float | None = None
        for name in self.held:
            draw = random.Random(f"{c.seed} {name}")  # noqa: S311
            here = stays(draw, c.stay_mean_s, c.stay_shape)
            away = stays(draw, c.absence_mean_s, c.stay_shape)
            # A swarm that has run for long: the first stay began at some time before.
            self._leave_at(name, next(here) * draw.random(), here, away)

    def _leave_at(
        self, name: str, after_s: float, here: Iterator[float], away: Iterator[float]
    ) -> None:
        engine = self.run.engine
        engine.call_at(engine.now_s + after_s, partial(self._leave, name, here, away))

    def _leave(self, name: str, here: Iterator[float], away: Iterator[float]) -> None:
        engine, run = self.run.engine, self.run
        self.losses += 1
        engine.fail(name)
        del self.held[name]
        self.scheduler.lost(name)
        hit = [s for s in run.live.values() if any(stage[0] == name for stage in s.stages)]
        for session in hit:
            engine.cancel(session)
        engine.call_at(engine.now_s + self.config.noticed_s, partial(self._noticed, hit))
        back_s = engine.now_s + next(away) + self.config.load_s
        engine.call_at(back_s, partial(self._come, name, here, away))
        self._watch_cover()

    def _noticed(self, hit: list[Session]) -> None:
        waiting = set(self.run.lost)
        self.run.lost.extend(session for session in hit if session not in waiting)
        self.run.serve_line()

    def _come(self, name: str, here: Iterator[float], away: Iterator[float]) -> None:
        self.returns += 1
        span = self._span_for(self.nodes[name]) if self.config.replan else self.old[name]
        self.held[name] = replace(span, peer_id=name)
        engine = self.run.engine
        engine.add(self.held[name], self.ends)
        self._adopt()
        self._leave_at(name, next(here), here, away)
        self._watch_cover()
        self.run.serve_line()

    def _span_for(self, node: PlannerNode) -> Assignment:
        """The span with the least tokens/s behind it among those that the node can hold."""

        def behind(span: tuple[int, int]) -> float:
            return sum(
                self.nodes[a.peer_id].tokens_per_s[a.end - a.start - 1]
                for a in self.held.values()
                if (a.start, a.end) == span
            )

        fitting = [span for span in self.spans if span[1] - span[0] <= len(node.tokens_per_s)]
        start, end = min(fitting, key=lambda span: (behind(span), span))
        return Assignment(peer_id=node.peer_id, start=start, end=end)

    def _adopt(self) -> None:
        """Follow the flow of what is held now."""
        held = tuple(self.held.values())
        solution = solve_flow(self.problem, held)
        self.scheduler.adopt(
            replace(
                self.plan,
                assignments=held,
                edges=solution.edges,
                flow_tokens_per_s=solution.flow_tokens_per_s,
            )
        )

    def _watch_cover(self) -> None:
        now_s = self.run.engine.now_s
        covered = {layer for a in self.held.values() for layer in range(a.start, a.end)}
        whole = len(covered) == self.problem.model.layers
        if whole and self._uncovered_since_s is not None:
            self.uncovered_s += now_s - self._uncovered_since_s
            self._uncovered_since_s = None
        elif not whole and self._uncovered_since_s is None:
            self._uncovered_since_s = now_s

    def end(self) -> None:
        """Count a gap that is still open."""
        if self._uncovered_since_s is not None:
            self.uncovered_s += self.run.engine.now_s - self._uncovered_since_s


def with_churn(
    problem: Problem,
    profiles: Profiles,
    plan: Plan,
    arrivals: Sequence[Request],
    config: ChurnConfig,
) -> ChurnReport:
    """Serve arrivals with the project's router while peers come and go."""
    engine = Engine(problem, profiles, plan.assignments, decodes_leave_first=True)
    scheduler = OurScheduler(problem, profiles, plan)
    run = Arrivals(
        engine,
        scheduler,
        arrivals,
        start_s=0.0,
        end_s=config.duration_s,
        chunk_tokens=config.chunk_tokens,
    )
    churn = _Churn(problem, plan, run, scheduler, config)
    run.sample()
    events = engine.run(config.duration_s, run)
    churn.end()
    return ChurnReport(
        served=run.report(events),
        losses=churn.losses,
        returns=churn.returns,
        uncovered_s=churn.uncovered_s,
    )
