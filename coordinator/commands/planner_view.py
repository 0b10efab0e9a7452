"""Derives the planner's view of simulated peers, the estimate's input, from their profiles."""

from pathlib import Path

import msgspec

from coordinator.commands.swarm_file import read_file, read_swarm
from coordinator.problem.cluster_file import HELIX_SCHEMA
from coordinator.problem.service import Curve, PeerSpeed, Service, Workload, service_from_rates
from coordinator.simulator.core.profiles import PeerProfile, Points, Profiles
from dht.messages.types import SINK, SOURCE, Problem


def read_service(path: Path, problem: Problem, *, hub: bool = False) -> Service:
    """The service of the cluster file at ``path``, whose ``problem`` was read before.

    Layer times of ``helix-cluster/1`` are in a folder ``profiles`` beside that of the file. Without
    it, and for other schemas, the service is derived from T_j. ``hub``: as in :func:`service_of`;
    live peers close the ring themselves. Raises UserError for malformed files.
    """
    schema = msgspec.json.decode(read_file(path), type=dict[str, object]).get("schema")
    if schema != HELIX_SCHEMA or not (path.parent.parent / "profiles").is_dir():
        return service_from_rates(problem)
    return service_of(problem, read_swarm(path, problem.model.name)[1], hub=hub)


def service_of(
    problem: Problem, profiles: Profiles, workload: Workload | None = None, *, hub: bool = True
) -> Service:
    """The service of ``profiles``, for the planner's estimate.

    ``hub``: whether tokens pass the clients' host on their way from the last stage to the first.
    """
    state = max(1, problem.model.activation_bytes)
    delays = {
        name: (profiles.client_links[SOURCE, name][1] + profiles.client_links[name, SINK][1]) / 2
        for name in profiles.peers
    }
    return Service(
        machines={name: _machine(profile, state) for name, profile in profiles.peers.items()},
        workload=workload or Workload(),
        hub_delay_s=delays if hub else {},
    )


def _machine(profile: PeerProfile, state_bytes: int) -> PeerSpeed:
    return PeerSpeed(
        decode=_curve(profile.decode),
        prompt=_curve(profile.prefill),
        kv=profile.kv,
        overhead_s_per_byte=profile.copy_s_per_token / state_bytes,
    )


def _curve(points: Points) -> Curve:
    return Curve(
        tokens=tuple(float(tokens) for tokens, _ in points),
        seconds=tuple(seconds for _, seconds in points),
    )
