"""The process that a coordinator starts for each solve."""

import subprocess
import sys

import msgspec

from coordinator.planning.solve import SolveRequest
from dht.messages.types import PlanVersion, Problem
from tests.unit.coordinator.problems import model, node, steady

SAY_IMPORTS = """
import sys
from coordinator.planning import solve

solved = solve.solve_request

def say(request):
    before = set(sys.modules)
    answer = solved(request)
    assert answer.searched.columns, answer
    new = {name.partition(".")[0] for name in sys.modules.keys() - before}
    sys.exit("imported " + " ".join(sorted(new - sys.stdlib_module_names)))

solve.solve_request = say
solve.main()
"""


def test_a_solve_spends_none_of_its_time_on_imports() -> None:
    """OR-Tools takes up to half a second to import, of the three that a quick solve has."""
    nodes = tuple(node(f"p{n}", steady(10 + 3 * n, 5)) for n in range(4))
    request = SolveRequest(
        problem=Problem(model=model(8), nodes=nodes),
        version=PlanVersion(term=1, counter=1),
        coordinator="a",
        time_limit_s=1.0,
        seed=1,
        now_unix_s=5.0,
    )
    ended = subprocess.run(
        [sys.executable, "-c", SAY_IMPORTS],
        input=msgspec.msgpack.encode(request),
        capture_output=True,
        check=False,
    )
    assert ended.stderr.decode() == "imported \n"
