"""Runs offline and online simulations of one placement."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.evaluation.max_flow import FlowSolution, solve_flow
from coordinator.planning.placement import Placement
from coordinator.simulator.core.event_loop import SwarmSimulation
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.core.report import SimulationReport
from coordinator.simulator.core.trace import Request, sampled
from coordinator.simulator.links.closed_form_wire import FramedWire
from coordinator.simulator.links.project_wire import ScheduledWire
from coordinator.simulator.routing.helix import (
    OFFLINE,
    ONLINE,
    HelixRules,
    HelixScheduler,
    link_shares,
)
from coordinator.simulator.routing.schedulers import (
    HopByHop,
    OurScheduler,
    RequestScheduler,
    SwarmChoice,
    even_cards,
    shortest_queue,
)
from coordinator.simulator.runs.runs import Arrivals, ClosedLoop, HelixFeed, Run, Standing
from dht.errors import UserError
from dht.messages.types import Assignment, Plan, PlanVersion, Problem

SCHEDULERS = ("helix", "anabranch", "swarm", "random", "shortest-queue")
LINKS = ("in-order", "decode-first", "framed", "anabranch")
"""Link models by name. ``in-order``: whole pieces in the order of the batch, as in Helix's
simulator; ``decode-first``: a batch's decodes before its prompts; ``framed``: decodes overtake
prompts on the link, in closed form; ``anabranch``: the project's own link scheduler, frame by
frame."""
DRAIN_S = 4 * 3600.0
STEP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """Options of an offline run; the defaults are Helix's."""

    seed: int = 0
    warm_up_s: float = 60.0
    measured_s: float = 600.0
    scheduler: str = "helix"
    links: str = "in-order"
    first_requests: int = 20
    """Number of requests at the start of a run with ``helix``."""
    sessions: int = 180
    """Number of sessions in flight with ``swarm``, ``random`` and ``shortest-queue``."""
    prompts_max: int = 8
    """Maximum prompts under way at a time with ``anabranch``."""
    chunk_tokens: int | None = None
    """Tokens of a chunk with ``anabranch``; ``chunks.MEASURED``: as stages choose; None: whole."""
    rules: HelixRules = OFFLINE


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineConfig:
    """Options of an online run: requests come at their arrival times."""

    seed: int = 0
    warm_up_s: float = 0.0
    measured_s: float = 1800.0
    scheduler: str = "helix"
    links: str = "in-order"
    chunk_tokens: int | None = None
    rules: HelixRules = ONLINE


def as_plan(problem: Problem, placement: Plan | Placement | Sequence[Assignment]) -> Plan:
    """``placement`` as a plan; without edges, it gets its max flow."""
    if isinstance(placement, Plan):
        return placement
    solution: FlowSolution | None = None
    if isinstance(placement, Placement):
        assignments = placement.assignments
        if placement.edges is not None:
            solution = FlowSolution(
                flow_tokens_per_s=placement.flow_tokens_per_s, edges=placement.edges
            )
    else:
        assignments = tuple(placement)
    solution = solution or solve_flow(problem, assignments)
    return Plan(
        version=PlanVersion(term=1, counter=1),
        coordinator="simulated",
        model=problem.model,
        assignments=assignments,
        edges=solution.edges,
        flow_tokens_per_s=solution.flow_tokens_per_s,
        bound_tokens_per_s=solution.flow_tokens_per_s,
        planner="simulated",
        solve_s=0.0,
        created_unix_s=0.0,
    )


def build_simulation(
    problem: Problem,
    profiles: Profiles,
    plan: Plan,
    *,
    scheduler: str,
    links: str,
    rules: HelixRules,
    seed: int,
) -> tuple[SwarmSimulation, RequestScheduler]:
    """The engine and the named scheduler; raises UserError for an unknown name."""
    if scheduler not in SCHEDULERS:
        raise UserError(f"scheduler {scheduler!r}; there are {', '.join(SCHEDULERS)}")
    if links not in LINKS:
        raise UserError(f"links {links!r}; there are {', '.join(LINKS)}")
    pairs = [(edge.tail, edge.head) for edge in plan.edges]
    share: Callable[[str, str, float], float] | None = None
    if scheduler == "helix":
        share = link_shares(profiles, plan.edges)
    elif scheduler != "anabranch":
        share = even_cards(profiles, pairs)
    engine = SwarmSimulation(
        problem,
        profiles,
        plan.assignments,
        link_rate=share,
        decodes_leave_first=links != "in-order",
        weights_take_time=scheduler == "anabranch",
    )
    if links == "framed":
        engine.make_wire = FramedWire
    elif links == "anabranch":
        engine.make_wire = ScheduledWire
    if scheduler == "helix":
        return engine, HelixScheduler(problem, profiles, plan.assignments, plan.edges, rules)
    if scheduler == "anabranch":
        return engine, OurScheduler(problem, profiles, plan)
    draw = random.Random(seed)  # noqa: S311
    choose: Callable[[str, list[str]], str]
    if scheduler == "swarm":
        choose = SwarmChoice(engine)
    elif scheduler == "random":
        choose = lambda _at, heads: heads[draw.randrange(len(heads))]  # noqa: E731
    else:
        choose = shortest_queue(engine, draw.randrange)
    return engine, HopByHop(plan.assignments, pairs, choose)


def offline(
    problem: Problem,
    profiles: Profiles,
    placement: Plan | Placement | Sequence[Assignment],
    trace: Sequence[Request],
    config: OfflineConfig,
    progress: Callable[[float], None] | None = None,
) -> SimulationReport:
    """Simulate a placement under as much load as its KV room takes.

    Routes follow a plan's own flow, otherwise the placement's max flow. The same arguments give the
    same report. ``progress`` is called with the share that is done.
    """
    plan = as_plan(problem, placement)
    engine, scheduler = build_simulation(
        problem,
        profiles,
        plan,
        scheduler=config.scheduler,
        links=config.links,
        rules=config.rules,
        seed=config.seed,
    )
    requests = sampled(trace, config.seed)
    start_s, end_s = config.warm_up_s, config.warm_up_s + config.measured_s
    run: Run
    if isinstance(scheduler, HelixScheduler):
        first = config.first_requests
        run = HelixFeed(engine, scheduler, requests, first=first, start_s=start_s, end_s=end_s)
    elif config.scheduler == "anabranch":
        run = Standing(
            engine,
            scheduler,
            requests,
            prompts_max=config.prompts_max,
            start_s=start_s,
            end_s=end_s,
            chunk_tokens=config.chunk_tokens,
        )
    else:
        sessions = config.sessions
        run = ClosedLoop(
            engine, scheduler, requests, sessions=sessions, start_s=start_s, end_s=end_s
        )
    run.sample()
    return run.report(_run_to(engine, run, end_s, progress))


def online(
    problem: Problem,
    profiles: Profiles,
    placement: Plan | Placement | Sequence[Assignment],
    arrivals: Sequence[Request],
    config: OnlineConfig,
    progress: Callable[[float], None] | None = None,
) -> SimulationReport:
    """Simulate requests at their arrival times, until all are served or ``DRAIN_S`` is over."""
    plan = as_plan(problem, placement)
    engine, scheduler = build_simulation(
        problem,
        profiles,
        plan,
        scheduler=config.scheduler,
        links=config.links,
        rules=config.rules,
        seed=config.seed,
    )
    end_s = config.warm_up_s + config.measured_s
    run = Arrivals(
        engine,
        scheduler,
        arrivals,
        start_s=config.warm_up_s,
        end_s=end_s,
        chunk_tokens=config.chunk_tokens,
    )
    run.sample()
    events = _run_to(engine, run, end_s, progress)
    while not run.all_done and engine.now_s < end_s + DRAIN_S:
        events += engine.run(engine.now_s + STEP_S, run)
    return run.report(events)


def _run_to(
    engine: SwarmSimulation, run: Run, end_s: float, progress: Callable[[float], None] | None
) -> int:
    if progress is None:
        return engine.run(end_s, run)
    events = 0
    while engine.now_s < end_s:
        events += engine.run(min(end_s, engine.now_s + STEP_S), run)
        progress(engine.now_s / end_s)
    return events
