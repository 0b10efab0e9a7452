"""The quickest rings, against all rings of small swarms."""

import random
from collections.abc import Iterator
from itertools import permutations

import pytest

from coordinator.evaluation.one_answer import AnswerTimes
from coordinator.planning.search.chain_dp import Chain
from coordinator.planning.search.short_rings import ring_s, short_rings
from coordinator.problem.service import announced_service
from dht.messages.types import Link, Problem, fits
from tests.unit.coordinator.problems import model, node, span, steady

LAYERS = 6


def drawn(seed: int) -> Problem:
    """Four unlike peers with links of very different delays."""
    rng = random.Random(seed)
    nodes = tuple(
        node(p, steady(rng.choice([50, 200, 800]), rng.randint(1, LAYERS)), memory_bytes=800)
        for p in "abcd"
    )
    links = tuple(
        Link(
            source=a,
            target=b,
            bandwidth_bytes_per_s=1e6,
            rtt_s=rng.choice([0.001, 0.02, 0.2]),
            measured_unix_s=0.0,
        )
        for a, b in permutations("abcd", 2)
    )
    spec = model(LAYERS, embed_bytes=100, head_bytes=150)
    return Problem(model=spec, nodes=nodes, links=links)


def every_ring(problem: Problem) -> Iterator[Chain]:
    nodes = {each.peer_id: each for each in problem.nodes}

    def further(at: int, taken: tuple[str, ...], chain: Chain) -> Iterator[Chain]:
        if at == LAYERS:
            yield chain
        for peer in nodes.keys() - set(taken):
            for end in range(at + 1, LAYERS + 1):
                if fits(problem.model, nodes[peer], at, end):
                    yield from further(end, (*taken, peer), (*chain, span(peer, at, end)))

    yield from further(0, (), ())


@pytest.mark.parametrize("seed", range(12))
def test_the_first_is_the_quickest_of_all(seed: int) -> None:
    problem = drawn(seed)
    times = AnswerTimes(problem, announced_service(problem))
    best_s = min((ring_s(times, chain) for chain in every_ring(problem)), default=None)
    found = short_rings(times, 3)
    if best_s is None:
        assert not found
        return
    assert found[0][0] == pytest.approx(best_s, rel=0.05)
    for took_s, chain in found:
        assert took_s == pytest.approx(ring_s(times, chain))
        assert [a.end for a in chain[:-1]] == [a.start for a in chain[1:]]
        assert (chain[0].start, chain[-1].end) == (0, LAYERS)
        nodes = {each.peer_id: each for each in problem.nodes}
        assert all(fits(problem.model, nodes[a.peer_id], a.start, a.end) for a in chain)
        assert len({a.peer_id for a in chain}) == len(chain)
