"""Frozen types that travel between peers or are shared by several rooms.

Layer ranges are half-open: ``[start, end)``. Units are the last word of a name. Annotations hold
the bounds, which :mod:`dht.messages.codec` enforces when a value is decoded.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBounds:
    """Bounds of what records and plans may say, and what their numbers mean."""

    layers_max: int = 1024
    layer_sizes_max: int = 16
    """Maximum kinds of layers of one model, by their bytes."""
    peers_max: int = 4096
    addresses_max: int = 8
    link_fresh_max_s: float = 6 * 3600.0
    """Age in seconds at which a peer measures even a steady link again."""
    links_max: int = 20
    context_tokens_max: int = 1 << 22
    plan_bytes_max: int = 8 << 20
    """Maximum size of a plan's body. ``peers_max`` peers with all edges and waves have 7.5 million
    bytes, a thousand peers with two edges each 0.4 million."""
    bytes_max: int = 1 << 50
    rate_max: float = 1e15
    answer_weight_max: float = 0.5
    """Weight of the speed of one answer in plans for an idle swarm, in the geometric mean of that
    speed and the throughput under full load: both count alike. What an idle swarm gives up is there
    again some minutes after its load rises."""
    tokens_per_s_max: float = 1e6
    """Maximum rate that a peer counts with: beside 1e15, which the wire allows, all others' would
    be lost."""
    flow_share: float = 1e-9
    """Worth of one token/s of flow, in tokens/s, where the estimate is that nothing is served."""
    layer_times_max: int = 12
    feature_layers_max: int = 3
    """Maximum layers in front of which a head takes a token's hidden states."""
    far_tokens: int = 4096
    """Context of a layer's second announced time; between and beyond both, time is linear in it."""
    nanoseconds_max: int = 1 << 50
    kv_tokens_least_max: int = 2048


RECORD_BOUNDS = RecordBounds()

PLAN_EDGES_MAX = 12 * RECORD_BOUNDS.peers_max

PeerId = Annotated[str, Meta(min_length=1, max_length=64)]
ShortText = Annotated[str, Meta(max_length=128)]
Address = Annotated[str, Meta(max_length=256)]
LayerIndex = Annotated[int, Meta(ge=0, le=RECORD_BOUNDS.layers_max)]
Count = Annotated[int, Meta(ge=0, le=RECORD_BOUNDS.bytes_max)]
Rate = Annotated[float, Meta(ge=0, le=RECORD_BOUNDS.rate_max)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Rows = Annotated[int, Meta(ge=1, le=1 << 20)]
Nanoseconds = Annotated[int, Meta(ge=0, le=RECORD_BOUNDS.nanoseconds_max)]
LayerTimes = Annotated[
    tuple[tuple[Rows, Nanoseconds, Nanoseconds], ...],
    Meta(max_length=RECORD_BOUNDS.layer_times_max),
]
"""Triples of a number of rows and two times of one layer, in nanoseconds, in a step of that many
rows: without context before these rows, and with ``RECORD_BOUNDS.far_tokens`` in each session. Rows
ascend."""

SOURCE = "source"
"""Name of the flow network's source: the clients' prompts and the ring's tokens."""
SINK = "sink"
"""Name of the flow network's sink: sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The device that a peer computes on."""

    kind: Annotated[str, Meta(max_length=16)]
    """``cpu`` or ``cuda``."""
    name: ShortText
    memory_bytes: Count
    """Total memory of the device, not only the lent part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as planners need it; computed from its configuration and tensor headers alone."""

    name: ShortText
    root: Annotated[str, Meta(max_length=64)]
    """SHA-256 over text and weight files (:func:`dht.checkpoints.model_files.root_of`)."""
    layers: Annotated[int, Meta(ge=1, le=RECORD_BOUNDS.layers_max)]
    layer_bytes: Count
    """Bytes of the largest layer's weights, in the dtype that peers compute in."""
    layer_sizes: Annotated[tuple[Count, ...], Meta(max_length=RECORD_BOUNDS.layer_sizes_max)] = ()
    """Bytes of each kind of layer, where layers differ; (): all are as large as the largest."""
    layer_kinds: Annotated[bytes, Meta(max_length=RECORD_BOUNDS.layers_max)] = b""
    """For each layer, the index of its kind in ``layer_sizes``."""
    embed_bytes: Count
    """Bytes of extra weights at the peer that holds layer 0 (embedding)."""
    head_bytes: Count
    """Bytes of extra weights at the peer that holds the last layer (norm and LM head)."""
    kv_bytes_per_token_layer: Count
    activation_bytes: Count
    """Bytes of one token's hidden state on a link."""
    context_tokens: Annotated[int, Meta(ge=1, le=RECORD_BOUNDS.context_tokens_max)]
    vocab: Annotated[int, Meta(ge=1, le=1 << 24)]

    @property
    def key(self) -> str:
        """The model's name as part of a DHT key (hub ids contain a slash, keys must not)."""
        return model_key(self.name)

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of all in which models of one name may differ: the root, and the sizes that
        sessions depend on."""
        return fingerprint_of(self.root, self.layers, self.context_tokens, self.vocab)

    def serves_with(self, other: "ModelSpec") -> bool:
        """Whether peers of both models can serve one session: they differ in sizes at most.

        Sizes depend on the precision that each peer computes in.
        """
        return _identity(self) == _identity(other)


def fingerprint_of(root: str, layers: int, context_tokens: int, vocab: int) -> str:
    """The fingerprint of a model with this root and these sizes."""
    return hashlib.sha256(f"{root} {layers} {context_tokens} {vocab}".encode()).hexdigest()


def _identity(model: ModelSpec) -> tuple[str, str, int, int, int]:
    return (model.key, model.root, model.layers, model.context_tokens, model.vocab)


class NodeState(StrEnum):
    """A peer's announced state. Only ``serving`` peers accept sessions."""

    WAITING = "waiting"
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PlanVersion:
    """Order of plans: a plan is adopted only if its version is larger than the adopted one."""

    term: Annotated[int, Meta(ge=0, le=1 << 48)] = 0
    counter: Annotated[int, Meta(ge=0, le=1 << 48)] = 0
    rank: Annotated[int, Meta(ge=0, le=1 << 62)] = 0

    def __str__(self) -> str:
        return f"{self.term}.{self.counter}"

    def __hash__(self) -> int:
        """That of a text: anybody can choose numbers whose tuples hash alike, in thousands."""
        return hash(f"{self.term} {self.counter} {self.rank}")


NO_VERSION = PlanVersion()


class Reach(StrEnum):
    """How others can reach a peer, found by peers that dialled it back."""

    UNKNOWN = "unknown"
    """No peer has tried yet."""
    DIRECT = "direct"
    RELAYED = "relayed"
    """No peer reached it directly; a relay passes on streams to it."""
    NONE = "none"
    """No peer reached it, and there is no relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkClaim:
    """A peer's claim that it is behind an internet connection which it shares with others.

    The connection has a key of its own, which its owner's machines share. It signs the peer's id,
    and the peer signs the record that the claim is in, so neither end can be named without its
    consent (:mod:`dht.identity.uplink`).
    """

    uplink: PeerId
    """The connection's public key, as the text of a peer id."""
    signature: Annotated[bytes, Meta(max_length=64)]
    """The signature, by that key, of the peer's id."""
    up_bytes_per_s: Rate | None = None
    """Rate to elsewhere that this peer measured for the connection; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A peer's announcement."""

    peer_id: PeerId
    name: ShortText
    software_version: ShortText
    device: DeviceSpec
    model: ModelSpec
    memory_bytes: Count
    """Memory lent for weights and KV pages."""
    kv_tokens_min: Count
    """Minimum KV room of the peer in tokens, for every number of layers that it holds."""
    tokens_per_s: Annotated[tuple[Rate, ...], Meta(max_length=RECORD_BOUNDS.layers_max)]
    """T_j: measured tokens/s while the peer holds j layers, at index j - 1 (Helix §4.2)."""
    decode_layer_ns: LayerTimes = ()
    """Decode time of a layer by sessions in the batch; empty: planners assume a curve."""
    prompt_layer_ns: LayerTimes = ()
    """Prefill time of a layer by the tokens of a prompt's chunk; empty: planners assume a curve."""
    up_bytes_per_s: Rate | None = None
    """Rate of the machine's own uplink, which all links from here share; None: not known."""
    down_bytes_per_s: Rate | None = None
    """Rate of the machine's own downlink, which all links to here share; None: not known."""
    uplink: UplinkClaim | None = None
    """The internet connection that the peer may share with others; None: it says nothing."""
    precision: Annotated[str, Meta(max_length=32)] = ""
    """Precision of the weights and of the computation, for example ``bfloat16`` or ``int4 in
    bfloat16``. The sizes in ``model`` are those of this precision; the fingerprint is the
    model's."""
    state: NodeState
    start: LayerIndex = 0
    end: LayerIndex = 0
    """End of the layers served now, or being loaded in state ``loading``; ``start``: none."""
    plan_version: PlanVersion = NO_VERSION
    """The highest plan version that this peer adopted."""
    kv_tokens_free: Count = 0
    kv_tokens_wanted: Count = 0
    """KV that the peer wants free, in tokens: headroom while it serves sessions of high priority,
    and the demand of a session that it just refused. Its freeness depends on it
    (:mod:`coordinator.policies.routing.balance`)."""
    sessions: Count = 0
    addresses: Annotated[tuple[Address, ...], Meta(max_length=RECORD_BOUNDS.addresses_max)] = ()
    joined_unix_s: Seconds = 0.0
    moved_unix_s: Seconds = 0.0
    """When the peer last gave up layers for others; 0: never."""
    answers: Count = 0
    """Number of answers completed with this peer as last stage, since it joined."""
    answer_tokens: Count = 0
    """Number of tokens sampled by this peer as last stage, since it joined."""
    loads_beside: bool = False
    """Whether the peer serves its old layers while it loads others, if its memory holds both."""
    light: bool = False
    """Whether this is a light peer: it uses the DHT through full peers and does not coordinate."""
    reach: Reach = Reach.UNKNOWN
    relays: bool = False
    """Whether the peer is a relay for peers that others cannot reach."""
    foretells: bool = False
    """Whether the peer holds a head of the model, and drafts with it as a last stage."""
    feature_layers: Annotated[
        tuple[LayerIndex, ...], Meta(max_length=RECORD_BOUNDS.feature_layers_max)
    ] = ()
    """Layers in front of which that head takes a token's hidden states, ascending; (): it takes
    none."""

    @property
    def shared_up_bytes_per_s(self) -> float | None:
        """The rate of the connection that the peer may share, as it measured that itself."""
        return None if self.uplink is None else self.uplink.up_bytes_per_s

    def holds(self, start: int, end: int) -> bool:
        """Whether this peer now serves all layers of ``[start, end)``."""
        return self.state == NodeState.SERVING and self.start <= start < end <= self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A peer's entry in its network's directory of models.

    It outlives the peer's node record, so that a model that lost its holders is still known. It
    says that a model exists; what is served of it follows from the model's node records.
    """

    peer_id: PeerId
    model: ModelSpec
    """The model, with its sizes in this peer's precision."""
    precision: Annotated[str, Meta(max_length=32)] = ""
    start: LayerIndex = 0
    end: LayerIndex = 0
    """End of the layers that the peer holds or loads; ``start``: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One measured directed link, timed by the receiver."""

    source: PeerId
    target: PeerId
    bandwidth_bytes_per_s: Rate
    rtt_s: Seconds
    measured_unix_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksRecord:
    """A peer's measurements of its directed links.

    It times links that end at it as their receiver, and derives those that start at it and were
    busy from acknowledged deliveries.
    """

    peer_id: PeerId
    links: Annotated[tuple[Link, ...], Meta(max_length=RECORD_BOUNDS.links_max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A candidate's claim to coordinate."""

    peer_id: PeerId
    term: Annotated[int, Meta(ge=0, le=1 << 48)]
    expires_unix_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHead:
    """Announces a plan, whose body is content-addressed and fetched over a stream."""

    peer_id: PeerId
    version: PlanVersion
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]
    size_bytes: Annotated[int, Meta(ge=0, le=RECORD_BOUNDS.plan_bytes_max)]
    fetch_bytes: Count = 0
    """Bytes of weights that peers must read to follow the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Layers ``[start, end)`` given to one peer."""

    peer_id: PeerId
    start: LayerIndex
    end: LayerIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowEdge:
    """Flow on one edge of the plan, in tokens/s; ends are peer ids, ``source`` or ``sink``."""

    tail: PeerId
    head: PeerId
    tokens_per_s: Rate


def worth_tokens_per_s(estimate_tokens_per_s: float | None, flow_tokens_per_s: float) -> float:
    """The value that placements are compared by: the estimate, or the flow without an estimate.

    A placement that is estimated to serve nothing is worth less than any that serves something; its
    flow only ranks it among others that serve nothing.
    """
    if estimate_tokens_per_s is None:
        return flow_tokens_per_s
    return max(estimate_tokens_per_s, RECORD_BOUNDS.flow_share * flow_tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement with a flow over it (Helix §4). It is advice: safety never depends on it."""

    version: PlanVersion
    coordinator: PeerId
    model: ModelSpec
    assignments: Annotated[tuple[Assignment, ...], Meta(max_length=RECORD_BOUNDS.peers_max)]
    edges: Annotated[tuple[FlowEdge, ...], Meta(max_length=PLAN_EDGES_MAX)]
    flow_tokens_per_s: Rate
    bound_tokens_per_s: Rate
    planner: ShortText
    solve_s: Seconds
    created_unix_s: Seconds
    estimate_tokens_per_s: Rate | None = None
    """Decoded tokens/s that the plan would serve under full load; None: not estimated."""
    waves: Annotated[
        tuple[Annotated[tuple[PeerId, ...], Meta(max_length=RECORD_BOUNDS.peers_max)], ...],
        Meta(max_length=RECORD_BOUNDS.peers_max),
    ] = ()
    """Peers that move, by wave: a peer waits until those of the waves before its own serve."""
    fetch_bytes: Count = 0
    """Bytes of weights that all peers together must read to follow this plan."""
    silent: Annotated[tuple[PeerId, ...], Meta(max_length=RECORD_BOUNDS.peers_max)] = ()
    """Peers that the plan leaves out because they do not answer the coordinator."""
    answer_weight: Annotated[float, Meta(ge=0, le=RECORD_BOUNDS.answer_weight_max)] = 0.0
    """Weight of the speed of one answer alone beside the throughput under full load for which the
    plan was made: 0 for a full swarm, ``RECORD_BOUNDS.answer_weight_max`` for an idle one."""

    @property
    def capacity_tokens_per_s(self) -> float:
        """Decoded tokens/s of all users together: as estimated, else the flow."""
        estimate = self.estimate_tokens_per_s
        return self.flow_tokens_per_s if estimate is None else estimate

    @property
    def value_tokens_per_s(self) -> float:
        """The value that plans are compared by: see :func:`worth_tokens_per_s`."""
        return worth_tokens_per_s(self.estimate_tokens_per_s, self.flow_tokens_per_s)

    def wave_of(self, peer_id: str) -> int:
        """Index of the wave in which ``peer_id`` moves; 0 when it is in no wave."""
        return next((i for i, peers in enumerate(self.waves) if peer_id in peers), 0)

    def assignment_of(self, peer_id: str) -> Assignment | None:
        """The assignment of ``peer_id``; None when the plan leaves it idle."""
        return next((a for a in self.assignments if a.peer_id == peer_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStage:
    """One stage of a route: ``peer_id`` runs layers ``[start, end)``."""

    peer_id: PeerId
    start: LayerIndex
    end: LayerIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerNode:
    """A peer as a planner sees it."""

    peer_id: PeerId
    memory_bytes: Count
    kv_tokens_min: Count
    tokens_per_s: tuple[Rate, ...]
    """T_j at index j - 1."""
    decode_layer_ns: LayerTimes = ()
    prompt_layer_ns: LayerTimes = ()
    up_bytes_per_s: Rate | None = None
    """Rate of the peer's own uplink, which all links from it share; None: not known, no limit."""
    down_bytes_per_s: Rate | None = None
    uplink: ShortText = ""
    """Name of the shared internet connection behind which the peer is; "": its own alone."""
    own_model: ModelSpec | None = None
    """The model with its sizes in this peer's precision; None: the problem's sizes."""
    current: Assignment | None = None
    """The layers that the peer holds now, for plans that move few peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUplink:
    """An internet connection that several peers share: those of one machine, or of one home.

    Links between these peers do not pass it; each direction of it carries all their other links.
    """

    name: ShortText
    up_bytes_per_s: Rate | None = None
    """Rate of all links from its peers to others together; None: not known, no limit."""
    down_bytes_per_s: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Input of every planner: the model, the peers and the measured directed links.

    A pair of peers without a measured link counts as having the default bandwidth and round trip.
    """

    model: ModelSpec
    nodes: tuple[PlannerNode, ...]
    links: tuple[Link, ...] = ()
    uplinks: tuple[SharedUplink, ...] = ()
    default_bandwidth_bytes_per_s: Rate = 12.5e6
    default_rtt_s: Seconds = 0.05
    token_bytes: Count = 8
    """Bytes of one token id on a link to or from the clients."""
    client_bandwidth_bytes_per_s: Rate = 12.5e6


def looks_within(feature_layers: tuple[int, ...], layers: int) -> bool:
    """Whether a head can look in front of these of a model's ``layers``: they ascend, and the model
    has them."""
    return all(one < other for one, other in pairwise((-1, *feature_layers, layers)))


def model_key(name: str) -> str:
    """A model's name as part of a DHT key. Peers under one key also compare fingerprints."""
    return name.replace("/", "--")


def in_precision_of(model: ModelSpec, peers: ModelSpec) -> ModelSpec:
    """``model`` with the sizes of a peer's own description; its other fields are ignored."""
    return replace(
        model,
        layer_bytes=peers.layer_bytes,
        layer_sizes=peers.layer_sizes,
        layer_kinds=peers.layer_kinds,
        embed_bytes=peers.embed_bytes,
        head_bytes=peers.head_bytes,
        kv_bytes_per_token_layer=peers.kv_bytes_per_token_layer,
    )


def layer_ranges(layers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of ``layers``, which ascend."""
    ranges: list[tuple[int, int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer:
            ranges[-1] = (ranges[-1][0], layer + 1)
        else:
            ranges.append((layer, layer + 1))
    return tuple(ranges)


def span_text(start: int, end: int) -> str:
    """A half-open range as people count it, for a column of layers: ``3-5``, or ``7``."""
    return f"{start}" if end - start == 1 else f"{start}-{end - 1}"


def layers_text(*ranges: tuple[int, int]) -> str:
    """Half-open ranges of layers as people count them: ``layers 3-5 and 7``."""
    parts = [span_text(start, end) for start, end in ranges]
    noun = "layer" if len(parts) == 1 and "-" not in parts[0] else "layers"
    return f"{noun} {' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))}"


def kv_tokens_least(model: ModelSpec) -> int:
    """Minimum KV tokens that a peer keeps per layer: one full context, but at most 2048."""
    return min(model.context_tokens, RECORD_BOUNDS.kv_tokens_least_max)


def weight_bytes(model: ModelSpec, start: int, end: int) -> int:
    """Bytes of the weights of layers ``[start, end)``, without embedding and LM head."""
    if not model.layer_sizes:
        return (end - start) * model.layer_bytes
    until = _bytes_until(model.layer_sizes, model.layer_kinds, model.layers)
    return until[end] - until[start]


def with_layer_bytes(model: ModelSpec, sizes: Sequence[int]) -> ModelSpec:
    """``model`` with layers of these ``sizes`` in bytes, or all alike for a single size; of more
    than ``RECORD_BOUNDS.layer_sizes_max`` kinds some count as large as the next."""
    found = sorted(set(sizes))
    if len(found) == 1:
        return replace(model, layer_bytes=found[0], layer_sizes=(), layer_kinds=b"")
    step = -(-len(found) // RECORD_BOUNDS.layer_sizes_max)
    kept = found[::-1][::step][::-1]
    return replace(
        model,
        layer_bytes=found[-1],
        layer_sizes=tuple(kept),
        layer_kinds=bytes(bisect_left(kept, size) for size in sizes),
    )


def mean_layer_bytes(model: ModelSpec) -> float:
    """Bytes of a layer's weights on average."""
    return weight_bytes(model, 0, model.layers) / model.layers


@lru_cache(maxsize=256)
def _bytes_until(sizes: tuple[int, ...], kinds: bytes, layers: int) -> tuple[int, ...]:
    """Bytes of the layers before each; whose kind is not said counts as the largest."""
    most = max(sizes)
    each = (
        sizes[kinds[layer]] if layer < len(kinds) and kinds[layer] < len(sizes) else most
        for layer in range(layers)
    )
    return tuple(accumulate(each, initial=0))


def stage_bytes(model: ModelSpec, start: int, end: int, kv_tokens: int) -> int:
    """Bytes of memory that layers ``[start, end)`` need with KV room for ``kv_tokens`` tokens."""
    weights = weight_bytes(model, start, end)
    weights += model.embed_bytes if start == 0 else 0
    weights += model.head_bytes if end == model.layers else 0
    return weights + (end - start) * kv_tokens * model.kv_bytes_per_token_layer


def fits(model: ModelSpec, node: PlannerNode, start: int, end: int) -> bool:
    """Whether memory and profile of ``node`` allow ``[start, end)`` with its minimum KV room."""
    model = node.own_model or model
    return (
        0 <= start < end <= model.layers
        and end - start <= len(node.tokens_per_s)
        and stage_bytes(model, start, end, node.kv_tokens_min) <= node.memory_bytes
    )


def layers_max(model: ModelSpec, memory_bytes: int, kv_tokens_min: int) -> int:
    """The most layers of ``model`` that fit into a memory at any place; 0: not even one does."""
    return max(longest_spans(model, memory_bytes, kv_tokens_min, model.layers))


@lru_cache(maxsize=4096)
def longest_spans(
    model: ModelSpec, memory_bytes: int, kv_tokens_min: int, count_max: int
) -> tuple[int, ...]:
    """The most layers, up to ``count_max``, that fit into a memory from each layer on.

    The ends only move on with the start, so each layer is looked at twice at most.
    """
    counts, end = [], 0
    for start in range(model.layers):
        end = max(end, start)
        while (
            end < model.layers
            and end < start + count_max
            and stage_bytes(model, start, end + 1, kv_tokens_min) <= memory_bytes
        ):
            end += 1
        counts.append(end - start)
    return tuple(counts)
