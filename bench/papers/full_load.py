"""Runs offline and online simulations of one placement by the rules of papers, or some of them.

The rules that peers live by alone: :mod:`coordinator.commands.full_load`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.papers.helix_feeds import ClosedLoop, HelixFeed
from bench.papers.helix_scheduler import OFFLINE, ONLINE, HelixRules, HelixScheduler, link_shares
from bench.papers.helix_swarm import HelixSwarm
from bench.papers.schedulers import HopByHop, SwarmChoice, even_cards, shortest_queue
from coordinator.commands.full_load import LIVING, Rules, as_plan, build_simulation
from coordinator.planning.placement import Placement
from coordinator.simulator.clients import RequestScheduler
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.core.report import SimulationReport
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.core.trace import Request, sampled
from coordinator.simulator.runs.runs import Arrivals, Run, Standing
from dht.errors import UserError
from dht.messages.types import Assignment, Plan, Problem

SCHEDULERS = ("helix", "swarm", "random", "shortest-queue")
"""Papers' ways to choose routes. ``helix`` is Helix's round robin with its mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRules:
    """By whose rules a swarm runs. Raises UserError for rules that do not go together."""

    scheduler: str | None = None
    """One of :data:`SCHEDULERS`; None: the clients' own, as ``living`` says."""
    living: Rules | None = None
    """How peers and links run; None: as in Helix's simulator, with its batches, whole prompts,
    links in order, and its load."""

    def __post_init__(self) -> None:
        able = SCHEDULERS if self.living is None else (None, "helix")
        if self.scheduler not in able:
            whose = "Helix's" if self.living is None else "living"
            names = ", ".join(name or "the clients' own" for name in able)
            raise UserError(f"scheduler {self.scheduler!r}; {whose} peers and links have {names}")

    def names(self) -> dict[str, str]:
        """Scheduler and link model, by name."""
        if self.living is None:
            return {"scheduler": str(self.scheduler), "links": "in-order"}
        return {"scheduler": self.scheduler or self.living.scheduler, "links": self.living.links}


HELIX = PaperRules(scheduler="helix")
OURS = PaperRules(living=LIVING)


def build(
    problem: Problem,
    profiles: Profiles,
    plan: Plan,
    rules: PaperRules,
    *,
    helix: HelixRules,
    seed: int = 0,
) -> tuple[LiveSwarm | HelixSwarm, RequestScheduler]:
    """The swarm and what chooses its routes; ``helix``: bounds of Helix's scheduler."""
    by_helix = HelixScheduler(problem, profiles, plan.assignments, plan.edges, helix)
    if rules.living is not None:
        swarm, clients = build_simulation(problem, profiles, plan, rules.living)
        return swarm, clients if rules.scheduler is None else by_helix
    if rules.scheduler == "helix":
        share = link_shares(profiles, plan.edges)
        return HelixSwarm(problem, profiles, plan.assignments, share), by_helix
    pairs = [(edge.tail, edge.head) for edge in plan.edges]
    engine = HelixSwarm(problem, profiles, plan.assignments, even_cards(profiles, pairs))
    draw = random.Random(seed)
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
    rules: PaperRules = HELIX,
    *,
    seed: int = 0,
    warm_up_s: float = 60.0,
    measured_s: float = 600.0,
    first_requests: int = 20,
    sessions: int = 180,
    progress: Callable[[float], None] | None = None,
) -> SimulationReport:
    """Simulate a placement under full load, which is Helix's for its peers and links.

    ``first_requests`` is the number of requests at the start of a run with Helix's scheduler,
    ``sessions`` the number of sessions in flight with the other schedulers. ``progress`` is called
    with the share that is done.
    """
    plan = as_plan(problem, placement)
    engine, scheduler = build(problem, profiles, plan, rules, helix=OFFLINE, seed=seed)
    requests = sampled(trace, seed)
    start_s, end_s = warm_up_s, warm_up_s + measured_s
    run: Run
    if rules.living is not None:
        run = Standing(engine, scheduler, requests, start_s=start_s, end_s=end_s)
    elif isinstance(scheduler, HelixScheduler):
        run = HelixFeed(
            engine, scheduler, requests, sessions=first_requests, start_s=start_s, end_s=end_s
        )
    else:
        run = ClosedLoop(
            engine, scheduler, requests, sessions=sessions, start_s=start_s, end_s=end_s
        )
    return run.measure(progress)


def online(
    problem: Problem,
    profiles: Profiles,
    placement: Plan | Placement | Sequence[Assignment],
    arrivals: Sequence[Request],
    rules: PaperRules = HELIX,
    *,
    seed: int = 0,
    warm_up_s: float = 0.0,
    measured_s: float = 1800.0,
    progress: Callable[[float], None] | None = None,
) -> SimulationReport:
    """Simulate requests at their arrival times, until all are served."""
    plan = as_plan(problem, placement)
    engine, scheduler = build(problem, profiles, plan, rules, helix=ONLINE, seed=seed)
    end_s = warm_up_s + measured_s
    return Arrivals(engine, scheduler, arrivals, start_s=warm_up_s, end_s=end_s).measure(progress)
