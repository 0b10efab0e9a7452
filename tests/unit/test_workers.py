"""The suite's scheduler, on workers that only note what they are sent."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist", reason="the suite runs in one process here")

from tests.workers import ALONE, PIECEWISE, PROCESSES, SHARING, ProcessesBesideFiles

FILES = (
    *("tests/browser/test_page.py", "tests/e2e/test_hub.py", "tests/e2e/test_moves.py"),
    *(*SHARING, *ALONE, *PIECEWISE, "tests/unit/test_mistakes.py"),
    *(f"tests/unit/dht/test_{name}.py" for name in "abcdefgh"),
)


class Worker(SimpleNamespace):
    """Takes what it is sent."""

    __hash__ = object.__hash__

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_each_test_is_run_once_beside_what_it_may_run_beside(seed: int, count: int) -> None:
    chance = random.Random(seed)
    tests = [f"{file}::test_{n}" for file in FILES for n in range(chance.randint(1, 6))]
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=False),
        getvalue=lambda _: [f"{count}*popen"],
    )
    log: Any = SimpleNamespace(loadscopesched=lambda *_: None)
    scheduler = ProcessesBesideFiles(config, log)
    workers: Any = [
        Worker(queue=[], shutting_down=False, gateway=SimpleNamespace(id=str(number)))
        for number in range(count)
    ]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    ran: dict[str, Any] = {}
    while busy := [worker for worker in workers if worker.queue]:
        worker = chance.choice(busy)
        index = worker.queue.pop(0)
        assert tests[index] not in ran
        assert not tests[index].startswith(ALONE) or busy == [worker]
        ran[tests[index]] = worker
        scheduler.mark_test_complete(worker, index)
    assert len(ran) == len(tests)
    assert all(worker.shutting_down for worker in workers)
    assert next(iter(tests)).startswith(PROCESSES)
    assert ran[tests[0]] is workers[0]
    for together in (SHARING, *FILES):
        if together not in PIECEWISE:
            own = {id(by) for test, by in ran.items() if test.startswith(together)}
            assert len(own) == 1, together
