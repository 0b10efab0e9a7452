"""How ``pytest -n`` shares the suite among its workers."""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

PROCESSES = ("tests/browser/", "tests/e2e/", "tests/unit/test_mistakes.py")
"""Tests that start peers, browsers and commands, and wait most of the time."""
SHARING = (
    "tests/e2e/test_answers.py",
    "tests/e2e/test_client_alone.py",
    "tests/e2e/test_logprobs.py",
    "tests/e2e/test_transformers_and_chat.py",
)
"""Of those, the ones that share swarms."""
SHARED = "tests/e2e/: shared swarms"
ALONE = ("tests/e2e/test_fleet.py", "tests/e2e/test_footprint.py")
"""Tests that measure what peers cost, or start enough of them to need every core."""
LAST = "alone"
PIECEWISE = ("tests/unit/node/model/test_families.py", "tests/unit/node/engine/test_fake_cuda.py")
"""Files that take minutes, near the end, and whose tests share nothing: handed out test by test."""


class ProcessesBesideFiles(LoadScopeScheduling):
    """Files one by one to whoever is free, ``PIECEWISE`` in parts, ``SHARING`` together.

    The first worker begins with ``PROCESSES``, the others with what computes; who has no more of
    its kind takes of the other. Once all that is over, ``ALONE`` to the first worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ALONE):
            return LAST
        if nodeid.startswith(PIECEWISE):
            return nodeid
        return SHARED if nodeid.startswith(SHARING) else str(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: WorkerController) -> None:
        first, *others = self.nodes
        if LAST in self.workqueue:
            self.workqueue.move_to_end(LAST)
            if len(self.workqueue) == 1:
                if node is not first:
                    node.shutdown()
                    return
                if any(self._pending_of(self.assigned_work[other]) for other in others):
                    return
        for scope in self.workqueue:
            if scope != LAST and scope.startswith(PROCESSES) == (node is first):
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        super().mark_test_complete(node, item_index, duration)
        if LAST in self.workqueue:
            self._reschedule(self.nodes[0])  # which may have waited for this one
