"""What the estimate takes from what peers announce of their layers' times."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.placement import best_placement
from coordinator.problem.config import ASSUMED
from coordinator.problem.from_records import problem_of
from coordinator.problem.service import announced_service, service_from_rates
from dht.messages.types import RECORD_BOUNDS, NodeState, Problem, fits
from tests.examples import examples
from tests.unit.coordinator.problems import model, node, record, steady

MS = 10**6
MEASURED = ((1, 10 * MS, 26 * MS), (4, 12 * MS, 28 * MS), (16, 20 * MS, 36 * MS))
"""16 ms more for each of 4096 tokens of context: 1 ms at the context of T_j, 256."""


def machine(**announced):
    peer = replace(node("a", steady(1000.0, 4)), **announced)
    problem = Problem(model=model(8), nodes=(peer,))
    return service_from_rates(problem).machines["a"]


def test_announced_times_are_used() -> None:
    chunks = ((32, 30 * MS, 30 * MS), (128, 60 * MS, 124 * MS))
    made = machine(decode_layer_ns=MEASURED, prompt_layer_ns=chunks)
    assert made.decode.at(1) == pytest.approx(0.010)
    assert made.decode.at(10) == pytest.approx(0.016)
    assert made.decode.at(10, 256) == pytest.approx(0.017)
    assert made.decode.at_context(1024).at(10) == pytest.approx(0.020)
    assert made.decode.at(32) == pytest.approx(0.040), "in proportion beyond what was measured"
    assert made.prompt.at(80) == pytest.approx(0.045)
    assert made.prompt.at(256) == pytest.approx(0.12)
    four_chunks = (0.060 + 0.062 + 0.064 + 0.066) / 4
    assert made.prompt_s(512, 128) == pytest.approx(4 * (four_chunks))
    assert made.prompt_s(32, 128) == pytest.approx(0.030)


def test_no_announced_time_makes_a_peer_faster_than_its_rates() -> None:
    """1000 layers × tokens/s: a millisecond for each row of a layer, whatever is claimed."""
    made = machine(decode_layer_ns=((1, 1, 1), (16, 1, 1)))
    assert made.decode.at(1) == pytest.approx(0.001)
    assert made.decode.at(16) == pytest.approx(0.016)


@pytest.mark.parametrize("times", [(), ((4, 9, 9), (1, 9, 9)), ((4, 9, 9), (4, 9, 9))])
def test_without_times_or_with_nonsense_typical_shapes_are_taken(times) -> None:
    assert machine(decode_layer_ns=times) == machine()


def test_rates_that_fall_for_want_of_room_slow_no_measured_layer() -> None:
    """T_j falls because with more layers there is KV room for fewer sessions."""
    rates = {"tokens_per_s": (1000.0, 500.0, 200.0, 50.0)}
    assert machine(decode_layer_ns=MEASURED, **rates).stretch_of(4) == 1.0
    assert machine(**rates).stretch_of(4) == pytest.approx(5.0), "nothing else is known"


TRIPLES = st.lists(
    st.tuples(
        st.integers(1, 1 << 20),
        st.integers(0, RECORD_BOUNDS.nanoseconds_max),
        st.integers(0, RECORD_BOUNDS.nanoseconds_max),
    ),
    max_size=RECORD_BOUNDS.layer_times_max,
    unique_by=lambda each: each[0],
)


@examples(100)
@given(TRIPLES.map(sorted), st.lists(st.floats(1, 1e6), min_size=2, max_size=2))
def test_no_announced_time_falls_with_rows_or_context(times, rows: list[float]) -> None:
    made = machine(decode_layer_ns=tuple(times), prompt_layer_ns=tuple(times))
    few, many = sorted(rows)
    for curve in (made.decode, made.prompt):
        assert 0 <= curve.at(few) <= curve.at(many) * (1 + 1e-9) < math.inf
        assert curve.at(few) <= curve.at(few, 1000) * (1 + 1e-9)
        assert curve.at(few, 1000) <= curve.at(many, 1000) * (1 + 1e-9) < math.inf
    for count, _, _ in times:
        each_s = made.decode.at(count, ASSUMED.context_typical) / count
        assert 0.001 * (1 - 1e-9) <= each_s <= 2 * 0.001 * ASSUMED.slow_max, (
            "within the rates' bounds"
        )


def test_times_reach_the_planner_with_the_record() -> None:
    announced = replace(
        record("a", 0, 0),
        decode_layer_ns=MEASURED,
        prompt_layer_ns=((8, 1, 2),),
        up_bytes_per_s=1e6,
        down_bytes_per_s=0.0,
    )
    found = problem_of(announced.model, {"a": announced}, {}).nodes[0]
    assert found.decode_layer_ns == MEASURED
    assert found.prompt_layer_ns == ((8, 1, 2),)
    assert (found.up_bytes_per_s, found.down_bytes_per_s) == (1e6, ASSUMED.link_bytes_per_s_min)
    silent = problem_of(announced.model, {"a": record("a", 0, 0)}, {}).nodes[0]
    assert (silent.up_bytes_per_s, silent.down_bytes_per_s) == (None, None)


def test_what_a_peer_loads_is_not_taken_for_held() -> None:
    loads = replace(record("a", 0, 4), state=NodeState.LOADING)
    serves = record("b", 0, 4)
    problem = problem_of(loads.model, {"a": loads, "b": serves}, {})
    assert [each.current is None for each in problem.nodes] == [True, False]


def test_a_peer_that_serves_nothing_at_its_own_word_draws_no_layers() -> None:
    """It announces great rates and 20 s for a layer: an estimate of nothing is not "none made"."""
    honest = tuple(node(f"h{n}", steady(800.0, 8)) for n in range(4))
    liar = replace(node("liar", steady(8000.0, 8)), decode_layer_ns=((1, 20_000 * MS, 0),))
    alone = Problem(model=model(8), nodes=honest)
    beside = Problem(model=model(8), nodes=(*honest, liar))
    found = best_placement(beside, time_limit_s=2, seed=0, service=announced_service(beside))
    without = best_placement(alone, time_limit_s=2, seed=0, service=announced_service(alone))
    assert found.estimate_tokens_per_s >= 0.9 * without.estimate_tokens_per_s > 1


def test_rates_are_at_most_what_the_times_allow() -> None:
    """1000 layers × tokens/s by the rates; 16 rows in 32 ms are half of that."""
    said = record("a", 0, 0, rates=steady(1000.0, 4))

    def rates(*times: tuple[int, int, int]) -> tuple[float, ...]:
        told = replace(said, decode_layer_ns=times)
        return problem_of(told.model, {"a": told}, {}).nodes[0].tokens_per_s

    plain = tuple(steady(1000.0, 4))
    assert rates() == plain
    assert rates((1, 10 * MS, 0), (16, 16 * MS, 0)) == plain, "no faster than announced"
    assert rates((1, 10 * MS, 0), (16, 31 * MS, 47 * MS)) == pytest.approx([r / 2 for r in plain])
    assert max(rates((1, 20_000 * MS, 0))) == pytest.approx(0.05)


def test_announced_times_are_bounded_by_the_rates() -> None:
    made = machine(
        decode_layer_ns=(
            (1, RECORD_BOUNDS.nanoseconds_max, 0),
            (16, 0, RECORD_BOUNDS.nanoseconds_max),
        )
    )
    assert made.decode.at(1) == pytest.approx(0.001 * ASSUMED.slow_max)


def test_the_ends_take_room_at_the_ends_alone_and_no_span_that_fits_lacks_its_minimum() -> None:
    spec = model(8, embed_bytes=150, head_bytes=150, kv_bytes=1)
    full = replace(node("a", steady(10, 4), memory_bytes=4 * (100 + 20)), kv_tokens_min=20)
    problem = Problem(model=spec, nodes=(full,))
    service = service_from_rates(problem)
    kv = service.machines["a"].kv
    assert fits(spec, full, 2, 6)
    assert kv.of(2, 6, 8) == 4 * 20 == 4 * service.kv_tokens("a", 4)
    assert kv.of(2, 3, 8) == 4 * 120 - 100
    assert kv.of(0, 1, 8) == kv.of(7, 8, 8) == 4 * 120 - 100 - 150
    assert kv.of(0, 2, 2) == 2 * 20
