"""What the health page says, from records, plan and the page's own probes. Pure.

:func:`build_state` returns plain lists and dictionaries, as ``/api/v1/state`` sends them; see
``docs/health.md``. No address of a peer gets in, but for those of an invitation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from client.errors import missing_text
from client.health.given import given_json
from client.health.models import held_verdict, models_json
from client.health.network import (
    fresh_links,
    links_json,
    links_of_peers,
    plan_json,
    reached,
    trace_json,
    why_idle,
)
from client.health.past import (
    INCIDENTS_SHOWN_MAX,
    SPANS,
    Incident,
    Past,
    incident_json,
    past_json,
)
from client.pages.clean import clean_id, clean_name, names_in
from coordinator.evaluation.explain.weak_points import weak_points
from coordinator.evaluation.explain.words import sentences
from coordinator.plans.catalogue.served import ServedModel
from coordinator.plans.versions import number_max
from coordinator.policies.failure.pinger import BY_CLIENTS
from coordinator.problem.from_records import problem_of
from dht.messages.types import (
    Assignment,
    LeaseRecord,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    RouteStage,
    layer_ranges,
    layers_text,
    stage_bytes,
)
from dht.process.json_file import Json
from dht.records.directory import LIFETIME_S, RecordKind

RECORD_S = LIFETIME_S[RecordKind.NODES]
"""A record that was not seen for this long counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """When what was seen counts, and how much the page says; times in seconds."""

    answer_s: float = 30.0
    """An answer that is older says nothing of now."""
    lies_least: int = 2
    """Refusals of announced layers that make a liar: one may be a record that lags."""
    lies_s: float = 600.0
    there_s: float = 25.0
    """A record that was not seen for longer is not there any more: two looks at the DHT, which come
    every 10 s, did not find it."""
    lag_s: float = 60.0
    """For a peer that just took its layers the record may lag behind what it does."""
    probes_s: float = 3600.0
    peers_shown_max: int = 1000
    """Peers that are shown and counted (:func:`first_of`)."""
    versions_shown_max: int = 10
    named_max: int = 4
    """Peers named in a sentence."""


STATE = StateConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPeer:
    """A peer's newest record and what the page itself saw of it. Times in Unix seconds."""

    record: NodeRecord
    seen_unix_s: float
    """When the page last read the record; it outlives its author by up to a minute."""
    answered_unix_s: float | None = None
    """When the peer last answered a ping of the page's own."""
    rtt_s: float | None = None
    """The round trip of that ping."""
    misses: int = 0
    """Pings in a row that were not answered."""
    placed_unix_s: float = 0.0
    """When the page first saw it announce its present layers."""
    refused_unix_s: tuple[float, ...] = ()
    """When it refused the page layers that its record announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One short request of the page's own."""

    at_unix_s: float
    reason: str = ""
    """Why it failed; empty: it was answered."""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens: int = 0

    @property
    def ok(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTime:
    """Where the time of an answer's later tokens went, in seconds per token."""

    computed_s: float
    waited_s: float
    way_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSnapshot:
    """All that the page knows at one time."""

    model_name: str
    now_unix_s: float
    model: ModelSpec | None = None
    """The model as its peers describe it; None while nobody announces it."""
    peers: tuple[SeenPeer, ...] = ()
    """The one that was seen first comes first."""
    links: tuple[LinksRecord, ...] = ()
    leases: tuple[LeaseRecord, ...] = ()
    plan: Plan | None = None
    blind: bool = False
    """Whether nobody told the page who serves when it last looked."""
    probes: tuple[Probe, ...] = ()
    """Those of the last hour, oldest first."""
    past: Sequence[Past] = tuple(Past(span=span) for span in SPANS)
    """The page's requests and what the swarm served, for each of :data:`SPANS`."""
    incidents: Sequence[Incident] = ()
    """What was lost, the newest first."""
    route: tuple[RouteStage, ...] = ()
    """The route of the page's last answered request."""
    token_time: TokenTime | None = None
    """Where its tokens' time went; None before the first."""
    versions: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """Plans that the page saw, the newest first."""
    models: tuple[ServedModel, ...] = ()
    """All models of the network, the watched one among them."""
    given: Mapping[str, float] = field(default_factory=dict)
    """Layer-seconds that the page saw held, as :class:`client.health.given.GivenTally` counts."""
    thanked: Mapping[str, str] = field(default_factory=dict)
    """Names of those who asked for it, by peer id."""
    invitation: str = ""
    """Shown to visitors within the commands that ask and join; empty: none is."""


def build_state(seen: SwarmSnapshot) -> Json:
    """The whole state as JSON values. Rates in tokens/s, times in seconds."""
    spec = _spec(seen)
    records = {each.record.peer_id: each.record for each in seen.peers}
    names = names_in(records)
    links = links_json(seen.links, seen.now_unix_s)
    at_peers = links_of_peers(links)
    shown = first_of(seen.peers, STATE.peers_shown_max)
    peers = [
        _peer(each, names, spec, seen.now_unix_s)
        for each in sorted(shown, key=lambda each: each.record.peer_id)
    ]
    for peer in peers:
        peer["links"] = at_peers.get(peer["id"])
    counts = _depths(peers, spec)
    weak = _weak_points(seen, spec, peers)
    cut_off = seen.blind and not any(counts)
    help_text = _help(spec, counts, weak, cut_off=cut_off)
    probes = _probes(seen)
    reasons = _reasons(seen, peers, counts, probes, cut_off=cut_off)
    verdict = _verdict(reasons, counts, probes, cut_off=cut_off)
    return {
        "version": 1,
        "generated_unix_s": seen.now_unix_s,
        "swarm": {
            "model": clean_name(spec.name if spec else seen.model_name),
            "fingerprint": spec.fingerprint if spec else "",
            "healthy": not reasons,
            "verdict": verdict,
            "reasons": reasons,
            "sentence": f"{verdict.capitalize()}: {_sentence(reasons, peers, counts, probes)}",
            "peers": len(peers),
            "serving": sum(each["counts"] for each in peers),
        },
        "coordinator": _coordinator(seen, names),
        "plan": plan_json(seen.plan, records, links),
        "plan_history": [
            {**each, "planner": clean_name(each["planner"])}
            for each in seen.versions[: STATE.versions_shown_max]
        ],
        "layers": _layers(counts, peers),
        "peers": peers,
        "links": links,
        "probes": probes,
        "served": {"hours": [dict(each) for each in seen.past[-1].served]},
        "history": [past_json(each) for each in seen.past],
        "incidents": [incident_json(each) for each in seen.incidents[:INCIDENTS_SHOWN_MAX]],
        "trace": trace_json(seen.route, names, links),
        "token_time": None if seen.token_time is None else asdict(seen.token_time),
        "help": help_text,
        "weak_points": [each for each in weak if each != help_text],
        "given": given_json(seen.given, seen.thanked),
        "models": models_json(seen.models, spec, counts, seen.invitation),
    }


def first_of(peers: Sequence[SeenPeer], count: int) -> list[SeenPeer]:
    """The ``count`` peers that a page has room for: those that answered it or were not asked yet,
    in the order of ``peers``, then those that miss its pings. Identities are free, and so is what
    they sort by."""
    missed = [0 if each.answered_unix_s is not None else each.misses for each in peers]
    order = sorted(range(len(peers)), key=missed.__getitem__)
    return [peers[at] for at in order[:count]]


def aged(state: Json, now_unix_s: float, limit_s: float) -> Json:
    """``state`` itself while it is younger than ``limit_s``; one that says how old it is after.

    A page whose measurements stopped must not go on calling anything healthy. A state is as old
    as its last request, which is from before where the history was kept over a restart.
    """
    last = state["probes"]["last"]
    measured_unix_s = state["generated_unix_s"] if last is None else last["at_unix_s"]
    age_s = now_unix_s - min(measured_unix_s, state["generated_unix_s"])
    if age_s <= limit_s:
        return state
    reason = f"nothing was measured for {age_s:.0f} s: what is shown is that old"
    swarm = {
        **state["swarm"],
        "healthy": False,
        "verdict": "not known",
        "reasons": [reason, *state["swarm"]["reasons"]],
        "sentence": f"Not known: {reason}",
    }
    return {**state, "swarm": swarm}


def _spec(seen: SwarmSnapshot) -> ModelSpec | None:
    model, now_unix_s = seen.model, seen.now_unix_s
    alive = (each.record.model for each in seen.peers if _alive(each, now_unix_s))
    return model if model is not None and any(map(model.serves_with, alive)) else None


def _alive(peer: SeenPeer, now_unix_s: float) -> bool:
    return now_unix_s - peer.seen_unix_s <= RECORD_S


def _peer(
    peer: SeenPeer, names: Mapping[str, str], spec: ModelSpec | None, now_unix_s: float
) -> Json:
    record = peer.record
    alive, serving = _alive(peer, now_unix_s), record.state is NodeState.SERVING
    last_seen_s = max(0.0, now_unix_s - peer.seen_unix_s)
    state = _state(peer, now_unix_s)
    ghost = serving and state == "silent"
    settled_s = peer.placed_unix_s + STATE.lag_s
    lies = [s for s in peer.refused_unix_s if s >= max(settled_s, now_unix_s - STATE.lies_s)]
    same = spec is not None and record.model.fingerprint == spec.fingerprint
    layers = spec.layers if spec is not None and same else record.model.layers
    held = record.end - record.start
    known = serving and 0 < held <= len(record.tokens_per_s)
    speed = record.tokens_per_s[held - 1] if known else 0.0
    lying = alive and (len(lies) >= STATE.lies_least or record.end > layers or held < 0)
    flags = [name for name, is_so in (("ghost", ghost), ("lying", lying)) if is_so]
    return {
        "id": clean_id(record.peer_id),
        "name": names[record.peer_id],
        "gpu": clean_name(record.device.name),
        "memory_bytes": record.memory_bytes,
        "start": record.start,
        "end": record.end,
        "state": state,
        "tokens_per_s": speed,
        "sessions": record.sessions,
        "via": reached(record),
        "why_idle": why_idle(record) if alive else "",
        "version": clean_name(record.software_version),
        "uptime_s": max(0.0, now_unix_s - record.joined_unix_s) if record.joined_unix_s else 0.0,
        "last_seen_s": last_seen_s,
        "record_there": last_seen_s < STATE.there_s,
        "answered_s": _answered_s(peer, now_unix_s),
        "rtt_s": peer.rtt_s,
        "flags": flags,
        "counts": state == "serving" and same and not flags and held > 0,
    }


def _answered_s(peer: SeenPeer, now_unix_s: float) -> float | None:
    """How long ago it answered the page; None: never."""
    if peer.answered_unix_s is None:
        return None
    return max(0.0, now_unix_s - peer.answered_unix_s)


def _state(peer: SeenPeer, now_unix_s: float) -> str:
    """What the peer announces, as far as it answers: a record alone is no sign of life."""
    answered_s = _answered_s(peer, now_unix_s)
    missing = peer.misses >= BY_CLIENTS.silent_misses
    silent = missing or (answered_s is not None and answered_s > STATE.answer_s)
    leaving = peer.record.state is NodeState.DRAINING
    if not _alive(peer, now_unix_s) or (silent and leaving):
        return "gone"
    if silent:
        return "silent"
    return "unknown" if answered_s is None else peer.record.state.value


def _depths(peers: list[Json], spec: ModelSpec | None) -> list[int]:
    """How many peers hold each layer, those that are believed."""
    depths = [0] * (spec.layers if spec else 0)
    for peer in peers:
        if peer["counts"]:
            for layer in range(peer["start"], peer["end"]):
                depths[layer] += 1
    return depths


def _ranges(depths: list[int], depth: int) -> tuple[tuple[int, int], ...]:
    return layer_ranges(layer for layer, found in enumerate(depths) if found == depth)


def _verdict(reasons: list[str], depths: list[int], probes: Json, *, cut_off: bool) -> str:
    if not reasons:
        return held_verdict(min(depths))
    return "not known" if cut_off or probes["last"] is None else "not healthy"


def _reasons(
    seen: SwarmSnapshot, peers: list[Json], depths: list[int], probes: Json, *, cut_off: bool
) -> list[str]:
    last = probes["last"]
    if last is None:
        return ["the page has only begun to look"]
    if cut_off:
        return ["the page reaches nobody who tells it who serves; it may be cut off itself"]
    if not depths:
        return ["nobody announces this model"]
    reasons = []
    if missing := _ranges(depths, 0):
        loading = [
            Assignment(peer_id=peer["id"], start=peer["start"], end=peer["end"])
            for peer in peers
            if peer["state"] == NodeState.LOADING
        ]
        ghosts = [peer["name"] for peer in peers if "ghost" in peer["flags"]][: STATE.named_max]
        beside = f"; not answering: {', '.join(ghosts)}" if ghosts else ""
        reasons.append(missing_text(missing, loading, "answers") + beside)
    if not last["ok"]:
        reasons.append(f"the page's last request failed: {last['reason']}")
    return reasons


def _sentence(reasons: list[str], peers: list[Json], depths: list[int], probes: Json) -> str:
    """What stands behind the verdict."""
    if reasons:
        return f"{'; '.join(reasons)}."
    serving = sum(peer["counts"] for peer in peers)
    ttft = probes["ttft_p50_s"]
    speed = f"; the first token comes after {ttft:.2f} s" if ttft is not None else ""
    silent = sum(peer["state"] == "silent" for peer in peers)
    verb = "does" if silent == 1 else "do"
    beside = f" {silent} more {verb} not answer." if silent else ""
    lost = " What nobody else holds is lost with its peer." if min(depths) == 1 else ""
    return f"every layer is on {_at_least(min(depths), serving)}{speed}.{lost}{beside}"


def _at_least(fewest: int, serving: int) -> str:
    """How many of the serving peers hold the layer with the fewest holders, in words."""
    if fewest == serving:
        return {1: "the one serving peer", 2: "both serving peers"}.get(
            serving, f"all {serving} serving peers"
        )
    return f"at least {fewest} of {serving} serving peers"


def _coordinator(seen: SwarmSnapshot, names: Mapping[str, str]) -> Json | None:
    living = [
        lease
        for lease in seen.leases
        if lease.expires_unix_s > seen.now_unix_s and lease.term <= number_max(seen.now_unix_s)
    ]
    if not living:
        return None
    lease = max(living, key=lambda each: (each.term, each.peer_id))
    name = names.get(lease.peer_id, "not a serving peer")
    return {"id": clean_id(lease.peer_id), "name": name, "term": lease.term}


def _layers(depths: list[int], peers: list[Json]) -> Json:
    holders: list[list[str]] = [[] for _ in depths]
    for peer in peers:
        if peer["counts"]:
            for layer in range(peer["start"], peer["end"]):
                holders[layer].append(peer["id"])
    return {
        "count": len(depths),
        "holders": holders,
        "replica_depth": min(depths, default=0),
        "single_points_of_failure": [layer for layer, depth in enumerate(depths) if depth == 1],
        "lost": [layer for layer, depth in enumerate(depths) if depth == 0],
    }


def _probes(seen: SwarmSnapshot) -> Json:
    recent = [each for each in seen.probes if seen.now_unix_s - each.at_unix_s <= STATE.probes_s]
    good = [each for each in recent if each.ok]
    figures: Json = {"sent": len(recent), "answered": len(good)}
    for name in ("ttft", "tpot"):
        values = [getattr(each, f"{name}_s") for each in good]
        for share in (50, 95):
            figures[f"{name}_p{share}_s"] = percentile(values, share)
    figures["series"] = [
        {"at_unix_s": p.at_unix_s, "ok": p.ok, "ttft_s": p.ttft_s, "tpot_s": p.tpot_s}
        for p in recent
    ]
    last = recent[-1] if recent else None
    figures["last"] = last and {"at_unix_s": last.at_unix_s, "ok": last.ok, "reason": last.reason}
    figures["hours"] = [dict(each) for each in seen.past[-1].probes]
    return figures


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that ``share`` percent of all do not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def _help(spec: ModelSpec | None, depths: list[int], weak: Sequence[str], *, cut_off: bool) -> str:
    if cut_off:
        return "What would help most is not known."
    if spec is None:
        return "Nobody serves this model: found the swarm with `anabranch join`."
    lost, single = _ranges(depths, 0), _ranges(depths, 1)
    if not lost and not single:
        return weak[0] if weak else "Every layer has two holders or more; another peer adds speed."
    start, end = max(lost or single, key=lambda each: each[1] - each[0])
    size_gib = stage_bytes(spec, start, end, spec.context_tokens) / 2**30
    size = f"{size_gib:.1f} GiB" if size_gib >= 0.1 else f"{size_gib * 1024:.0f} MiB"
    one = end - start == 1
    if lost:
        effect = f"{'has' if one else 'have'} no holder: one more peer of {size} would bring"
        return f"{layers_text((start, end)).capitalize()} {effect} {'it' if one else 'them'} back."
    ending = "the single point of failure" if len(single) == 1 else "that single point of failure"
    verb = "has" if one else "have"
    text = layers_text((start, end)).capitalize()
    return f"{text} {verb} one holder: one more peer of {size} would remove {ending}."


def _weak_points(seen: SwarmSnapshot, spec: ModelSpec | None, peers: list[Json]) -> tuple[str, ...]:
    """What answers wait for and whose loss would hurt, by the believed holders' graph."""
    shown = list(zip(seen.peers, peers, strict=False))
    held = {
        each.record.peer_id: each.record
        for each, peer in shown
        if peer["counts"] and each.record.end - each.record.start <= len(each.record.tokens_per_s)
    }
    if spec is None or not held:
        return ()
    links = {
        record.peer_id: replace(record, links=fresh)
        for record in seen.links
        if (fresh := fresh_links(record, seen.now_unix_s))
    }
    spans = [
        Assignment(peer_id=peer_id, start=record.start, end=record.end)
        for peer_id, record in held.items()
    ]
    try:
        problem = problem_of(spec, held, links)
        ageless = tuple(replace(link, measured_unix_s=0.0) for link in problem.links)
        found = _asked(replace(problem, links=ageless), tuple(spans))
    except ModuleNotFoundError:
        return ()  # a client's installation has neither networkx nor numpy
    if found.missing:
        return ()  # which layers these are, and what brings them back, is said without the graph
    names = {each.record.peer_id: str(peer["name"]) for each, peer in shown}
    return sentences(found, lambda peer_id: names[peer_id])


_asked = lru_cache(maxsize=4)(weak_points)
"""A state is built more often than peers, layers and links change."""
