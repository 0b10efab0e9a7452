"""Runs offline and online simulations of one placement, by the rules that peers live by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.planning.placement import Placement
from coordinator.simulator.clients import Clients
from coordinator.simulator.core.parts import SimulatedWire
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.core.report import SimulationReport
from coordinator.simulator.core.swarm import AS_CHOSEN, LiveSwarm
from coordinator.simulator.core.trace import Request, sampled
from coordinator.simulator.links.closed_form_wire import FramedWire, InOrderWire
from coordinator.simulator.links.scheduled_wire import ScheduledWire
from coordinator.simulator.plans import plan_of
from coordinator.simulator.runs.runs import Arrivals, Standing
from dht.errors import UserError
from dht.messages.types import Assignment, Plan, Problem

SCHEDULERS = ("anabranch", "in-turn")
"""Ways to choose routes: ``anabranch`` is the clients' own, ``in-turn`` the same without the
quickest ring at light load."""
WIRES: dict[str, Callable[[LiveSwarm], SimulatedWire]] = {
    "framed": FramedWire,
    "anabranch": ScheduledWire,
    "in-order": InOrderWire,
}
"""Link models by name. ``framed``: the project's link scheduler in closed form; ``anabranch``: the
scheduler itself, slice by slice; ``in-order``: whole frames, first come, first served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a simulated swarm runs; the defaults are what live peers do."""

    scheduler: str = "anabranch"
    links: str = "framed"
    chunk_tokens: int | None = AS_CHOSEN
    """Tokens of a prompt's chunk; :data:`AS_CHOSEN`; or None: whole prompts."""
    hub: bool = False
    """Whether tokens go from the last stage to the first over the clients' host, as in Helix."""

    def __post_init__(self) -> None:
        if self.scheduler not in SCHEDULERS:
            raise UserError(f"scheduler {self.scheduler!r}; there are {', '.join(SCHEDULERS)}")
        if self.links not in WIRES:
            raise UserError(f"links {self.links!r}; there are {', '.join(WIRES)}")


LIVING = Rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    seed: int = 0
    warm_up_s: float = 60.0
    measured_s: float = 600.0
    rules: Rules = LIVING


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineConfig:
    """Options of an online run: requests come at their arrival times."""

    warm_up_s: float = 0.0
    measured_s: float = 1800.0
    rules: Rules = LIVING


def as_plan(problem: Problem, placement: Plan | Placement | Sequence[Assignment]) -> Plan:
    """``placement`` as a plan; without edges, it gets its max flow."""
    if isinstance(placement, Plan):
        return placement
    if isinstance(placement, Placement):
        return plan_of(problem, placement.assignments, placement.edges)
    return plan_of(problem, tuple(placement))


def build_simulation(
    problem: Problem, profiles: Profiles, plan: Plan, rules: Rules
) -> tuple[LiveSwarm, Clients]:
    """The swarm and the clients that choose its routes."""
    swarm = LiveSwarm(
        problem,
        profiles,
        plan.assignments,
        WIRES[rules.links],
        chunk_tokens=rules.chunk_tokens,
        hub=rules.hub,
    )
    in_turn = rules.scheduler == "in-turn"
    return swarm, Clients(problem, profiles, plan, swarm.peers, in_turn=in_turn)


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
    swarm, clients = build_simulation(problem, profiles, plan, config.rules)
    start_s, end_s = config.warm_up_s, config.warm_up_s + config.measured_s
    requests = sampled(trace, config.seed)
    return Standing(swarm, clients, requests, start_s=start_s, end_s=end_s).measure(progress)


def online(
    problem: Problem,
    profiles: Profiles,
    placement: Plan | Placement | Sequence[Assignment],
    arrivals: Sequence[Request],
    config: OnlineConfig,
    progress: Callable[[float], None] | None = None,
) -> SimulationReport:
    """Simulate requests at their arrival times, until all are served or for
    ``RUN.drain_s`` more."""
    plan = as_plan(problem, placement)
    swarm, clients = build_simulation(problem, profiles, plan, config.rules)
    start_s, end_s = config.warm_up_s, config.warm_up_s + config.measured_s
    return Arrivals(swarm, clients, arrivals, start_s=start_s, end_s=end_s).measure(progress)
