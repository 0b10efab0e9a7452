"""Reads simulation profiles from cluster files, beside the planner's problem (see
:mod:`coordinator.problem.cluster_file`).

``anabranch-cluster/1`` may carry profiles inline: a node names one of ``profiles``, each with
tables per model::

    {"nodes": [{"id": "a", "profile": "rtx4090", ...}],
     "profiles": {"rtx4090": {"tiny": {
         "prefill_s": [[0, 0.0], [512, 0.004]], "decode_s": [[0, 0.0], [64, 0.002]],
         "kv_entries": [100000, 80000], "prefill_tokens_max": 2048, "decodes_max": 256}}},
     "client_latency_s": 0.03}

``helix-cluster/1`` keeps layer times in files of their own:
``../profiles/<model>_<gpu>_{prompt,decode}.json`` as seen from the cluster file.
Nodes without a profile get one from T_j.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from coordinator.problem.cluster_file import HELIX_SCHEMA, read_cluster
from coordinator.problem.service import KvCapacity
from coordinator.simulator.core.profiles import (
    PeerProfile,
    Points,
    Profiles,
    StepLimits,
    default_client_links,
    from_rates,
    interpolated,
)
from dht.errors import UserError
from dht.messages.types import RECORD_BOUNDS, SINK, SOURCE, Count, Problem, Rate, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmFileConfig:
    """Bounds of a file, and rates that Helix's simulator assumes."""

    file_bytes_max: int = 64 << 20
    points_max: int = 4096
    concat_bytes_per_s: float = 4e9
    transfer_bytes_per_s: float = 5e9
    """Rates of Helix's simulator: each arrived token's activation is joined, then moved to the
    GPU."""
    single_decode_factor: float = 2.0


SWARM_FILE = SwarmFileConfig()

Table = Annotated[
    tuple[tuple[Count, Seconds], ...], Meta(min_length=2, max_length=SWARM_FILE.points_max)
]
Entries = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=RECORD_BOUNDS.layers_max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    prompt_max_requests: Count
    prompt_max_tokens: Count
    decode_max_tokens: Count
    decode_max_context: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    kv_entries: Entries
    inference: Annotated[
        tuple[_Limits, ...], Meta(min_length=1, max_length=RECORD_BOUNDS.layers_max)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    activation_bytes: Count
    gpus: dict[str, _Gpu]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    id: int | str
    gpu: str
    in_nic_Bps: Rate = float("inf")
    out_nic_Bps: Rate = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Helix:
    models: dict[str, _Model]
    nodes: tuple[_Node, ...]
    links: tuple[tuple[int | str, int | str, Rate, Seconds], ...] = ()


_UNLIMITED = StepLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnProfile:
    prefill_s: Table
    decode_s: Table
    kv_entries: Entries | None = None
    prefills_max: Count = _UNLIMITED.prefills_max
    prefill_tokens_max: Count = _UNLIMITED.prefill_tokens_max
    decodes_max: Count = _UNLIMITED.decodes_max


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnNode:
    id: str
    profile: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    nodes: tuple[_OwnNode, ...]
    profiles: dict[str, dict[str, _OwnProfile]] = field(default_factory=dict)
    client_latency_s: Seconds | None = None


def read_swarm(path: Path, model: str | None) -> tuple[Problem, Profiles]:
    """A cluster file's problem and profiles; raises UserError, in one line, if malformed."""
    data = read_file(path)
    problem = read_cluster(data, model)
    name = problem.model.name
    try:
        schema = msgspec.json.decode(data, type=dict[str, Any]).get("schema")
        if schema == HELIX_SCHEMA:
            cluster = msgspec.json.decode(data, type=_Helix)
            return problem, _helix(cluster, name, path.parent.parent / "profiles")
        return problem, _own(msgspec.json.decode(data, type=_Own), problem)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{path}: the profiles cannot be read: {error}") from error


def read_file(path: Path) -> bytes:
    """A file's bytes; raises UserError when it cannot be read or is too large."""
    try:
        if path.stat().st_size > SWARM_FILE.file_bytes_max:
            raise UserError(f"{path} is larger than {SWARM_FILE.file_bytes_max >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _points(table: Points, where: str) -> Points:
    try:
        interpolated(table, 1)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    return table


def _helix(cluster: _Helix, model: str, directory: Path) -> Profiles:
    gpus = {
        gpu: _gpu(profile, cluster.models[model].activation_bytes, directory, f"{model}_{gpu}")
        for gpu, profile in cluster.models[model].gpus.items()
        if any(node.gpu == gpu for node in cluster.nodes)
    }
    peers = {
        str(node.id): replace(
            gpus[node.gpu], in_bytes_per_s=node.in_nic_Bps, out_bytes_per_s=node.out_nic_Bps
        )
        for node in cluster.nodes
    }
    links: dict[tuple[str, str], tuple[float, float]] = {}
    for source, target, bytes_per_s, latency_s in cluster.links:
        if source == "coordinator":
            links[SOURCE, str(target)] = bytes_per_s, latency_s
        elif target == "coordinator":
            links[str(source), SINK] = bytes_per_s, latency_s
    return Profiles(peers=peers, client_links=links)


def _gpu(gpu: _Gpu, activation_bytes: int, directory: Path, name: str) -> PeerProfile:
    tables = [
        _points(
            msgspec.json.decode(read_file(directory / f"{name.lower()}_{phase}.json"), type=Table),
            f"{name.lower()}_{phase}.json",
        )
        for phase in ("prompt", "decode")
    ]
    return PeerProfile(
        prefill=tables[0],
        decode=tables[1],
        kv=KvCapacity(beside=gpu.kv_entries),
        limits=tuple(
            StepLimits(
                prefills_max=limits.prompt_max_requests,
                prefill_tokens_max=limits.prompt_max_tokens,
                decodes_max=limits.decode_max_tokens,
                context_tokens_max=limits.decode_max_context,
            )
            for limits in gpu.inference
        ),
        layers_max=len(gpu.inference),
        copy_s_per_token=activation_bytes / SWARM_FILE.concat_bytes_per_s
        + activation_bytes / SWARM_FILE.transfer_bytes_per_s,
        single_decode_factor=SWARM_FILE.single_decode_factor,
    )


def _own(cluster: _Own, problem: Problem) -> Profiles:
    plain = from_rates(problem)
    peers = dict(plain.peers)
    for node in cluster.nodes:
        if node.profile is None:
            continue
        found = cluster.profiles.get(node.profile, {}).get(problem.model.name)
        if found is None:
            raise UserError(
                f"node {node.id}: there is no profile {node.profile} for {problem.model.name}"
            )
        where = f"profile {node.profile}"
        peers[node.id] = replace(
            peers[node.id],
            prefill=_points(found.prefill_s, where),
            decode=_points(found.decode_s, where),
            kv=KvCapacity(beside=found.kv_entries) if found.kv_entries else peers[node.id].kv,
            limits=(
                StepLimits(
                    prefills_max=found.prefills_max,
                    prefill_tokens_max=found.prefill_tokens_max,
                    decodes_max=found.decodes_max,
                ),
            ),
        )
    links = default_client_links(problem)
    if cluster.client_latency_s is not None:
        links = {pair: (rate, cluster.client_latency_s) for pair, (rate, _) in links.items()}
    return Profiles(peers=peers, client_links=links)
