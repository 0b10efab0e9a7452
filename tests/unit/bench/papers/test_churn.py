"""Peers that come and go: every request still ends, from the tokens it already has."""

import itertools
import random
from dataclasses import replace

import pytest

from bench.papers.arrivals import poisson
from bench.papers.churn import ChurnConfig, Cut, stays, with_churn
from coordinator.commands.full_load import as_plan
from coordinator.problem.service import KvCapacity
from coordinator.simulator.core.profiles import (
    PeerProfile,
    Profiles,
    StepLimits,
    default_client_links,
)
from coordinator.simulator.core.trace import typical
from dht.messages.types import Assignment, ModelSpec, Plan, PlannerNode, Problem


def swarm(chains: int) -> tuple[Problem, Profiles, Plan]:
    """So many chains of two peers, over 8 layers."""
    names = [f"p{index}" for index in range(2 * chains)]
    problem = Problem(
        model=ModelSpec(
            name="toy",
            root="f",
            layers=8,
            layer_bytes=1,
            embed_bytes=0,
            head_bytes=0,
            kv_bytes_per_token_layer=1,
            activation_bytes=8192,
            context_tokens=4096,
            vocab=8,
        ),
        nodes=tuple(
            PlannerNode(
                peer_id=name, memory_bytes=1 << 30, kv_tokens_min=0, tokens_per_s=(500.0,) * 4
            )
            for name in names
        ),
    )
    profile = PeerProfile(
        prefill=((0, 0.0), (2048, 0.05)),
        decode=((0, 0.0), (64, 0.004)),
        kv=KvCapacity(beside=(400_000,)),
        limits=(StepLimits(prefill_tokens_max=2048, decodes_max=64),),
    )
    held = [
        Assignment(peer_id=name, start=4 * (index % 2), end=4 * (index % 2) + 4)
        for index, name in enumerate(names)
    ]
    profiles = Profiles(
        peers=dict.fromkeys(names, profile), client_links=default_client_links(problem)
    )
    return problem, profiles, as_plan(problem, held)


def test_stays_have_their_mean_and_a_heavy_tail() -> None:
    found = list(itertools.islice(stays(random.Random(1), 100.0, 2.5), 20_000))
    assert sum(found) / len(found) == pytest.approx(100.0, rel=0.05)
    assert min(found) >= 60.0
    assert sorted(found)[len(found) // 2] < 100.0


@pytest.mark.parametrize("replan", [True, False])
def test_every_request_ends_though_peers_come_and_go(replan: bool) -> None:
    problem, profiles, plan = swarm(3)
    arrivals = poisson(typical(), per_s=0.5, duration_s=120.0, seed=2)
    config = ChurnConfig(
        stay_mean_s=60.0, absence_mean_s=20.0, load_s=5.0, duration_s=900.0, replan=replan
    )
    report = with_churn(problem, profiles, plan, arrivals, config)
    assert report.losses > 5
    assert report.served.replays > 0
    assert report.served.sessions_done == report.served.sessions_opened == len(arrivals)
    again = with_churn(problem, profiles, plan, arrivals, config)
    assert again == report


def test_no_peer_leaves_nothing_is_replayed() -> None:
    problem, profiles, plan = swarm(1)
    arrivals = poisson(typical(), per_s=0.2, duration_s=60.0, seed=2)
    config = ChurnConfig(stay_mean_s=1e12, duration_s=300.0)
    report = with_churn(problem, profiles, plan, arrivals, config)
    assert (report.losses, report.served.replays, report.uncovered_s) == (0, 0, 0.0)
    assert report.served.sessions_done == len(arrivals)


def test_a_cut_without_replanning_waits_and_with_it_moves_a_peer() -> None:
    problem, profiles, plan = swarm(chains=3)
    arrivals = poisson(typical(), per_s=0.5, duration_s=600.0, seed=2)
    first_half = tuple(a.peer_id for a in plan.assignments if a.start == 0)
    cut = Cut(peers=first_half, start_s=100.0, end_s=400.0)
    kept = ChurnConfig(stay_mean_s=0.0, cuts=(cut,), replan=False, duration_s=2000.0)
    moved = replace(kept, replan=True, plan_s=10.0, load_s=60.0)
    waits = with_churn(problem, profiles, plan, arrivals, kept)
    mends = with_churn(problem, profiles, plan, arrivals, moved)
    assert waits.losses == mends.losses == 3
    assert waits.moves == 0
    assert waits.uncovered_s == pytest.approx(300.0)
    assert mends.moves == 1
    assert mends.uncovered_s == pytest.approx(70.0)
    assert waits.served.sessions_done == mends.served.sessions_done == len(arrivals)
    assert waits.served.decode.count == mends.served.decode.count
    assert mends.served.prompt.percentiles_s[99] < waits.served.prompt.percentiles_s[99]


def test_cells_do_not_share_peers_or_flow() -> None:
    problem, profiles, plan = swarm(chains=2)
    apart = [
        replace(edge, tokens_per_s=500.0)
        for edge in as_plan(problem, plan.assignments[:2]).edges
        + as_plan(problem, plan.assignments[2:]).edges
    ]
    arrivals = poisson(typical(), per_s=0.5, duration_s=300.0, seed=3)
    cut = Cut(peers=("p0",), start_s=100.0, end_s=200.0)
    config = ChurnConfig(stay_mean_s=0.0, cuts=(cut,), duration_s=1500.0, cells_above=0)
    report = with_churn(problem, profiles, replace(plan, edges=tuple(apart)), arrivals, config)
    assert report.moves == 0  # the other cell covers its layers; this one has nobody to move
    assert report.uncovered_s == pytest.approx(100.0)
    assert report.served.sessions_done == len(arrivals)
