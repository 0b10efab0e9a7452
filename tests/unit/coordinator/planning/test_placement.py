"""Placement by hand-made cases: each heuristic's rule, tight memory, spares, what is kept.

``test_placement_coverage`` holds coverage and the whole planner against brute force.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from inspect import signature
from itertools import count
from typing import Any, Never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planner.announced import announced_problem
from bench.planner.clusters import load
from coordinator.evaluation.estimate import estimate
from coordinator.evaluation.max_flow import flow_parts, solve_flow
from coordinator.evaluation.plan_check import check_plan, uncovered
from coordinator.planning import placement, solve
from coordinator.planning.heuristics import heuristics
from coordinator.planning.placement import (
    HEURISTICS,
    PLACEMENT,
    NoPlacementError,
    Placement,
    adoptable,
    choose,
    finalists,
    score,
    tried_best,
    why_uncoverable,
)
from coordinator.planning.search.chain_dp import Chains
from coordinator.planning.search.columns import Master
from coordinator.planning.solve import SolveAnswer, SolveRequest, gain_of, solve_request
from coordinator.plans.transition import TransitionConfig
from coordinator.problem.service import announced_service, service_from_rates
from coordinator.simulator.judge import judge
from dht.messages.types import (
    RECORD_BOUNDS,
    Assignment,
    Plan,
    PlanVersion,
    Problem,
    layers_max,
)
from tests.examples import examples
from tests.unit.coordinator.problems import (
    SOLVERS,
    best_for,
    ends_after,
    link,
    model,
    node,
    plan_of,
    problems,
    span,
    steady,
)

VERSION = PlanVersion(term=3, counter=7)


def request(problem: Problem) -> SolveRequest:
    return SolveRequest(
        problem=problem, version=VERSION, coordinator="a", time_limit_s=0.3, seed=1, now_unix_s=5.0
    )


def holding(problem: Problem, spans: tuple[Assignment, ...]) -> Problem:
    """The same problem, with every peer holding what it was given."""
    held = {a.peer_id: a for a in spans}
    return replace(
        problem, nodes=tuple(replace(n, current=held.get(n.peer_id)) for n in problem.nodes)
    )


class TestHeuristics:
    def test_a_chain_is_evened_out_by_speed(self) -> None:
        nodes = (node("fast", steady(30, 7)), node("slow", steady(10, 7)))
        problem = Problem(model=model(8), nodes=nodes)
        assert heuristics.even_out(problem, [span("fast", 0, 1), span("slow", 1, 8)]) == (
            span("fast", 0, 6),
            span("slow", 6, 8),
        )

    def test_a_chain_finds_the_order_in_which_the_ends_fit(self) -> None:
        # Only b has room for the embedding beside a layer, only a for the head.
        nodes = (
            node("a", [9, 9], memory_bytes=350),
            node("b", [9], memory_bytes=200),
            node("c", [9], memory_bytes=100),
        )
        spec = model(4, embed_bytes=100, head_bytes=150)
        spans = heuristics.chain(Problem(model=spec, nodes=nodes))
        assert spans == (span("b", 0, 1), span("c", 1, 2), span("a", 2, 4))

    def test_a_quantised_peer_holds_what_it_says_its_layers_weigh(self) -> None:
        spec = model(8, kv_bytes=1)
        in_4_bits = replace(spec, layer_bytes=25)
        nodes = (
            node("whole", steady(9, 8), memory_bytes=200),
            node("packed", steady(9, 8), memory_bytes=150, own_model=in_4_bits),
        )
        problem = Problem(model=spec, nodes=nodes)
        assert [heuristics.span_max(problem, each, 1) for each in nodes] == [2, 6]
        plan = solve_request(request(problem)).best
        assert plan is not None
        assert check_plan(plan, problem) == []
        assert {a.peer_id: a.end - a.start for a in plan.assignments} == {"whole": 2, "packed": 6}

    def test_greedy_serves_the_least_served(self) -> None:
        nodes = (node("a", [9, 9, 9]), node("b", [5, 5]), node("c", [1]))
        problem = Problem(model=model(3), nodes=nodes)
        assert heuristics.greedy(problem) == (span("a", 0, 3), span("b", 0, 2), span("c", 2, 3))

    def test_replicas_need_a_peer_that_holds_everything(self) -> None:
        whole = node("a", [9, 9, 9])
        assert heuristics.replicas(Problem(model=model(4), nodes=(whole,))) is None
        assert heuristics.replicas(Problem(model=model(3), nodes=(whole,))) == (span("a", 0, 3),)

    def test_keep_moves_nobody_and_gives_a_newcomer_layers(self) -> None:
        nodes = (
            node("a", [9, 9], current=(0, 2)),
            node("b", [9, 9], current=(2, 4)),
            node("c", [9, 9]),
        )
        spans = heuristics.keep_layers(Problem(model=model(4), nodes=nodes))
        assert spans is not None
        assert set(spans) > {span("a", 0, 2), span("b", 2, 4)}
        assert len(spans) == 3

    def test_keep_gives_up_when_layers_are_lost(self) -> None:
        nodes = (node("a", [9, 9], current=(0, 2)),)
        assert heuristics.keep_layers(Problem(model=model(4), nodes=nodes)) is None


class TestTightMemory:
    def tight(self) -> Problem:
        """Ten layers over six peers, with just the memory for it.

        Only c and d have room for an end's weights, and no order by memory begins with one of
        them and ends with the other.
        """
        return Problem(
            model=model(10, embed_bytes=100, head_bytes=100),
            nodes=(
                node("a", [9] * 3, memory_bytes=300),
                node("b", [9] * 3, memory_bytes=300),
                node("c", [9], memory_bytes=200),
                node("d", [9], memory_bytes=400),
                node("e", [9], memory_bytes=100),
                node("f", [9], memory_bytes=100),
            ),
        )

    def test_the_cover_is_found(self) -> None:
        problem = self.tight()
        placement = best_for(problem)
        assert placement.flow_tokens_per_s == pytest.approx(9)
        assert uncovered(placement.assignments, 10) == ()
        ends = {a.peer_id for a in placement.assignments if a.start == 0 or a.end == 10}
        assert ends == {"c", "d"}

    def test_without_room_at_an_end_nothing_is_found_and_the_text_says_so(self) -> None:
        problem = self.tight()
        poor = replace(problem, model=replace(problem.model, head_bytes=400))
        with pytest.raises(NoPlacementError, match="the 6 peers here can hold at most 9 of 10"):
            best_for(poor)

    def test_too_few_layers_in_all(self) -> None:
        problem = Problem(model=model(10), nodes=(node("a", [9] * 3), node("b", [9] * 2)))
        with pytest.raises(NoPlacementError, match="the 2 peers here can hold at most 5 of 10"):
            best_for(problem)


class TestBest:
    @pytest.mark.property
    @examples(12)
    @given(problems(peers_max=4, layers_max=5))
    def test_never_worse_than_the_best_heuristic(self, problem: Problem) -> None:
        answers = [heuristic(problem) for heuristic in HEURISTICS.values()]
        service = announced_service(problem)
        values = [score(problem, a, "x", service=service).value for a in answers if a is not None]
        try:
            placement = best_for(problem)
        except NoPlacementError:
            assert not values
            return
        # A shorter ring is worth 2% of the throughput.
        assert placement.value >= 0.98 * max(values, default=0.0) * (1 - 1e-6)
        assert check_plan(plan_of(problem, placement.assignments), problem) == []

    def test_peers_that_the_flow_does_not_need_are_spares_if_they_can_hold_anything(self) -> None:
        nodes = (node("a", [9, 9]), node("b", [9, 9], memory_bytes=50), node("c", [1, 0.5]))
        problem = Problem(
            model=model(2), nodes=nodes, client_bandwidth_bytes_per_s=8 * 9, token_bytes=8
        )
        placement = best_for(problem)
        assert {a.peer_id for a in placement.assignments} == {"a", "c"}

    def test_any_best_placement_is_kept_once_it_is_held(self) -> None:
        problem = Problem(
            model=model(4), nodes=tuple(node(name, steady(8, 4)) for name in ("a", "b", "c"))
        )
        first = best_for(problem)
        again = best_for(holding(problem, first.assignments), seed=2)
        assert set(again.assignments) == set(first.assignments)
        # The same placement with the names changed round serves as much, and stays.
        turned = {"a": "b", "b": "c", "c": "a"}
        others = tuple(replace(a, peer_id=turned[a.peer_id]) for a in first.assignments)
        kept = best_for(holding(problem, others), seed=2)
        assert set(kept.assignments) == set(others)

    def test_equal_plans_are_ranked_by_second_holders_before_rings_and_moves(self) -> None:
        base = Placement(
            assignments=(), flow_tokens_per_s=100.0, planner="x", estimate_tokens_per_s=100.0
        )
        alone = replace(base, lone_layers=4, latency_s=0.1)
        shared = replace(base, lone_layers=0, latency_s=0.2, moved_layers=9)
        slower = replace(shared, estimate_tokens_per_s=97.9)
        nearer = replace(shared, latency_s=0.1, moved_layers=12)
        stays = replace(shared, latency_s=0.105, moved_layers=3)
        assert choose([alone, replace(shared, estimate_tokens_per_s=98.1)]).lone_layers == 0
        assert choose([alone, slower]) is alone
        assert choose([shared, nearer]) is nearer
        assert choose([shared, nearer, stays]) is stays

    def test_a_placement_that_would_serve_nothing_is_the_last_choice(self) -> None:
        """Its flow counts where nobody estimated, not where the estimate is 0."""
        little = Placement(
            assignments=(), flow_tokens_per_s=1.0, planner="x", estimate_tokens_per_s=0.1
        )
        idle = replace(little, flow_tokens_per_s=100.0, estimate_tokens_per_s=0.0)
        wider = replace(idle, flow_tokens_per_s=200.0)
        assert choose([idle, little]) is little
        assert choose([idle, wider]) is wider
        assert choose([replace(idle, estimate_tokens_per_s=None), little]).flow_tokens_per_s == 100

    def test_of_equal_plans_the_swarm_takes_the_one_with_second_holders(self) -> None:
        """Four peers that hold half each: two halves twice, not a chain of four."""
        problem = Problem(
            model=model(8), nodes=tuple(node(name, [9.0] * 4) for name in ("a", "b", "c", "d"))
        )
        plan = solve_request(request(problem)).best
        assert plan is not None
        holders = [sum(a.start <= ly < a.end for a in plan.assignments) for ly in range(8)]
        assert min(holders) == 2

    def test_spans_that_do_not_fit_make_no_plan(self) -> None:
        problem = Problem(model=model(4), nodes=(node("a", [9, 9]),))
        with pytest.raises(ValueError, match=r"\[0, 4\) does not fit a"):
            plan_of(problem, [span("a", 0, 4)])


class TestSolve:
    def test_a_first_plan_has_no_kept_one(self) -> None:
        answer = solve_request(request(Problem(model=model(1), nodes=(node("a", [9]),))))
        assert answer.best is not None
        assert (answer.best.version, answer.best.created_unix_s) == (VERSION, 5.0)
        assert answer.kept is None

    def test_the_plan_that_moves_nobody_comes_with_the_best_one(self) -> None:
        nodes = (node("a", [9, 1], current=(0, 2)), node("b", [9, 1], current=(0, 2)))
        answer = solve_request(request(Problem(model=model(2), nodes=nodes)))
        assert answer.best is not None
        assert answer.kept is not None
        assert set(answer.kept.assignments) == {span("a", 0, 2), span("b", 0, 2)}
        assert answer.best.flow_tokens_per_s == pytest.approx(9)
        assert answer.kept.flow_tokens_per_s == pytest.approx(2)

    @pytest.mark.parametrize("broken", ["", *SOLVERS])
    def test_or_tools_places_the_layers_of_a_quick_solve(
        self, broken: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Eight peers: columns whose variables are 1 in the last choice hold every layer; and where
        GLOP or CP-SAT fails, the answer says so, and there is a plan all the same."""
        choices: list[Chains] = []
        choose = Master.chosen

        def chosen(master: Master) -> Chains:
            choices.append(choose(master))
            return choices[-1]

        def fails(*_: object, **__: object) -> Never:
            raise RuntimeError(f"{broken} is ill")

        monkeypatch.setattr(Master, "chosen", chosen)
        if broken:
            monkeypatch.setattr(SOLVERS[broken], "solve", fails)
        nodes = tuple(node(f"p{n}", steady(10 + 3 * n, 5)) for n in range(8))
        asked = request(Problem(model=model(8), nodes=nodes))
        answer = solve_request(asked, ends_after(400))
        assert answer.best is not None
        assert answer.searched is not None
        if broken:
            assert answer.searched.failed == f"RuntimeError: {broken} is ill"
            assert not choices, "no layer is placed by a variable of OR-Tools"
            return
        assert not answer.searched.failed
        assert answer.searched.masters > 0
        assert choices[-1]
        assert all(not uncovered(chain, 8) for chain in choices[-1])

    def test_no_placement_is_an_answer(self) -> None:
        answer = solve_request(request(Problem(model=model(3), nodes=(node("a", [9]),))))
        assert answer.best is None
        assert "can hold at most 1 of 3 layers" in answer.error

    def test_fewer_layers_than_a_peer_announces_are_explained(self) -> None:
        """A peer says how many fit in the middle; at an end there is less room."""
        toy = model(8, embed_bytes=100, head_bytes=100)
        alone = node("a", [9] * 6)
        assert layers_max(toy, alone.memory_bytes, 0) == 6
        said = why_uncoverable(Problem(model=toy, nodes=(alone,)))
        assert said is not None
        assert "at most 5 of 8 layers beside embedding and head;" in said


class TestTrials:
    def placed(self, planner: str, value: float, *spans: Assignment) -> Placement:
        return Placement(
            assignments=spans,
            flow_tokens_per_s=value,
            planner=planner,
            estimate_tokens_per_s=value,
        )

    def test_one_finalist_for_each_depth_and_planner(self) -> None:
        halves = (span("a", 0, 2), span("b", 2, 4))
        whole = (span("a", 0, 4), span("b", 0, 4))
        found = [
            self.placed("greedy", 7.5, *whole),
            self.placed("search", 8.0, *halves),
            self.placed("search", 7.3, span("b", 0, 2), span("a", 2, 4)),
            self.placed("search", 7.2, *whole),
            self.placed("search+moves", 9.0, *halves),
            self.placed("chain", 7.0, *halves),
            self.placed("replicas", 9.0 * PLACEMENT.tried_within - 0.1, *whole),
        ]
        kept = finalists(found)
        assert [p.value for p in kept] == [9.0, 7.5, 8.0, 7.0, 7.2]

    def test_no_placement_is_chosen_that_peers_would_refuse_or_never_reach(self) -> None:
        """``a`` and ``b`` hold one half each: they cannot change places unless ``c`` holds both."""
        held = (node("a", [9, 9], current=(0, 2)), node("b", [9, 9], current=(2, 4)))
        swapped = self.placed("search", 8.0, span("b", 0, 2), span("a", 2, 4))
        stays = self.placed("greedy", 5.0, span("a", 0, 2), span("b", 2, 4))
        poor = self.placed("chain", 4.0, span("a", 0, 2), span("b", 2, 4))
        found = [swapped, stays, poor]
        assert adoptable(Problem(model=model(4), nodes=held), found) == [stays]
        helped = Problem(model=model(4), nodes=(*held, node("c", [9] * 4)))
        assert adoptable(helped, found) == [swapped, stays]

    def problem(self, held: int = 4) -> Problem:
        """Four unlike peers, which can hold so many of four layers."""
        rates = {"a": 9, "b": 9, "c": 5, "d": 3}
        nodes = tuple(node(name, steady(rate, held)) for name, rate in rates.items())
        return Problem(model=model(4), nodes=nodes)

    @pytest.mark.parametrize("which", range(3))
    def test_the_finalist_that_serves_the_most_in_a_run_wins_wherever_it_stands(
        self, which: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem, spans = self.problem(), ((span("a", 0, 4),), *self.splits())
        found = [self.placed("search", 9.0 - n, *each) for n, each in enumerate(spans)]
        assert finalists(found) == found
        run = dict.fromkeys(spans, 1.0) | {spans[which]: 2.0}
        monkeypatch.setattr(placement, "judge", lambda _, __, of, *___, **____: run[tuple(of)])
        service = announced_service(problem)
        assert tried_best(problem, service, found, None) is found[which]

    def splits(self) -> tuple[tuple[Assignment, ...], ...]:
        """Placements of two and of three stages."""
        return (
            (span("a", 0, 2), span("b", 2, 4)),
            (span("a", 0, 2), span("b", 2, 3), span("c", 3, 4)),
        )

    def test_with_trials_a_plan_is_the_best_of_runs_and_without_them_of_the_estimate(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The run says that what was tried last serves the most."""
        runs: list[frozenset[Assignment]] = []

        def run(_: object, __: object, spans: Sequence[Assignment], *___: object, **____: object):
            runs.append(frozenset(spans))
            return float(len(runs))

        monkeypatch.setattr(placement, "judge", run)
        problem = self.problem(held=3)

        def planned(*, trials: bool) -> Placement:
            return best_for(problem, looks=300, seed=0, trials=trials)

        by_estimate = planned(trials=False)
        assert runs == []
        by_run = planned(trials=True)
        assert len(set(runs)) > 1
        assert set(by_run.assignments) >= runs[-1]
        assert not set(by_estimate.assignments) >= runs[-1]

    def test_what_chose_a_plan_does_not_also_compare_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A plan that won by luck with some requests must win with others, too."""
        seeds: dict[str, set[int]] = {"chose": set(), "compared": set()}

        def seen(by: str) -> Callable[..., float]:
            def run(*given: Any, **named: Any) -> float:
                bound = signature(judge).bind(*given, **named)
                bound.apply_defaults()
                seeds[by].add(bound.arguments["seed"])
                return 1.0 + len(set(given[2]))

            return run

        monkeypatch.setattr(placement, "judge", seen("chose"))
        monkeypatch.setattr(solve, "judge", seen("compared"))
        held = holding(self.problem(), (span("a", 0, 1), span("b", 1, 2), span("c", 2, 4)))
        answer = solve_request(replace(request(held), thorough=True), ends_after(300))
        assert answer.tried
        assert seeds["chose"]
        assert seeds["compared"]
        assert not seeds["chose"] & seeds["compared"]

    def test_a_thorough_answer_has_the_gain_of_a_run(self) -> None:
        nodes = (node("a", steady(9, 4), current=(0, 4)), node("b", steady(9, 4)))
        asked = replace(request(Problem(model=model(4), nodes=nodes)), thorough=True)
        service = announced_service(asked.problem)
        spans = (span("a", 0, 2), span("b", 2, 4)), (span("a", 0, 4),)
        best, kept = (score(asked.problem, each, "chain", service=service) for each in spans)
        found, tried = gain_of(asked, asked.problem, best, kept, service)
        assert tried
        assert found > 1
        back, _ = gain_of(asked, asked.problem, kept, best, service)
        assert back == pytest.approx(1 / found)
        assert gain_of(asked, asked.problem, best, best, service) == (1.0, False)
        hasty = replace(asked, thorough=False)
        estimated = best.value / kept.value, False
        assert gain_of(hasty, asked.problem, best, kept, service) == estimated


def solved(asked: SolveRequest) -> SolveAnswer:
    """The answer of a solve that ends after a number of steps: the same each time."""
    return solve_request(asked, ends_after(100))


def spans_of(answer: SolveAnswer) -> set[Assignment]:
    assert answer.best is not None
    return set(answer.best.assignments)


class TestSettled:
    """Newcomers get layers, yet nobody moves for them."""

    def asked(self, *settled: str, rate: float = 1e4) -> SolveRequest:
        halves = {"a": (0, 4), "b": (0, 4), "c": (4, 8), "d": (4, 8)}
        held = tuple(node(p, steady(10, 4), current=at) for p, at in halves.items())
        new = tuple(node(p, steady(rate, 8), current=None) for p in ("x", "y"))
        problem = Problem(model=model(8), nodes=(*held, *new))
        return replace(request(problem), settled=frozenset(settled) if settled else None)

    def test_no_holder_moves_for_newcomers_however_fast_they_say_they_are(self) -> None:
        whole = self.asked()
        for asked in (self.asked(*"abcd"), replace(self.asked(*"abcd"), thorough=True)):
            answer = solved(asked)
            assert answer.best is not None
            given = {a.peer_id: (a.start, a.end) for a in answer.best.assignments}
            assert [given[p] for p in "abcd"] == [(0, 4), (0, 4), (4, 8), (4, 8)]
            assert given.keys() >= {"x", "y"}
            assert answer.gain is not None
            assert answer.gain < TransitionConfig().tried_gain_min
        answer = solved(replace(whole, settled=frozenset("abcdxy")))
        assert spans_of(answer) == spans_of(solved(whole))  # once all are settled

    def test_all_count_where_the_settled_cannot_hold_the_model(self) -> None:
        few, all_ = (spans_of(solved(self.asked(*each))) for each in ("a", ""))
        assert few == all_

    @pytest.mark.parametrize(("x", "gain"), [((0, 4), 2.0), ((4, 8), 1.0)])
    def test_a_gain_is_one_without_newcomers_and_with_them(
        self, x: tuple[int, int], gain: float
    ) -> None:
        """One of the first three should help ``d``, unless ``x`` does for the time being."""
        spans = {"a": (0, 4), "b": (0, 4), "c": (0, 4), "d": (4, 8), "x": x}
        nodes = tuple(node(p, steady(10, 4), current=at) for p, at in spans.items())
        asked = replace(request(Problem(model=model(8), nodes=nodes)), settled=frozenset("abcd"))
        answer = solved(asked)
        assert answer.gain == pytest.approx(gain, rel=0.05)
        halves = Counter(a.start for a in spans_of(answer) if a.peer_id != "x")
        assert halves == {0: 2, 4: 2}

    @examples(40)
    @given(problems(peers_max=5, layers_max=5), st.sets(st.integers(0, 4)), st.randoms())
    def test_nobody_moves_for_what_reviewers_might_refuse(
        self, problem: Problem, settled: set[int], rng: random.Random
    ) -> None:
        """They count newcomers, too; a plan that keeps all is exempt from the comparison."""
        placed = [heuristics.greedy(problem), heuristics.replicas(problem)]
        held = holding(problem, rng.choice(placed) or ())
        names = frozenset(f"p{index}" for index in settled)
        answer = solved(replace(request(held), settled=names))
        spans = heuristics.greedy(held)
        if answer.kept is None or not answer.gain or spans is None:
            return
        assert answer.best is not None
        service, edges = announced_service(held), solve_flow(held, spans).edges
        least = score(held, spans, "greedy", service=service, edges=edges).value
        assert answer.best.value_tokens_per_s >= 0.9 * least * (1 - 1e-9)


class TestManyCells:
    """Beyond ``PLACEMENT.cells_above`` peers, what is kept flows inside the cells that there are,
    and after a change only cells that lost a layer are planned anew."""

    @staticmethod
    def swarm(sites: int = 8) -> Problem:
        """Peers at sites, with short links inside each."""
        names = [(site, at) for site in range(sites) for at in range(12)]
        links = tuple(
            link(f"p{site}-{a}", f"p{site}-{b}", 1e4, rtt_s=0.002)
            for site, a in names
            for b in range(12)
            if a != b
        )
        return Problem(
            model=model(8),
            nodes=tuple(
                node(f"p{site}-{at}", steady(10 + at, 4), memory_bytes=400) for site, at in names
            ),
            links=links,
            default_rtt_s=0.2,
            default_bandwidth_bytes_per_s=1e5,
        )

    @classmethod
    @cache
    def first(cls) -> tuple[Problem, Plan]:
        """The swarm, each of whose peers holds what its first plan gave it, and that plan."""
        problem = cls.swarm()
        plan = solved(request(problem)).best
        assert plan is not None
        assert len(flow_parts(plan.edges)) > 2
        return holding(problem, plan.assignments), plan

    def without(self, problem: Problem, lost: Collection[str]) -> Problem:
        return replace(problem, nodes=tuple(n for n in problem.nodes if n.peer_id not in lost))

    def can_spare(self, plan: Plan, cell: frozenset[str], peer: str) -> bool:
        """Whether the other peers of a cell hold every layer."""
        left = [a for a in plan.assignments if a.peer_id in cell - {peer}]
        return not uncovered(left, plan.model.layers)

    def test_a_loss_leaves_the_other_cells_as_they_are(self) -> None:
        problem, plan = self.first()
        cells = flow_parts(plan.edges)
        peers = ((cell, peer) for cell in cells for peer in sorted(cell))
        lost = next(peer for cell, peer in peers if self.can_spare(plan, cell, peer))
        left = self.without(problem, {lost})
        answer = solved(replace(request(left), flow=plan.edges))
        assert answer.kept is not None
        assert {a for a in plan.assignments if a.peer_id != lost} <= set(answer.kept.assignments)
        whole = [cell for cell in cells if lost not in cell]
        assert all(cell in flow_parts(answer.kept.edges) for cell in whole)
        share = (len(cells) - 1) / len(cells)
        assert answer.kept.value_tokens_per_s > 0.98 * share * plan.value_tokens_per_s
        scattered = solved(request(left)).kept
        assert scattered is not None
        assert len(flow_parts(scattered.edges)) == 1, "nothing says where its cells are"

    def test_only_a_cell_that_lost_a_layer_is_planned_anew(self) -> None:
        problem, plan = self.first()
        cells = flow_parts(plan.edges)
        firsts = {a.peer_id for a in plan.assignments if a.start == 0} & cells[0]
        left = self.without(problem, firsts)
        answer = solved(replace(request(left), flow=plan.edges))
        assert answer.best is not None
        assert answer.kept is not None
        assert answer.gain is not None
        moved = set(plan.assignments) - set(answer.best.assignments)
        assert moved
        assert {a.peer_id for a in moved} <= cells[0] | min(cells[1:], key=len)
        # All of what these peers serve, not of what the swarm does.
        whole = answer.best.value_tokens_per_s / answer.kept.value_tokens_per_s
        assert answer.gain > whole
        thorough = solved(replace(request(left), flow=plan.edges, thorough=True))
        assert thorough.best is not None
        others = set(plan.assignments) - set(thorough.best.assignments)
        assert {a.peer_id for a in others} - cells[0]

    def test_newcomers_serve_in_the_cell_that_is_near_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a swarm that is too large for a flow over all peers."""
        monkeypatch.setattr(
            placement, "PLACEMENT", replace(PLACEMENT, whole_peers_max=PLACEMENT.cells_above)
        )
        problem, plan = self.first()
        cells = flow_parts(plan.edges)
        new = tuple(node(f"new-{at}", steady(20, 4), memory_bytes=400) for at in range(4))
        links = (link(n.peer_id, min(cells[1]), 1e4, rtt_s=0.002) for n in new)
        more = replace(problem, nodes=(*problem.nodes, *new), links=(*problem.links, *links))
        settled = frozenset(n.peer_id for n in problem.nodes)
        answer = solved(replace(request(more), flow=plan.edges, settled=settled))
        for found in (answer.best, answer.kept):
            assert found is not None
            assert set(plan.assignments) <= set(found.assignments)
            assert found.value_tokens_per_s > plan.value_tokens_per_s
            serving = {peer for cell in {*flow_parts(found.edges)} - {*cells} for peer in cell}
            assert serving <= cells[1] | {n.peer_id for n in new}

    def test_newcomers_that_could_be_a_cell_become_one(self) -> None:
        problem, plan = self.first()
        held = {a.peer_id for a in plan.assignments}
        new = tuple(node(f"new-{at}", steady(20, 4), memory_bytes=400) for at in range(6))
        more = replace(problem, nodes=(*problem.nodes, *new))
        answer = solved(replace(request(more), flow=plan.edges))
        assert answer.best is not None
        assert {a for a in answer.best.assignments if a.peer_id in held} == set(plan.assignments)
        assert any({n.peer_id for n in new} & cell for cell in flow_parts(answer.best.edges))
        assert answer.best.value_tokens_per_s > plan.value_tokens_per_s


def test_chains_that_serve_more_by_themselves_are_kept_so() -> None:
    """A flow over all peers of Helix's single24 would cross its A100s' chain and its T4s'."""
    known = announced_problem(*load("single24/30b"))
    large = [span(f"{n}", at, at + 15) for n, at in zip((10, 9, 17, 6), count(0, 15))]
    numbers = (0, 8, 11, 7, 14, 4, 18, 22, 21, 20, 23, 2, 3, 19, 5, 16, 1, 15, 12, 13)
    small = [span(f"{n}", at, at + 3) for n, at in zip(numbers, count(0, 3))]
    edges = (*solve_flow(known, large).edges, *solve_flow(known, small).edges)
    spans = (*large, *small)
    serves = estimate(known, spans, edges, announced_service(known)).tokens_per_s
    kept = solved(replace(request(holding(known, spans)), flow=edges)).kept
    assert kept is not None
    assert set(kept.assignments) == set(spans)
    assert kept.value_tokens_per_s >= 0.998 * serves


class TestLightLoad:
    """Plans for swarms with little to do weigh the speed of one answer, too."""

    @pytest.mark.parametrize("rtt_s", [0.001, 0.005, 0.02])
    def test_four_equal_peers_are_two_replicas_of_halves_at_once(self, rtt_s: float) -> None:
        # Each has room for 90% of the model: a ring of four has more KV room, but no second holder.
        spec = replace(
            model(8, embed_bytes=786_432, head_bytes=786_432, kv_bytes=256), layer_bytes=880_000
        )
        room = (8 * spec.layer_bytes + spec.embed_bytes + spec.head_bytes) * 9 // 10
        peers = tuple(
            replace(node(p, steady(4000, 7), memory_bytes=room), kv_tokens_min=1024) for p in "abcd"
        )
        problem = Problem(model=spec, nodes=peers, default_rtt_s=rtt_s)
        first = solve_request(
            replace(request(problem), answer_weight=RECORD_BOUNDS.answer_weight_max)
        ).best
        assert first is not None
        assert first.answer_weight == RECORD_BOUNDS.answer_weight_max
        assert Counter((a.start, a.end) for a in first.assignments) == {(0, 4): 2, (4, 8): 2}

    def test_an_idle_swarm_is_planned_for_speed_and_a_full_one_for_throughput(self) -> None:
        idle = Placement(
            assignments=(span("a", 0, 4),),
            flow_tokens_per_s=90.0,
            planner="short",
            one_answer_s=0.05,
        )
        full = replace(idle, flow_tokens_per_s=100.0, planner="long", one_answer_s=0.1)
        weights = {"long": 0.0, "short": RECORD_BOUNDS.answer_weight_max}
        for best, weight in weights.items():
            found = [replace(p, answer_weight=weight) for p in (idle, full)]
            assert choose(found).planner == best

    def test_a_quicker_answer_costs_a_tenth_of_what_the_greedy_placement_serves_at_most(
        self,
    ) -> None:
        problem = Problem(model=model(4), nodes=(node("a", steady(9, 4)),))
        greedy = Placement(
            assignments=(span("a", 0, 4),),
            flow_tokens_per_s=100.0,
            planner="greedy",
            one_answer_s=0.1,
            answer_weight=RECORD_BOUNDS.answer_weight_max,
        )
        little = replace(greedy, planner="quick", flow_tokens_per_s=91.0, one_answer_s=0.01)
        much = replace(little, planner="quicker", flow_tokens_per_s=89.0)
        assert adoptable(problem, [greedy, little, much]) == [greedy, little]


def test_of_plans_worth_the_same_the_one_whose_spare_helps_is_chosen() -> None:
    """One has the slow peer beside a fast one; the other leaves it to be a spare."""
    rates = {"a": [627.0, 626.0, 122.0, 104.0, 19.0], "b": [748.0], "c": [76.0], "d": [765.0]}
    nodes = [node(name, each) for name, each in rates.items()]
    problem = Problem(model=model(5), nodes=tuple(nodes))
    service = service_from_rates(problem)
    chain = (span("d", 0, 1), span("a", 1, 4), span("b", 4, 5))
    beside = score(problem, (*chain, span("c", 4, 5)), "beside", service=service)
    idle = score(problem, chain, "idle", service=service)
    assert beside.worth == pytest.approx(idle.worth)
    alone = placement._best_with_spares(problem, [beside], service)
    best = placement._best_with_spares(problem, [beside, idle], service)
    assert best.planner == "idle"
    assert best.worth > 1.05 * alone.worth
