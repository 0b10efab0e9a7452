"""How ``pytest -n`` shares the suite among its workers."""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

PROCESSES = ("tests/browser/", "tests/e2e/", "tests/unit/test_mistakes.py")
ALONE = ("tests/e2e/test_fleet.py", "tests/e2e/test_footprint.py")
"""Tests that measure what peers cost, or start enough of them to need every core."""
PIECEWISE = ("tests/unit/node/model/test_families.py", "tests/unit/node/engine/test_fake_cuda.py")
"""Files that take minutes, near the end, and whose tests share nothing: handed out test by test."""


class ProcessesBesideFiles(LoadScopeScheduling):
    """``PROCESSES`` to the first worker, which share swarms, and what :mod:`tests.forked` imports
    once for each worker, and wait most of the time.

    The other files, which compute, one by one to whoever is free, ``PIECEWISE`` in parts. Once all
    that is over, ``ALONE`` to the first worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ALONE):
            return "alone"
        if nodeid.startswith(PIECEWISE):
            return nodeid
        return "processes" if nodeid.startswith(PROCESSES) else str(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: WorkerController) -> None:
        if "alone" in self.workqueue:
            self.workqueue.move_to_end("alone")
            if len(self.workqueue) == 1:
                first, *others = self.nodes
                if node is not first:
                    node.shutdown()
                    return
                if any(self._pending_of(self.assigned_work[other]) for other in others):
                    return
        super()._assign_work_unit(node)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        super().mark_test_complete(node, item_index, duration)
        if "alone" in self.workqueue:
            self._reschedule(self.nodes[0])  # which may have waited for this one
