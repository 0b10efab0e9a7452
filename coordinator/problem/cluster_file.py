"""Reads cluster files: a planner's problem as JSON, for planning offline.

The project's own format (sizes in bytes, rates in tokens/s, ``links`` directed)::

    {"schema": "anabranch-cluster/1",
     "models": {"tiny": {"layers": 8, "layer_bytes": 1000, "embed_bytes": 500, "head_bytes": 500,
                         "kv_bytes_per_token_layer": 2, "activation_bytes": 64}},
     "nodes": [{"id": "a", "memory_bytes": 6000, "kv_tokens_min": 100,
                "tokens_per_s": {"tiny": [90.0, 45.0, 30.0]}}],
     "links": [["a", "b", 12500000, 0.02]],
     "default_bandwidth_bytes_per_s": 12500000, "default_rtt_s": 0.05}

``layer_bytes`` may be a list, with a number for each layer.
A link is source, target, bytes/s, round trip in seconds. ``tokens_per_s[model][j - 1]`` is T_j. A
node may have ``up_bytes_per_s`` and ``down_bytes_per_s``, which all its links share, and name one
of ``uplinks``, an internet connection that all links of its nodes to others share::

    {"uplinks": {"home": {"up_bytes_per_s": 12500000, "down_bytes_per_s": 62500000}},
     "nodes": [{"id": "a", "uplink": "home", ...}, {"id": "b", "uplink": "home", ...}]}

The schema ``helix-cluster/1`` is read too: Helix's own clusters, where the length of T_j is the
number of layers that a GPU can hold, and links have one-way latencies.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from msgspec import Meta

from dht.errors import UserError
from dht.messages.types import (
    RECORD_BOUNDS,
    SINK,
    SOURCE,
    Count,
    Link,
    ModelSpec,
    PeerId,
    PlannerNode,
    Problem,
    Rate,
    Seconds,
    SharedUplink,
    ShortText,
    with_layer_bytes,
)
from dht.process.json_file import decode_json

HELIX_SCHEMA = "helix-cluster/1"
OWN_SCHEMA = "anabranch-cluster/1"

Rates = Annotated[tuple[Rate, ...], Meta(max_length=RECORD_BOUNDS.layers_max)]
LayerCount = Annotated[int, Meta(ge=1, le=RECORD_BOUNDS.layers_max)]
_ASSUMED: dict[str, Any] = {each.name: each.default for each in fields(Problem)}
"""What a problem assumes that says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    layers: LayerCount
    layer_bytes: (
        Count
        | Annotated[tuple[Count, ...], Meta(min_length=1, max_length=RECORD_BOUNDS.layers_max)]
    )
    embed_bytes: Count = 0
    head_bytes: Count = 0
    kv_bytes_per_token_layer: Count = 0
    activation_bytes: Count
    token_bytes: Count = _ASSUMED["token_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    id: PeerId
    memory_bytes: Count
    kv_tokens_min: Count = 0
    up_bytes_per_s: Rate | None = None
    down_bytes_per_s: Rate | None = None
    uplink: ShortText = ""
    tokens_per_s: dict[str, Rates]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uplink:
    up_bytes_per_s: Rate | None = None
    down_bytes_per_s: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    models: dict[str, _Model]
    nodes: Annotated[tuple[_Node, ...], Meta(min_length=1, max_length=RECORD_BOUNDS.peers_max)]
    links: tuple[tuple[PeerId, PeerId, Rate, Seconds], ...] = ()
    uplinks: Annotated[dict[ShortText, _Uplink], Meta(max_length=RECORD_BOUNDS.peers_max)] = field(
        default_factory=dict
    )
    default_bandwidth_bytes_per_s: Rate = _ASSUMED["default_bandwidth_bytes_per_s"]
    default_rtt_s: Seconds = _ASSUMED["default_rtt_s"]
    client_bandwidth_bytes_per_s: Rate = _ASSUMED["client_bandwidth_bytes_per_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _HelixGpu:
    max_layers: LayerCount
    tokens_per_s: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class _HelixModel:
    layers: LayerCount
    token_bytes: Count
    activation_bytes: Count
    layer_bytes: Rate
    gpus: dict[str, _HelixGpu]


@dataclass(frozen=True, slots=True, kw_only=True)
class _HelixNode:
    id: int | str
    gpu: str
    in_nic_Bps: Rate | None = None
    out_nic_Bps: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _HelixCluster:
    models: dict[str, _HelixModel]
    nodes: Annotated[tuple[_HelixNode, ...], Meta(min_length=1, max_length=RECORD_BOUNDS.peers_max)]
    links: tuple[tuple[int | str, int | str, Rate, Seconds], ...] = field(default=())


def read_cluster(data: bytes, model: str | None) -> Problem:
    """The problem of placing ``model`` (None: the file's only model) on a cluster file's nodes.

    Raises UserError, in one line, for malformed files and unknown models.
    """
    try:
        schema = decode_json(data, dict[str, Any]).get("schema")
        if schema == HELIX_SCHEMA:
            problem = _from_helix(decode_json(data, _HelixCluster), model)
        elif schema in {OWN_SCHEMA, None}:
            problem = _from_own(decode_json(data, _Cluster), model)
        else:
            raise UserError(f"schema {schema!r} is not known; use {OWN_SCHEMA} or {HELIX_SCHEMA}")
    except ValueError as error:
        raise UserError(f"not a cluster file: {error}") from error
    _check_names(problem)
    return problem


def _check_names(problem: Problem) -> None:
    names = [node.peer_id for node in problem.nodes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"node {min(twice)} is listed twice")
    if {SOURCE, SINK} & set(names):
        raise UserError(f"a node cannot be named {SOURCE} or {SINK}")
    for link in problem.links:
        for end in (link.source, link.target):
            if end not in names:
                raise UserError(f"a link names {end}, which is no node of the cluster")


def _pick(models: dict[str, Any], model: str | None) -> str:
    have = ", ".join(sorted(models)) or "none"
    if model is None:
        if len(models) != 1:
            raise UserError(f"the cluster file has {len(models)} models, {have}: name one")
        return next(iter(models))
    if model not in models:
        raise UserError(f"the cluster file has no model {model}; it has {have}")
    return model


def _from_own(cluster: _Cluster, wanted: str | None) -> Problem:
    name = _pick(cluster.models, wanted)
    model = cluster.models[name]
    for node in cluster.nodes:
        if name not in node.tokens_per_s:
            raise UserError(f"node {node.id} has no tokens_per_s for {name}")
        if node.uplink and node.uplink not in cluster.uplinks:
            raise UserError(f"node {node.id} is behind {node.uplink}, which is none of uplinks")
    each = model.layer_bytes
    sizes = (each,) if isinstance(each, int) else each
    if len(sizes) not in {1, model.layers}:
        raise UserError(f"{name} has {model.layers} layers and the bytes of {len(sizes)}")
    spec = _spec(
        name,
        layers=model.layers,
        layer_bytes=max(sizes),
        embed_bytes=model.embed_bytes,
        head_bytes=model.head_bytes,
        kv_bytes_per_token_layer=model.kv_bytes_per_token_layer,
        activation_bytes=model.activation_bytes,
    )
    return Problem(
        model=with_layer_bytes(spec, sizes),
        nodes=tuple(
            PlannerNode(
                peer_id=node.id,
                memory_bytes=node.memory_bytes,
                kv_tokens_min=node.kv_tokens_min,
                up_bytes_per_s=node.up_bytes_per_s,
                down_bytes_per_s=node.down_bytes_per_s,
                uplink=node.uplink,
                tokens_per_s=node.tokens_per_s[name],
            )
            for node in cluster.nodes
        ),
        uplinks=tuple(
            SharedUplink(
                name=uplink,
                up_bytes_per_s=each.up_bytes_per_s,
                down_bytes_per_s=each.down_bytes_per_s,
            )
            for uplink, each in cluster.uplinks.items()
        ),
        links=tuple(_link(*link) for link in cluster.links),
        default_bandwidth_bytes_per_s=cluster.default_bandwidth_bytes_per_s,
        default_rtt_s=cluster.default_rtt_s,
        token_bytes=model.token_bytes,
        client_bandwidth_bytes_per_s=cluster.client_bandwidth_bytes_per_s,
    )


def _from_helix(cluster: _HelixCluster, wanted: str | None) -> Problem:
    name = _pick(cluster.models, wanted)
    model = cluster.models[name]
    layer_bytes = math.ceil(model.layer_bytes)
    nodes = []
    for node in cluster.nodes:
        gpu = model.gpus.get(node.gpu)
        if gpu is None:
            raise UserError(f"node {node.id} has a {node.gpu}, of which {name} has no profile")
        rates = gpu.tokens_per_s[: gpu.max_layers]
        nodes.append(
            PlannerNode(
                peer_id=str(node.id),
                memory_bytes=len(rates) * layer_bytes,
                kv_tokens_min=0,
                up_bytes_per_s=node.out_nic_Bps,
                down_bytes_per_s=node.in_nic_Bps,
                tokens_per_s=rates,
            )
        )
    clients = [link[2] for link in cluster.links if "coordinator" in link[:2]]
    spec = _spec(
        name,
        layers=model.layers,
        layer_bytes=layer_bytes,
        activation_bytes=model.activation_bytes,
    )
    return Problem(
        model=spec,
        nodes=tuple(nodes),
        links=tuple(
            _link(str(source), str(target), bandwidth, 2 * latency_s)
            for source, target, bandwidth, latency_s in cluster.links
            if "coordinator" not in {source, target}
        ),
        token_bytes=model.token_bytes,
        client_bandwidth_bytes_per_s=min(clients, default=12.5e6),
    )


def _link(source: str, target: str, bandwidth_bytes_per_s: float, rtt_s: float) -> Link:
    return Link(
        source=source,
        target=target,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        rtt_s=rtt_s,
        measured_unix_s=0.0,
    )


def _spec(
    name: str,
    *,
    layers: int,
    layer_bytes: int,
    activation_bytes: int,
    embed_bytes: int = 0,
    head_bytes: int = 0,
    kv_bytes_per_token_layer: int = 0,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        root="offline",
        layers=layers,
        layer_bytes=layer_bytes,
        embed_bytes=embed_bytes,
        head_bytes=head_bytes,
        kv_bytes_per_token_layer=kv_bytes_per_token_layer,
        activation_bytes=activation_bytes,
        context_tokens=1,
        vocab=1,
    )
