"""Profiles of simulated peers: layer times, KV room and limits of a step.

A planner's T_j is one number; a simulated step's time depends on its batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from coordinator.problem.service import KvCapacity, kv_capacity, stretched
from dht.messages.types import SINK, SOURCE, PlannerNode, Problem

Points = tuple[tuple[int, float], ...]
"""Measured ``(tokens in the batch, seconds per layer)``, tokens ascending."""

RATE_POINTS = ((0, 0.0), (1, 1.0), (4096, 4096.0))
"""Layer times proportional to tokens, for peers of which only T_j is known."""
TABLES_MAX = 64
"""Maximum cached tables of layer times: a swarm has many peers of a few sorts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of one engine step of a peer that holds a given number of layers."""

    prefills_max: int = 1 << 30
    prefill_tokens_max: int = 1 << 30
    """Maximum prefill tokens per step; a longer chunk runs as the step's only prefill."""
    decodes_max: int = 1 << 30
    context_tokens_max: int = 1 << 50
    """Maximum sum of the context lengths of a step's decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProfile:
    """One peer's speed and KV room for one model."""

    prefill: Points
    decode: Points
    prefill_context: Points = ()
    """Seconds that each token of earlier context adds, by tokens of the chunk; empty: none."""
    decode_context: Points = ()
    """Seconds that each token of mean context adds, by decodes; empty: none."""
    kv: KvCapacity
    limits: tuple[StepLimits, ...] = (StepLimits(),)
    """Limits of a step in Helix's simulator while j layers are held, at index j - 1; the last one
    repeats. Stages derive theirs from layer times."""
    layers_max: int = 0
    """Maximum layers that the peer can hold, which bound a step's prefill rows; 0: unknown."""
    stretch: tuple[float, ...] = ()
    """Factor on a layer's time while j layers are held, at index j - 1; empty: 1."""
    copy_s_per_token: float = 0.0
    """Copy time per arrived token, before the first layer of a pass."""
    single_decode_factor: float = 1.0
    """Factor on the table's time of a step with exactly one decode (Helix: 2)."""
    in_bytes_per_s: float = math.inf
    """Rate of the peer's own downlink."""
    out_bytes_per_s: float = math.inf

    def stretch_of(self, layers: int) -> float:
        """Factor on a layer's time while ``layers`` layers are held."""
        return stretched(self.stretch, layers)

    def limits_of(self, layers: int) -> StepLimits:
        """Limits of a step while ``layers`` layers are held."""
        return self.limits[min(layers, len(self.limits)) - 1]


NOTHING = PeerProfile(
    prefill=((0, 0.0), (1, 0.0)), decode=((0, 0.0), (1, 0.0)), kv=KvCapacity(beside=(0.0,))
)
"""The profile of the sink and other ends that compute nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Profiles by peer, and the links of the clients' host (``source`` and ``sink``)."""

    peers: Mapping[str, PeerProfile]
    client_links: Mapping[tuple[str, str], tuple[float, float]]
    """Bytes/s and one-way seconds of each link (``source``, peer) and (peer, ``sink``)."""


@lru_cache(maxsize=TABLES_MAX)
def interpolated(points: Points, tokens_max: int) -> tuple[float, ...]:
    """Seconds per layer for 0 … ``tokens_max`` tokens: linear between points and beyond the last.

    Raises ValueError for fewer than two points or points out of order.
    """
    if len(points) < 2 or any(a[0] >= b[0] for a, b in pairwise(points)):
        raise ValueError("a layer's times need two points or more, tokens ascending")
    times: list[float] = []
    at = 0
    for tokens in range(tokens_max + 1):
        while at < len(points) - 2 and points[at + 1][0] < tokens:
            at += 1
        (x0, y0), (x1, y1) = points[at], points[at + 1]
        if tokens == x1:
            times.append(y1)
        else:
            times.append(max(0.0, y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)))
    return tuple(times)


def from_rates(problem: Problem) -> Profiles:
    """Profiles from T_j alone: time proportional to tokens x layers.

    KV room is the memory left beside the weights.
    """
    return Profiles(
        peers={node.peer_id: _from_rate(problem, node) for node in problem.nodes},
        client_links=default_client_links(problem),
    )


def default_client_links(problem: Problem) -> dict[tuple[str, str], tuple[float, float]]:
    """Client links without measurements: client bandwidth and half the default round trip."""
    link = problem.client_bandwidth_bytes_per_s, problem.default_rtt_s / 2
    links = {(SOURCE, node.peer_id): link for node in problem.nodes}
    return links | {(node.peer_id, SINK): link for node in problem.nodes}


def _from_rate(problem: Problem, node: PlannerNode) -> PeerProfile:
    best = max((j * rate for j, rate in enumerate(node.tokens_per_s, start=1)), default=0.0)
    token_layer_s = 1.0 / best if best > 0 else 1.0
    points = tuple((tokens, count * token_layer_s) for tokens, count in RATE_POINTS)
    return PeerProfile(
        prefill=points,
        decode=points,
        kv=kv_capacity(problem.model, node),
        layers_max=len(node.tokens_per_s),
        in_bytes_per_s=math.inf if node.down_bytes_per_s is None else node.down_bytes_per_s,
        out_bytes_per_s=math.inf if node.up_bytes_per_s is None else node.up_bytes_per_s,
    )
