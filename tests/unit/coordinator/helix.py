"""Helix's clusters as problems, with the machines that the estimate needs."""

import json
from pathlib import Path

from coordinator.commands.planner_view import read_service
from coordinator.problem.cluster_file import read_cluster
from coordinator.problem.service import Service
from dht.messages.types import Assignment, Problem

DATA = Path(__file__).parents[3] / "bench" / "data" / "helix"


def problem_of(cluster: str, model: str) -> Problem:
    return read_cluster((DATA / "clusters" / f"{cluster}.json").read_bytes(), model)


def service_of(cluster: str, model: str) -> Service:
    """Profiles and KV room of a cluster's peers; rings close through Helix's coordinator."""
    return read_service(DATA / "clusters" / f"{cluster}.json", problem_of(cluster, model), hub=True)


def published(cluster: str, model: str, planner: str) -> tuple[Assignment, ...]:
    """A placement that came with Helix's artifact."""
    shipped = json.loads((DATA / "reference.json").read_text())["max_flow_shipped"]
    file = json.loads((DATA / "clusters" / f"{cluster}.json").read_text())
    spans = shipped[f"{cluster}/{model}/{planner}"]["placement"]
    return tuple(
        Assignment(peer_id=str(node["id"]), start=start, end=end)
        for node, (start, end) in zip(file["nodes"], spans, strict=True)
    )
