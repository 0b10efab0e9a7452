"""A connection that several peers share is counted once: in flows, estimates, plans and runs."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.evaluation.estimate import estimate
from coordinator.evaluation.max_flow import balanced_flow, capacities, solve_flow
from coordinator.evaluation.plan_check import check_plan
from coordinator.evaluation.shared_uplinks import (
    Way,
    edge_flows,
    kept_shares,
    shared_uplinks,
)
from coordinator.planning.heuristics.peer_cells import parts
from coordinator.planning.placement import Placement, best_placement
from coordinator.policies.routing.routes import NoRoute, Router
from coordinator.problem.service import service_from_rates
from coordinator.simulator.judge import judge
from dht.messages.types import Assignment, PlannerNode, Problem, SharedUplink
from tests.examples import examples
from tests.unit.coordinator.problems import (
    LAYER_BYTES,
    link,
    model,
    node,
    placed,
    plan_of,
    record,
    span,
    steady,
)

MBIT_100 = 12.5e6
UP: Way = ("home", "up")


def behind(home: str, *nodes: PlannerNode) -> list[PlannerNode]:
    return [replace(node, uplink=home) for node in nodes]


def home(up: float, down: float | None = None, name: str = "home") -> SharedUplink:
    return SharedUplink(name=name, up_bytes_per_s=up, down_bytes_per_s=down)


class TestFlow:
    def problem(self, *uplinks: SharedUplink) -> Problem:
        """Two peers of one home before two others; rows have 12.5 kB."""
        return Problem(
            model=replace(model(2), activation_bytes=12_500),
            nodes=(
                *behind("home", node("a", [900]), node("b", [900])),
                node("c", [900]),
                node("d", [900]),
            ),
            uplinks=uplinks,
            default_bandwidth_bytes_per_s=1e9,
        )

    SPANS = (span("a", 0, 1), span("b", 0, 1), span("c", 1, 2), span("d", 1, 2))

    def test_two_gpus_behind_one_uplink_of_100_mbit_get_no_more_than_it_carries(self) -> None:
        for solve in (solve_flow, balanced_flow):
            free, shared = (
                solve(self.problem(*uplinks), self.SPANS) for uplinks in ((), (home(MBIT_100),))
            )
            assert free.flow_tokens_per_s == pytest.approx(1800)
            assert shared.flow_tokens_per_s == pytest.approx(1000, rel=1e-3)
        from_home = {e.tail: e.tokens_per_s for e in shared.edges if e.tail in {"a", "b"}}
        assert from_home.keys() == {"a", "b"}, "a balanced flow leaves neither of them idle"

    def test_the_downlink_is_shared_too_and_clients_tokens_do_not_count(self) -> None:
        nodes = self.problem().nodes
        turned = replace(self.problem(home(1.0, MBIT_100)), nodes=(*nodes[2:], *nodes[:2]))
        spans = (span("c", 0, 1), span("d", 0, 1), span("a", 1, 2), span("b", 1, 2))
        assert solve_flow(turned, spans).flow_tokens_per_s == pytest.approx(1000, rel=1e-3)

    def test_links_within_a_home_do_not_pass_its_uplink(self) -> None:
        spans = (span("a", 0, 1), span("b", 1, 2))
        assert solve_flow(self.problem(home(1.0)), spans).flow_tokens_per_s == pytest.approx(900)

    def test_a_part_that_a_peer_does_not_need_goes_to_the_other(self) -> None:
        """b sends to d alone, whose downlink is narrow: a has the rest of the uplink."""
        problem = self.problem(home(MBIT_100))
        slow = [link(b, d, 0.0) for b, d in (("b", "c"), ("a", "d"))]
        narrow = [replace(link("b", "d", 0.0), bandwidth_bytes_per_s=125_000 * 12.5)]
        flow = solve_flow(replace(problem, links=(*slow, *narrow)), self.SPANS)
        assert {e.tail: round(e.tokens_per_s) for e in flow.edges if e.head in {"c", "d"}} == {
            "a": 875,
            "b": 125,
        }

    def test_a_plan_that_counts_a_shared_uplink_twice_is_wrong(self) -> None:
        plan = plan_of(self.problem(), self.SPANS)
        assert check_plan(plan, self.problem()) == []
        wrong = check_plan(plan, self.problem(home(MBIT_100)))
        assert any("uplink shared by home carries 1800.0" in each for each in wrong)
        good = plan_of(self.problem(home(MBIT_100)), self.SPANS)
        assert check_plan(good, self.problem(home(MBIT_100))) == []

    def test_clients_draw_their_routes_by_what_the_uplink_carries(self) -> None:
        """A quarter of them over the home, whose peers announce half of the speed."""
        problem = self.problem(home(300 * 12_500.0))
        whole = replace(problem.nodes[3], tokens_per_s=(900.0, 900.0), memory_bytes=200)
        problem = replace(problem, nodes=(*problem.nodes[:3], whole))
        spans = (*self.SPANS[:3], span("d", 0, 2))
        router = Router(plan_of(problem, spans))
        usable = {a.peer_id: record(a.peer_id, a.start, a.end, layers=2) for a in spans}
        drawn = [router.next_route(usable) for _ in range(400)]
        assert not any(isinstance(route, NoRoute) for route in drawn)
        over = sum(1 for route in drawn if isinstance(route, tuple) and len(route) == 2)
        assert over == pytest.approx(100, abs=3)

    @examples(75)
    @given(placed(shared=True))
    def test_no_flow_is_more_than_shared_uplinks_carry(
        self, case: tuple[Problem, tuple[Assignment, ...]]
    ) -> None:
        problem, spans = case
        shared, row = shared_uplinks(problem), problem.model.activation_bytes
        for solve in (solve_flow, balanced_flow):
            for way, flow in shared.passes(edge_flows(solve(problem, spans).edges)).items():
                assert flow * row <= shared.bytes_per_s[way] * (1 + 1e-6) + 1e-6

    @examples(75)
    @given(placed(shared=True), st.floats(0.0, 5000.0))
    def test_who_claims_to_share_lowers_no_flow_but_that_over_its_own_home(
        self, case: tuple[Problem, tuple[Assignment, ...]], rate: float
    ) -> None:
        """A liar's home of one: the others carry what they carry without the liar, at least."""
        problem, spans = case
        liar = problem.nodes[0]
        nodes = (replace(liar, uplink="lie"), *problem.nodes[1:])
        lied = replace(problem, nodes=nodes, uplinks=(*problem.uplinks, home(rate, rate, "lie")))
        without = [a for a in spans if a.peer_id != liar.peer_id]
        flow = solve_flow(lied, spans).flow_tokens_per_s
        assert flow >= solve_flow(problem, without).flow_tokens_per_s * (1 - 1e-6) - 1e-6


def test_cells_that_share_an_uplink_count_it_once_together() -> None:
    nodes = behind("home", *(node(name, [1]) for name in "abcd"))
    problem = Problem(model=model(1), nodes=tuple(nodes), uplinks=(home(100.0, 40.0),))
    one, other = parts(problem, [nodes[:1], nodes[1:]])
    assert one.uplinks == (home(25.0, 10.0),)
    assert other.uplinks == (home(75.0, 30.0),)
    assert capacities(one, (span("a", 0, 1),)).away == {}, "nothing leaves the home"


shares = st.floats(0.01, 3.0)
each_use = st.dictionaries(st.sampled_from([UP, ("home", "down"), ("other", "up")]), shares)


@given(st.lists(st.tuples(st.floats(0.1, 100.0), each_use), max_size=6))
def test_kept_shares_fill_no_way_beyond_what_it_carries(
    flows: list[tuple[float, Mapping[Way, float]]],
) -> None:
    kept = kept_shares([rate for rate, _ in flows], [uses for _, uses in flows])
    assert all(0 <= share <= 1 for share in kept)
    for way in {way for _, uses in flows for way in uses}:
        taken = sum(s * uses.get(way, 0.0) for s, (_, uses) in zip(kept, flows, strict=True))
        assert taken <= 1 + 1e-9
    for share, (_, uses) in zip(kept, flows, strict=True):
        assert uses or share == 1, "who passes no shared uplink keeps all"


def test_what_uses_an_uplink_least_comes_first_only_where_that_serves_more() -> None:
    assert kept_shares([100.0, 100.0], [{UP: 0.8}, {UP: 0.8}]) == pytest.approx([0.625, 0.625])
    assert kept_shares([100.0, 100.0], [{UP: 5.0}, {UP: 1.0}]) == pytest.approx([0.0, 1.0])


class TestHome:
    """A home of two peers that hold five layers of eight, and two elsewhere that hold three."""

    def problem(self, *, known: bool) -> Problem:
        spec = replace(model(8, kv_bytes=1), activation_bytes=40_000, context_tokens=4096)
        own = None if known else MBIT_100

        def peer(name: str, rate: float, layers: int) -> PlannerNode:
            memory = (LAYER_BYTES + 40_000) * layers
            return node(name, steady(rate, layers), memory_bytes=memory)

        inside = [
            replace(peer(name, 900, 5), up_bytes_per_s=own, uplink="home" * known)
            for name in ("h1", "h2")
        ]
        lan = [
            replace(link(*pair, 0.0, rtt_s=0.001), bandwidth_bytes_per_s=125e6)
            for pair in (("h1", "h2"), ("h2", "h1"))
        ]
        return Problem(
            model=spec,
            nodes=(*inside, peer("d1", 500, 3), peer("d2", 500, 3)),
            links=tuple(lan),
            uplinks=(home(MBIT_100, MBIT_100),) if known else (),
            default_bandwidth_bytes_per_s=125e6,
            default_rtt_s=0.02,
        )

    def planned(self, problem: Problem) -> Placement:
        return best_placement(
            problem, time_limit_s=1.0, seed=1, spent=None, service=service_from_rates(problem)
        )

    def test_a_plan_that_knows_serves_more_in_the_simulator_than_one_that_does_not(self) -> None:
        real = self.problem(known=True)
        service = service_from_rates(real)
        served, estimated = [], []
        for problem in (self.problem(known=False), real):
            plan = self.planned(problem)
            assert plan.edges is not None
            served.append(judge(real, service, plan.assignments, plan.edges, seed=3))
            estimated.append(estimate(real, plan.assignments, plan.edges, service).tokens_per_s)
        assert served[1] > 1.5 * served[0]
        assert estimated == pytest.approx(served, rel=0.25), "the estimate counts it once, too"


class TestTwoHomes:
    """Two homes of two peers, each of which holds half of the model and a little more."""

    def problem(self, rate: float) -> Problem:
        nodes = [
            replace(node(f"{name}{at}", steady(900, 5)), uplink=name)
            for at in (1, 2)
            for name in ("north", "south")
        ]
        return Problem(
            model=replace(model(8), activation_bytes=40_000, context_tokens=4096),
            nodes=tuple(nodes),
            uplinks=(home(rate, rate, "north"), home(rate, rate, "south")),
            default_bandwidth_bytes_per_s=125e6,
            default_rtt_s=0.001,
        )

    def test_a_plan_prefers_the_split_that_the_uplinks_allow(self) -> None:
        problem = self.problem(MBIT_100 / 20)
        service = service_from_rates(problem)
        plan = best_placement(problem, time_limit_s=1.0, seed=1, spent=None, service=service)
        assert plan.edges is not None
        crossed = shared_uplinks(problem).passes(edge_flows(plan.edges))
        assert sum(crossed.values()) < 0.05 * plan.flow_tokens_per_s, "each home serves by itself"
        across = [
            Assignment(peer_id=f"{name}{at}", start=4 * (at - 1), end=4 * at)
            for at in (1, 2)
            for name in ("north", "south")
        ]
        mixed = balanced_flow(replace(problem, uplinks=()), across).edges
        assert plan.estimate_tokens_per_s is not None
        there = estimate(problem, across, mixed, service).tokens_per_s
        assert plan.estimate_tokens_per_s > 1.2 * there
