"""Rates of peers under full load: what their machines and their KV keep up with."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.evaluation.estimate import ceiling
from coordinator.planning.search.full_load import at_full_load
from coordinator.problem.service import service_from_rates
from dht.messages.types import Assignment, Problem
from tests.unit.coordinator.problems import problems


@given(problems(peers_max=4, layers_max=8))
def test_without_a_ring_rates_are_what_machines_keep_up_with(problem: Problem) -> None:
    service = service_from_rates(problem)
    for node in at_full_load(problem, service, 0.0).nodes:
        for layers, rate in enumerate(node.tokens_per_s, start=1):
            held = Assignment(peer_id=node.peer_id, start=0, end=layers)
            assert rate == pytest.approx(ceiling(held, service))


@given(problems(peers_max=4, layers_max=8), st.floats(1e-3, 1e3))
def test_a_peer_passes_on_a_token_per_session_and_ring(problem: Problem, token_s: float) -> None:
    service = service_from_rates(problem)
    free = {node.peer_id: node for node in at_full_load(problem, service, 0.0).nodes}
    for node in at_full_load(problem, service, token_s).nodes:
        for layers, rate in enumerate(node.tokens_per_s, start=1):
            room = service.kv_tokens(node.peer_id, layers)
            sessions = room / service.workload.kv_tokens
            unbounded = free[node.peer_id].tokens_per_s[layers - 1]
            assert rate == pytest.approx(min(unbounded, sessions / token_s))
        assert all(fewer >= more for fewer, more in pairwise(node.tokens_per_s))
