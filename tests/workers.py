"""How ``pytest -n`` shares the suite among its workers."""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ALONE = ("tests/e2e/", "tests/browser/")
"""Start processes that need every core: one after the other, and beside nothing else."""


class ProcessesLast(LoadScopeScheduling):
    """File by file to whoever is free; then, once all that is over, ``ALONE`` to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(ALONE) else str(super()._split_scope(nodeid))

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
