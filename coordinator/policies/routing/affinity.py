"""Decides whether a session goes over the route that has its history. Pure.

The route whose stages keep the KV of a prompt's beginning is taken again unless another would have
the whole answer sooner, though it runs the whole prompt. Times are those that peers announce; a
peer's tokens/s are shared by its sessions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.policies.routing.quickest import QUICKEST
from coordinator.policies.routing.routes import NoRoute, replacement, route_from_records, stage_s
from dht.messages.types import NodeRecord, RouteStage

Route = tuple[RouteStage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPrefix:
    """What is known of a prompt before its session is opened."""

    route: Route
    """Stages that should have the KV of the prompt's beginning."""
    cached_tokens: int
    prompt_tokens: int
    answer_tokens: int
    """Tokens that are expected to follow."""


def rows_of(route: Route, known: KnownPrefix) -> list[int]:
    """Rows of the prompt that each stage of ``route`` would run: a stage without KV needs all rows,
    and so do the stages before it, which make them."""
    cached = known.cached_tokens
    rows = []
    for stage in reversed(route):
        cached = cached if stage in known.route else 0
        rows.append(known.prompt_tokens - cached)
    return rows[::-1]


def answer_s(route: Route, known: KnownPrefix, records: Mapping[str, NodeRecord]) -> float:
    """Expected seconds of a whole answer over ``route``. The prompt's chunks pass through all
    stages at once, so the slowest decides; each token of the answer visits one after another."""
    prompt_s = token_s = 0.0
    for stage, rows in zip(route, rows_of(route, known), strict=True):
        record, layers = records[stage.peer_id], stage.end - stage.start
        beside = 1 + record.sessions
        row_s = stage_s(record, layers)
        token_s += QUICKEST.hop_s + row_s * beside
        if record.prompt_layer_ns:
            chunk, near_ns, _ = record.prompt_layer_ns[-1]
            row_s = layers * near_ns / chunk / 1e9
        prompt_s = max(prompt_s, rows * row_s * beside)
    return prompt_s + known.answer_tokens * token_s


def again(known: KnownPrefix, usable: Mapping[str, NodeRecord], layers: int) -> Route | NoRoute:
    """The known route, its stages that cannot be used replaced; NoRoute if another is sooner."""
    lost = {
        stage.peer_id
        for stage in known.route
        if stage.peer_id not in usable or not usable[stage.peer_id].holds(stage.start, stage.end)
    }
    route = replacement(known.route, lost, usable, layers)
    quickest = route_from_records(usable, layers)
    if isinstance(route, NoRoute) or isinstance(quickest, NoRoute):
        return route
    if not set(route) & set(known.route):
        return NoRoute(reason="no stage of the known route can be used")
    if answer_s(quickest, known, usable) < answer_s(route, known, usable):
        return NoRoute(reason="another route is sooner")
    return route
