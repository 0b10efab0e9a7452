"""Simulates a swarm, event-driven and deterministic by seed
(:mod:`coordinator.simulator.core.event_loop`).

:func:`offline` simulates a placement under full load, :func:`online` under requests with arrival
times.
"""

from coordinator.simulator.core.profiles import PeerProfile, Profiles, StepLimits, from_rates
from coordinator.simulator.core.report import SimulationReport
from coordinator.simulator.core.trace import Request, as_in_papers, read_trace, typical
from coordinator.simulator.runs.full_load import OfflineConfig, OnlineConfig, offline, online

__all__ = [
    "OfflineConfig",
    "OnlineConfig",
    "PeerProfile",
    "Profiles",
    "Request",
    "SimulationReport",
    "StepLimits",
    "as_in_papers",
    "from_rates",
    "offline",
    "online",
    "read_trace",
    "typical",
]
