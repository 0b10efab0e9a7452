"""The stage-pattern program on Helix's clusters and on made ones."""

import pytest
from hypothesis import given

from bench.planner.pattern_cpsat import chain_flow, widest_chain
from bench.planner.stage_patterns import Terrain, place_chains, used
from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import check_plan, uncovered
from dht.messages.types import Problem, fits
from tests.examples import examples
from tests.unit.coordinator.helix import problem_of
from tests.unit.coordinator.problems import link, model, node, plan_of, problems


def terrain_of(problem: Problem) -> Terrain:
    return Terrain(problem)


# Flows that an exhaustive search of patterns found, tokens/s.
KNOWN = (
    ("small10", "30b", 60, 286.587),
    ("single24", "70b", 12, 1392.6),
    ("single24", "70b", 14, 1515.7),
    ("single24", "70b", 24, 2045.6),
    ("geo24", "70b", 12, 1392.6),
)


@pytest.mark.parametrize(("cluster", "name", "stages_max", "flow"), KNOWN)
def test_flows_of_known_clusters(cluster: str, name: str, stages_max: int, flow: float) -> None:
    problem = problem_of(cluster, name)
    terrain = terrain_of(problem)
    chain = widest_chain(terrain, terrain.counts(), stages_max, seed=0)
    assert chain is not None
    assert len(chain) <= stages_max
    assert chain_flow(terrain, chain) == pytest.approx(flow, rel=5e-3)
    spans = place_chains(terrain, [chain])
    assert check_plan(plan_of(problem, spans), problem) == []
    # Where a region is left, links are wide enough for what the stages carry.
    assert solve_flow(problem, spans).flow_tokens_per_s == pytest.approx(flow, rel=5e-3)


def test_the_same_input_gives_the_same_chain() -> None:
    problem = problem_of("geo24", "70b")
    chains = [
        widest_chain(terrain, terrain.counts(), 14, seed=3)
        for terrain in (terrain_of(problem), terrain_of(problem))
    ]
    assert chains[0] == chains[1]


def test_a_crossing_takes_as_many_links_as_the_flow_needs() -> None:
    """Two sites with links of 4 tokens/s between them: one link carries 4, two 8."""
    near = [node(f"a{i}", [10, 10, 10]) for i in range(3)]
    far = [node(f"b{i}", [10, 10, 10]) for i in range(3)]
    links = [
        link(a.peer_id, b.peer_id, 4.0 if a.peer_id[0] != b.peer_id[0] else 1e6, rtt_s=rtt)
        for a in (*near, *far)
        for b in (*near, *far)
        if a is not b
        for rtt in (0.1 if a.peer_id[0] != b.peer_id[0] else 0.001,)
    ]
    problem = Problem(model=model(12), nodes=(*near, *far), links=tuple(links))
    terrain = terrain_of(problem)
    chain = widest_chain(terrain, terrain.counts(), 12, seed=0)
    assert chain is not None
    spans = place_chains(terrain, [chain])
    assert solve_flow(problem, spans).flow_tokens_per_s >= 7.9


@examples(40)
@given(problems(peers_max=6, layers_max=8))
def test_a_chain_covers_the_model_and_fits_its_peers(problem: Problem) -> None:
    terrain = terrain_of(problem)
    if not terrain.kinds:
        return
    counts = terrain.counts()
    chain = widest_chain(terrain, counts, 8, seed=0)
    if chain is None:
        return
    assert all(a <= b for a, b in zip(used(terrain, chain), counts, strict=True))
    nodes = {peer.peer_id: peer for peer in problem.nodes}
    spans = place_chains(terrain, [chain])
    assert uncovered(spans, problem.model.layers) == ()
    assert len({a.peer_id for a in spans}) == len(spans)
    assert all(fits(problem.model, nodes[a.peer_id], a.start, a.end) for a in spans)
