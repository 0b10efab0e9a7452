"""Builds the planners' input from peers' records. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.problem.config import ASSUMED
from coordinator.problem.unmeasured import with_guesses
from coordinator.problem.uplinks import homes_of, rates_of
from dht.messages.types import (
    RECORD_BOUNDS,
    Assignment,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlannerNode,
    Problem,
    in_precision_of,
)


def problem_of(
    model: ModelSpec,
    usable: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
    plan: Plan | None = None,
) -> Problem:
    """The problem of placing ``model`` on the ``usable`` peers, with the links between them.

    A peer's current span is what ``plan`` gives it, which it may still be loading, or else what it
    serves. Peers that show that they share an internet connection are planned as behind one.
    """
    homes = homes_of(usable)
    given = {a.peer_id: a for a in plan.assignments} if plan is not None else {}
    nodes = tuple(
        PlannerNode(
            peer_id=peer_id,
            memory_bytes=record.memory_bytes,
            kv_tokens_min=record.kv_tokens_min,
            tokens_per_s=_rates(record),
            decode_layer_ns=record.decode_layer_ns,
            prompt_layer_ns=record.prompt_layer_ns,
            up_bytes_per_s=_own_rate(_lent(record) if peer_id in homes else record.up_bytes_per_s),
            uplink=homes.get(peer_id, ""),
            down_bytes_per_s=_own_rate(record.down_bytes_per_s),
            own_model=in_precision_of(model, record.model),
            current=given.get(peer_id, _served(record)),
        )
        for peer_id, record in sorted(usable.items())
    )
    measured = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=max(ASSUMED.link_bytes_per_s_min, link.bandwidth_bytes_per_s),
        )
        for author, record in sorted(links.items())
        for link in record.links
        if author in {link.source, link.target} and link.source in usable and link.target in usable
    )
    uplinks = tuple(
        replace(uplink, up_bytes_per_s=_own_rate(uplink.up_bytes_per_s))
        for uplink in rates_of(homes, usable, measured)
    )
    links_ = with_guesses(sorted(usable), measured)
    return Problem(model=model, nodes=nodes, links=links_, uplinks=uplinks)


def _rates(record: NodeRecord) -> tuple[float, ...]:
    """T_j, at most what the record's own decode times allow.

    A peer refines its times while it serves, never its T_j; and one that announced high rates
    with endless times would get layers by the rates and stop plans by the times.
    """
    best = max((j * rate for j, rate in enumerate(record.tokens_per_s, start=1)), default=0.0)
    share = 1.0
    if record.decode_layer_ns and best > 0:
        share = min(1.0, max(map(_layer_rate, record.decode_layer_ns)) / best)
    return tuple(
        min(RECORD_BOUNDS.tokens_per_s_max, max(ASSUMED.tokens_per_s_min, share * rate))
        for rate in record.tokens_per_s
    )


def _layer_rate(time: tuple[int, int, int]) -> float:
    """Layers × tokens/s of a step at the context of T_j."""
    rows, near_ns, far_ns = time
    typical_ns = (
        near_ns + max(0, far_ns - near_ns) * ASSUMED.context_typical / RECORD_BOUNDS.far_tokens
    )
    return rows / max(1.0, typical_ns) * 1e9


def _lent(record: NodeRecord) -> float | None:
    """The peer's own rate, unless it is what it measured for the connection that it shares: that
    does not bind links within the home."""
    own, measured = record.up_bytes_per_s, record.shared_up_bytes_per_s
    return None if own is None or (measured is not None and own >= measured) else own


def _own_rate(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else max(ASSUMED.link_bytes_per_s_min, bytes_per_s)


def _served(record: NodeRecord) -> Assignment | None:
    if record.state is not NodeState.SERVING or record.start >= record.end:
        return None
    return Assignment(peer_id=record.peer_id, start=record.start, end=record.end)
