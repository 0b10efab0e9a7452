"""``python -m coordinator.planning.solve``: runs one solve in a process of its own.

Reads a :class:`SolveRequest` from stdin and writes a :class:`SolveAnswer` to stdout, both msgpack.
A coordinator starts it so that neither a long solve nor the solver's memory or crashes affect
serving.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from coordinator.evaluation.plan_check import check_plan, uncovered
from coordinator.heuristics.repair import repair
from coordinator.planning.placement import (
    CELLS_ABOVE,
    NoPlacementError,
    Placement,
    best_placement,
    make_plan,
    score,
    with_spares,
)
from coordinator.problem.service import Service, announced_service
from coordinator.simulator.judge import judge
from dht.messages.types import Assignment, Plan, PlanVersion, Problem

OTHER_REQUESTS = 1
"""Seed of the run that compares two plans: not that by which one of them was chosen."""
COMPARED_TOKENS = 60_000
"""Decoded tokens of such a run."""
NICE = 10
"""Priority of a thorough solve, in steps of the operating system: the machine serves meanwhile."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveAnswer:
    """The plans that a solve found, both checked.

    ``best`` would serve the most (:mod:`coordinator.evaluation.estimate`); ``kept`` moves the
    fewest peers (None: it would move too many); ``error`` says why there is no plan at all.
    """

    best: Plan | None = None
    kept: Plan | None = None
    gain: float | None = None
    """Tokens/s of ``best`` in a short simulated run, as a multiple of those of ``kept``; None: they
    were only estimated."""
    error: str = ""


def solve_request(request: SolveRequest, spent: Callable[[], float] | None = None) -> SolveAnswer:
    """Solve one request.

    ``spent()`` returns the share of the allowed work that is done; by default, of the time limit.
    """
    spent = spent or _by_clock(request.time_limit_s)
    service = announced_service(request.problem)
    try:
        placement = best_placement(
            request.problem,
            time_limit_s=request.time_limit_s,
            seed=request.seed,
            spent=spent,
            service=service,
            trials=request.thorough,
        )
    except NoPlacementError as error:
        return SolveAnswer(error=str(error))
    solve_s = spent() * request.time_limit_s
    best = _checked(_plan(request, placement, solve_s), request.problem)
    kept_spans = repair(request.problem)
    if kept_spans is None or not any(node.current for node in request.problem.nodes):
        return SolveAnswer(best=best)
    kept = _checked(
        _plan(request, _kept(request.problem, kept_spans, service), 0.0), request.problem
    )
    if kept is not None and best is not None:
        kept = replace(kept, bound_tokens_per_s=best.bound_tokens_per_s)
    return SolveAnswer(best=best or kept, kept=kept, gain=gain_of(request, best, kept, service))


def gain_of(
    request: SolveRequest, best: Plan | None, kept: Plan | None, service: Service
) -> float | None:
    """What ``best`` serves more than ``kept`` in a short simulated run, as a ratio."""
    if best is None or kept is None or set(best.assignments) == set(kept.assignments):
        return None
    if not request.thorough or len(request.problem.nodes) > CELLS_ABOVE:
        return None
    served, before = (
        judge(
            request.problem,
            service,
            plan.assignments,
            plan.edges,
            seed=OTHER_REQUESTS,
            tokens=COMPARED_TOKENS,
        )
        for plan in (best, kept)
    )
    return served / before if before > 0 else None


def _kept(problem: Problem, spans: Sequence[Assignment], service: Service) -> Placement:
    """The placement that moves the fewest peers; joined peers stand by where they cost flow."""
    holders = {node.peer_id for node in problem.nodes if node.current is not None}
    held = [a for a in spans if a.peer_id in holders]
    if uncovered(held, problem.model.layers):
        return score(problem, spans, "keep", service=service)
    return with_spares(problem, score(problem, held, "keep", service=service), service)


def _by_clock(limit_s: float) -> Callable[[], float]:
    started_s = time.monotonic()
    return lambda: (time.monotonic() - started_s) / limit_s


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


def main() -> int:
    """Solve one request from stdin and write the answer to stdout."""
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SolveRequest)
    if request.thorough and sys.platform != "win32":
        os.nice(NICE)
    sys.stdout.buffer.write(msgspec.msgpack.encode(solve_request(request)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
