"""Covering every layer again with few moves."""

from dataclasses import replace

import pytest

from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.heuristics.repair import MOVED_MAX, repair


def holding(make, *spans, memory=450):
    problem = make.problem([(memory, 100.0)] * len(spans))
    nodes = tuple(
        replace(node, current=make.span(node.peer_id, *span) if span else None)
        for node, span in zip(problem.nodes, spans, strict=True)
    )
    return replace(problem, nodes=nodes)


def moves(problem, spans):
    now = {node.peer_id: node.current for node in problem.nodes if node.current}
    return sorted(a.peer_id for a in spans if a.peer_id in now and a != now[a.peer_id])


def test_one_move_suffices_where_one_peer_was_a_replica(make):
    problem = holding(make, (0, 3), (5, 8), (6, 8))
    spans = repair(problem)
    assert uncovered(spans, 8) == ()
    assert len(moves(problem, spans)) == 1


def test_nobody_moves_where_nothing_is_missing_and_spares_join(make):
    problem = holding(make, (0, 4), (4, 7), (6, 8), None)
    spans = repair(problem)
    assert moves(problem, spans) == []
    assert len(spans) == 4


def test_without_a_way_there_is_none(make):
    assert repair(holding(make, None, None)) is None
    assert repair(holding(make, (0, 3), (1, 4))) is None


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_covers_everything(make, seed):
    problem = make.random_problem(seed, peers=5, layers=6)
    nodes = tuple(
        replace(node, current=make.span(node.peer_id, seed % 5, seed % 5 + 1))
        for node in problem.nodes
    )
    problem = replace(problem, nodes=nodes)
    spans = repair(problem)
    if spans is not None:
        assert uncovered(spans, 6) == ()
        assert len(moves(problem, spans)) <= MOVED_MAX
