"""The judge of placements: repeatable, and the better placement is judged better."""

from dataclasses import replace
from random import Random
from statistics import correlation, fmean, stdev

import pytest

from bench.papers.clusters import azure, published
from coordinator.commands.planner_view import service_of
from coordinator.evaluation.estimate import estimate
from coordinator.problem.service import Curve, Workload, service_from_rates
from coordinator.simulator.clients import Clients
from coordinator.simulator.core.trace import Request, typical
from coordinator.simulator.judge import (
    TRIAL,
    judge,
    midway,
    profiles_of,
    requests_of,
    standing_load,
)
from coordinator.simulator.plans import plan_of
from dht.messages.types import Plan
from tests.unit.coordinator.simulator.toy import saturated


def test_a_judgement_is_repeated_to_the_digit_and_follows_the_seed() -> None:
    problem, profiles, held, _ = saturated()
    service = service_of(problem, profiles, hub=False)
    first = judge(problem, service, held, virtual_s=10.0)
    assert first == judge(problem, service, held, virtual_s=10.0) > 0
    assert first != judge(problem, service, held, virtual_s=10.0, seed=1)


def test_a_run_lasts_until_enough_tokens_count() -> None:
    problem, profiles, held, _ = saturated()
    service = service_of(problem, profiles, Workload(requests_max=1), hub=False)
    alone = estimate(problem, held, plan_of(problem, held).edges, service).tokens_per_s
    lasts_s = 20_000 / (1 - TRIAL.settle_share) / alone
    assert TRIAL.virtual_s < lasts_s < TRIAL.run_s_max
    found = judge(problem, service, held, tokens=20_000)
    assert found == judge(problem, service, held, virtual_s=lasts_s)


def test_typical_requests_are_as_many_and_as_alike_as_the_traces() -> None:
    found, real = typical(4096), azure()
    for each in ("input_tokens", "output_tokens"):
        ours, theirs = ([getattr(r, each) for r in trace] for trace in (found, real))
        assert fmean(ours) == pytest.approx(fmean(theirs), rel=0.05)
        assert stdev(ours) == pytest.approx(stdev(theirs), rel=0.05)
    ours, theirs = (
        correlation([r.input_tokens for r in trace], [r.output_tokens for r in trace])
        for trace in (found, real)
    )
    assert ours == pytest.approx(theirs, abs=0.05)


def test_a_swarm_that_begins_with_prompts_alone_has_served_less_so_far() -> None:
    problem, profiles, held, _ = saturated()
    trace = requests_of(Workload())
    plan = plan_of(problem, held)
    served = [
        standing_load(problem, profiles, plan, trace, prompts_share=share, virtual_s=4.0)
        for share in (0.0, 1.0)
    ]
    assert served[0] > 1.2 * served[1]


def test_half_the_speed_serves_less() -> None:
    problem, profiles, held, _ = saturated()
    service = service_of(problem, profiles, hub=False)

    def halved(curve: Curve) -> Curve:
        return replace(curve, seconds=tuple(2 * each for each in curve.seconds))

    machines = {
        name: replace(machine, decode=halved(machine.decode), prompt=halved(machine.prompt))
        for name, machine in service.machines.items()
    }
    slower = judge(problem, replace(service, machines=machines), held, virtual_s=15.0)
    assert slower < 0.8 * judge(problem, service, held, virtual_s=15.0)


def test_requests_in_flight_are_bounded_where_the_workload_says_so() -> None:
    problem, profiles, held, _ = saturated()
    service = service_of(problem, profiles, Workload(requests_max=1), hub=False)
    alone = judge(problem, service, held, virtual_s=10.0)
    assert alone < 0.5 * judge(
        problem, service_of(problem, profiles, hub=False), held, virtual_s=10.0
    )


def test_a_service_from_announced_rates_can_be_judged() -> None:
    problem, _, held, _ = saturated()
    nodes = tuple(replace(node, memory_bytes=1 << 20) for node in problem.nodes)
    problem = replace(problem, nodes=nodes)
    service = service_from_rates(problem)
    assert judge(problem, service, held, virtual_s=10.0) > 0
    slope = Curve(tokens=(1.0, 16.0), seconds=(0.01, 0.02), context_s=(1e-6, 4e-6))
    machines = {name: replace(m, decode=slope) for name, m in service.machines.items()}
    profile = profiles_of(problem, replace(service, machines=machines)).peers["p0"]
    assert profile.decode == ((0, 0.0), (1, 0.01), (16, 0.02))
    assert profile.decode_context == ((0, 0.0), (1, 1e-6), (16, 4e-6))


def test_sessions_found_at_a_moment_are_the_long_ones_anywhere_in_their_answers() -> None:
    short, long = (Request(arrival_s=0.0, input_tokens=9, output_tokens=n) for n in (10, 90))
    found = [pair for pair, _ in zip(midway((short, long), Random(1)), range(4000), strict=False)]
    of_long = [done for request, done in found if request is long]
    assert len(of_long) / len(found) == pytest.approx(0.9, abs=0.02)
    assert sum(of_long) / len(of_long) == pytest.approx(44.5, rel=0.05)


def test_requests_have_the_workloads_mean_lengths() -> None:
    found = requests_of(Workload(input_tokens=100.0, output_tokens=50.0))
    assert sum(r.input_tokens for r in found) / len(found) == pytest.approx(100.0, rel=0.01)
    assert sum(r.output_tokens for r in found) / len(found) == pytest.approx(50.0, rel=0.01)


@pytest.mark.slow
def test_of_two_published_plans_the_better_one_is_judged_better() -> None:
    judged = {}
    for case in ("geo24/70b/helix", "geo24/70b/swarm"):
        problem, profiles, plan = published(case)
        service = service_of(problem, profiles, hub=False)
        judged[case] = judge(problem, service, plan.assignments, plan.edges)
    assert judged["geo24/70b/helix"] > judged["geo24/70b/swarm"]


def test_routes_are_drawn_as_over_the_plan_that_would_be_published() -> None:
    """Such a plan says what it would serve, and clients take the quickest ring below that."""
    problem, profiles, held, _ = saturated()
    service = service_of(problem, profiles, hub=False)
    plan = plan_of(problem, held)
    worth = estimate(problem, held, plan.edges, service).tokens_per_s
    seen: list[float | None] = []

    class Told(Clients):
        def adopt(self, plan: Plan) -> None:
            seen.append(plan.estimate_tokens_per_s)
            super().adopt(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.simulator.judge.Clients", Told)
        judge(problem, service, held, virtual_s=5.0)
    assert seen == [worth]
