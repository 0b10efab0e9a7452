"""A placement's weak points, against brute force."""

from dataclasses import replace
from itertools import combinations

import networkx
import pytest
from hypothesis import given

from coordinator.evaluation.explain import graph as graphs
from coordinator.evaluation.explain.graph import graph_of
from coordinator.evaluation.explain.weak_points import WEAK_POINTS, weak_points
from coordinator.evaluation.explain.words import sentences
from coordinator.evaluation.max_flow import capacities, solve_flow
from dht.messages.types import SINK, SOURCE, Assignment, Problem
from tests.examples import examples
from tests.unit.coordinator.problems import link, model, node, placed, span, steady

Spans = tuple[Assignment, ...]


def carried(problem: Problem, spans: Spans) -> float:
    return solve_flow(problem, spans).flow_tokens_per_s if spans else 0.0


def routes(problem: Problem, spans: Spans) -> bool:
    """Whether a token can get through: peers, connections and links that carry anything."""
    limits = capacities(problem, spans)
    graph = networkx.DiGraph()
    graph.add_nodes_from([(SOURCE, "out"), (SINK, "in")])
    total = sum(limits.peers.values())
    graph.add_edges_from((a, b) for a, b, rate in limits.arcs() if rate > 1e-9 * total)
    return bool(networkx.has_path(graph, (SOURCE, "out"), (SINK, "in")))


def fewest_losses(problem: Problem, spans: Spans) -> int:
    for count in range(len(spans) + 1):
        for gone in combinations(spans, count):
            if not routes(problem, tuple(each for each in spans if each not in gone)):
                return count
    raise AssertionError


@given(placed())
@examples(100)
def test_the_graph_says_what_trying_every_loss_says(case: tuple[Problem, Spans]) -> None:
    problem, spans = case
    found = weak_points(problem, spans)
    held = {layer for a in spans for layer in range(a.start, a.end)}
    gaps = {layer for start, end in found.missing for layer in range(start, end)}
    assert gaps == set(range(problem.model.layers)) - held
    if gaps:
        return
    flow = carried(problem, spans)
    assert found.tokens_per_s == pytest.approx(flow, rel=1e-6, abs=1e-6)
    if flow < 1e-3:
        return
    shares = {a.peer_id: 1 - carried(problem, _without(spans, a)) / flow for a in spans}
    worst = sorted((s for s in shares.values() if s >= WEAK_POINTS.loss_min), reverse=True)[
        : WEAK_POINTS.losses_max
    ]
    assert [each.share for each in found.losses] == pytest.approx(worst, abs=1e-5)
    for loss in found.losses:
        assert loss.share == pytest.approx(shares[loss.peer_id], abs=1e-5)
        alone = {at for start, end in loss.layers for at in range(start, end)}
        mine = next(a for a in spans if a.peer_id == loss.peer_id)
        left = {at for a in _without(spans, mine) for at in range(a.start, a.end)}
        assert alone == set(range(problem.model.layers)) - left
    assert len(found.fewest) == fewest_losses(problem, spans)
    gone = tuple(a for a in spans if a.peer_id not in found.fewest)
    assert not routes(problem, gone)


def _without(spans: Spans, gone: Assignment) -> Spans:
    return tuple(a for a in spans if a != gone)


@given(placed())
def test_without_slow_links_the_path_of_segments_is_the_same(case: tuple[Problem, Spans]) -> None:
    problem, spans = case
    quick = replace(problem, links=(), default_bandwidth_bytes_per_s=1e15)
    nodes = tuple(replace(n, up_bytes_per_s=None, down_bytes_per_s=None) for n in quick.nodes)
    quick = replace(quick, nodes=nodes)
    whole = weak_points(quick, spans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "EDGES_MAX", -1)
        path = weak_points(quick, spans)
    assert path.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=1e-6)
    assert path.narrowest == whole.narrowest
    assert path.missing == whole.missing
    assert len(path.fewest) == len(whole.fewest)
    shares = [[each.share for each in found.losses] for found in (path, whole)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-5)


@given(placed())
def test_a_cut_carries_the_flow_and_all_routes_pass_it(case: tuple[Problem, Spans]) -> None:
    asked = graph_of(*case)
    if not asked.assignments or not all(asked.holders):
        return
    cut = asked.cut()
    assert sum(each.tokens_per_s for each in cut) == pytest.approx(asked.tokens_per_s(), abs=1e-6)
    asked.graph.remove_edges_from(
        [
            (a, b)
            for a, b, each in asked.graph.edges(data=True)
            if any((each["kind"], each["peers"]) == (e.kind, e.peers) for e in cut)
        ]
    )
    assert not networkx.has_path(asked.graph, graphs.START, graphs.END)


def swarm(*peers: tuple[str, float, int, int], layers: int = 8) -> tuple[Problem, Spans]:
    """Peers by name, speed over any number of layers, and the layers that they hold."""
    nodes = tuple(node(name, [rate] * layers) for name, rate, _, _ in peers)
    spans = tuple(span(name, start, end) for name, _, start, end in peers)
    fast = replace(Problem(model=model(layers), nodes=nodes), default_bandwidth_bytes_per_s=1e9)
    return fast, spans


def told(case: tuple[Problem, Spans]) -> tuple[str, ...]:
    return sentences(weak_points(*case), str.title)


def test_the_narrowest_layers_are_named_with_who_would_help() -> None:
    case = swarm(
        *(("birch", 30.0, 0, 4), ("oak", 30.0, 0, 4), ("elm", 40.0, 4, 8), ("fir", 43.0, 4, 8))
    )
    assert told(case) == (
        "Answers wait for layers 0-3: two peers hold them (Birch and Oak), 60 tokens/s together;"
        " one more peer like Birch there gives +38%.",
        "Without Birch, 50% less gets through.",
        "Without Oak, 50% less gets through.",
        "Without Fir, 33% less gets through.",
        "Answers stop if two peers leave at once: Elm and Fir.",
    )


def test_who_holds_layers_alone_is_named_with_them() -> None:
    said = told(swarm(("birch", 30.0, 0, 4), ("oak", 90.0, 3, 8), ("elm", 90.0, 4, 8)))
    assert said[0].startswith("Answers wait for layers 0-2: one peer holds them (Birch), 30")
    assert said[1] == "Without Birch, layers 0-2 have no holder, and answers stop."
    assert not any("at once" in each for each in said), "one loss is enough"


def test_more_peers_than_are_named_may_hold_layers_alone() -> None:
    said = told(
        swarm(*((name, 30.0, 2 * at, 2 * at + 2) for at, name in enumerate("abcdef")), layers=12)
    )
    assert said[1] == "Without A, layers 0-1 have no holder, and answers stop."
    assert said[4:] == ("The same holds for three more peers.",)


def test_layers_without_a_holder_are_all_that_is_said() -> None:
    said = told(swarm(("birch", 30.0, 0, 4), ("oak", 90.0, 5, 8)))
    assert said == ("Layer 4 has no holder: there are no answers.",)


def test_equal_layers_are_said_to_be_equal() -> None:
    assert told(swarm(("birch", 30.0, 0, 4), ("oak", 30.0, 4, 8)))[0] == (
        "All layers are equally narrow, 30 tokens/s: one more peer helps once all is planned anew."
    )


def test_a_connection_that_is_slower_than_its_peer_is_named() -> None:
    problem, spans = swarm(("birch", 30.0, 0, 4), ("oak", 90.0, 4, 8))
    slow = replace(problem.nodes[0], up_bytes_per_s=10 * problem.model.activation_bytes)
    said = told((replace(problem, nodes=(slow, *problem.nodes[1:])), spans))
    assert "(Birch), 10 tokens/s; the connection of Birch limits that" in said[0]


def test_links_that_are_narrower_than_all_layers_are_named() -> None:
    problem, spans = swarm(("birch", 30.0, 0, 4), ("oak", 90.0, 4, 8))
    said = told((replace(problem, links=(link("birch", "oak", 5.0),)), spans))
    assert said[0] == "Answers wait for connections, which carry 5 tokens/s together: Birch to Oak."


def test_two_thousand_peers_are_asked_as_a_path_whatever_they_hold() -> None:
    """Hostile records may hold as many spans as there are peers."""
    layers = 80
    nodes = tuple(node(f"p{at}", steady(50.0 + at, layers)) for at in range(2000))
    starts = [at * 13 % 76 for at in range(2000)]
    spans = tuple(
        span(f"p{at}", start, min(layers, start + 4 + at % 9)) for at, start in enumerate(starts)
    )
    problem = Problem(model=model(layers), nodes=nodes)
    asked, tried = graph_of(problem, spans), []
    flow_of = graphs.PlacementGraph.tokens_per_s

    def counted(self: graphs.PlacementGraph) -> float:
        tried.append(len(self.graph.edges))
        return flow_of(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.PlacementGraph, "tokens_per_s", counted)
        found = weak_points(problem, spans)
    assert found.tokens_per_s > 0
    assert not asked.has_links
    assert max(tried) <= layers + 1, "no edge for each pair of peers, nor for each peer"
    assert len(tried) <= 1 + WEAK_POINTS.tried_max + WEAK_POINTS.kinds_max
