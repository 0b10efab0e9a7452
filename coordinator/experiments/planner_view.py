"""Derives the planner's view of simulated peers, the estimate's input, from their profiles."""

from coordinator.problem.service import Curve, PeerSpeed, Service, Workload
from coordinator.simulator.core.profiles import PeerProfile, Points, Profiles
from dht.messages.types import SINK, SOURCE, Problem


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
        kv_layer_tokens=tuple(float(entries) for entries in profile.kv_entries),
        overhead_s_per_byte=profile.copy_s_per_token / state_bytes,
    )


def _curve(points: Points) -> Curve:
    return Curve(
        tokens=tuple(float(tokens) for tokens, _ in points),
        seconds=tuple(seconds for _, seconds in points),
    )
