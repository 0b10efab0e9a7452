"""The max flow of a placement, against hand-computed cases and two other algorithms."""

import math
import random
from dataclasses import replace

import networkx
import pytest
from hypothesis import given

from coordinator.evaluation import max_flow
from coordinator.evaluation.max_flow import (
    FLOW,
    balanced_flow,
    capacities,
    follows,
    least_served,
    ring_latency_s,
    round_trips_s,
    solve_flow,
    upper_bound,
)
from coordinator.evaluation.plan_check import check_plan, max_flow_tokens_per_s
from dht.messages.types import SINK, SOURCE, Assignment, Problem
from tests.examples import examples
from tests.unit.coordinator.problems import link, model, node, placed, plan_of, span, steady


def by_networkx(problem: Problem, spans: tuple[Assignment, ...]) -> float:
    limits = capacities(problem, spans)
    graph = networkx.DiGraph()
    graph.add_nodes_from([(SOURCE, "out"), (SINK, "in")])
    for tail, head, rate in limits.arcs():
        graph.add_edge(tail, head, capacity=rate)
    return float(
        networkx.maximum_flow_value(
            graph,
            (SOURCE, "out"),
            (SINK, "in"),
            flow_func=networkx.algorithms.flow.boykov_kolmogorov,
        )
    )


class TestAgainstOtherAlgorithms:
    @examples(75)
    @given(placed(shared=True))
    def test_three_algorithms_agree_on_any_placement(
        self, case: tuple[Problem, tuple[Assignment, ...]]
    ) -> None:
        problem, spans = case
        flow = solve_flow(problem, spans).flow_tokens_per_s
        limits = capacities(problem, spans)
        assert flow == pytest.approx(by_networkx(problem, spans), rel=1e-6, abs=1e-6)
        slow = max_flow_tokens_per_s(limits)
        assert flow == pytest.approx(slow, rel=1e-6, abs=1e-6)

    @given(placed())
    def test_no_placement_beats_the_bound(
        self, case: tuple[Problem, tuple[Assignment, ...]]
    ) -> None:
        problem, spans = case
        assert solve_flow(problem, spans).flow_tokens_per_s <= upper_bound(problem) * (1 + 1e-6)

    @examples(75)
    @given(placed())
    def test_no_flow_is_more_than_a_peers_own_links_carry(
        self, case: tuple[Problem, tuple[Assignment, ...]]
    ) -> None:
        problem, spans = case
        width = problem.model.activation_bytes
        for solve in (solve_flow, balanced_flow):
            edges = [e for e in solve(problem, spans).edges if e.tail != SOURCE and e.head != SINK]
            for peer in problem.nodes:
                sent = width * sum(e.tokens_per_s for e in edges if e.tail == peer.peer_id)
                taken = width * sum(e.tokens_per_s for e in edges if e.head == peer.peer_id)
                assert sent <= _most(peer.up_bytes_per_s)
                assert taken <= _most(peer.down_bytes_per_s)


def _most(bytes_per_s: float | None) -> float:
    return math.inf if bytes_per_s is None else bytes_per_s * (1 + 1e-6) + 1e-6


class TestByHand:
    def test_an_uplink_with_three_links_counts_once(self) -> None:
        ends = [node(name, [20]) for name in "bcd"]
        spans = [span("a", 0, 1), *(span(name, 1, 2) for name in "bcd")]

        def flow(**rates: float) -> float:
            first = replace(node("a", [60]), **rates)  # type: ignore[arg-type]
            problem = Problem(model=model(2), nodes=(first, *ends))
            found = solve_flow(problem, spans)
            plan = plan_of(problem, spans)
            assert check_plan(plan, problem) == []
            assert plan.flow_tokens_per_s == pytest.approx(found.flow_tokens_per_s, rel=1e-4)
            return found.flow_tokens_per_s

        assert flow() == pytest.approx(60)
        assert flow(up_bytes_per_s=10 * 25.0) == pytest.approx(25)
        assert flow(down_bytes_per_s=10 * 25.0) == pytest.approx(60), "prompts come as token ids"

    def test_a_downlink_is_shared_too_and_the_last_stage_sends_tokens_only(self) -> None:
        last = replace(node("c", [50]), down_bytes_per_s=10 * 7.0, up_bytes_per_s=1.0)
        problem = Problem(model=model(2), nodes=(node("a", [20]), node("b", [20]), last))
        spans = [span("a", 0, 1), span("b", 0, 1), span("c", 1, 2)]
        assert solve_flow(problem, spans).flow_tokens_per_s == pytest.approx(7)

    def test_a_plan_that_counts_an_uplink_twice_is_wrong(self) -> None:
        last = [node(name, [20]) for name in "bc"]
        spans = [span("a", 0, 1), span("b", 1, 2), span("c", 1, 2)]
        free = Problem(model=model(2), nodes=(node("a", [40]), *last))
        held = Problem(
            model=model(2), nodes=(replace(node("a", [40]), up_bytes_per_s=10 * 20.0), *last)
        )
        plan = plan_of(free, spans)
        assert check_plan(plan, free) == []
        assert any("the uplink of a" in wrong for wrong in check_plan(plan, held))

    def test_a_chain_is_as_fast_as_its_slowest_peer(self) -> None:
        problem = Problem(model=model(3), nodes=(node("a", [9, 8]), node("b", [5])))
        solution = solve_flow(problem, [span("a", 0, 2), span("b", 2, 3)])
        assert solution.flow_tokens_per_s == pytest.approx(5)
        assert {(e.tail, e.head) for e in solution.edges} == {
            (SOURCE, "a"),
            ("a", "b"),
            ("b", SINK),
        }

    def test_a_slow_link_limits_it(self) -> None:
        problem = Problem(
            model=model(2), nodes=(node("a", [9]), node("b", [9])), links=(link("a", "b", 3),)
        )
        solution = solve_flow(problem, [span("a", 0, 1), span("b", 1, 2)])
        assert solution.flow_tokens_per_s == pytest.approx(3)

    def test_the_clients_bandwidth_limits_it(self) -> None:
        problem = Problem(
            model=model(1),
            nodes=(node("a", [100]),),
            client_bandwidth_bytes_per_s=80,
            token_bytes=8,
        )
        assert solve_flow(problem, [span("a", 0, 1)]).flow_tokens_per_s == pytest.approx(10)

    def test_replicas_of_one_stage_add_up(self) -> None:
        problem = Problem(model=model(2), nodes=(node("a", [10]), node("b", [4]), node("c", [3])))
        spans = [span("a", 0, 1), span("b", 1, 2), span("c", 1, 2)]
        assert solve_flow(problem, spans).flow_tokens_per_s == pytest.approx(7)

    def test_a_peer_may_be_entered_in_the_middle_of_its_layers(self) -> None:
        problem = Problem(
            model=model(4), nodes=(node("a", [9, 9]), node("b", [9, 9, 7]), node("c", [2, 2, 2, 2]))
        )
        spans = [span("a", 0, 2), span("b", 1, 4), span("c", 0, 4)]
        assert solve_flow(problem, spans).flow_tokens_per_s == pytest.approx(7 + 2)

    def test_a_gap_is_not_jumped_over(self) -> None:
        problem = Problem(model=model(3), nodes=(node("a", [9]), node("b", [9])))
        solution = solve_flow(problem, [span("a", 0, 1), span("b", 2, 3)])
        assert solution.flow_tokens_per_s == 0
        assert solution.edges == ()

    def test_nobody_and_empty_ranges_serve_nothing(self) -> None:
        problem = Problem(model=model(1), nodes=(node("a", [9]),))
        assert solve_flow(problem, []).flow_tokens_per_s == 0
        assert solve_flow(problem, [span("a", 0, 0)]).flow_tokens_per_s == 0

    def test_rates_far_apart_keep_their_precision(self) -> None:
        problem = Problem(
            model=model(2),
            nodes=(node("a", [1e6]), node("b", [0.01])),
            default_bandwidth_bytes_per_s=1e12,
        )
        solution = solve_flow(problem, [span("a", 0, 1), span("b", 1, 2)])
        assert solution.flow_tokens_per_s == pytest.approx(0.01, rel=1e-3)

    @pytest.mark.parametrize(
        ("before", "after", "legal"),
        [((0, 2), (2, 3), True), ((0, 2), (1, 3), True), ((0, 2), (0, 2), False),
         ((0, 2), (3, 4), False), ((1, 3), (0, 2), False)],
    )  # fmt: skip
    def test_who_can_follow_whom(
        self, before: tuple[int, int], after: tuple[int, int], legal: bool
    ) -> None:
        assert follows(span("a", *before), span("b", *after)) is legal

    def test_the_bound_takes_each_peer_at_its_best(self) -> None:
        problem = Problem(model=model(4), nodes=(node("a", [8, 5, 2]), node("b", steady(6, 4))))
        # At F = 3, a carries 3 through two layers and b through two.
        assert upper_bound(problem) == pytest.approx(3.0)


class TestRingLatency:
    def test_it_closes_the_ring_and_takes_the_default_for_what_is_not_measured(self) -> None:
        problem = Problem(
            model=model(1),
            nodes=(),
            links=(link("a", "b", 1, rtt_s=0.2),),
            default_rtt_s=0.04,
        )
        measured, default_rtt_s = round_trips_s(problem), problem.default_rtt_s
        assert ring_latency_s(measured, default_rtt_s, ["a", "b"]) == pytest.approx(0.1 + 0.02)
        assert ring_latency_s(measured, default_rtt_s, ["a"]) == 0.0


class TestManyPeers:
    """Where thousands of peers could go on after each other, each goes on with a few."""

    def large(
        self, seed: int, count: int = 300, layers: int = 12
    ) -> tuple[Problem, list[Assignment]]:
        rng = random.Random(seed)
        names = [f"p{at}" for at in range(count)]
        starts = {name: rng.choice([0, 3, 4, 6, 9]) for name in names}
        spans = [
            span(name, at, min(layers, at + rng.choice([3, 4]))) for name, at in starts.items()
        ]
        links = [link(*rng.sample(names, 2), rng.uniform(5, 500)) for _ in range(10 * count)]
        problem = Problem(
            model=model(layers),
            nodes=tuple(node(name, steady(rng.uniform(10, 80), 4)) for name in names),
            links=tuple(links),
            default_bandwidth_bytes_per_s=1e6,
        )
        return problem, spans

    @pytest.mark.parametrize("seed", range(4))
    def test_few_pairs_carry_about_as_much_as_all(
        self, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        problem, spans = self.large(seed)
        all_pairs = len(capacities(problem, spans).edges)
        whole = solve_flow(problem, spans).flow_tokens_per_s
        monkeypatch.setattr(max_flow, "FLOW", replace(FLOW, pairs_max=20 * len(spans)))
        limits = capacities(problem, spans)
        assert len(limits.edges) < min(all_pairs / 2, 22 * len(spans))
        held = {a.peer_id: a for a in spans}
        assert all(
            follows(held[tail], held[head])
            for tail, head in limits.edges
            if tail != SOURCE and head != SINK
        )
        few = solve_flow(problem, spans).flow_tokens_per_s
        assert 0.95 * whole <= few <= whole * (1 + 1e-6)
        assert whole <= least_served(problem, spans) * (1 + 1e-6)

    def test_the_nearest_of_those_that_were_measured_are_among_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [f"{stage}{at}" for stage in "ab" for at in range(100)]
        spans = [span(name, "ab".index(name[0]), "ab".index(name[0]) + 1) for name in names]
        near = [link(f"a{at}", f"b{99 - at}", 1e3, rtt_s=0.001) for at in range(100)]
        far = [link(f"a{at}", f"b{(at + k) % 100}", 1e3) for at in range(100) for k in range(9)]
        problem = Problem(
            model=model(2), nodes=tuple(node(n, [10.0]) for n in names), links=(*far, *near)
        )
        monkeypatch.setattr(max_flow, "FLOW", replace(FLOW, pairs_max=1))
        limits = capacities(problem, spans).edges
        assert all((f"a{at}", f"b{99 - at}") in limits for at in range(100))

    def test_the_checker_takes_an_edge_that_another_network_would_not_have(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem, spans = self.large(0)
        plan = plan_of(problem, spans)
        monkeypatch.setattr(max_flow, "FLOW", replace(FLOW, pairs_max=1))
        pairs = capacities(problem, spans).edges
        assert any((edge.tail, edge.head) not in pairs for edge in plan.edges)
        assert not check_plan(plan, problem)
        lazy = replace(plan, edges=(), flow_tokens_per_s=0.0)
        assert any("could serve" in each for each in check_plan(lazy, problem))
