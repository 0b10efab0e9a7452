"""Judges a placement by a short simulated run under the living rules.

A planner's estimate ranks placements by formulas; this runs them. Sessions live for minutes, and
how many of them wait in their prompts settles only after as long; a judgement must take less. So
the run begins in the middle, with sessions somewhere in their answers as far as stages admit them,
and all is shrunk alike: prompts, answers and KV room are a fraction of what they are, so the peers
hold as many sessions, run batches as large and prompts as often, and sessions come and go faster.
"""

import math
from collections.abc import Iterator, Sequence
from random import Random

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
from dht.messages.types import SOURCE, Assignment, FlowEdge, PlannerNode, Problem

VIRTUAL_S = 20.0
SHRINK = 8.0
"""By what lengths and KV room are divided."""
SETTLE_SHARE = 0.5
"""Share of the time before tokens count."""
ENTER_S = 1.0
"""Time over which the sessions that begin in the middle enter the ring, in seconds."""


def judge(
    problem: Problem,
    service: Service,
    assignments: Sequence[Assignment],
    edges: Sequence[FlowEdge] | None = None,
    *,
    seed: int = 0,
    virtual_s: float = VIRTUAL_S,
    shrink: float = SHRINK,
) -> float:
    """Decoded tokens/s of a placement under full load, in ``virtual_s`` simulated seconds.

    Routes follow ``edges``, or the placement's max flow. The same arguments give the same result.
    """
    profiles = profiles_of(problem, service, shrink)
    plan = plan_of(problem, assignments, edges)
    swarm = LiveSwarm(
        problem, profiles, plan.assignments, FramedWire, hub=bool(service.hub_delay_s)
    )
    trace = requests_of(service.workload, shrink)
    run = Standing(
        swarm,
        Clients(problem, profiles, plan, swarm.peers, trace),
        sampled(trace, seed),
        start_s=SETTLE_SHARE * virtual_s,
        end_s=virtual_s,
        sessions_max=service.workload.requests_max,
    )
    fill(run, swarm, midway(trace, Random(seed)), Random(seed))  # noqa: S311
    swarm.run(virtual_s, run)
    return len(run.decode_s) / (run.end_s - run.start_s)


def fill(
    run: Standing, swarm: LiveSwarm, sessions: Iterator[tuple[Request, int]], draw: Random
) -> None:
    """Place ``sessions`` (each with the tokens that it has) until one finds no room."""
    for request, done in sessions:
        session = SimulatedSession(run.opened, request, 0.0)
        if len(run.live) >= run.sessions_max or not run.place(session, done):
            return
        swarm.at(draw.random() * ENTER_S, swarm.enter, session)


def midway(trace: Sequence[Request], draw: Random) -> Iterator[tuple[Request, int]]:
    """Sessions as they are found at a moment, with the number of tokens that they have.

    A long answer is found more often than a short one, and anywhere in it.
    """
    longest = max(request.output_tokens for request in trace)
    while True:
        request = trace[draw.randrange(len(trace))]
        if draw.randrange(longest) < request.output_tokens:
            yield request, draw.randrange(request.output_tokens)


def requests_of(workload: Workload, shrink: float = 1.0) -> tuple[Request, ...]:
    """Requests of the workload's mean lengths divided by ``shrink``, spread like those of a
    conversation service."""
    spread = typical()
    inputs = workload.input_tokens / shrink * len(spread) / sum(r.input_tokens for r in spread)
    outputs = workload.output_tokens / shrink * len(spread) / sum(r.output_tokens for r in spread)
    return tuple(
        Request(
            arrival_s=0.0,
            input_tokens=max(1, round(r.input_tokens * inputs)),
            output_tokens=max(1, round(r.output_tokens * outputs)),
        )
        for r in spread
    )


def profiles_of(problem: Problem, service: Service, shrink: float = 1.0) -> Profiles:
    """The profiles of the peers that a planner knows from their announcements, with KV room divided
    by ``shrink`` and contexts that cost as much more."""
    links = default_client_links(problem)
    if service.hub_delay_s:
        links = {
            (a, b): (rate, service.hub_delay_s.get(b if a == SOURCE else a, latency_s))
            for (a, b), (rate, latency_s) in links.items()
        }
    state_bytes = problem.model.activation_bytes + problem.token_bytes
    return Profiles(
        peers={
            node.peer_id: _profile(node, service.machines[node.peer_id], state_bytes, shrink)
            for node in problem.nodes
        },
        client_links=links,
    )


def _profile(node: PlannerNode, machine: PeerSpeed, state_bytes: int, shrink: float) -> PeerProfile:
    return PeerProfile(
        prefill=_points(machine.prompt),
        decode=_points(machine.decode),
        prefill_context=_slopes(machine.prompt, shrink),
        decode_context=_slopes(machine.decode, shrink),
        kv_entries=tuple(int(entries / shrink) for entries in machine.kv_layer_tokens),
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


def _slopes(curve: Curve, shrink: float) -> Points:
    """Seconds that each token of context adds, by rows; empty: the context costs nothing."""
    if not curve.context_s:
        return ()
    each = tuple(shrink * seconds for seconds in curve.context_s)
    return _points(Curve(tokens=curve.tokens, seconds=each))
