"""The planner's view of a cluster file."""

from dataclasses import replace
from pathlib import Path

from coordinator.commands.planner_view import read_service
from coordinator.problem.service import service_from_rates
from tests.unit.coordinator.helix import DATA, problem_of


def test_machines_are_read_beside_the_cluster(tmp_path: Path) -> None:
    problem, path = problem_of("geo24", "70b"), DATA / "clusters" / "geo24.json"
    read = read_service(path, problem, hub=True)
    assert read.machines.keys() == read.hub_delay_s.keys() == {n.peer_id for n in problem.nodes}
    assert all(each.overhead_s_per_byte > 0 for each in read.machines.values())

    living = read_service(path, problem)
    assert living == replace(read, hub_delay_s={}), "live peers close the ring themselves"

    (tmp_path / "clusters").mkdir()
    alone = tmp_path / "clusters" / "geo24.json"
    alone.write_bytes(path.read_bytes())
    assert read_service(alone, problem) == service_from_rates(problem)
