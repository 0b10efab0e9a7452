"""Chooses the layers that a peer takes when there is no plan: the least served ones. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.planning.heuristics.heuristics import fill
from coordinator.problem.from_records import problem_of
from dht.messages.types import Assignment, NodeRecord, NodeState, Reach, fits


def span_to_take(mine: NodeRecord, nodes: Mapping[str, NodeRecord]) -> Assignment | None:
    """The span for the peer of record ``mine``, which holds no layers.

    None when no span fits it or others cannot reach it. ``nodes`` are the living records. The rule
    is Petals' for a joiner: the span whose layers are served by the least tokens/s, within memory
    (Petals, Borzunov et al., 2023, §3.3). All waiting peers compute the spans of all of them in the
    same order, so that no two take the same span.
    """
    model = mine.model
    if mine.reach is Reach.NONE:
        return None
    same = {
        peer_id: record
        for peer_id, record in nodes.items()
        if peer_id != mine.peer_id
        and record.model.serves_with(model)
        and record.reach is not Reach.NONE
    }
    serving = {p: record for p, record in same.items() if record.state is NodeState.SERVING}
    waiting = {p: record for p, record in same.items() if record.state is NodeState.WAITING}
    whole = problem_of(model, {**serving, **waiting, mine.peer_id: mine}, {})
    nodes_by_id = {node.peer_id: replace(node, current=None) for node in whole.nodes}
    placed = [
        Assignment(peer_id=peer_id, start=record.start, end=record.end)
        for peer_id, record in serving.items()
        if fits(model, nodes_by_id[peer_id], record.start, record.end)
    ]
    known = {a.peer_id for a in placed} | {mine.peer_id, *waiting}
    problem = replace(whole, nodes=tuple(n for p, n in nodes_by_id.items() if p in known))
    return next((a for a in fill(problem, placed) if a.peer_id == mine.peer_id), None)
