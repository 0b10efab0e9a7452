"""Builds the planners' input from peers' records. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from dht.messages.types import (
    TOKENS_PER_S_MAX,
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

LINK_BYTES_PER_S_MIN = 1000.0
"""Bandwidth that a slower link counts with: no plan can use less, and solvers fail on ratios of
1e300, which the wire allows."""
TOKENS_PER_S_MIN = 1e-2
"""Rate that a slower peer counts with, for the same reason."""


def problem_of(
    model: ModelSpec,
    usable: Mapping[str, NodeRecord],
    links: Mapping[str, LinksRecord],
    plan: Plan | None = None,
) -> Problem:
    """The problem of placing ``model`` on the ``usable`` peers, with the links between them.

    A peer's current span is what ``plan`` gives it, which it may still be loading, or else what it
    serves.
    """
    given = {a.peer_id: a for a in plan.assignments} if plan is not None else {}
    nodes = tuple(
        PlannerNode(
            peer_id=peer_id,
            memory_bytes=record.memory_bytes,
            kv_tokens_min=record.kv_tokens_min,
            tokens_per_s=tuple(
                min(TOKENS_PER_S_MAX, max(TOKENS_PER_S_MIN, rate)) for rate in record.tokens_per_s
            ),
            decode_layer_ns=record.decode_layer_ns,
            prompt_layer_ns=record.prompt_layer_ns,
            up_bytes_per_s=_own_rate(record.up_bytes_per_s),
            down_bytes_per_s=_own_rate(record.down_bytes_per_s),
            own_model=in_precision_of(model, record.model),
            current=given.get(peer_id, _served(record)),
        )
        for peer_id, record in sorted(usable.items())
    )
    measured = tuple(
        replace(link, bandwidth_bytes_per_s=max(LINK_BYTES_PER_S_MIN, link.bandwidth_bytes_per_s))
        for author, record in sorted(links.items())
        for link in record.links
        if author in {link.source, link.target} and link.source in usable and link.target in usable
    )
    return Problem(model=model, nodes=nodes, links=measured)


def _own_rate(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else max(LINK_BYTES_PER_S_MIN, bytes_per_s)


def _served(record: NodeRecord) -> Assignment | None:
    if record.state is not NodeState.SERVING or record.start >= record.end:
        return None
    return Assignment(peer_id=record.peer_id, start=record.start, end=record.end)
