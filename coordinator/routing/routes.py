"""Routes: which peers run which layers of one session.

Interleaved weighted round-robin (IWRR) per vertex over the plan's flow (Helix §5.1); where the
plan is missing or does not match what peers really serve, the shortest way over the node records.
Layers that two neighbours both hold are run once, by the earlier one.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from dht.messages.session import STAGES_MAX
from dht.messages.types import (
    SOURCE,
    Assignment,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    RouteStage,
)

HOP_S = 0.02
"""What one more stage costs a token, where nothing is known about the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """Why there is no route; ``missing`` are half-open ranges of layers that nobody holds."""

    reason: str
    missing: tuple[tuple[int, int], ...] = ()
    loading: tuple[Assignment, ...] = ()
    """What peers announce to be loading, while layers are missing."""
    retry_after_s: float = 0.0
    """Where peers are full: when the first of them expects to have room; 0: nobody knows."""


class Wheel:
    """Interleaved weighted round-robin over names: smooth, deterministic, no randomness.

    Each turn every name earns its weight; the richest is drawn and pays the sum. After as many
    turns as whole weights sum up to, each name was drawn exactly by its weight. A name that is
    passed over earns nothing meanwhile, so that it does not come back with all its turns at once.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._credit = dict.fromkeys(self._weights, 0.0)

    def order(self) -> list[str]:
        """All names, the one whose turn it is first."""
        return sorted(
            self._weights, key=lambda name: (-self._credit[name] - self._weights[name], name)
        )

    def draw(self, name: str, among: Collection[str]) -> None:
        """Take ``name``'s turn; only those it was drawn ``among`` earn one."""
        earned = {other: self._weights[other] for other in among}
        for other, weight in earned.items():
            self._credit[other] += weight
        self._credit[name] -= sum(earned.values())


class Router:
    """Draws routes over one plan. Keeps its wheels' positions between draws."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        weights: dict[str, dict[str, float]] = {}
        for edge in plan.edges:
            weights.setdefault(edge.tail, {})[edge.head] = edge.tokens_per_s
        self._wheels = {tail: Wheel(heads) for tail, heads in weights.items()}
        self._ends = {a.peer_id: a.end for a in plan.assignments}

    def next_route(self, usable: Mapping[str, NodeRecord]) -> tuple[RouteStage, ...] | NoRoute:
        """The next session's route over peers in ``usable`` that hold what the plan gave them.

        A peer that is masked is passed over for the next in turn; a dead end is backed out of,
        and no peer is tried twice.
        Only the vertices of the route that is returned take a turn.
        """
        layers = self.plan.model.layers
        dead: set[str] = set()
        stages: list[RouteStage] = []
        choices = [self._choices(SOURCE, 0, usable, dead)]
        while choices:
            stage = next(choices[-1], None)
            if stage is None or len(stages) == STAGES_MAX:
                choices.pop()
                if stages:  # nothing follows it: back to its neighbours
                    dead.add(stages.pop().peer_id)
                continue
            stages.append(stage)
            if stage.end == layers:
                self._take_turns(stages, usable, dead)
                return tuple(stages)
            choices.append(self._choices(stage.peer_id, stage.end, usable, dead))
        return NoRoute(reason="the plan has no route over the peers that can be used")

    def _choices(
        self, vertex: str, layer: int, usable: Mapping[str, NodeRecord], dead: set[str]
    ) -> Iterator[RouteStage]:
        """Stages that can go on from ``layer``, those whose turn it is first."""
        wheel = self._wheels.get(vertex)
        for name in wheel.order() if wheel is not None else ():
            record, end = usable.get(name), self._ends.get(name, 0)
            if record is not None and name not in dead and record.holds(layer, end):
                yield RouteStage(peer_id=name, start=layer, end=end)

    def _take_turns(
        self, stages: list[RouteStage], usable: Mapping[str, NodeRecord], dead: set[str]
    ) -> None:
        vertex = SOURCE
        for stage in stages:
            choices = self._choices(vertex, stage.start, usable, dead)
            among = [choice.peer_id for choice in choices]
            self._wheels[vertex].draw(stage.peer_id, among)
            vertex = stage.peer_id


def missing_layers(nodes: Mapping[str, NodeRecord], layers: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of layers that no serving peer of ``nodes`` holds."""
    gaps: list[tuple[int, int]] = []
    for layer in range(layers):
        if any(record.holds(layer, layer + 1) for record in nodes.values()):
            continue
        if gaps and gaps[-1][1] == layer:
            gaps[-1] = (gaps[-1][0], layer + 1)
        else:
            gaps.append((layer, layer + 1))
    return tuple(gaps)


def being_loaded(nodes: Mapping[str, NodeRecord], model: ModelSpec) -> tuple[Assignment, ...]:
    """What peers of ``nodes`` announce to be loading of ``model``."""
    return tuple(
        Assignment(peer_id=peer_id, start=record.start, end=record.end)
        for peer_id, record in nodes.items()
        if record.state is NodeState.LOADING and record.model.serves_with(model)
    )


def route_from_records(
    usable: Mapping[str, NodeRecord], layers: int
) -> tuple[RouteStage, ...] | NoRoute:
    """The route with the least expected time per token, over what peers say they serve.

    A stage's time is one over its T_j at the layers it would run, and a hop's on top, so fewer and
    faster stages win.
    Peers may be entered in the middle of their range and always run to its end.
    """
    gaps = missing_layers(usable, layers)
    if gaps:
        return NoRoute(reason="some layers are held by nobody", missing=gaps)
    stages = _quickest(usable, 0, layers)
    if stages is None:
        return NoRoute(reason="the peers that can be used do not join up to a route")
    if len(stages) > STAGES_MAX:
        return NoRoute(reason=f"every route needs more than {STAGES_MAX} stages")
    return stages


def _quickest(
    usable: Mapping[str, NodeRecord], first: int, last: int
) -> tuple[RouteStage, ...] | None:
    """The quickest stages that together run layers ``[first, last)``, each peer once."""
    best: dict[int, tuple[float, tuple[RouteStage, ...]]] = {first: (0.0, ())}
    for layer in range(first, last):
        if layer not in best:
            continue
        time_s, stages = best[layer]
        for record in usable.values():
            end = min(record.end, last)
            if end <= layer or not record.holds(layer, end):
                continue
            stage = RouteStage(peer_id=record.peer_id, start=layer, end=end)
            total_s = time_s + HOP_S + _stage_s(record, end - layer)
            if end not in best or total_s < best[end][0]:
                best[end] = (total_s, (*stages, stage))
    return best[last][1] if last in best else None


def replacement(
    route: tuple[RouteStage, ...],
    lost: Collection[str],
    usable: Mapping[str, NodeRecord],
    layers: int,
) -> tuple[RouteStage, ...] | NoRoute:
    """``route`` with its ``lost`` peers' stages replaced; the other stages stay as they are.

    Each run of lost stages is covered by one or several peers of ``usable`` that are not on the
    route already. Where that fails, the neighbours of the gap are given up too, the later one
    first (its KV is rebuilt from the earlier one's log), then the earlier one, until nothing of
    the old route is left. ``usable`` need not hold the survivors: they serve the session already.
    It should leave out lost peers for as long as they are not trusted again.
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
        if len(mended) > STAGES_MAX:
            return NoRoute(reason=f"every route needs more than {STAGES_MAX} stages")
        return mended


def _mend(
    route: tuple[RouteStage, ...], kept: list[bool], pool: Mapping[str, NodeRecord]
) -> tuple[RouteStage, ...] | list[int]:
    """The route with its gaps covered, or ``[first, end)`` of the gap that nobody covers."""
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


def _stage_s(record: NodeRecord, count: int) -> float:
    rates = record.tokens_per_s
    if not rates:
        return float(count)
    rate = rates[min(count, len(rates)) - 1]
    return 1.0 / rate if rate > 0 else float("inf")
