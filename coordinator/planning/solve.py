"""``python -m coordinator.planning.solve``: runs one solve in a process of its own.

Reads a :class:`SolveRequest` from stdin and writes a :class:`SolveAnswer` to stdout, both msgpack.
A coordinator starts it so that neither a long solve nor the solver's memory or crashes affect
serving.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from coordinator.evaluation.max_flow import flow_parts, solve_flow
from coordinator.evaluation.one_answer import worth
from coordinator.evaluation.plan_check import check_plan, uncovered
from coordinator.planning.heuristics.heuristics import greedy
from coordinator.planning.heuristics.peer_cells import parts
from coordinator.planning.heuristics.repair import repair
from coordinator.planning.placement import (
    PLACEMENT,
    NoPlacementError,
    Placement,
    best_placement,
    counted,
    make_plan,
    score,
    together,
    why_uncoverable,
    with_spares,
)
from coordinator.planning.search.generation import Searched
from coordinator.problem.service import Service, announced_service
from coordinator.simulator.judge import judge
from dht.messages.types import Assignment, FlowEdge, Plan, PlanVersion, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveConfig:
    """How a thorough solve runs, and how two plans are compared."""

    other_requests: int = 1
    """Seed of the run that compares two plans: not that by which one of them was chosen."""
    compared_tokens: int = 60_000
    """Decoded tokens of such a run."""
    nice: int = 10
    """Priority of a thorough solve, in steps of the operating system: the machine serves
    meanwhile."""


SOLVE = SolveConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveRequest:
    """A problem to solve, and the version, coordinator and time to write into the plan."""

    problem: Problem
    version: PlanVersion
    coordinator: str
    time_limit_s: float
    seed: int
    now_unix_s: float
    thorough: bool = False
    """Whether short simulated runs choose among the finalists, and show what moves would gain."""
    answer_weight: float = 0.0
    """Weight of the speed of one answer (:attr:`coordinator.problem.service.Workload`)."""
    settled: frozenset[str] | None = None
    """Peers for whose sake others may be moved (:func:`coordinator.plans.transition.settled`);
    None: all. Where they cannot hold every layer, or there is nothing to keep, all may."""
    flow: tuple[FlowEdge, ...] = ()
    """The running plan's. What is kept passes on between peers that it joins, in a small swarm
    also over all peers where that serves more: in a large one, such a flow would take many seconds,
    and long links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveAnswer:
    """The plans that a solve found, both checked.

    ``best`` would be worth the most (:mod:`coordinator.evaluation.estimate`, and the speed of one
    answer by its weight) over the settled peers, with the others added; ``kept`` moves the fewest
    peers (None: it would move too many); ``error`` says why there is no plan at all.
    """

    best: Plan | None = None
    kept: Plan | None = None
    gain: float | None = None
    """The worth of ``best`` as a multiple of that of ``kept``, over the settled peers or over all,
    whichever is less; 0 where they cannot be compared; None: there is no ``kept``."""
    tried: bool = False
    """Whether a short simulated run showed ``gain``; otherwise it is estimated."""
    error: str = ""
    searched: Searched | None = None
    """What OR-Tools did for ``best``, and whether it failed; None: there was no search."""


def solve_request(request: SolveRequest, spent: Callable[[], float] | None = None) -> SolveAnswer:
    """Solve one request.

    ``spent()`` returns the share of the allowed work that is done; by default, of the time limit.
    """
    spent = spent or by_clock(request.time_limit_s)
    whole = request.problem
    service = announced_service(whole)
    load = replace(service.workload, answer_weight=request.answer_weight)
    service = replace(service, workload=load)
    kept_spans = repair(whole)
    core = whole if kept_spans is None else _core(request)
    standing = _Standing(service, flow_parts(request.flow))
    if (
        kept_spans is not None
        and not request.thorough
        and len(core.nodes) > PLACEMENT.cells_above
        and len(standing.joined) > 1
    ):
        return _where_it_changed(request, core, kept_spans, standing, spent)
    try:
        placement = _planned(request, core, service, spent)
    except NoPlacementError as error:
        return SolveAnswer(error=str(error))
    solve_s = spent() * request.time_limit_s
    with_all = placement if core is whole else with_spares(whole, placement, service)
    best = _checked(_plan(request, with_all, solve_s), whole)
    searched = placement.searched
    if kept_spans is None:
        return SolveAnswer(best=best, searched=searched)
    kept_placement = _kept(whole, kept_spans, standing)
    kept = _checked(_plan(request, kept_placement, 0.0), whole)
    if kept is not None and best is not None:
        kept = replace(kept, bound_tokens_per_s=best.bound_tokens_per_s)
    gain, tried = 0.0, False
    if core is whole:
        gain, tried = gain_of(request, core, placement, kept_placement, service)
    elif (before := _kept_by(core, kept_placement, standing)) is not None and _adoptable(
        whole, with_all, service
    ):
        alone, tried = gain_of(request, core, placement, before, service)
        gain = min(alone, _ratio(with_all.worth, kept_placement.worth))
    return SolveAnswer(best=best or kept, kept=kept, gain=gain, tried=tried, searched=searched)


def _planned(
    request: SolveRequest, problem: Problem, service: Service, spent: Callable[[], float]
) -> Placement:
    return best_placement(
        problem,
        time_limit_s=request.time_limit_s,
        seed=request.seed,
        spent=spent,
        service=service,
        trials=request.thorough,
    )


def _where_it_changed(
    request: SolveRequest,
    core: Problem,
    kept_spans: Sequence[Assignment],
    standing: "_Standing",
    spent: Callable[[], float],
) -> SolveAnswer:
    """The answer for a large swarm after a change: cells that lost no layer stay as they are, and
    all others are planned anew. The gain is that of these alone."""
    whole, service = request.problem, standing.service
    holders = {node.peer_id for node in core.nodes if node.current is not None}
    cells, _ = standing.cells(core, [a for a in kept_spans if a.peer_id in holders])
    staying = {a.peer_id for held in cells for a in held}
    others = [node for node in core.nodes if node.peer_id not in staying]
    changed = parts(core, [others])[0]
    stays = standing.scored_cells(core, cells)
    kept_placement = _kept(whole, kept_spans, standing)
    kept = _checked(_plan(request, kept_placement, 0.0), whole)
    try:
        found = _planned(request, changed, service, spent)
    except NoPlacementError:
        return SolveAnswer(best=kept, kept=kept, gain=1.0)
    placement = together((*stays, found), service)
    with_all = with_spares(whole, placement, service)
    best = _checked(_plan(request, with_all, spent() * request.time_limit_s), whole)
    gain = 0.0
    if _adoptable(whole, with_all, service):
        stay = sum(each.value for each in stays)
        before = _kept_by(core, kept_placement, standing)
        alone = _ratio(found.value, before.value - stay if before else 0.0)
        gain = min(alone, _ratio(with_all.value - stay, kept_placement.value - stay))
    return SolveAnswer(best=best or kept, kept=kept, gain=gain, searched=found.searched)


def _core(request: SolveRequest) -> Problem:
    """The problem of the settled peers alone, where they can hold every layer."""
    problem, settled = request.problem, request.settled
    if settled is None or settled >= {node.peer_id for node in problem.nodes}:
        return problem
    core = parts(problem, [[node for node in problem.nodes if node.peer_id in settled]])[0]
    return problem if why_uncoverable(core) is not None else core


def _adoptable(problem: Problem, placement: Placement, service: Service) -> bool:
    """Whether reviewers, who count newcomers too, would accept what was made for settled peers."""
    spans = greedy(problem)
    if spans is None:
        return True
    edges = solve_flow(problem, spans).edges
    best = score(problem, spans, "greedy", service=service, edges=edges)
    return placement.value >= PLACEMENT.greedy_share * best.value


def _kept_by(core: Problem, kept: Placement, standing: "_Standing") -> Placement | None:
    """What is kept, over the peers of ``core`` alone; None where they do not hold every layer."""
    peers = {node.peer_id for node in core.nodes}
    held = [a for a in kept.assignments if a.peer_id in peers]
    if uncovered(held, core.model.layers):
        return None
    return standing.scored(core, held)


class _Standing:
    """What a swarm holds, scored with flow inside the ``joined`` sets of peers, and, unless it is
    large, over all peers.

    Each set is scored once, whichever peers are asked about.
    """

    def __init__(self, service: Service, joined: Sequence[frozenset[str]]) -> None:
        self.service = service
        self.joined = joined
        self._known: dict[tuple[Assignment, ...], Placement] = {}

    def scored(self, problem: Problem, spans: Sequence[Assignment]) -> Placement:
        """The placement of the kept ``spans``: as it stands, or with a flow over all peers where
        that serves more. Sets that have lost a layer are taken together."""
        found: list[Placement] = []
        if len(self.joined) > 1:
            whole, broken = self.cells(problem, spans)
            if broken and not uncovered(broken, problem.model.layers):
                whole.append(broken)
            if whole:
                placed = together(self.scored_cells(problem, whole), self.service)
                standing = replace(placed, assignments=tuple(spans), planner="keep")
                found.append(counted(problem, standing))
        if not found or len(problem.nodes) <= PLACEMENT.cells_above:
            found.append(score(problem, spans, "keep", service=self.service))
        return max(found, key=lambda placement: placement.worth)

    def cells(
        self, problem: Problem, spans: Sequence[Assignment]
    ) -> tuple[list[list[Assignment]], list[Assignment]]:
        """``(whole, broken)``: the ``spans`` of each joined set that holds every layer, and those
        of all others, with the smallest whole set where these alone do not hold every layer."""
        layers = problem.model.layers
        set_of = {peer: index for index, peers in enumerate(self.joined) for peer in peers}
        by_set: list[list[Assignment]] = [[] for _ in self.joined]
        for a in spans:
            if a.peer_id in set_of:
                by_set[set_of[a.peer_id]].append(a)
        whole = sorted((held for held in by_set if not uncovered(held, layers)), key=len)
        broken = [a for held in by_set if uncovered(held, layers) for a in held]
        if whole and broken and uncovered(broken, layers):
            broken += whole.pop(0)
        return whole, broken

    def scored_cells(
        self, problem: Problem, cells: Sequence[Sequence[Assignment]]
    ) -> list[Placement]:
        """The placements of cells, each by itself."""
        new = [tuple(held) for held in cells if tuple(held) not in self._known]
        nodes = {node.peer_id: node for node in problem.nodes}
        alone = parts(problem, [[nodes[a.peer_id] for a in held] for held in new])
        for part, held in zip(alone, new, strict=True):
            self._known[held] = score(part, held, "keep", service=self.service)
        return [self._known[tuple(held)] for held in cells]


def gain_of(
    request: SolveRequest, problem: Problem, best: Placement, kept: Placement, service: Service
) -> tuple[float, bool]:
    """The worth of ``best`` as a multiple of that of ``kept``, and whether a run showed what they
    serve."""
    run = request.thorough and len(problem.nodes) <= PLACEMENT.cells_above
    if not run or set(best.assignments) == set(kept.assignments):
        return _ratio(best.worth, kept.worth), False
    after, before = (
        worth(
            judge(
                problem,
                service,
                placement.assignments,
                placement.edges,
                seed=SOLVE.other_requests,
                tokens=SOLVE.compared_tokens,
            ),
            placement.one_answer_s,
            placement.answer_weight,
        )
        for placement in (best, kept)
    )
    return _ratio(after, before), True


def _ratio(after: float, before: float) -> float:
    return after / max(before, 1e-9)


def _kept(
    problem: Problem,
    spans: Sequence[Assignment],
    standing: "_Standing",
) -> Placement:
    """The placement that moves the fewest peers; joined peers stand by where they cost flow."""
    holders = {node.peer_id for node in problem.nodes if node.current is not None}
    held = [a for a in spans if a.peer_id in holders]
    if uncovered(held, problem.model.layers):
        return standing.scored(problem, spans)
    return with_spares(problem, standing.scored(problem, held), standing.service)


def by_clock(limit_s: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """A solve's ``spent``: the share of ``limit_s`` seconds that has passed from now on."""
    started_s = clock()
    return lambda: (clock() - started_s) / limit_s


def _checked(plan: Plan, problem: Problem) -> Plan | None:
    """The plan if the checker finds no error in it, else None; errors are written to stderr.

    Plans are checked here because that takes seconds for thousands of peers.
    """
    wrong = check_plan(plan, problem)
    for reason in wrong:
        print(f"the solver's plan is wrong: {reason}", file=sys.stderr)
    return None if wrong else plan


def _plan(request: SolveRequest, placement: Placement, solve_s: float) -> Plan:
    return make_plan(
        request.problem,
        placement,
        version=request.version,
        coordinator=request.coordinator,
        solve_s=solve_s,
        now_unix_s=request.now_unix_s,
    )


def _import_solvers() -> None:
    """Import what a solve imports where it needs it, as that takes a tenth of a quick solve's time.

    What fails here fails there again, and is told there.
    """
    with suppress(Exception):
        import ortools.graph.python.max_flow
        import ortools.graph.python.min_cost_flow
        import ortools.math_opt.python.mathopt  # noqa: F401


def main() -> int:
    """Solve one request from stdin and write the answer to stdout."""
    _import_solvers()
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SolveRequest)
    if request.thorough and sys.platform != "win32":
        os.nice(SOLVE.nice)
    sys.stdout.buffer.write(msgspec.msgpack.encode(solve_request(request)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
