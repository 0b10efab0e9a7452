"""An engine that computes nothing and takes as long as a GPU would: for links, not for numbers.

Its hidden states have the true size and hold zeros; its tokens are zeros, so requests to it ask for
no drafts (``speculate=False``). Batches are formed by the project's own scheduler. Time is the
event loop's, so it runs under a virtual clock, too.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from coordinator.policies.batching.scheduler import BatchLimits, Scheduler
from dht.messages.types import ModelSpec
from node.engine.work_item import WorkItem, WorkResult
from node.kv.page_names import NO_NAMES, PageNames
from node.sessions.open_checks import StageView


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTimes:
    """How long a step of one stage takes, in seconds."""

    step_s: float
    """Reading the stage's weights once: what the smallest step costs."""
    decode_s: float
    """Per decode row, beside that (reading its KV)."""
    prefill_s: float
    """Per prefill row, once more rows than ``step_s`` pays for."""

    def of(self, decodes: int, prefill_rows: int) -> float:
        """Time of a step by its number of rows."""
        rows_s = (prefill_rows + decodes) * self.prefill_s
        return max(self.step_s, rows_s) + decodes * self.decode_s


class TimedEngine:
    """Implements the stage's engine for layers ``[start, end)``."""

    wire_dtype = "float16"
    page_tokens = 16

    def __init__(
        self,
        spec: ModelSpec,
        span: tuple[int, int],
        times: GpuTimes,
        *,
        kv_tokens: int,
        limits: BatchLimits,
    ) -> None:
        self.hidden = spec.activation_bytes // 2
        self.steps = 0
        self.busy_s = 0.0
        self._spec = spec
        self._span = span
        self._times = times
        self.kv_tokens = kv_tokens
        self._kv: dict[str, int] = {}
        self._kv_spans: dict[str, range] = {}
        self._scheduler: Scheduler[WorkItem] = Scheduler(limits)
        self._running = False
        self.decoding: tuple[float, int] | None = None
        """When the step that runs began, on the loop's clock, and its decodes; None: there are
        none."""
        self.serving = True
        self._zeros = torch.zeros(1 << 12, self.hidden, dtype=torch.float16)

    @property
    def view(self) -> StageView:
        return StageView(
            fingerprint=self._spec.fingerprint,
            layers=self._spec.layers,
            context_tokens=self._spec.context_tokens,
            vocab=self._spec.vocab,
            start=self._span[0],
            end=self._span[1],
            serving=self.serving,
        )

    def kv_taken(self, layer: int) -> int:
        """KV tokens that sessions have taken on a layer."""
        return sum(n for key, n in self._kv.items() if layer in self._kv_spans[key])

    def open_kv(
        self,
        key: str,
        tokens: int,
        layers: tuple[int, int],
        likely_tokens: int,
        names: PageNames = NO_NAMES,
    ) -> int:
        """It keeps nothing for later sessions."""
        self._kv[key], self._kv_spans[key] = 0, range(*layers)
        return 0

    def keep_no_more(self, key: str) -> None: ...

    def settle(self, key: str, tokens: int) -> None: ...

    def extend_kv(self, key: str, tokens: int) -> bool:
        pages = -(-tokens // self.page_tokens) * self.page_tokens
        more = pages - self._kv[key]
        if more > 0:
            if any(self.kv_taken(at) + more > self.kv_tokens for at in self._ends(key)):
                return False
            self._kv[key] = pages
        return True

    def _ends(self, key: str) -> set[int]:
        """Layers of a session's span at which another's begins: one of them is the fullest."""
        span = self._kv_spans[key]
        return {span.start} | {s.start for s in self._kv_spans.values() if s.start in span}

    def free(self, key: str) -> None:
        self._kv.pop(key, None)
        self._kv_spans.pop(key, None)
        self._scheduler.drop(key)

    def drop(self, key: str) -> None:
        self._scheduler.drop(key)

    @property
    def state_tokens(self) -> int:
        return 0

    def resumable(self, key: str, position: int) -> int:
        return position

    def kv_row_bytes(self, start: int, end: int) -> int:
        return self._spec.kv_bytes_per_token_layer * (end - start)

    async def export_kv(self, key: str, position: int, tokens: int) -> bytes:
        if key not in self._kv:
            raise KeyError(key)
        return bytes(tokens * self.kv_row_bytes(*self._span))

    async def import_kv(
        self, key: str, layers: tuple[int, int], position: int, tokens: int, body: bytes
    ) -> str | None:
        return None if key in self._kv else "no KV is reserved"

    @property
    def backlog_tokens(self) -> int:
        return self._scheduler.backlog_tokens

    def start(self, on_results: Callable[[Sequence[WorkResult]], None]) -> None:
        self._on_results = on_results

    def submit(self, item: WorkItem) -> None:
        self._scheduler.add(item)
        if not self._running:
            self._running = True
            # What arrives in one turn of the loop runs in one step.
            asyncio.get_running_loop().call_soon(self._start)

    def together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _more_s(self, batch: Sequence[WorkItem]) -> float:
        """Time that a step takes beside that of its rows, in seconds."""
        return 0.0

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        batch = self._scheduler.next_batch(loop.time())
        if not batch:
            self._running = False
            wait_s = self._scheduler.wait_s(loop.time())
            if wait_s is not None:
                loop.call_later(wait_s, self._look_again)
            return
        self._running = True
        decodes = sum(item.decodes for item in batch)
        prefill_rows = sum(item.tokens for item in batch) - decodes
        took_s = self._times.of(decodes, prefill_rows) + self._more_s(batch)
        self.steps += 1
        self.busy_s += took_s
        self.decoding = (loop.time(), decodes) if decodes else None
        asyncio.get_running_loop().call_later(took_s, self._finish, batch)

    def _look_again(self) -> None:
        """Background work may run now, unless something else does."""
        if not self._running:
            self._start()

    def _finish(self, batch: list[WorkItem]) -> None:
        self.decoding = None
        results = [self._result(item) for item in batch if item.session in self._kv]
        self._start()
        self._on_results(results)

    def _result(self, item: WorkItem) -> WorkResult:
        if item.end == self._spec.layers:
            return WorkResult(item=item, token_ids=(0,) if item.sampling is not None else ())
        return WorkResult(item=item, hidden=self._zeros[: item.tokens])
