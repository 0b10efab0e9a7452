"""Judges a placement by a short simulated run under the living rules.

A planner's estimate ranks placements by formulas; this runs them. Sessions live for minutes, and a
swarm that begins empty settles only after as long; a judgement must take a second or so. So the run
begins in the middle, with sessions somewhere in their answers as far as stages admit them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from coordinator.evaluation.estimate import estimate
from coordinator.problem.service import Curve, PeerSpeed, Service, Workload
from coordinator.simulator.clients import Clients
from coordinator.simulator.core.parts import SimulatedSession
from coordinator.simulator.core.profiles import (
    PeerProfile,
    Points,
    Profiles,
    default_client_links,
)
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.core.trace import Request, sampled, typical
from coordinator.simulator.links.closed_form_wire import FramedWire
from coordinator.simulator.plans import plan_of
from coordinator.simulator.runs.runs import Standing
from dht.messages.types import SOURCE, Assignment, FlowEdge, Plan, PlannerNode, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunConfig:
    """How long a simulated trial of a placement runs; times in simulated seconds."""

    virtual_s: float = 60.0
    settle_share: float = 0.5
    """Share of the run before tokens count."""
    sessions_max: int = 2048
    """Maximum sessions in flight, where KV room is unlimited or not known."""
    run_s_max: float = 1800.0
    """Maximum length of a run that lasts until enough tokens count, in simulated seconds."""
    enter_s: float = 1.0
    """Time over which the sessions that begin in the middle enter the ring, in seconds."""


TRIAL = TrialRunConfig()


def judge(
    problem: Problem,
    service: Service,
    assignments: Sequence[Assignment],
    edges: Sequence[FlowEdge] | None = None,
    *,
    seed: int = 0,
    virtual_s: float = TRIAL.virtual_s,
    tokens: float = 0.0,
) -> float:
    """Decoded tokens/s of a placement under full load, by what a planner knows of its peers.

    Routes follow ``edges``, or the placement's max flow. The run lasts ``virtual_s`` and longer,
    until about ``tokens`` count, ``TRIAL.run_s_max`` at most: what a small swarm decodes in a
    minute depends on which requests it happens to get. A swarm that decodes far more than
    ``tokens`` in ``virtual_s`` runs for less. The same arguments give the same result.
    """
    load, plan = service.workload, plan_of(problem, assignments, edges)
    guess = estimate(problem, plan.assignments, plan.edges, service)
    # Routes depend on what the swarm would serve: while it serves less, there is little to do.
    plan = replace(plan, estimate_tokens_per_s=guess.tokens_per_s)
    wanted_s = tokens / (1 - TRIAL.settle_share) / max(guess.tokens_per_s, 1e-9)
    lasts_s = guess.prompt_time_s + load.output_tokens * guess.token_time_s
    if tokens:  # ten times as many are plenty, if two answers end one behind the other
        virtual_s = min(virtual_s, max(10 * wanted_s, 2 * lasts_s))
    return standing_load(
        problem,
        profiles_of(problem, service),
        plan,
        requests_of(load),
        prompts_share=guess.prompt_time_s / lasts_s if lasts_s > 0 else 0.0,
        seed=seed,
        virtual_s=max(virtual_s, min(TRIAL.run_s_max, wanted_s)),
        sessions_max=load.requests_max,
        hub=bool(service.hub_delay_s),
        requests=guess.requests,
    )


def standing_load(
    problem: Problem,
    profiles: Profiles,
    plan: Plan,
    trace: Sequence[Request],
    *,
    prompts_share: float = 0.0,
    seed: int = 0,
    virtual_s: float = TRIAL.virtual_s,
    sessions_max: float = TRIAL.sessions_max,
    hub: bool = False,
    requests: float = 0.0,
) -> float:
    """Decoded tokens/s of a plan under full load that has lasted for long.

    At the beginning ``prompts_share`` of the sessions are in their prompts. Where stages let in no
    more of these, ``requests`` is about how many sessions there are, those outside included.
    """
    swarm = LiveSwarm(problem, profiles, plan.assignments, FramedWire, hub=hub)
    run = Standing(
        swarm,
        Clients(problem, profiles, plan, swarm.peers, trace),
        sampled(trace, seed),
        start_s=TRIAL.settle_share * virtual_s,
        end_s=virtual_s,
        sessions_max=min(sessions_max, TRIAL.sessions_max),
    )
    sessions = midway(trace, Random(seed))  # noqa: S311
    place_sessions(run, swarm, sessions, Random(seed), prompts_share, requests)  # noqa: S311
    swarm.run(virtual_s, run)
    return len(run.decode_s) / (run.end_s - run.start_s)


def place_sessions(
    run: Standing,
    swarm: LiveSwarm,
    sessions: Iterator[tuple[Request, int]],
    draw: Random,
    prompts_share: float,
    requests: float,
) -> None:
    """Place ``sessions`` (each with the tokens that it has) until one finds no room.

    ``prompts_share`` of them are only beginning. Those whose prompts stages do not let in, as
    others wait, are not placed, but count among ``requests``, at which the placing then ends.
    """
    outside = 0
    for request, done in sessions:
        if draw.random() < prompts_share:
            if len(run.live) >= run.sessions_max:
                return
            outside += not run.open(request, 0.0)
            if outside and len(run.live) + outside >= requests:
                return
            continue
        session = SimulatedSession(run.opened, request, 0.0)
        if len(run.live) >= run.sessions_max or not run.place(session, done):
            return
        swarm.at(draw.random() * TRIAL.enter_s, swarm.enter, session)


def midway(trace: Sequence[Request], draw: Random) -> Iterator[tuple[Request, int]]:
    """Sessions as they are found at a moment, with the number of tokens that they have.

    A long answer is found more often than a short one, and anywhere in it.
    """
    longest = max(request.output_tokens for request in trace)
    while True:
        request = trace[draw.randrange(len(trace))]
        if draw.randrange(longest) < request.output_tokens:
            yield request, draw.randrange(request.output_tokens)


def requests_of(workload: Workload) -> tuple[Request, ...]:
    """Requests of the workload's mean lengths, spread like those of a conversation service."""
    spread = typical()
    inputs = workload.input_tokens * len(spread) / sum(r.input_tokens for r in spread)
    outputs = workload.output_tokens * len(spread) / sum(r.output_tokens for r in spread)
    return tuple(
        Request(
            arrival_s=0.0,
            input_tokens=max(1, round(r.input_tokens * inputs)),
            output_tokens=max(1, round(r.output_tokens * outputs)),
        )
        for r in spread
    )


def profiles_of(problem: Problem, service: Service) -> Profiles:
    """The profiles of the peers that a planner knows from their announcements."""
    links = default_client_links(problem)
    if service.hub_delay_s:
        links = {
            (a, b): (rate, service.hub_delay_s.get(b if a == SOURCE else a, latency_s))
            for (a, b), (rate, latency_s) in links.items()
        }
    state_bytes = problem.model.activation_bytes + problem.token_bytes
    return Profiles(
        peers={
            node.peer_id: _profile(node, service.machines[node.peer_id], state_bytes)
            for node in problem.nodes
        },
        client_links=links,
    )


def _profile(node: PlannerNode, machine: PeerSpeed, state_bytes: int) -> PeerProfile:
    return PeerProfile(
        prefill=_points(machine.prompt),
        decode=_points(machine.decode),
        prefill_context=_slopes(machine.prompt),
        decode_context=_slopes(machine.decode),
        kv=machine.kv,
        layers_max=len(node.tokens_per_s),
        stretch=machine.stretch,
        copy_s_per_token=machine.overhead_s_per_byte * state_bytes,
        in_bytes_per_s=math.inf if node.down_bytes_per_s is None else node.down_bytes_per_s,
        out_bytes_per_s=math.inf if node.up_bytes_per_s is None else node.up_bytes_per_s,
    )


def _points(curve: Curve) -> Points:
    """Times by whole numbers of rows, from none on."""
    rows = {0: 0.0} | {round(tokens): curve.at(tokens) for tokens in curve.tokens}
    if len(rows) == 1:
        rows[1] = curve.at(1.0)
    return tuple(sorted(rows.items()))


def _slopes(curve: Curve) -> Points:
    """Seconds that each token of context adds, by rows; empty: the context costs nothing."""
    if not curve.context_s:
        return ()
    return _points(Curve(tokens=curve.tokens, seconds=curve.context_s))
