"""Chooses the route of a session: which peers run which layers.

With a plan: weighted turns per vertex over the plan's flow (Helix §5.1), among the peers that say
that they follow it. Every client begins its turns at places of its own, so that many clients with
one request each share the routes as one client with many does. A turn falls to the freer of two
looks, so that a peer's announcement moves a bounded part of the turns. While the swarm has little
to do, a much quicker ring is taken out of turn (:mod:`coordinator.policies.routing.quickest`).

Where the plan is missing or differs from what peers really serve: the quickest route over the node
records. Peers that follow different plans, or none that is known, share the routes by what they
announce: a plan says nothing of those that do not follow it. Layers that two neighbours both hold
are run once, by the earlier one.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from operator import itemgetter
from typing import Generic, TypeVar

from coordinator.policies.routing.quickest import QUICKEST, Ring, RingTimes, light_ring
from dht.messages.session import SESSION_BOUNDS
from dht.messages.types import (
    NO_VERSION,
    RECORD_BOUNDS,
    SOURCE,
    Assignment,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlanVersion,
    RouteStage,
    layer_ranges,
)

Name = TypeVar("Name", str, int, PlanVersion)
Freeness = Callable[[NodeRecord], float]
Credit = Callable[[NodeRecord], float]
"""The part of what a peer announces that it can do that is believed, in ``(0, 1]``."""


def all_of_it(record: NodeRecord) -> float:
    """The credit of one whose word is taken."""
    del record
    return 1.0


GOLDEN_SECTION = (5**0.5 - 1) / 2
"""Fixed by mathematics: part of the circle between two turns of a wheel. No other spreads any
number of turns better."""
SECOND_SECTION = 2**0.5 - 1
"""Fixed by mathematics: the same for a wheel's second look. It is no multiple of the first, so that
all pairs come up."""
ALMOST_ONE = 1.0 - 2**-53
"""Fixed by float64: the largest number below 1."""
FREER = 1.25
"""Minimum ratio of two names' freeness for one to take the other's turn: what peers announce is
old, and small differences are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How many peers a search for a route over records looks at: identities are free, and each
    request searches."""

    all_max: int = 256
    """Number of peers up to which it looks at all."""
    holders_max: int = 16
    """Maximum peers of each layer where there are more."""


SEARCH = SearchConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """Why there is no route; ``missing`` are the half-open ranges of layers that nobody holds."""

    reason: str
    missing: tuple[tuple[int, int], ...] = ()
    loading: tuple[Assignment, ...] = ()
    """Layers that peers announce to be loading, where layers are missing."""
    retry_after_s: float = 0.0
    """Where peers are full: seconds until the first of them expects room; 0: unknown."""


class Wheel(Generic[Name]):
    """Weighted round-robin over names: interleaved, deterministic, no randomness.

    The names lie on a circle, each on an arc as long as its weight, and the hand advances by the
    golden section from turn to turn (a Kronecker sequence). After any number of turns each name has
    had its share to within a few. Over hands that begin at evenly spread places, every turn, the
    first like the hundredth, falls to the names exactly by their weights.

    Where names differ in freeness, a turn falls to the freer of two looks at the circle (the power
    of two choices). A name of share p is looked at in 2p - p² of the turns, whatever it says of
    itself: that is the most that freeness can bring it, and the most that comes at once to the name
    that old announcements show as the freest.
    """

    def __init__(self, begin: float = 0.0, second: float = 0.0) -> None:
        """``begin`` is the hand's first place on the circle, in ``[0, 1)``; ``second`` that of the
        second look."""
        self._begin = begin
        self._second = second
        self._turns = 0

    def order(
        self, weights: Mapping[Name, float], freeness: Callable[[Name], float] | None = None
    ) -> Iterator[Name]:
        """All names, next turn first; what is passed over leaves its turn to the others by their
        weights. Names without weight come last. Without ``freeness`` there is no second look."""
        at = (self._begin + self._turns * GOLDEN_SECTION) % 1.0
        left = {name: weights[name] for name in sorted(weights) if weights[name] > 0}
        if freeness is not None and len(left) > 1:
            first, _ = _at(left, at)
            other, _ = _at(left, (self._second + self._turns * SECOND_SECTION) % 1.0)
            if freeness(other) > FREER * max(0.0, freeness(first)):
                yield other
                del left[other]
        while left:
            name, at = _at(left, at)
            yield name
            del left[name]
        yield from sorted(name for name, weight in weights.items() if not weight > 0)

    def turn(self) -> None:
        """Advance the hand by one turn."""
        self._turns += 1


def _at(arcs: Mapping[Name, float], at: float) -> tuple[Name, float]:
    """The name whose arc has the place ``at``, and the place within that arc, in ``[0, 1)``."""
    ends = list(accumulate(arcs.values()))
    place = at * ends[-1]
    index = min(bisect_right(ends, place), len(ends) - 1)
    name = list(arcs)[index]
    within = 1.0 - (ends[index] - place) / arcs[name]
    return name, min(max(within, 0.0), ALMOST_ONE)


def begin_of(identity: str, *names: str) -> float:
    """The place on a wheel's circle at which ``identity`` begins, in ``[0, 1)``.

    Even over identities, and independent for wheels of different ``names``.
    """
    digest = blake2b("\n".join((identity, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


class Router:
    """Draws routes over one plan. Its wheels go on turning from draw to draw."""

    def __init__(
        self,
        plan: Plan,
        identity: str = "",
        freeness: Freeness | None = None,
        credit: Credit = all_of_it,
    ) -> None:
        """``identity`` is whose routes these are: it decides where the wheels begin. ``freeness``
        tells how free a peer is by its record; without it, all are alike. By ``credit``, peers get
        fewer turns than the plan's flow, which follows what they announced, has for them."""
        self.plan = plan
        self._freeness = freeness
        self._credit = credit
        weights: dict[str, dict[str, float]] = {}
        into: dict[str, float] = {}
        for edge in plan.edges:
            weights.setdefault(edge.tail, {})[edge.head] = edge.tokens_per_s
            into[edge.head] = into.get(edge.head, 0.0) + edge.tokens_per_s
        self._weights = weights
        share = plan.value_tokens_per_s / max(1e-9, sum(weights.get(SOURCE, {}).values()))
        self._given = {head: flow * share for head, flow in into.items()}
        self._begins = identity, str(plan.version)
        self._wheels: dict[str, Wheel[str]] = {}
        self._ends = {a.peer_id: a.end for a in plan.assignments}

    def weight_tokens_per_s(self, usable: Mapping[str, NodeRecord]) -> float:
        """The flow into those of ``usable`` that hold what the plan gave them at layer 0, each with
        what it announces at most."""
        return sum(
            min(flow, announced_tokens_per_s(record))
            for peer_id, flow in self._weights.get(SOURCE, {}).items()
            if (record := usable.get(peer_id)) is not None
            and record.holds(0, self._ends.get(peer_id, 0))
        )

    def next_route(self, usable: Mapping[str, NodeRecord]) -> tuple[RouteStage, ...] | NoRoute:
        """The next session's route over peers in ``usable`` that hold what the plan gave them.

        A peer that is not usable is skipped for the next in turn; the search backtracks from dead
        ends and tries no peer twice. Only vertices of the returned route take a turn.
        """
        layers = self.plan.model.layers
        dead: set[str] = set()
        stages: list[RouteStage] = []
        choices = [self._choices(SOURCE, 0, usable, dead)]
        while choices:
            stage = next(choices[-1], None)
            if stage is None or len(stages) == SESSION_BOUNDS.stages_max:
                choices.pop()
                if stages:  # nothing can follow the last stage: try its neighbours
                    dead.add(stages.pop().peer_id)
                continue
            stages.append(stage)
            if stage.end == layers:
                for vertex in (SOURCE, *(s.peer_id for s in stages[:-1])):
                    self._wheel(vertex).turn()
                return tuple(stages)
            choices.append(self._choices(stage.peer_id, stage.end, usable, dead))
        return NoRoute(reason="the plan has no route over the peers that can be used")

    def quickest(self, times: RingTimes) -> Ring | None:
        """The plan's quickest ring over peers with little to do; no turn is taken."""
        return light_ring(self._weights, self._ends, self._given, times)

    def _choices(
        self, vertex: str, layer: int, usable: Mapping[str, NodeRecord], dead: set[str]
    ) -> Iterator[RouteStage]:
        """Stages that can go on from ``layer``, next turn first."""
        able: dict[str, float] = {}
        for name, weight in self._weights.get(vertex, {}).items():
            record = usable.get(name)
            if record is not None and record.holds(layer, self._ends.get(name, 0)):
                able[name] = weight * self._credit(record)
        told = self._freeness
        freeness = None if told is None else lambda name: told(usable[name])
        for name in self._wheel(vertex).order(able, freeness):
            if name not in dead:
                yield RouteStage(peer_id=name, start=layer, end=self._ends[name])

    def _wheel(self, vertex: str) -> Wheel[str]:
        if vertex not in self._wheels:
            names = (*self._begins, vertex)
            self._wheels[vertex] = Wheel(begin_of(*names), begin_of(*names, "second look"))
        return self._wheels[vertex]


class FollowedRouter:
    """Draws routes over the plans that the peers themselves say that they follow.

    What a peer says governs routes over itself alone: a plan directs only those that follow it, and
    takes no more from the others than its followers could by announcing the same without it.
    """

    def __init__(
        self,
        identity: str = "",
        freeness: Freeness | None = None,
        credit: Credit = all_of_it,
    ) -> None:
        """``identity`` is whose routes these are; see :class:`Router`."""
        self._router = partial(Router, identity=identity, freeness=freeness, credit=credit)
        self._routers: dict[PlanVersion, Router] = {}
        self._shares: Wheel[PlanVersion] = Wheel(begin_of(identity))

    def take_plans(self, plans: Mapping[PlanVersion, Plan]) -> None:
        """Draw over these plans from now on; the turns of those that are known go on."""
        known = self._routers
        self._routers = {
            version: known[version]
            if version in known and known[version].plan is plan
            else self._router(plan)
            for version, plan in plans.items()
        }

    def plan(self, usable: Mapping[str, NodeRecord], model: ModelSpec) -> Plan | None:
        """The plan that most of the flow over ``usable`` peers follows; None: none."""
        shares = self._weights(self._groups(usable, model), model)
        followed = [version for version in shares if shares[version] and version != NO_VERSION]
        if not followed:
            return None
        return self._routers[max(followed, key=lambda v: (shares[v], v))].plan

    def next_route(
        self, usable: Mapping[str, NodeRecord], model: ModelSpec
    ) -> tuple[RouteStage, ...] | NoRoute:
        """The next session's route over ``usable`` peers: of one plan's followers, or over what all
        of them announce where no plan's followers have one."""
        groups = self._groups(usable, model)
        shares = self._weights(groups, model)
        for version in self._shares.order({v: share for v, share in shares.items() if share > 0}):
            router = self._routers.get(version)
            route = (
                route_from_records(groups[version], model.layers)
                if router is None
                else router.next_route(groups[version])
            )
            if not isinstance(route, NoRoute):
                self._shares.turn()
                return route
        return route_from_records(usable, model.layers)

    def quickest(self, times: RingTimes, model: ModelSpec) -> Ring | None:
        """The quickest ring over the followers of one plan that have little to do."""
        rings = (
            self._routers[version].quickest(times.among(group))
            for version, group in self._groups(times.usable, model).items()
            if version in self._routers
        )
        return min((ring for ring in rings if ring), key=itemgetter(0), default=None)

    def _groups(
        self, usable: Mapping[str, NodeRecord], model: ModelSpec
    ) -> dict[PlanVersion, dict[str, NodeRecord]]:
        """``usable`` by the plan that they follow; ``NO_VERSION``: one that is not known here."""
        known = {v for v, r in self._routers.items() if r.plan.model.serves_with(model)}
        groups: dict[PlanVersion, dict[str, NodeRecord]] = {v: {} for v in (NO_VERSION, *known)}
        for peer_id, record in usable.items():
            followed = record.plan_version if record.plan_version in known else NO_VERSION
            groups[followed][peer_id] = record
        return groups

    def _weights(
        self, groups: Mapping[PlanVersion, Mapping[str, NodeRecord]], model: ModelSpec
    ) -> dict[PlanVersion, float]:
        """Tokens/s of each group: of its plan's flow, or of the scarcest layer without a plan."""
        return {
            version: self._routers[version].weight_tokens_per_s(group)
            if version in self._routers
            else _scarcest_tokens_per_s(group, model.layers)
            for version, group in groups.items()
        }


def announced_tokens_per_s(record: NodeRecord) -> float:
    """What a serving peer says that it can do with the layers that it holds, within reason."""
    held = record.end - record.start
    if not record.holds(record.start, record.end) or held > len(record.tokens_per_s):
        return 0.0
    return min(RECORD_BOUNDS.tokens_per_s_max, record.tokens_per_s[held - 1])


def _scarcest_tokens_per_s(nodes: Mapping[str, NodeRecord], layers: int) -> float:
    """The rates that the holders of a layer announce together, at the layer where that is least."""
    changes = [0.0] * (layers + 1)
    held = [0] * (layers + 1)
    for record in nodes.values():
        if record.start < record.end <= layers:
            rate = announced_tokens_per_s(record)
            changes[record.start] += rate
            changes[record.end] -= rate
            held[record.start] += 1
            held[record.end] -= 1
    rates = list(accumulate(changes[:-1]))
    counts = list(accumulate(held[:-1]))
    return max(0.0, min(r if count else 0.0 for r, count in zip(rates, counts, strict=True)))


def missing_layers(nodes: Mapping[str, NodeRecord], layers: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of layers that no serving peer of ``nodes`` holds."""
    return layer_ranges(
        layer
        for layer in range(layers)
        if not any(record.holds(layer, layer + 1) for record in nodes.values())
    )


def being_loaded(nodes: Mapping[str, NodeRecord], model: ModelSpec) -> tuple[Assignment, ...]:
    """Layers of ``model`` that peers of ``nodes`` announce to be loading."""
    return tuple(
        Assignment(peer_id=peer_id, start=record.start, end=record.end)
        for peer_id, record in nodes.items()
        if record.state is NodeState.LOADING and record.model.serves_with(model)
    )


def route_from_records(
    usable: Mapping[str, NodeRecord], layers: int
) -> tuple[RouteStage, ...] | NoRoute:
    """The route with the least expected time per token, over what peers announce to serve.

    A stage's time is 1 / T_j at the layers that it would run, plus ``QUICKEST.hop_s``, so fewer and
    faster stages win. A route may enter a peer in the middle of its range and runs it to the
    range's end.
    """
    gaps = missing_layers(usable, layers)
    if gaps:
        return NoRoute(reason="some layers are held by nobody", missing=gaps)
    stages = _quickest(usable, 0, layers)
    if stages is None:
        return NoRoute(reason="the peers that can be used do not join up to a route")
    if len(stages) > SESSION_BOUNDS.stages_max:
        return NoRoute(reason=f"every route needs more than {SESSION_BOUNDS.stages_max} stages")
    return stages


def _quickest(
    usable: Mapping[str, NodeRecord], first: int, last: int
) -> tuple[RouteStage, ...] | None:
    """The quickest stages that together run layers ``[first, last)``, each peer at most once."""
    best: dict[int, tuple[float, tuple[RouteStage, ...]]] = {first: (0.0, ())}
    able = _contenders(usable, first, last)
    for layer in range(first, last):
        if layer not in best:
            continue
        time_s, stages = best[layer]
        for record in able:
            end = min(record.end, last)
            if end <= layer or not record.holds(layer, end):
                continue
            stage = RouteStage(peer_id=record.peer_id, start=layer, end=end)
            total_s = time_s + QUICKEST.hop_s + stage_s(record, end - layer)
            if end not in best or total_s < best[end][0]:
                best[end] = (total_s, (*stages, stage))
    return best[last][1] if last in best else None


def _contenders(usable: Mapping[str, NodeRecord], first: int, last: int) -> Sequence[NodeRecord]:
    """The peers that a search over layers ``[first, last)`` looks at: all, or where they are many,
    of each layer the ``SEARCH.holders_max`` that say that they are the fastest."""
    able = [
        record
        for record in usable.values()
        if record.state is NodeState.SERVING and record.start < last and first < record.end
    ]
    if len(able) <= SEARCH.all_max:
        return able
    able.sort(key=_layer_s)
    lacking = [SEARCH.holders_max] * (last - first)
    found: list[NodeRecord] = []
    for record in able:
        start, end = max(record.start, first) - first, min(record.end, last) - first
        if max(lacking[start:end], default=0) > 0:
            found.append(record)
            lacking[start:end] = [left - 1 for left in lacking[start:end]]
    return found


def replacement(
    route: tuple[RouteStage, ...],
    lost: Collection[str],
    usable: Mapping[str, NodeRecord],
    layers: int,
) -> tuple[RouteStage, ...] | NoRoute:
    """``route`` with its ``lost`` peers' stages replaced; the other stages stay as they are.

    Each run of lost stages is covered by one or more peers of ``usable`` that are not on the route
    already. Where that fails, the gap's neighbours are replaced too, the later one first (its KV is
    rebuilt from the earlier one's log), then the earlier one, until nothing of the old route is
    left. ``usable`` need not contain the surviving peers: they serve the session already. It should
    leave out lost peers until they are trusted again.
    """
    kept = [stage.peer_id not in lost for stage in route]
    while True:
        mended = _mend(route, kept, usable)
        if not isinstance(mended, tuple):
            gap_start, gap_end = mended
            widened = [i for i in (gap_end, gap_start - 1) if 0 <= i < len(route) and kept[i]]
            if widened:
                kept[widened[0]] = False
                continue
            if any(kept):
                kept = [False] * len(route)
                continue
            return route_from_records(usable, layers)
        if len(mended) > SESSION_BOUNDS.stages_max:
            return NoRoute(reason=f"every route needs more than {SESSION_BOUNDS.stages_max} stages")
        return mended


def _mend(
    route: tuple[RouteStage, ...], kept: list[bool], pool: Mapping[str, NodeRecord]
) -> tuple[RouteStage, ...] | list[int]:
    """The route with its gaps covered, or ``[first, end)`` of the first gap that nobody covers."""
    taken = {stage.peer_id for stage, keep in zip(route, kept, strict=True) if keep}
    mended: list[RouteStage] = []
    at = 0
    while at < len(route):
        if kept[at]:
            mended.append(route[at])
            at += 1
            continue
        end = at
        while end < len(route) and not kept[end]:
            end += 1
        free = {peer_id: record for peer_id, record in pool.items() if peer_id not in taken}
        stages = _quickest(free, route[at].start, route[end - 1].end)
        if stages is None:
            return [at, end]
        taken |= {stage.peer_id for stage in stages}
        mended += stages
        at = end
    return tuple(mended)


def _layer_s(record: NodeRecord) -> float:
    """Seconds per token of one of the layers that a peer holds, all of which it runs."""
    held = max(1, record.end - record.start)
    return stage_s(record, held) / held


def stage_s(record: NodeRecord, count: int) -> float:
    """Seconds per token of ``count`` layers at a peer, by what it announces."""
    rates = record.tokens_per_s
    if not rates:
        return float(count)
    rate = rates[min(count, len(rates)) - 1]
    return 1.0 / rate if rate > 0 else float("inf")
