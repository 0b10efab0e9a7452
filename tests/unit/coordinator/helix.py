"""Helix's clusters as problems, with the machines that the estimate needs."""

import json
from functools import cache
from pathlib import Path

from coordinator.problem.cluster_file import read_cluster
from coordinator.problem.service import Curve, PeerSpeed, Service
from dht.messages.types import Assignment, Problem

DATA = Path(__file__).parents[3] / "bench" / "data" / "helix"


def problem_of(cluster: str, model: str) -> Problem:
    return read_cluster((DATA / "clusters" / f"{cluster}.json").read_bytes(), model)


@cache
def _curve(name: str) -> Curve:
    points = json.loads((DATA / "profiles" / f"{name}.json").read_text())
    return Curve(
        tokens=tuple(float(tokens) for tokens, _ in points),
        seconds=tuple(seconds for _, seconds in points),
    )


def service_of(cluster: str, model: str) -> Service:
    """Profiles and KV room of a cluster's peers; rings close through Helix's coordinator."""
    file = json.loads((DATA / "clusters" / f"{cluster}.json").read_text())
    machines = {}
    for node in file["nodes"]:
        gpu = file["models"][model]["gpus"][node["gpu"]]
        machines[str(node["id"])] = PeerSpeed(
            decode=_curve(f"{model}_{node['gpu'].lower()}_decode"),
            prompt=_curve(f"{model}_{node['gpu'].lower()}_prompt"),
            kv_layer_tokens=tuple(gpu["kv_entries"]),
            overhead_s_per_byte=0.5 * (1 / 4e9 + 1 / 5e9),
        )
    hub = {}
    for source, target, _, latency_s in file["links"]:
        if "coordinator" in {source, target}:
            hub[str(target if source == "coordinator" else source)] = latency_s
    return Service(machines=machines, hub_delay_s=hub)


def published(cluster: str, model: str, planner: str) -> tuple[Assignment, ...]:
    """A placement that came with Helix's artifact."""
    shipped = json.loads((DATA / "reference.json").read_text())["max_flow_shipped"]
    file = json.loads((DATA / "clusters" / f"{cluster}.json").read_text())
    spans = shipped[f"{cluster}/{model}/{planner}"]["placement"]
    return tuple(
        Assignment(peer_id=str(node["id"]), start=start, end=end)
        for node, (start, end) in zip(file["nodes"], spans, strict=True)
    )
