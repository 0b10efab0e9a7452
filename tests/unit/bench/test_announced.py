"""What stand-ins of Helix's machines announce: its tables, through the node's own code."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.planner.announced import (
    TableLayer,
    announced,
    announced_links,
    announced_problem,
    errors,
    measured,
)
from coordinator.commands.swarm_file import read_swarm
from coordinator.problem.service import announced_service
from dht.messages import codec
from dht.messages.types import RECORD_BOUNDS, fits

CLUSTERS = Path(__file__).parents[3] / "bench" / "data" / "helix" / "clusters"
FIGURES_BYTES_MAX = 300


@pytest.mark.parametrize("model", ["30b", "70b"])
def test_a_planner_reads_the_tables_within_their_own_steps(model: str) -> None:
    """Tables of whole milliseconds jump by a third from one point to the next."""
    cluster = CLUSTERS / "het42.json"
    problem, profiles = read_swarm(cluster, model)
    read = announced_problem(problem, profiles)
    machines = announced_service(read).machines
    sorts = {profile: name for name, profile in profiles.peers.items()}
    assert len(sorts) == 7
    for profile, name in sorts.items():
        decode, prompt = errors(profile, machines[name])
        assert decode.mean < 0.11
        assert decode.largest < 0.35
        assert prompt.mean < 0.02
        assert prompt.largest < 0.04
        exact = next(node for node in problem.nodes if node.peer_id == name)
        held = len(exact.tokens_per_s)
        room = machines[name].kv.beside[held - 1]
        assert room == pytest.approx(profile.kv.beside[held - 1], rel=1e-3)
    for node in read.nodes:
        held = len(node.tokens_per_s)
        assert fits(read.model, node, 0, held)
        assert all(a > b for a, b in zip(node.tokens_per_s, node.tokens_per_s[1:], strict=False))


def test_records_stay_small_and_carry_what_was_measured() -> None:
    for record in announced(*read_swarm(CLUSTERS / "single24.json", "70b")):
        assert 8 <= len(record.decode_layer_ns) <= RECORD_BOUNDS.layer_times_max
        assert record.decode_layer_ns[-1][0] == 256
        assert record.up_bytes_per_s == 1e10
        none = dict.fromkeys(("decode_layer_ns", "prompt_layer_ns"), ())
        none |= dict.fromkeys(("up_bytes_per_s", "down_bytes_per_s"))
        bare = len(codec.encode(replace(record, **none)))
        assert len(codec.encode(record)) - bare < FIGURES_BYTES_MAX


def test_each_peer_tells_as_many_links_as_a_record_holds() -> None:
    told = announced_links(read_swarm(CLUSTERS / "het42.json", "70b")[0])
    assert {len(record.links) for record in told.values()} == {RECORD_BOUNDS.links_max}
    assert all(link.target == name for name, record in told.items() for link in record.links)
    first = {frozenset(link.source for link in record.links) for record in told.values()}
    assert len(first) > len(told) / 2, "peers probe different links"


def test_a_clock_of_steps_is_all_that_passes() -> None:
    problem, profiles = read_swarm(CLUSTERS / "single24.json", "70b")
    name = problem.nodes[0].peer_id
    layer = TableLayer(profiles.peers[name], kv_tokens=1 << 16, context_tokens=2048)
    with layer.sessions(2, 1) as step_s:
        assert step_s(1) + step_s(2) == pytest.approx(layer.clock())
    memory_bytes, profile = measured(problem, problem.nodes[0], profiles.peers[name])
    assert profile.fit_error is not None
    assert profile.fit_error < 0.25
    assert memory_bytes > problem.nodes[0].memory_bytes
