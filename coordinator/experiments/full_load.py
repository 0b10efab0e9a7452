"""Runs offline and online simulations of one placement, by the living rules or the papers'."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.experiments.papers.feeds import ClosedLoop, HelixFeed
from coordinator.experiments.papers.helix import (
    OFFLINE,
    ONLINE,
    HelixRules,
    HelixScheduler,
    link_shares,
)
from coordinator.experiments.papers.helix_swarm import HelixSwarm
from coordinator.experiments.papers.schedulers import (
    HopByHop,
    SwarmChoice,
    even_cards,
    shortest_queue,
)
from coordinator.planning.placement import Placement
from coordinator.simulator.clients import Clients, RequestScheduler
from coordinator.simulator.core.parts import SimulatedWire
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.core.report import SimulationReport
from coordinator.simulator.core.swarm import AS_CHOSEN, LiveSwarm
from coordinator.simulator.core.trace import Request, sampled
from coordinator.simulator.links.closed_form_wire import FramedWire, InOrderWire
from coordinator.simulator.links.scheduled_wire import ScheduledWire
from coordinator.simulator.plans import plan_of
from coordinator.simulator.runs.runs import Arrivals, Run, Standing
from dht.errors import UserError
from dht.messages.types import Assignment, Plan, Problem

OWN = ("anabranch", "in-turn")
SCHEDULERS = (*OWN, "helix", "swarm", "random", "shortest-queue")
"""Ways to choose routes. Under the living rules ``anabranch`` is the clients' own, ``in-turn`` the
same without the quickest ring at light load, and ``helix`` Helix's round robin with its mask; under
the papers' rules there are all but the clients' own."""
WIRES: dict[str, Callable[[LiveSwarm], SimulatedWire]] = {
    "framed": FramedWire,
    "anabranch": ScheduledWire,
    "in-order": InOrderWire,
}
"""Link models by name. ``framed``: the project's link scheduler in closed form; ``anabranch``: the
scheduler itself, slice by slice; ``in-order``: whole frames, first come, first served."""
DRAIN_S = 4 * 3600.0
STEP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """By whose rules a swarm runs."""

    papers: bool = False
    """Whether all is as in Helix's simulator: batches, whole prompts, links in order, load; only
    the scheduler can be chosen then."""
    scheduler: str = "anabranch"
    links: str = "framed"
    chunk_tokens: int | None = AS_CHOSEN
    """Tokens of a prompt's chunk; :data:`AS_CHOSEN`; or None: whole prompts."""
    hub: bool = False
    """Whether tokens go from the last stage to the first over the clients' host, as in Helix."""

    def __post_init__(self) -> None:
        living = (*OWN, "helix")
        able = [n for n in SCHEDULERS if (n not in OWN if self.papers else n in living)]
        if self.scheduler not in able:
            rules = "papers'" if self.papers else "living"
            raise UserError(f"scheduler {self.scheduler!r}; the {rules} rules have {able}")
        if self.links not in WIRES:
            raise UserError(f"links {self.links!r}; there are {', '.join(WIRES)}")


LIVING = Rules()
HELIX = Rules(papers=True, scheduler="helix")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """Options of an offline run."""

    seed: int = 0
    warm_up_s: float = 60.0
    measured_s: float = 600.0
    rules: Rules = LIVING
    first_requests: int = 20
    """Number of requests at the start of a run with Helix's rules."""
    sessions: int = 180
    """Number of sessions in flight with ``swarm``, ``random`` and ``shortest-queue``."""
    helix: HelixRules = OFFLINE


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineConfig:
    """Options of an online run: requests come at their arrival times."""

    seed: int = 0
    warm_up_s: float = 0.0
    measured_s: float = 1800.0
    rules: Rules = LIVING
    helix: HelixRules = ONLINE


def as_plan(problem: Problem, placement: Plan | Placement | Sequence[Assignment]) -> Plan:
    """``placement`` as a plan; without edges, it gets its max flow."""
    if isinstance(placement, Plan):
        return placement
    if isinstance(placement, Placement):
        return plan_of(problem, placement.assignments, placement.edges)
    return plan_of(problem, tuple(placement))


def build_simulation(
    problem: Problem,
    profiles: Profiles,
    plan: Plan,
    rules: Rules,
    *,
    helix: HelixRules,
    seed: int,
) -> tuple[LiveSwarm | HelixSwarm, RequestScheduler]:
    """The swarm and what chooses its routes."""
    by_helix = HelixScheduler(problem, profiles, plan.assignments, plan.edges, helix)
    if not rules.papers:
        swarm = LiveSwarm(
            problem,
            profiles,
            plan.assignments,
            WIRES[rules.links],
            chunk_tokens=rules.chunk_tokens,
            hub=rules.hub,
        )
        if rules.scheduler not in OWN:
            return swarm, by_helix
        in_turn = rules.scheduler != OWN[0]
        return swarm, Clients(problem, profiles, plan, swarm.peers, in_turn=in_turn)
    pairs = [(edge.tail, edge.head) for edge in plan.edges]
    if rules.scheduler == "helix":
        share = link_shares(profiles, plan.edges)
        return HelixSwarm(problem, profiles, plan.assignments, share), by_helix
    engine = HelixSwarm(problem, profiles, plan.assignments, even_cards(profiles, pairs))
    draw = random.Random(seed)  # noqa: S311
    choose: Callable[[str, list[str]], str]
    if rules.scheduler == "swarm":
        choose = SwarmChoice(engine)
    elif rules.scheduler == "random":
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
    rules = config.rules
    engine, scheduler = build_simulation(
        problem, profiles, plan, rules, helix=config.helix, seed=config.seed
    )
    requests = sampled(trace, config.seed)
    start_s, end_s = config.warm_up_s, config.warm_up_s + config.measured_s
    run: Run
    if not rules.papers:
        run = Standing(engine, scheduler, requests, start_s=start_s, end_s=end_s)
    elif isinstance(scheduler, HelixScheduler):
        first = config.first_requests
        run = HelixFeed(engine, scheduler, requests, sessions=first, start_s=start_s, end_s=end_s)
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
        problem, profiles, plan, config.rules, helix=config.helix, seed=config.seed
    )
    end_s = config.warm_up_s + config.measured_s
    run = Arrivals(engine, scheduler, arrivals, start_s=config.warm_up_s, end_s=end_s)
    run.sample()
    events = _run_to(engine, run, end_s, progress)
    while not run.all_done and engine.now_s < end_s + DRAIN_S:
        events += engine.run(engine.now_s + STEP_S, run)
    return run.report(events)


def _run_to(
    engine: LiveSwarm | HelixSwarm,
    run: Run,
    end_s: float,
    progress: Callable[[float], None] | None,
) -> int:
    if progress is None:
        return engine.run(end_s, run)
    events = 0
    while engine.now_s < end_s:
        events += engine.run(min(end_s, engine.now_s + STEP_S), run)
        progress(engine.now_s / end_s)
    return events
