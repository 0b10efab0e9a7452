"""Decides when to plan again and whether a new plan is worth its moves. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.planning.waves import can_be_reached, keepers, waves
from coordinator.plans.move_waits import MoveWaitConfig
from dht.messages.types import (
    Assignment,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    Reach,
    stage_bytes,
)

PERIODIC = "periodic"
"""The reason of a thorough solve: nothing changed but figures."""
TIMES_TOLD_MAX = 1000.0
"""Gains from here on are not told as multiples."""
HOLDERS_WANTED = 2
"""Holders of every layer that are worth moves at about equal throughput: the loss of a single one
stops the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionConfig:
    """Times in seconds."""

    settle_s: float = 0.9
    """Time without a further join before a plan is made for those that joined."""
    settle_max_s: float = 5.0
    """Maximum time for which further joins postpone a plan."""
    calm_s: float = 60.0
    """Time after the last solve for a change after which the plan is reconsidered, thoroughly."""
    period_s: float = 300.0
    """Time between two thorough solves while nothing changes but figures."""
    fruitless_max: int = 3
    """Thorough solves in a row without a better plan after which an unchanged swarm is not solved
    again: of large homes, one seed finds 5 to 25% more than another."""
    retry_s: float = 5.0
    """Pause after a solve that led to no plan."""
    elder_s: float = 300.0
    """Time since it was first seen after which a peer coordinates before younger ones."""
    gain_min: float = 1.1
    """Minimum ratio of a moving plan's throughput to the kept one's, unless layers were lost."""
    tried_gain_min: float = 1.05
    """The same where simulated runs show it: they err less than the estimate."""
    move_every_s: float = MoveWaitConfig().rest_s
    """Minimum time between two moves of a peer, unless layers have no holder. It is the peers' own:
    with a shorter one, plans would have moves that nobody makes yet."""
    calm_after_loss_s: float = 300.0
    """Time after a loss for which nobody moves while every layer has ``HOLDERS_WANTED``: who leaves
    often comes back, and another often leaves next, as where an owner restarts machines in turn."""
    loss_max: float = 0.98
    """Minimum share of the kept plan's throughput of one that is chosen for its replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Differences from the running plan: since when there are any, and when they last changed."""

    joined: frozenset[str]
    lost: frozenset[str]
    since_s: float
    last_s: float


def difference(plan: Plan | None, usable: Mapping[str, NodeRecord]) -> tuple[set[str], set[str]]:
    """``(joined, lost)``: peers that the plan does not name, and its peers that are gone."""
    planned = {a.peer_id for a in plan.assignments} if plan is not None else set()
    return set(usable) - planned, planned - set(usable)


def usable_nodes(
    nodes: Mapping[str, NodeRecord], model: ModelSpec, silent: frozenset[str]
) -> dict[str, NodeRecord]:
    """The peers that a plan may count on.

    They serve the same model, are not draining, answer, have room for a layer, and were not found
    unreachable by others (a peer that nobody tried yet counts).
    """
    return {
        peer_id: record
        for peer_id, record in nodes.items()
        if record.state is not NodeState.DRAINING
        and record.model.serves_with(model)
        and peer_id not in silent
        and record.tokens_per_s
        and record.reach is not Reach.NONE
    }


def left_out(nodes: Mapping[str, NodeRecord], model: ModelSpec) -> str:
    """A phrase on the number of peers that a plan leaves out as unreachable; "": none."""
    count = sum(
        record.reach is Reach.NONE and record.model.serves_with(model) for record in nodes.values()
    )
    if not count:
        return ""
    return f"; {count} more {'is' if count == 1 else 'are'} left out: others cannot reach them"


def reason_to_plan(
    plan: Plan | None,
    change: Change | None,
    planned_s: float,
    now_s: float,
    cfg: TransitionConfig,
    *,
    thorough: bool = False,
) -> str | None:
    """The reason to solve now; None: there is none.

    ``planned_s`` is when the last solve ended, ``thorough`` whether it was a thorough one. A lost
    holder is replaced at once; joins must settle first, so that ten peers that start together get
    one plan.
    """
    if change is not None and change.lost:
        return "a peer left"
    if change is not None and change.joined:
        settled = now_s - change.last_s >= cfg.settle_s
        if settled or now_s - change.since_s >= cfg.settle_max_s:
            return "a peer joined" if plan is not None else "the first plan"
        return None
    if plan is not None and now_s - planned_s >= (cfg.period_s if thorough else cfg.calm_s):
        return PERIODIC
    return None


def elders(
    nodes: Mapping[str, NodeRecord], now_unix_s: float, cfg: TransitionConfig
) -> frozenset[str]:
    """Peers that joined at least ``cfg.elder_s`` ago; none in a young swarm.

    ``nodes`` are as seen here (:mod:`dht.records.sightings`): a record's own word makes no elder.
    """
    return frozenset(
        peer_id
        for peer_id, record in nodes.items()
        if now_unix_s - record.joined_unix_s >= cfg.elder_s
    )


def settled(
    usable: Mapping[str, NodeRecord], now_unix_s: float, cfg: TransitionConfig
) -> frozenset[str]:
    """Peers for whose sake others may be moved: those here for half as long as the one that has
    been here the longest, or for ``cfg.elder_s``.

    Newer ones are given layers beside what the others hold: most volunteers who leave do so soon,
    and whoever announces much may hold nothing. ``usable`` are as seen here.
    """
    ages_s = {p: now_unix_s - record.joined_unix_s for p, record in usable.items()}
    enough_s = min(cfg.elder_s, max(ages_s.values(), default=0.0) / 2)
    return frozenset(p for p, age_s in ages_s.items() if age_s >= enough_s)


def replication(assignments: Sequence[Assignment], layers: int) -> int:
    """Number of holders of the layer that has the fewest."""
    holders = [0] * layers
    for a in assignments:
        for layer in range(a.start, a.end):
            holders[layer] += 1
    return min(holders)


def carried_out(
    plan: Plan, usable: Mapping[str, NodeRecord], counted: Collection[str] | None = None
) -> Plan:
    """``plan`` as its peers carry it out: those that serve other layers, because they wait for
    their turn or for a holder, with these.

    Peers that are gone stay in it, so that their loss is seen; of those in ``usable``, only those
    in ``counted`` do (None: all).
    """
    assignments = []
    for a in plan.assignments:
        record = usable.get(a.peer_id)
        if record is not None and counted is not None and a.peer_id not in counted:
            continue
        if record is not None and record.state is NodeState.SERVING and record.start < record.end:
            assignments.append(replace(a, start=record.start, end=record.end))
        else:
            assignments.append(a)
    return replace(plan, assignments=tuple(assignments))


def moved(old: Sequence[Assignment], new: Sequence[Assignment]) -> frozenset[str]:
    """Peers whose span in ``new`` differs from their span in ``old``."""
    before = {a.peer_id: (a.start, a.end) for a in old}
    return frozenset(
        a.peer_id for a in new if a.peer_id in before and before[a.peer_id] != (a.start, a.end)
    )


def moved_lately(
    usable: Mapping[str, NodeRecord], now_unix_s: float, cfg: TransitionConfig
) -> frozenset[str]:
    """Peers that moved within ``cfg.move_every_s`` of now, whichever way clocks differ.

    ``usable`` are as seen here (:mod:`dht.records.sightings`).
    """
    return frozenset(
        peer_id
        for peer_id, record in usable.items()
        if abs(now_unix_s - record.moved_unix_s) < cfg.move_every_s
    )


def fetch_bytes(
    model: ModelSpec, serving: Sequence[Assignment], new: Sequence[Assignment]
) -> dict[str, int]:
    """Bytes of weights that each peer must read to go from what it serves to ``new``."""
    before = {a.peer_id: a for a in serving}
    needed: dict[str, int] = {}
    for a in new:
        needed[a.peer_id] = stage_bytes(model, a.start, a.end, 0)
        old = before.get(a.peer_id)
        if old is not None and (shared := range(max(a.start, old.start), min(a.end, old.end))):
            needed[a.peer_id] -= stage_bytes(model, shared.start, shared.stop, 0)
    return needed


def with_effects(plan: Plan, usable: Mapping[str, NodeRecord]) -> Plan:
    """``plan`` with the waves of its moves and the bytes of weights that peers must read."""
    serving = _serving(usable)
    able = {p: r for p, r in usable.items() if r.loads_beside}
    keeping = keepers(
        plan.model,
        {peer_id: record.memory_bytes for peer_id, record in able.items()},
        {peer_id: record.kv_tokens_min for peer_id, record in able.items()},
        serving,
        plan.assignments,
    )
    return replace(
        plan,
        waves=tuple(wave.peers for wave in waves(serving, plan.assignments, keeping)),
        fetch_bytes=sum(fetch_bytes(plan.model, serving, plan.assignments).values()),
    )


def _serving(usable: Mapping[str, NodeRecord]) -> list[Assignment]:
    return [
        Assignment(peer_id=peer_id, start=record.start, end=record.end)
        for peer_id, record in sorted(usable.items())
        if record.state is NodeState.SERVING and record.start < record.end
    ]


def choose_plan(
    old: Plan | None,
    best: Plan,
    kept: Plan | None,
    usable: Mapping[str, NodeRecord],
    cfg: TransitionConfig,
    now_unix_s: float,
    gain: float | None = None,
    *,
    tried: bool = False,
    lost_lately: bool = False,
) -> tuple[Plan, str] | None:
    """The plan to run next and the reason; None: stay with ``old``.

    ``kept`` is the plan that moves no holder of layers, or the fewest where layers are lost; None
    where there is no such plan. Plans are compared by what they would serve: by ``gain``, which is
    ``best``'s worth as a multiple of ``kept``'s (throughput, and the speed of one answer by its
    weight), in a simulated run if ``tried``, or else by the estimates. ``best`` deserves its moves
    if it is worth 10% more (5% where that was tried), or about as much with a second holder of
    every layer, or with replicas that were lost; if none of its peers has to wait for ever, or
    ``kept`` has such, too; and, where ``kept`` moves nobody, if it moves no peer that has just
    moved. Otherwise ``kept`` is chosen, also when a peer left: one death must not make all
    survivors fetch their weights again. Where a settled peer was ``lost_lately``, nobody moves as
    long as every layer has two holders: another may leave next. Holders are counted among
    :func:`settled` peers.
    """
    joined, lost = difference(old, usable)
    rests = lost_lately or bool(lost)
    plan, gains = _chosen(
        old, best, kept, usable, cfg, now_unix_s, gain, tried=tried, lost_lately=rests
    )
    if old is None:
        return plan, "there was no plan"
    if lost:
        return plan, f"{len(lost)} peer{'s' if len(lost) > 1 else ''} left"
    now = {(a.peer_id, a.start, a.end) for a in old.assignments}
    then = {(a.peer_id, a.start, a.end) for a in plan.assignments}
    if now == then:
        return None
    if gains:
        return plan, gains
    if now < then:
        return plan, f"{len(joined)} peer{'s' if len(joined) > 1 else ''} joined, nobody moves"
    return None


def _chosen(
    old: Plan | None,
    best: Plan,
    kept: Plan | None,
    usable: Mapping[str, NodeRecord],
    cfg: TransitionConfig,
    now_unix_s: float,
    gain: float | None,
    *,
    tried: bool,
    lost_lately: bool,
) -> tuple[Plan, str]:
    """The plan that is worth its moves, and its gain in words ("": nobody moves)."""
    if kept is None:
        return best, _times(_gain(best, old), best)
    held = old.assignments if old is not None else ()
    movers = moved(held, best.assignments)
    stays = not moved(held, kept.assignments)  # otherwise reviewers would find it too poor
    if stays and movers & moved_lately(usable, now_unix_s, cfg):
        return kept, ""
    serving = _serving(usable)
    if not can_be_reached(serving, best.assignments) and (
        stays or can_be_reached(serving, kept.assignments)
    ):
        return kept, ""  # nobody gives up layers that no other holds, whatever else is lost
    stay = settled(usable, now_unix_s, cfg)
    have, will = (
        replication([a for a in plan.assignments if a.peer_id in stay], best.model.layers)
        for plan in (kept, best)
    )
    if stays and lost_lately and have >= HOLDERS_WANTED:
        return kept, ""
    gain = _gain(best, kept) if gain is None else gain
    if gain >= (cfg.tried_gain_min if tried else cfg.gain_min):
        return best, _times(gain, best) if movers else ""
    wanted = max(HOLDERS_WANTED, replication(held, best.model.layers))
    if have < min(wanted, will) and gain >= cfg.loss_max:
        return best, f"{will} holders of every layer, not {have}"
    return kept, ""


def _gain(best: Plan, before: Plan | None) -> float:
    """Estimated tokens/s of ``best`` as a multiple of those before."""
    return best.value_tokens_per_s / max(before.value_tokens_per_s if before else 0.0, 1e-9)


def _times(gain: float, plan: Plan) -> str:
    """A plan's gain in words; what served nothing serves any multiple of it."""
    if gain >= TIMES_TOLD_MAX:
        return "what served nothing serves"
    if plan.answer_weight:
        return f"{gain:.2f} times the worth of all tokens/s and of the speed of one answer"
    return f"{gain:.2f} times the tokens/s"
