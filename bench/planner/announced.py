"""What the peers of a made cluster would announce if it were live, without their GPUs.

Each sort of machine is measured by the node's own profiling code, on a stand-in layer whose steps
take what the cluster's tables say. The fit, T_j, the records and their bytes are the node's own,
too, so a planner that reads them knows what a live one knows, no more.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import cast

from coordinator.policies.batching.scheduler import BATCHING
from coordinator.problem.from_records import problem_of
from coordinator.problem.service import PeerSpeed
from coordinator.simulator.core.profiles import PeerProfile, Profiles, interpolated
from dht.identity.uplink import claim_of
from dht.messages import codec, session
from dht.messages.types import (
    RECORD_BOUNDS,
    DeviceSpec,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    PlannerNode,
    Problem,
    UplinkClaim,
    kv_tokens_least,
)
from node.engine.engine import KV_TOKENS_MOST
from node.peer.link_keeper import probe_order
from node.profiling.layer_profile import measure_layer
from node.profiling.layer_rates import BATCHES, CHUNKS, Profile, rates

assert session  # registers the records' kinds with the codec

KV_BYTES_PER_TOKEN_LAYER = {"30b": 2 * 6656 * 2, "70b": 2 * 8 * 128 * 2}
"""Keys and values in float16: 52 heads of 128 in LLaMA 30B, 8 in LLaMA 2 70B. Helix's files give KV
room as a number of entries instead."""
CONTEXT_TOKENS = 4096


class TableLayer:
    """A :class:`node.profiling.layer_profile.TimedLayer` that waits for nothing."""

    page_tokens = 16

    def __init__(self, profile: PeerProfile, *, kv_tokens: int, context_tokens: int) -> None:
        self.kv_tokens, self.context_tokens = kv_tokens, context_tokens
        self._now_s = 0.0
        self._decode_s = list(interpolated(profile.decode, max(BATCHES)))
        self._decode_s[1] *= profile.single_decode_factor
        self._prompt_s = interpolated(profile.prefill, BATCHING.prefill_tokens_most)

    def clock(self) -> float:
        """Seconds that all steps so far took."""
        return self._now_s

    @contextlib.contextmanager
    def sessions(self, count: int, context: int) -> Iterator[Callable[[int], float]]:
        """Tables are for typical contexts: times do not depend on it."""
        yield lambda batch: self._pass(self._decode_s[batch])

    def chunk_s(self, before: int, tokens: int) -> float:
        """Time of a prompt's chunk."""
        return self._pass(self._prompt_s[tokens])

    def _pass(self, seconds: float) -> float:
        self._now_s += seconds
        return seconds


def model_of(problem: Problem) -> ModelSpec:
    """The problem's model with a size of KV and a context, as records need them."""
    spec = problem.model
    kv_bytes = spec.kv_bytes_per_token_layer or KV_BYTES_PER_TOKEN_LAYER[spec.name]
    return replace(
        spec,
        kv_bytes_per_token_layer=kv_bytes,
        context_tokens=max(spec.context_tokens, CONTEXT_TOKENS),
    )


def measured(problem: Problem, node: PlannerNode, profile: PeerProfile) -> tuple[int, Profile]:
    """The memory that a machine lends in bytes, and its profile."""
    spec, held = model_of(problem), len(node.tokens_per_s)
    memory_bytes = node.memory_bytes
    if problem.model.kv_bytes_per_token_layer == 0:
        # Its table of KV room, where all layers that fit are held, beside their weights.
        memory_bytes += int(profile.kv.beside[held - 1]) * spec.kv_bytes_per_token_layer
    beside = (memory_bytes - spec.layer_bytes) // spec.kv_bytes_per_token_layer
    layer = TableLayer(
        profile, kv_tokens=min(KV_TOKENS_MOST, beside), context_tokens=spec.context_tokens
    )
    return memory_bytes, measure_layer(layer, layer.clock)


def claims_of(problem: Problem) -> dict[str, UplinkClaim]:
    """The claims of a cluster's peers that are behind shared connections."""
    rates = {uplink.name: uplink.up_bytes_per_s for uplink in problem.uplinks}
    return {
        node.peer_id: replace(
            claim_of(blake2b(node.uplink.encode(), digest_size=32).digest(), "", node.peer_id),
            up_bytes_per_s=rates.get(node.uplink),
        )
        for node in problem.nodes
        if node.uplink
    }


def announced(problem: Problem, profiles: Profiles) -> tuple[NodeRecord, ...]:
    """The records of a cluster's peers, decoded from their bytes."""
    spec = model_of(problem)
    known: dict[tuple[PeerProfile, int, int], tuple[int, Profile]] = {}
    found, claims = [], claims_of(problem)
    for node in problem.nodes:
        profile, held = profiles.peers[node.peer_id], len(node.tokens_per_s)
        sort = profile, node.memory_bytes, held
        if sort not in known:
            known[sort] = measured(problem, node, profile)
        memory_bytes, timed = known[sort]
        record = NodeRecord(
            peer_id=node.peer_id,
            name=node.peer_id,
            software_version="0",
            device=DeviceSpec(kind="cuda", name="stand-in", memory_bytes=memory_bytes),
            model=spec,
            memory_bytes=memory_bytes,
            kv_tokens_min=kv_tokens_least(spec),
            tokens_per_s=rates(timed, spec, memory_bytes, held),
            decode_layer_ns=timed.decode_times,
            prompt_layer_ns=timed.prompt_times,
            up_bytes_per_s=node.up_bytes_per_s,
            down_bytes_per_s=node.down_bytes_per_s,
            uplink=claims.get(node.peer_id),
            state=NodeState.WAITING,
        )
        told = codec.decode(codec.encode(record), limit_bytes=codec.FRAME_BOUNDS.record_bytes_max)
        found.append(cast("NodeRecord", told))
    return tuple(found)


def announced_links(problem: Problem) -> dict[str, LinksRecord]:
    """The links that each peer measured and has room for in its record, by its name."""
    found = {}
    for node in problem.nodes:
        name = node.peer_id
        into = {link.source: link for link in problem.links if link.target == name}
        first = probe_order(name, into)[: RECORD_BOUNDS.links_max]
        found[name] = LinksRecord(peer_id=name, links=tuple(into[source] for source in first))
    return found


def announced_problem(problem: Problem, profiles: Profiles) -> Problem:
    """The planner's input in a live swarm of the cluster's peers."""
    records = announced(problem, profiles)
    nodes = {record.peer_id: record for record in records}
    return problem_of(records[0].model, nodes, announced_links(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative differences of announced times from the tables they came from."""

    mean: float
    largest: float


def errors(profile: PeerProfile, speed: PeerSpeed) -> tuple[Errors, Errors]:
    """The errors of decodes at every batch, and of prompts at every chunk of a step.

    Chunks shorter than the shortest that is measured are left out.
    """
    decode_s = list(interpolated(profile.decode, max(BATCHES)))
    decode_s[1] *= profile.single_decode_factor
    prompt_s = interpolated(profile.prefill, BATCHING.prefill_tokens_most)
    batches, chunks = (
        range(1, max(BATCHES) + 1),
        range(min(CHUNKS), BATCHING.prefill_tokens_most + 1),
    )
    return (
        _errors([speed.decode.at(n) / decode_s[n] for n in batches]),
        _errors([speed.prompt.at(n) / prompt_s[n] for n in chunks]),
    )


def _errors(ratios: Sequence[float]) -> Errors:
    off = [abs(ratio - 1) for ratio in ratios]
    return Errors(mean=statistics.fmean(off), largest=max(off))
