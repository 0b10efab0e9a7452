"""A swarm on paper: event-driven, deterministic by seed (see :mod:`coordinator.simulator.engine`).

:func:`offline` says what a placement would serve under full load, :func:`online` how it would
serve requests that come at their own times.
"""

from coordinator.simulator.full_load import OfflineConfig, OnlineConfig, offline, online
from coordinator.simulator.profiles import PeerProfile, Profiles, StepLimits, from_rates
from coordinator.simulator.report import SimulationReport
from coordinator.simulator.trace import Request, as_in_papers, read_trace, typical

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
