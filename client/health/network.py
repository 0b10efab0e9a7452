"""Plan, links and routes of a swarm as JSON values for the health page. Pure.

Ends of edges are peers' cleaned ids, ``source`` or ``sink``; see ``docs/health.md`` for units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from client.pages.clean import clean_id, clean_name
from coordinator.plans.demand import planned_for
from dht.messages.types import (
    RECORD_BOUNDS,
    SINK,
    SOURCE,
    Link,
    LinksRecord,
    NodeRecord,
    Plan,
    Reach,
    RouteStage,
)
from dht.process.json_file import Json

LINK_S = RECORD_BOUNDS.link_fresh_max_s + 300.0
"""Older measurements are not shown: peers have measured such a link again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """How much of a plan the page says."""

    assignments_shown_max: int = 1000
    links_shown_max: int = 4000
    stages_shown_max: int = 64
    capacity_least: float = 1e-6
    """Tokens/s below which nothing can be said of how much of a capacity is used."""


NETWORK_PAGE = NetworkConfig()


def links_json(records: Sequence[LinksRecord], now_unix_s: float) -> list[Json]:
    """Measured directed links, the newest measurement of each pair; only by one of its two ends."""
    newest: dict[tuple[str, str], Json] = {}
    for record in records:
        for link in fresh_links(record, now_unix_s):
            age_s = max(0.0, now_unix_s - link.measured_unix_s)
            pair = clean_id(link.source), clean_id(link.target)
            if pair in newest and newest[pair]["age_s"] <= age_s:
                continue
            newest[pair] = {
                "from": pair[0],
                "to": pair[1],
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "rtt_s": link.rtt_s,
                "age_s": age_s,
            }
    return list(newest.values())[: NETWORK_PAGE.links_shown_max]


def fresh_links(record: LinksRecord, now_unix_s: float) -> tuple[Link, ...]:
    """The links of a record that count: measured lately, and by one of their two ends."""
    return tuple(
        link
        for link in record.links
        if now_unix_s - link.measured_unix_s <= LINK_S
        and record.peer_id in (link.source, link.target)
    )


def links_of_peers(links: Sequence[Json]) -> dict[str, Json]:
    """For each peer: how many links were measured at it, and their medians."""
    ends: dict[str, list[Json]] = {}
    for link in links:
        for end in (link["from"], link["to"]):
            ends.setdefault(end, []).append(link)
    return {
        peer_id: {
            "count": len(each),
            "bandwidth_bytes_per_s": median(link["bandwidth_bytes_per_s"] for link in each),
            "rtt_s": median(link["rtt_s"] for link in each),
        }
        for peer_id, each in ends.items()
    }


def plan_json(
    plan: Plan | None, records: Mapping[str, NodeRecord], links: Sequence[Json]
) -> Json | None:
    """The plan with what each peer and each edge could carry, where that is known (else null).

    An edge's capacity is its measured bandwidth over the bytes of one token's hidden state
    (Helix §4.3); a peer's is its announced T_j.
    """
    if plan is None:
        return None
    bandwidths = {(link["from"], link["to"]): link["bandwidth_bytes_per_s"] for link in links}
    token_bytes = max(1, plan.model.activation_bytes)
    edges = []
    for edge in plan.edges[: NETWORK_PAGE.links_shown_max]:
        pair = _end(edge.tail), _end(edge.head)
        bandwidth = bandwidths.get(pair)
        capacity = None if bandwidth is None else bandwidth / token_bytes
        edges.append(
            {
                "from": pair[0],
                "to": pair[1],
                "tokens_per_s": edge.tokens_per_s,
                "capacity_tokens_per_s": capacity,
                "use": _share(edge.tokens_per_s, capacity),
            }
        )
    through: dict[str, float] = {}
    for edge in plan.edges:
        through[edge.head] = through.get(edge.head, 0.0) + edge.tokens_per_s
    assignments = []
    for each in plan.assignments[: NETWORK_PAGE.assignments_shown_max]:
        record = records.get(each.peer_id)
        held = each.end - each.start
        rates = record.tokens_per_s if record is not None else ()
        capacity = rates[held - 1] if 0 < held <= len(rates) else None
        flow = through.get(each.peer_id, 0.0)
        assignments.append(
            {
                "id": clean_id(each.peer_id),
                "start": each.start,
                "end": each.end,
                "tokens_per_s": flow,
                "capacity_tokens_per_s": capacity,
                "use": _share(flow, capacity),
            }
        )
    return {
        "version": str(plan.version),
        "planner": clean_name(plan.planner),
        "planned_for": planned_for(plan.answer_weight),
        "capacity_tokens_per_s": plan.capacity_tokens_per_s,
        "flow_tokens_per_s": plan.flow_tokens_per_s,
        "bound_tokens_per_s": plan.bound_tokens_per_s,
        "created_unix_s": plan.created_unix_s,
        "layers": plan.model.layers,
        "assignments": assignments,
        "edges": edges,
    }


def trace_json(
    route: Sequence[RouteStage], names: Mapping[str, str], links: Sequence[Json]
) -> list[Json]:
    """The stages that answered the page's last request, each with its measured link onwards.

    The last stage's link onwards is the ring's: sampled tokens go back to the first stage.
    """
    measured = {(link["from"], link["to"]): link for link in links}
    shown = route[: NETWORK_PAGE.stages_shown_max]
    stages = []
    for at, stage in enumerate(shown):
        onwards = shown[(at + 1) % len(shown)].peer_id
        link = measured.get((clean_id(stage.peer_id), clean_id(onwards)))
        stages.append(
            {
                "id": clean_id(stage.peer_id),
                "name": names.get(stage.peer_id, "gone"),
                "start": stage.start,
                "end": stage.end,
                "link_rtt_s": link and link["rtt_s"],
                "link_bandwidth_bytes_per_s": link and link["bandwidth_bytes_per_s"],
            }
        )
    return stages


def reached(record: NodeRecord) -> str:
    """How others reach this peer, as they found: ``direct``, ``relay``, ``nobody`` does, or
    ``unknown`` where none has tried."""
    return {Reach.DIRECT: "direct", Reach.RELAYED: "relay", Reach.NONE: "nobody"}.get(
        record.reach, "unknown"
    )


def why_idle(record: NodeRecord) -> str:
    """Why plans have no layers for this peer, where others cannot reach it; else empty."""
    if record.reach is Reach.NONE:
        return "others cannot reach it, so plans leave it out"
    return ""


def _share(flow: float, capacity: float | None) -> float | None:
    # A capacity of 1e-300 makes a share that JSON has no number for.
    return None if capacity is None or capacity < NETWORK_PAGE.capacity_least else flow / capacity


def _end(name: str) -> str:
    return name if name in {SOURCE, SINK} else clean_id(name)
