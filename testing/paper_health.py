"""Swarms on paper for the health page: for its tests in a browser and the screenshots in docs/.

Nothing in them was measured; they show how the page looks when a swarm is in such a state.
"""

import math
from dataclasses import replace

from client.health.given import ALL
from client.health.past import SPANS, Incident, Past, Span
from client.health.state import Probe, SeenPeer, SwarmSnapshot, TokenTime, build_state
from coordinator.plans.catalogue.served import served_model
from coordinator.policies.failure.pinger import BY_CLIENTS
from dht.identity.peer_id import Identity
from dht.messages.types import (
    SINK,
    SOURCE,
    Assignment,
    DeviceSpec,
    FlowEdge,
    LeaseRecord,
    Link,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlanVersion,
    Reach,
    RouteStage,
)
from dht.networks.invitation import invitation_to, text_of
from dht.process.json_file import Json

NOW_S = 1_800_000_000.0
LAYERS = 32
MODEL = ModelSpec(
    name="paper-8b",
    root="paper",
    layers=LAYERS,
    layer_bytes=440 << 20,
    embed_bytes=1 << 30,
    head_bytes=1 << 30,
    kv_bytes_per_token_layer=4096,
    activation_bytes=8192,
    context_tokens=8192,
    vocab=128_256,
)
SMALL = replace(MODEL, name="brook", root="brook", layers=14)
HUGE = replace(MODEL, name="paper/Paper-Instruct-70B", root="huge", layers=80)
FOUNDER = f"/dns/swarm.example.org/tcp/31337/p2p/{Identity(b'f' * 32).peer_id}"
INVITATION = text_of(invitation_to("anabranch", [FOUNDER], MODEL.name, MODEL.fingerprint))
GPUS = (("RTX 4090", 24, 60.0), ("RTX 3060", 12, 24.0), ("RTX 3090", 24, 45.0), ("T4", 15, 18.0))


def record(number: int, start: int, end: int, name: str | None = None) -> NodeRecord:
    """A serving peer; ``number`` decides its GPU."""
    gpu, gib, speed = GPUS[number % len(GPUS)]
    return NodeRecord(
        peer_id=f"12D3KooWpaper{number:04}",
        name=name if name is not None else f"peer-{number}",
        software_version="0.1.0",
        device=DeviceSpec(kind="cuda", name=gpu, memory_bytes=gib << 30),
        model=MODEL,
        memory_bytes=int(0.85 * (gib << 30)),
        kv_tokens_min=4096,
        tokens_per_s=tuple(speed * 16 / (16 + held) for held in range(LAYERS)),
        state=NodeState.SERVING,
        start=start,
        end=end,
        addresses=("/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW",),
        joined_unix_s=NOW_S - 7200 - 3000 * number,
        reach=Reach.DIRECT,
    )


def links(records: list[NodeRecord]) -> tuple[LinksRecord, ...]:
    """Everybody measured everybody, as the receiver."""
    found = []
    for to, target in enumerate(records[:20]):
        measured = tuple(
            Link(
                source=source.peer_id,
                target=target.peer_id,
                bandwidth_bytes_per_s=1e6 * (2 + 37 * (at + 2 * to) % 97 / 8),
                rtt_s=0.008 + 0.011 * ((3 * at + 5 * to) % 7),
                measured_unix_s=NOW_S - 40,
            )
            for at, source in enumerate(records[:20])
            if source is not target
        )
        found.append(LinksRecord(peer_id=target.peer_id, links=measured))
    return tuple(found)


def plan(records: list[NodeRecord], planner: str = "milp", model: ModelSpec = MODEL) -> Plan:
    """The records' layers with a flow that spreads evenly over who can follow whom."""
    edges = []
    by_start: dict[int, list[NodeRecord]] = {}
    for each in records:
        by_start.setdefault(each.start, []).append(each)
    flow = 40.0
    for tail in [None, *records]:
        heads = by_start.get(0 if tail is None else tail.end, [])
        share = flow if tail is None else flow / len(by_start[tail.start])
        if tail is not None and tail.end == model.layers:
            edges.append(FlowEdge(tail=tail.peer_id, head=SINK, tokens_per_s=share))
        for head in heads:
            name = SOURCE if tail is None else tail.peer_id
            edges.append(
                FlowEdge(tail=name, head=head.peer_id, tokens_per_s=share / max(1, len(heads)))
            )
    return Plan(
        version=PlanVersion(term=7, counter=12),
        coordinator=records[0].peer_id,
        model=model,
        assignments=tuple(
            Assignment(peer_id=each.peer_id, start=each.start, end=each.end) for each in records
        ),
        edges=tuple(edges),
        flow_tokens_per_s=flow,
        bound_tokens_per_s=52.0,
        planner=planner,
        solve_s=0.8,
        created_unix_s=NOW_S - 300,
    )


def probes(reason: str = "") -> tuple[Probe, ...]:
    """An hour of the page's own requests; ``reason`` makes the last six fail."""
    return tuple(
        Probe(at_unix_s=NOW_S - 30 * ago, reason=reason)
        if reason and ago < 6
        else Probe(
            at_unix_s=NOW_S - 30 * ago,
            ttft_s=0.31 + 0.09 * math.sin(ago / 7) + 0.04 * (ago % 5),
            tpot_s=0.041 + 0.004 * (ago % 3),
            tokens=8,
        )
        for ago in reversed(range(120))
    )


def past(span: Span) -> Past:
    """A span with a day's rise and fall, some failed requests and a while without the page."""
    begin_unix_s, steps = span.begin_unix_s(NOW_S), range(span.steps // 20, span.steps)
    starts = [begin_unix_s + span.step_s * at for at in steps]
    waves = [math.sin(start / 14_000) for start in starts]
    requests = max(1, span.step_s // 30)
    failed = {span.steps // 2, span.steps // 2 + 1}
    return Past(
        span=span,
        probes=tuple(
            {
                "start_unix_s": start,
                "requests": requests,
                "answered": requests // 2 if at in failed else requests,
                "tokens": 8 * requests,
                "ttft_p50_s": 0.36 + 0.09 * wave + 0.01 * (at % 5),
                "ttft_p95_s": 0.49 + 0.13 * wave + 0.02 * (at % 7),
            }
            for at, start, wave in zip(steps, starts, waves, strict=True)
        ),
        served=tuple(
            {
                "start_unix_s": start,
                "answers": int(span.step_s / 17 * (1.4 + wave)),
                "tokens": int(span.step_s * (14 + 10 * wave + at % 4)),
            }
            for at, start, wave in zip(steps, starts, waves, strict=True)
        ),
    )


INCIDENTS = tuple(
    Incident(key=name, name=name, what=what, since_unix_s=NOW_S - ago_s, until_unix_s=until_unix_s)
    for name, what, ago_s, until_unix_s in (
        ("kestrel-2", "lost", 9_400, None),
        ("attic-3060", "lost", 10_020, NOW_S - 10_016),
        ("the swarm", "not healthy: layers 24-31 are held by nobody", 90_300, NOW_S - 90_262),
        ("birch", "lost", 90_310, NOW_S - 90_262),
        ("t4-spare", "lost", 260_000, NOW_S - 249_000),
        ("garage", "lost", 400_000, NOW_S - 399_990),
    )
)


def observed(
    records: list[NodeRecord], *, reason: str = "", ghosts: frozenset[str] = frozenset()
) -> SwarmSnapshot:
    """What the page knows of a swarm of ``records``."""
    seen = tuple(
        SeenPeer(
            record=each,
            seen_unix_s=NOW_S - 4,
            answered_unix_s=NOW_S - (25 if each.peer_id in ghosts else 1 + at % 3),
            rtt_s=0.012 + 0.009 * (at % 6),
            misses=BY_CLIENTS.silent_misses if each.peer_id in ghosts else 0,
        )
        for at, each in enumerate(records)
    )
    route, end = [], 0
    while end < LAYERS and (step := next((r for r in records if r.start == end), None)):
        route.append(RouteStage(peer_id=step.peer_id, start=step.start, end=step.end))
        end = step.end
    nodes = {each.peer_id: each for each in records}
    beside = {each.peer_id: replace(each, model=SMALL) for each in records[:1]}
    models = (served_model(MODEL, nodes), served_model(SMALL, beside), served_model(HUGE, {}))
    made = plan(records)
    versions = [
        {
            "version": f"7.{12 - back}",
            "planner": "milp",
            "flow_tokens_per_s": 40.0 - 2 * back,
            "peers": len(records) - back,
            "created_unix_s": NOW_S - 300 - 4000 * back,
            "seen_unix_s": NOW_S - 290 - 4000 * back,
        }
        for back in range(3)
    ]
    return SwarmSnapshot(
        model_name=MODEL.name,
        now_unix_s=NOW_S,
        model=MODEL,
        peers=seen,
        links=links(records),
        leases=(LeaseRecord(peer_id=records[0].peer_id, term=7, expires_unix_s=NOW_S + 20),),
        plan=made,
        probes=probes(reason),
        past=tuple(past(span) for span in SPANS),
        incidents=INCIDENTS,
        route=tuple(route) if end == LAYERS else (),
        token_time=TokenTime(computed_s=0.011, waited_s=0.0004, way_s=0.031),
        versions=versions,
        models=models,
        given={ALL: 3600.0 * 61_440, **{each.peer_id: 3600.0 * 9_800 for each in records[:2]}},
        thanked={each.peer_id: each.name for each in records[:2] if each.name in NAMES},
        invitation=INVITATION,
    )


def _spread(names: tuple[str, ...], spans: tuple[tuple[int, int], ...]) -> list[NodeRecord]:
    pairs = enumerate(zip(names, spans, strict=True))
    return [record(number, *span, name=name) for number, (name, span) in pairs]


NAMES = ("Aino's desktop", "attic-3060", "uni-lab-2", "t4-spare", "birch", "kestrel", "garage")
HELD = ((0, 14), (0, 14), (14, 24), (14, 24), (24, 32), (24, 32), (14, 24))


def healthy() -> Json:
    """Seven peers, every layer twice."""
    return build_state(observed(_spread(NAMES, HELD)))


def layer_lost() -> Json:
    """The holders of layers 24 to 31 are gone."""
    return build_state(
        observed(_spread(NAMES[:4], HELD[:4]), reason="no route: layers 24-31 missing")
    )


def ghost() -> Json:
    """One of two holders of layers 24 to 31 announces them and answers no ping."""
    records = _spread(NAMES, HELD)
    relayed = replace(records[6], reach=Reach.RELAYED)
    return build_state(observed([*records[:6], relayed], ghosts=frozenset({records[5].peer_id})))


def crossed() -> Json:
    """Two peers for each half of the layers, so that lines of the plan cross."""
    spans = ((0, 16), (0, 16), (16, LAYERS), (16, LAYERS))
    return build_state(observed(_spread(NAMES[:4], spans)))


def many(peers: int = 500) -> Json:
    """``peers`` peers in as many as four columns of equally many layers."""
    columns = min(4, peers)
    bounds = [LAYERS * at // columns for at in range(columns + 1)]
    records = [record(n, bounds[n % columns], bounds[n % columns + 1]) for n in range(peers)]
    return build_state(observed(records))


def hostile(payloads: tuple[str, ...]) -> Json:
    """A peer for each payload, which stands in every word that it and a planner choose."""
    records = []
    for number, text in enumerate(payloads):
        device = DeviceSpec(kind=text[:16], name=text, memory_bytes=1)
        model = replace(MODEL, name=text)
        base = record(number, 0, LAYERS, name=text)
        records.append(
            replace(base, peer_id=text[:64], software_version=text, device=device, model=model)
        )
    seen = observed(records)
    last = payloads[-1]
    hostile = tuple(
        served_model(replace(MODEL, name=text, root=text), {}) for text in payloads[:64]
    )
    bad_plan = replace(plan(records, planner=last), coordinator=last[:64])
    versions = tuple({**each, "planner": last} for each in seen.versions)
    return build_state(
        replace(
            seen,
            plan=bad_plan,
            model_name=last,
            versions=versions,
            models=hostile,
            invitation=last,
        )
    )
