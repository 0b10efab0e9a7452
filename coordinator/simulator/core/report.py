"""The report of a simulated run: throughput, latencies, and use of peers and links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PERCENTILES = (5, 25, 50, 75, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A latency's mean and percentiles, in seconds."""

    count: int
    mean_s: float
    percentiles_s: Mapping[int, float]
    """Percentile by percent: the value at index ``count * percent // 100`` of the sorted values."""
    distribution_s: tuple[float, ...] = ()
    """Percentiles for every percent from 0 to 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUse:
    """One peer's layers, and the shares of time busy and of KV used at the peak."""

    start: int
    layers: int
    busy: float
    kv_peak: float
    tokens_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One directed link's pieces, share of time busy, and mean wait of a piece in seconds."""

    pieces: int
    busy: float
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Throughput, latencies and use over the measured span."""

    decode_tokens_per_s: float
    prompt_tokens_per_s: float
    prompt: Latency
    """Latency from a request's arrival to its prompt's end at the clients."""
    decode: Latency
    """Latency from one token at the clients to the next."""
    prompts_done: int
    sessions_done: int
    sessions_opened: int
    sessions_live: float
    """Mean number of open sessions, sampled every second."""
    rejected: int
    """Offline: requests that found no route with room and were dropped (Helix's rule)."""
    replays: int
    """Number of replays: a session lost a peer and went on over another route."""
    measured_s: float
    simulated_s: float
    events: int
    tokens_per_s_by_time: tuple[tuple[float, float], ...] = ()
    """Pairs of a start time and the decoded tokens/s in the ten seconds from then."""
    peers: Mapping[str, PeerUse] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkUse] = field(default_factory=dict)


def latency(values: Sequence[float]) -> Latency:
    """The latency of ``values``, in seconds; zeros when there are no values."""
    ordered = sorted(values)
    count = len(ordered)
    every = tuple(
        ordered[min(count - 1, count * percent // 100)] if count else 0.0 for percent in range(101)
    )
    return Latency(
        count=count,
        mean_s=sum(ordered) / count if count else 0.0,
        percentiles_s={percent: every[percent] for percent in PERCENTILES},
        distribution_s=every if count else (),
    )
