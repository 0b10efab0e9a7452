"""Records of strangers as a planner's input: no figure that the wire allows stops the planning."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning import placement
from coordinator.planning.solve import SolveRequest, solve_request
from coordinator.problem.config import ASSUMED
from coordinator.problem.from_records import problem_of
from dht.messages.types import RECORD_BOUNDS, Link, LinksRecord, PlanVersion, Problem
from tests.examples import examples
from tests.unit.coordinator.problems import ends_after, model, record

RATES = st.one_of(
    st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1e6, RECORD_BOUNDS.rate_max]),
    st.floats(0.0, RECORD_BOUNDS.rate_max),
)
MODEL = model(6)


def drawn_problem(rates: list[float], bandwidths: list[float]) -> Problem:
    """Four peers for two layers or more each, with links of these bandwidths between all."""
    names = "abcd"
    nodes = {
        name: replace(record(name, 0, 0, rates=(rate,) * 4, layers=6), memory_bytes=400)
        for name, rate in zip(names, rates, strict=True)
    }
    pairs = [(a, b) for a in names for b in names if a != b]
    links = {
        name: LinksRecord(
            peer_id=name,
            links=tuple(
                Link(
                    source=a,
                    target=b,
                    bandwidth_bytes_per_s=bandwidth,
                    rtt_s=0.01,
                    measured_unix_s=0.0,
                )
                for (a, b), bandwidth in zip(pairs, bandwidths, strict=True)
                if b == name
            ),
        )
        for name in names
    }
    return problem_of(MODEL, nodes, links)


def asked(problem: Problem) -> SolveRequest:
    return SolveRequest(
        problem=problem,
        version=PlanVersion(),
        coordinator="a",
        seed=1,
        time_limit_s=1.0,
        now_unix_s=0.0,
    )


@examples(25)
@given(st.lists(RATES, min_size=4, max_size=4), st.lists(RATES, min_size=12, max_size=12))
def test_whatever_peers_announce_there_is_a_plan(
    rates: list[float], bandwidths: list[float]
) -> None:
    problem = drawn_problem(rates, bandwidths)
    assert all(link.bandwidth_bytes_per_s >= ASSUMED.link_bytes_per_s_min for link in problem.links)
    assert all(
        ASSUMED.tokens_per_s_min <= rate <= RECORD_BOUNDS.tokens_per_s_max
        for node in problem.nodes
        for rate in node.tokens_per_s
    )
    assert solve_request(asked(problem), ends_after(40)).best is not None


def test_a_planner_that_fails_costs_only_its_own_placements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a solver's own")

    monkeypatch.setattr(placement, "_searched", fails)
    problem = drawn_problem([1.0] * 4, [1e6] * 12)
    best = solve_request(asked(problem), lambda: 0.0).best
    assert best is not None
    assert best.planner in placement.HEURISTICS
