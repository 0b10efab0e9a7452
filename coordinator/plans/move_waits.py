"""Decides what this peer must wait for before it gives up its layers for others. Pure.

The plan's waves order the moves, and each peer still checks the records itself before it gives up
layers: a coordinator that is wrong or hostile cannot make a layer's last holder drop it. This has
no exception for emergencies, which a hostile plan could feign.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dht.messages.types import NodeRecord, NodeState, Plan


class WaitFor(StrEnum):
    """What a peer that is to move waits for, each for a bounded time."""

    EARLIER_WAVES = "earlier waves"
    """Peers of earlier waves do not serve their new layers yet."""
    REST = "rest"
    """The peer has moved lately, and no layer is without a holder."""
    HOLDER = "holder"
    """Nobody else who stays meanwhile has shown to hold some layers that this peer gives up, or, as
    long as every layer has a holder, that it will hold again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveWaitConfig:
    """Maximum time that a peer waits for each, in seconds.

    For another holder it waits as long as the plan stands: whoever announces layers, or is to hold
    them, may be made up, and a layer without a holder stops the model for everybody.
    """

    earlier_waves_s: float = 300.0
    rest_s: float = 300.0

    def limit_s(self, what: WaitFor) -> float:
        """The limit of one kind of wait."""
        match what:
            case WaitFor.EARLIER_WAVES:
                return self.earlier_waves_s
            case WaitFor.REST:
                return self.rest_s
            case WaitFor.HOLDER:
                return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveWait:
    """A reason why a peer does not move yet."""

    what: WaitFor
    text: str


def why_wait(
    plan: Plan,
    mine: NodeRecord,
    nodes: Mapping[str, NodeRecord],
    proven: Collection[str],
    answering: Collection[str],
    now_unix_s: float,
    config: MoveWaitConfig,
) -> tuple[MoveWait, ...]:
    """What the peer of record ``mine`` must wait for before it follows ``plan``; (): nothing.

    ``nodes`` are the records. ``proven`` are those of :func:`other_holders` that have shown their
    layers: there must be one for each layer that the peer gives up, whatever else is so. As long as
    every layer has a holder, there must also be one for each layer that the peer will hold again
    and other planned peers announce; the only holder must leave such a layer for a moment.

    ``answering`` are those of :func:`serving_beside`, planned or not, that answer this peer: a plan
    says nothing of who serves. While they leave some layer without a holder, the model cannot be
    served, so nobody waits for its turn or rests. Peers of earlier waves without a record are not
    waited for.
    """
    target = plan.assignment_of(mine.peer_id)
    if target is None or mine.state is not NodeState.SERVING:
        return ()
    held = frozenset(range(mine.start, mine.end))
    beside = serving_beside(mine, nodes)
    whole = covers(plan, mine, (r for r in beside if r.peer_id in answering))
    waits = []
    behind = _not_yet_there(plan, mine.peer_id, nodes)
    if whole and behind:
        waits.append(MoveWait(what=WaitFor.EARLIER_WAVES, text=f"{behind[0]} moves first"))
    since_s = abs(now_unix_s - mine.moved_unix_s)
    if whole and since_s < config.rest_s:
        waits.append(MoveWait(what=WaitFor.REST, text=f"it moved {since_s:.0f} s ago"))
    shown = layers_of(r for r in other_holders(plan, mine, nodes) if r.peer_id in proven)
    needed = given_up(plan, mine)
    if whole:
        # It serves none of its layers while it loads: not those either that it will hold again.
        announced = _announced(mine, nodes, NodeState.SERVING, NodeState.LOADING)
        needed |= held & layers_of(r for r in announced if r.peer_id in _wanted(plan))
    alone = sorted(needed - shown)
    if alone:
        text = f"nobody else has shown to hold layer {alone[0]}"
        waits.append(MoveWait(what=WaitFor.HOLDER, text=text))
    return tuple(waits)


def serving_beside(mine: NodeRecord, nodes: Mapping[str, NodeRecord]) -> tuple[NodeRecord, ...]:
    """The other peers that announce to serve layers of the model of ``mine``'s peer."""
    return tuple(_announced(mine, nodes, NodeState.SERVING))


def covers(plan: Plan, mine: NodeRecord, others: Iterable[NodeRecord]) -> bool:
    """Whether ``mine``'s peer and ``others`` together hold every layer of ``plan``'s model."""
    every = frozenset(range(plan.model.layers))
    return every - set(range(mine.start, mine.end)) <= layers_of(others)


def given_up(plan: Plan, mine: NodeRecord) -> frozenset[int]:
    """Layers that the peer of record ``mine`` serves and ``plan`` takes from it."""
    target = plan.assignment_of(mine.peer_id)
    if target is None or mine.state is not NodeState.SERVING:
        return frozenset()
    return frozenset(range(mine.start, mine.end)) - frozenset(range(target.start, target.end))


def other_holders(
    plan: Plan, mine: NodeRecord, nodes: Mapping[str, NodeRecord]
) -> tuple[NodeRecord, ...]:
    """Peers that serve some layers of ``mine``'s peer while it moves: they stay, or move after it,
    since two that counted on each other could go at once.

    Peers that follow a later plan may be leaving by that. Those without layers in this one stay
    where they follow it.
    """
    wanted = _wanted(plan)
    wave_of = {p: index for index, wave in reversed([*enumerate(plan.waves)]) for p in wave}
    turn = wave_of.get(mine.peer_id, 0), mine.peer_id

    def stays(record: NodeRecord) -> bool:
        if record.peer_id not in wanted:
            return record.plan_version == plan.version
        later = (wave_of.get(record.peer_id, 0), record.peer_id) > turn
        return record.plan_version <= plan.version and (_is_there(record, wanted) or later)

    staying = (record for record in serving_beside(mine, nodes) if stays(record))
    return with_layers(staying, range(mine.start, mine.end))


def _wanted(plan: Plan) -> dict[str, tuple[int, int]]:
    """The layers that each peer is to hold."""
    return {a.peer_id: (a.start, a.end) for a in plan.assignments}


def _is_there(record: NodeRecord, wanted: Mapping[str, tuple[int, int]]) -> bool:
    """Whether the peer of a record serves what it is to hold."""
    span = record.start, record.end
    return record.state is NodeState.SERVING and wanted.get(record.peer_id) == span


def _announced(
    mine: NodeRecord, nodes: Mapping[str, NodeRecord], *states: NodeState
) -> Iterator[NodeRecord]:
    """The records of other peers of the same model in these states."""
    for peer_id, record in nodes.items():
        same = peer_id != mine.peer_id and record.model.serves_with(mine.model)
        if same and record.state in states:
            yield record


def with_layers(records: Iterable[NodeRecord], layers: Collection[int]) -> tuple[NodeRecord, ...]:
    """The records of peers that announce some of ``layers``."""
    return tuple(r for r in records if not set(layers).isdisjoint(range(r.start, r.end)))


def layers_of(records: Iterable[NodeRecord]) -> frozenset[int]:
    """Layers that at least one of the records announces."""
    return frozenset(layer for r in records for layer in range(r.start, r.end))


def _not_yet_there(plan: Plan, me: str, nodes: Mapping[str, NodeRecord]) -> list[str]:
    earlier = [peer_id for wave in plan.waves[: plan.wave_of(me)] for peer_id in wave]
    wanted = _wanted(plan)
    return [
        peer_id
        for peer_id in earlier
        if peer_id in nodes
        and not _is_there(nodes[peer_id], wanted)
        and nodes[peer_id].plan_version <= plan.version
    ]
