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
    MEANWHILE = "meanwhile"
    """Nobody else has shown to hold some layers that this peer will hold again, and some layer has
    no other holder than peers that did not show what they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveWaitConfig:
    """Maximum time that a peer waits for each, in seconds.

    For another holder it waits as long as the plan stands: whoever announces layers, or is to hold
    them, may be made up, and a layer without a holder stops the model for everybody. Each other
    wait ends: otherwise whoever announces layers that it does not hold would keep this peer from
    taking those that nobody serves.
    """

    earlier_waves_s: float = 300.0
    rest_s: float = 300.0
    """Minimum time between two moves of a peer."""
    meanwhile_s: float = 300.0
    forgotten_s: float = 600.0
    """Time without a wait after which earlier ones count no more."""

    def limit_s(self, what: WaitFor) -> float:
        match what:
            case WaitFor.EARLIER_WAVES:
                return self.earlier_waves_s
            case WaitFor.REST:
                return self.rest_s
            case WaitFor.MEANWHILE:
                return self.meanwhile_s
            case WaitFor.HOLDER:
                return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveWait:
    """A reason why a peer does not move yet."""

    what: WaitFor
    text: str


class Patience:
    """How long this peer has waited for each reason since it last moved, over all plans: whoever
    publishes plans without end starts no wait anew."""

    def __init__(self, config: MoveWaitConfig) -> None:
        self._config = config
        self._waited_s: dict[WaitFor, float] = {}
        self._last_s = -math.inf

    def left(self, waits: Iterable[MoveWait], now_s: float) -> tuple[MoveWait, ...]:
        """Those of ``waits`` that have not lasted too long."""
        if now_s - self._last_s > self._config.forgotten_s:
            self.end()
        config = self._config
        return tuple(w for w in waits if self._waited_s.get(w.what, 0.0) < config.limit_s(w.what))

    def waited(self, what: WaitFor, seconds: float, now_s: float) -> None:
        """This peer has just waited for ``what``."""
        self._waited_s[what] = self._waited_s.get(what, 0.0) + seconds
        self._last_s = now_s

    def end(self) -> None:
        """This peer moved: forget all waits."""
        self._waited_s.clear()


def why_wait(
    plan: Plan,
    mine: NodeRecord,
    nodes: Mapping[str, NodeRecord],
    proven: Collection[str],
    answering: Collection[str],
    now_unix_s: float,
    config: MoveWaitConfig,
    unshown: Collection[str] = (),
) -> tuple[MoveWait, ...]:
    """What the peer of record ``mine`` must wait for before it follows ``plan``; (): nothing.

    ``nodes`` are the records. ``proven`` are those of :func:`other_holders` that have shown their
    layers: there must be one for each layer that the peer gives up, whatever else is so. As long as
    every layer has a holder, there must also be one for each layer that the peer will hold again
    and other planned peers announce; the only holder must leave such a layer for a moment. Where
    some layer has holders among the ``unshown`` alone, which were asked to show layers and did not,
    the peer waits for that for a bounded time: they may be made up, and nobody serve that layer.

    ``answering`` are those of :func:`serving_beside`, planned or not, that answer this peer, or
    that it has not asked yet: a plan says nothing of who serves. While they leave some layer
    without a holder, the model cannot be served, so nobody waits for its turn or rests. Peers of
    earlier waves without a record are not waited for.
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
    lost = given_up(plan, mine)
    needed = {WaitFor.HOLDER: lost}
    if whole:
        # It serves none of its layers while it loads: not those either that it will hold again.
        announced = _announced(mine, nodes, NodeState.SERVING, NodeState.LOADING)
        again = held & layers_of(r for r in announced if r.peer_id in _wanted(plan))
        there = (r for r in beside if r.peer_id in answering and r.peer_id not in unshown)
        if covers(plan, mine, there):
            needed[WaitFor.HOLDER] = lost | again
        else:
            needed[WaitFor.MEANWHILE] = again - lost
    for what, layers in needed.items():
        if alone := layers - shown:
            text = f"nobody else has shown to hold layer {min(alone)}"
            waits.append(MoveWait(what=what, text=text))
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
