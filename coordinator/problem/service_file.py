"""Reads machines from cluster files: layer times by batch, KV room (see cluster-format.md)."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from coordinator.problem.cluster_file import HELIX_SCHEMA
from coordinator.problem.service import Curve, PeerSpeed, Service, service_from_rates
from dht.errors import UserError
from dht.messages.types import LAYERS_MAX, Problem, Rate, Seconds

FILE_BYTES_MAX = 64 << 20
COPY_S_PER_BYTE = 0.5 * (1 / 4e9 + 1 / 5e9)
"""Copy time per byte: Helix's simulator joins and moves arriving activations at these rates. Half
of it counts at each end."""

Points = Annotated[tuple[tuple[Rate, Seconds], ...], Meta(min_length=2, max_length=4096)]


class _Gpu(msgspec.Struct, frozen=True):
    kv_entries: Annotated[tuple[Rate, ...], Meta(max_length=LAYERS_MAX)] = ()


class _Model(msgspec.Struct, frozen=True):
    gpus: dict[str, _Gpu]


class _Node(msgspec.Struct, frozen=True):
    id: int | str
    gpu: str


class _Helix(msgspec.Struct, frozen=True):
    models: dict[str, _Model]
    nodes: tuple[_Node, ...]
    links: tuple[tuple[int | str, int | str, Rate, Seconds], ...] = ()


def read_service(path: Path, problem: Problem) -> Service:
    """The service of the cluster file at ``path``, whose ``problem`` was read before.

    Layer times of ``helix-cluster/1`` are in ``../profiles/<model>_<gpu>_prompt.json`` and
    ``…_decode.json``. Without these files, and for other schemas, the service is derived from T_j.
    Raises UserError for malformed files.
    """
    data = path.read_bytes()
    if json.loads(data).get("schema") != HELIX_SCHEMA:
        return service_from_rates(problem)
    try:
        cluster = msgspec.json.decode(data, type=_Helix)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: the machines cannot be read: {error}") from error
    directory, name = path.parent.parent / "profiles", problem.model.name
    machines = {}
    curves: dict[str, Curve] = {}
    gpus = cluster.models[name].gpus
    if not all(gpus[node.gpu].kv_entries for node in cluster.nodes):
        return service_from_rates(problem)
    for node in cluster.nodes:
        for phase in ("prompt", "decode"):
            key = f"{name}_{node.gpu.lower()}_{phase}"
            if key not in curves:
                if not (directory / f"{key}.json").is_file():
                    return service_from_rates(problem)
                curves[key] = _curve(directory / f"{key}.json")
        machines[str(node.id)] = PeerSpeed(
            decode=curves[f"{name}_{node.gpu.lower()}_decode"],
            prompt=curves[f"{name}_{node.gpu.lower()}_prompt"],
            kv_layer_tokens=gpus[node.gpu].kv_entries,
            overhead_s_per_byte=COPY_S_PER_BYTE,
        )
    hub: dict[str, float] = {}
    for source, target, _, latency_s in cluster.links:
        if "coordinator" in {source, target}:
            hub[str(target if source == "coordinator" else source)] = latency_s
    return Service(machines=machines, hub_delay_s=hub)


def _curve(path: Path) -> Curve:
    decode = partial(msgspec.json.decode, type=Points)
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UserError(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB")
        points: Any = decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise UserError(f"{path}: tokens must ascend")
    return Curve(tokens=tuple(tokens for tokens, _ in points), seconds=tuple(s for _, s in points))
