"""What the estimate takes from what peers announce of their layers' times."""

from dataclasses import replace

import pytest

from coordinator.planning.placement import best_placement
from coordinator.problem.from_records import problem_of
from coordinator.problem.service import SLOW_MAX, announced_service, service_from_rates
from dht.messages.types import NodeState, Problem
from tests.unit.coordinator.problems import model, node, record, steady

MEASURED = ((1, 0.010), (4, 0.012), (16, 0.020))


def machine(**announced):
    peer = replace(node("a", steady(1000.0, 4)), **announced)
    problem = Problem(model=model(8), nodes=(peer,))
    return service_from_rates(problem).machines["a"]


def test_announced_times_are_used() -> None:
    made = machine(decode_layer_s=MEASURED, prompt_layer_s=((32, 0.03), (128, 0.06)))
    assert made.decode.at(1) == pytest.approx(0.010)
    assert made.decode.at(10) == pytest.approx(0.016)
    assert made.decode.at(32) == pytest.approx(0.040), "in proportion beyond what was measured"
    assert made.prompt.at(80) == pytest.approx(0.045)
    assert made.prompt.at(256) == pytest.approx(0.12)


def test_no_announced_time_makes_a_peer_faster_than_its_rates() -> None:
    """1000 layers × tokens/s: a millisecond for each row of a layer, whatever is claimed."""
    made = machine(decode_layer_s=((1, 1e-9), (16, 1e-9)))
    assert made.decode.at(1) == pytest.approx(0.001)
    assert made.decode.at(16) == pytest.approx(0.016)


@pytest.mark.parametrize("times", [(), ((4, 0.1), (1, 0.2)), ((4, 0.1), (4, 0.1))])
def test_without_times_or_with_nonsense_typical_shapes_are_taken(times) -> None:
    assert machine(decode_layer_s=times) == machine()


def test_times_reach_the_planner_with_the_record() -> None:
    announced = replace(record("a", 0, 0), decode_layer_s=MEASURED, prompt_layer_s=((8, 0.1),))
    problem = problem_of(announced.model, {"a": announced}, {})
    assert problem.nodes[0].decode_layer_s == MEASURED
    assert problem.nodes[0].prompt_layer_s == ((8, 0.1),)


def test_what_a_peer_loads_is_not_taken_for_held() -> None:
    loads = replace(record("a", 0, 4), state=NodeState.LOADING)
    serves = record("b", 0, 4)
    problem = problem_of(loads.model, {"a": loads, "b": serves}, {})
    assert [each.current is None for each in problem.nodes] == [True, False]


def test_a_peer_that_serves_nothing_at_its_own_word_draws_no_layers() -> None:
    """It announces great rates and 20 s for a layer: an estimate of nothing is not "none made"."""
    honest = tuple(node(f"h{n}", steady(800.0, 8)) for n in range(4))
    liar = replace(node("liar", steady(8000.0, 8)), decode_layer_s=((1, 20.0),))
    alone = Problem(model=model(8), nodes=honest)
    beside = Problem(model=model(8), nodes=(*honest, liar))
    found = best_placement(beside, time_limit_s=2, seed=0, service=announced_service(beside))
    without = best_placement(alone, time_limit_s=2, seed=0, service=announced_service(alone))
    assert found.estimate_tokens_per_s >= 0.9 * without.estimate_tokens_per_s > 1


def test_announced_times_are_bounded_by_the_rates() -> None:
    made = machine(decode_layer_s=((1, 1e9), (16, 1e9)))
    assert made.decode.at(1) == pytest.approx(0.001 * SLOW_MAX)
