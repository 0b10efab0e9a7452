"""A toy swarm on paper, for the simulator's tests: times that can be computed by hand."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from coordinator.commands.full_load import OfflineConfig
from coordinator.problem.service import KvCapacity
from coordinator.simulator.core.parts import SimulatedSession
from coordinator.simulator.core.profiles import PeerProfile, Profiles, StepLimits
from coordinator.simulator.core.trace import Request
from dht.messages.types import SINK, SOURCE, Assignment, Link, ModelSpec, PlannerNode, Problem

PREFILL_S, DECODE_S = 0.001, 0.002
LATENCY_S = 0.5
BYTES_PER_S = 1000.0
STATE_BYTES, ID_BYTES = 10, 2
REQUESTS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 60), st.integers(1, 8), st.booleans()),
    min_size=1,
    max_size=12,
)
"""Requests, each its arrival in seconds, the tokens of its prompt and answer, and which of two
routes it takes."""


def profile(limits: StepLimits | None = None, **more: float) -> PeerProfile:
    """1 ms per prompt token and layer; 2 ms per step with decodes and layer, however many."""
    return PeerProfile(
        prefill=((0, 0.0), (1, PREFILL_S), (1000, 1000 * PREFILL_S)),
        decode=((0, 0.0), (1, DECODE_S), (100, DECODE_S)),
        kv=KvCapacity(beside=(10_000,)),
        limits=(limits or StepLimits(),),
        **more,
    )


def swarm(
    spans: Sequence[tuple[int, int]], profiles: Sequence[PeerProfile] | None = None
) -> tuple[Problem, Profiles, tuple[Assignment, ...]]:
    """Peers ``p0, p1, …`` that hold ``spans``; every link has 1000 bytes/s and half a second."""
    layers = max(end for _, end in spans)
    names = [f"p{index}" for index in range(len(spans))]
    problem = Problem(
        model=ModelSpec(
            name="toy",
            root="f",
            layers=layers,
            layer_bytes=1,
            embed_bytes=0,
            head_bytes=0,
            kv_bytes_per_token_layer=1,
            activation_bytes=STATE_BYTES - ID_BYTES,
            context_tokens=4096,
            vocab=8,
        ),
        nodes=tuple(
            PlannerNode(
                peer_id=name, memory_bytes=1000, kv_tokens_min=0, tokens_per_s=(50.0,) * layers
            )
            for name in names
        ),
        links=tuple(
            Link(
                source=a,
                target=b,
                bandwidth_bytes_per_s=BYTES_PER_S,
                rtt_s=2 * LATENCY_S,
                measured_unix_s=0.0,
            )
            for a in names
            for b in names
            if a != b
        ),
        token_bytes=ID_BYTES,
        client_bandwidth_bytes_per_s=BYTES_PER_S,
    )
    clients = {(SOURCE, name): (BYTES_PER_S, LATENCY_S) for name in names}
    clients |= {(name, SINK): (BYTES_PER_S, LATENCY_S) for name in names}
    each = profiles or [profile()] * len(spans)
    held = tuple(
        Assignment(peer_id=name, start=start, end=end)
        for name, (start, end) in zip(names, spans, strict=True)
    )
    peers = dict(zip(names, each, strict=True))
    return problem, Profiles(peers=peers, client_links=clients), held


@dataclass
class Recorder:
    """Every token's time, by session."""

    prompts: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)

    def prompt_done(self, session: SimulatedSession, now_s: float) -> None:
        self.prompts[session.number] = now_s

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None:
        assert issued_s < now_s
        self.tokens.setdefault(session.number, []).append(now_s)

    def session_done(self, session: SimulatedSession, now_s: float) -> None:
        self.done[session.number] = now_s


def request(input_tokens: int, output_tokens: int) -> Request:
    return Request(arrival_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens)


def start(engine: Any, at_s: float, what: Request, route: Sequence[tuple[str, int, int]]) -> int:
    """Open a session over a route at a time; returns its number."""
    number = start.numbers = getattr(start, "numbers", 0) + 1  # type: ignore[attr-defined]
    session = SimulatedSession(number, what, at_s)
    engine.call_at(at_s, lambda: engine.open(session, route))
    return number


def pass_s(tokens: int, layers: Sequence[int], *, prompt: bool) -> float:
    """Seconds of one pass of ``tokens`` over an idle chain of peers that hold these numbers of
    layers."""
    compute = sum(layers) * (tokens * PREFILL_S if prompt else DECODE_S)
    ends = 2 * (LATENCY_S + tokens * ID_BYTES / BYTES_PER_S)
    between = (len(layers) - 1) * (LATENCY_S + tokens * STATE_BYTES / BYTES_PER_S)
    return compute + ends + between


def saturated(seed: int = 3) -> tuple[Problem, Profiles, tuple[Assignment, ...], OfflineConfig]:
    limits = StepLimits(prefills_max=1, prefill_tokens_max=2048, decodes_max=64)
    fast = PeerProfile(
        prefill=((0, 0.0), (2048, 0.05)),
        decode=((0, 0.0), (64, 0.004)),
        kv=KvCapacity(beside=(400_000,)),
        limits=(limits,),
    )
    problem, profiles, held = swarm([(0, 4), (4, 8), (0, 4)], [fast] * 3)
    quick = dict.fromkeys(profiles.client_links, (1e9, 0.0005))
    problem = Problem(
        model=problem.model,
        nodes=problem.nodes,
        default_bandwidth_bytes_per_s=1e9,
        default_rtt_s=0.001,
        token_bytes=2,
        client_bandwidth_bytes_per_s=1e9,
    )
    config = OfflineConfig(seed=seed, warm_up_s=10.0, measured_s=30.0)
    return problem, Profiles(peers=profiles.peers, client_links=quick), held, config


def poisson(
    trace: Sequence[Request], *, per_s: float, duration_s: float, seed: int
) -> tuple[Request, ...]:
    """Poisson arrivals at ``per_s`` for ``duration_s``, with lengths drawn from a trace."""
    draw = random.Random(seed)
    found: list[Request] = []
    at_s = draw.expovariate(per_s)
    while at_s < duration_s:
        request = trace[draw.randint(0, len(trace) - 1)]
        found.append(
            Request(
                arrival_s=at_s,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
            )
        )
        at_s += draw.expovariate(per_s)
    return tuple(found)
