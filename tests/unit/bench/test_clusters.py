"""Made clusters: the same wherever they are made, in two halves, and each can hold its model."""

import pytest

from bench.planner.announced import announced_problem
from bench.planner.clusters import HELD_OUT, NAMES, TUNING, load
from coordinator.planning.heuristics.heuristics import coverage
from dht.messages.types import SINK, SOURCE

SOME = (*NAMES[:6], *NAMES[-4:])


def test_there_are_a_hundred_of_which_half_are_never_tuned_on() -> None:
    assert len(set(NAMES)) == 100
    assert len(TUNING) == len(HELD_OUT) == 50
    assert set(TUNING) | set(HELD_OUT) == set(NAMES)


@pytest.mark.parametrize("name", SOME)
def test_a_cluster_is_the_same_each_time_and_can_be_planned(name: str) -> None:
    problem, profiles = load(name)
    assert load(name) == (problem, profiles)
    names = {node.peer_id for node in problem.nodes}
    assert profiles.peers.keys() == names
    assert {end for link in problem.links for end in (link.source, link.target)} <= names
    ends = {(SOURCE, name) for name in names} | {(name, SINK) for name in names}
    assert profiles.client_links.keys() == ends
    known = announced_problem(problem, profiles)
    assert coverage(known).layers == known.model.layers


def test_homes_send_more_slowly_than_they_receive() -> None:
    problem, _ = load("homes-03")
    assert sum(n.up_bytes_per_s for n in problem.nodes) < 0.7 * sum(
        n.down_bytes_per_s for n in problem.nodes
    )


def test_an_unknown_name_is_no_cluster() -> None:
    with pytest.raises(KeyError):
        load("helix-50")
