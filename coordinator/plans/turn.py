"""Decides whether it is this peer's turn to give up its layers for others. Pure.

The plan's waves order the moves, and each peer still checks the records itself before it gives up
layers: a coordinator that is wrong or hostile cannot make a layer's last holder drop it quickly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dht.messages.types import Assignment, NodeRecord, NodeState, Plan


class WaitFor(StrEnum):
    """What a peer that is to move waits for, each for a bounded time."""

    EARLIER_WAVES = "earlier waves"
    """Peers of earlier waves do not serve their new layers yet."""
    REST = "rest"
    """The peer has moved lately, and no layer is without a holder."""
    HOLDER = "holder"
    """Only this peer serves some layers that it is to give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnConfig:
    """Maximum time that a peer waits for each, in seconds."""

    earlier_waves_s: float = 300.0
    rest_s: float = 300.0
    holder_s: float = 30.0

    def limit_s(self, what: WaitFor) -> float:
        """The limit of one kind of wait."""
        match what:
            case WaitFor.EARLIER_WAVES:
                return self.earlier_waves_s
            case WaitFor.REST:
                return self.rest_s
            case WaitFor.HOLDER:
                return self.holder_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWait:
    """A reason why a peer does not move yet."""

    what: WaitFor
    text: str


def why_wait(
    plan: Plan,
    mine: NodeRecord,
    nodes: Mapping[str, NodeRecord],
    now_unix_s: float,
    config: TurnConfig,
) -> tuple[TurnWait, ...]:
    """What the peer of record ``mine`` must wait for before it follows ``plan``; (): nothing.

    ``nodes`` are the records; peers that the plan leaves out do not count as holders, since they
    may be dead. While some layer has no holder nobody waits: the model cannot be served anyway, and
    all peers load at the same time. Peers of earlier waves without a record are not waited for.
    """
    target = plan.assignment_of(mine.peer_id)
    if target is None or mine.state is not NodeState.SERVING:
        return ()
    planned = {a.peer_id for a in plan.assignments}
    covered = {
        layer
        for peer_id, record in nodes.items()
        if peer_id != mine.peer_id and peer_id in planned and record.state is NodeState.SERVING
        for layer in range(record.start, record.end)
    }
    if not set(range(plan.model.layers)) - set(range(mine.start, mine.end)) <= covered:
        return ()
    waits = []
    behind = _not_yet_there(plan, mine.peer_id, nodes)
    if behind:
        waits.append(TurnWait(what=WaitFor.EARLIER_WAVES, text=f"{behind[0]} moves first"))
    since_s = abs(now_unix_s - mine.moved_unix_s)
    if since_s < config.rest_s:
        waits.append(TurnWait(what=WaitFor.REST, text=f"it moved {since_s:.0f} s ago"))
    alone = [ly for ly in _given_up(mine, target) if ly not in covered]
    if alone:
        waits.append(TurnWait(what=WaitFor.HOLDER, text=f"nobody else serves layer {alone[0]} yet"))
    return tuple(waits)


def _given_up(mine: NodeRecord, target: Assignment) -> list[int]:
    return [ly for ly in range(mine.start, mine.end) if not target.start <= ly < target.end]


def _not_yet_there(plan: Plan, me: str, nodes: Mapping[str, NodeRecord]) -> list[str]:
    earlier = [peer_id for wave in plan.waves[: plan.wave_of(me)] for peer_id in wave]
    wanted = {a.peer_id: (a.start, a.end) for a in plan.assignments}
    return [
        peer_id
        for peer_id in earlier
        if peer_id in nodes
        and not (
            nodes[peer_id].state is NodeState.SERVING
            and (nodes[peer_id].start, nodes[peer_id].end) == wanted.get(peer_id)
        )
        and nodes[peer_id].plan_version <= plan.version
    ]
