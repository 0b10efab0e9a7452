"""The engine: runs batches of rows of many sessions through the layers that this peer holds.

It is synchronous and used from one thread (:mod:`node.engine.worker`), except its pool
(:mod:`node.kv.pool`), in which sessions are opened and freed from another.
Importable without hivemind.
"""

import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from coordinator.policies.admission.config import ADMISSION
from dht.errors import MachineError, UserError
from dht.messages.session import OVERFLOWS
from dht.messages.types import kv_tokens_least, layers_max, layers_text, stage_bytes
from node.attention.block_table import AttendPages
from node.device.failure import AcceleratorError, lost
from node.device.heap import give_back
from node.engine.batch_rows import StepRows
from node.engine.model_runner import ModelRunner
from node.engine.work_check import WorkBounds, is_unsound, unsound_of, work_refusal
from node.engine.work_item import WorkItem, WorkResult
from node.kernels.choice import experts_kernel, pages_kernel, rows_kernels
from node.kernels.kv_rows import tried_writer
from node.kernels.moe import GroupedKernel
from node.kv.export import KvRows
from node.kv.layer_pool import LayerPool
from node.kv.pool import KvPool
from node.model.layer_range import LoadedRange, ModelLayout
from node.weights.hashes import Progress
from node.weights.store import WeightStore

__all__ = ["Engine", "EngineConfig", "KvRows", "WorkItem", "WorkResult"]

logger = logging.getLogger(__name__)

TRIAL_ROWS = 16
"""Rows that try a load in float16: enough that every expert of most mixtures runs."""
KV_TOKENS_MOST = 1 << 20


class DeviceLostError(MachineError):
    """The device has failed for good in this process, which has to start anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    store: WeightStore
    name: str
    device: str = "cpu"
    dtype: str = "float32"
    quantize: str | None = None
    """``int8`` or ``int4`` for the layers' weights; see :mod:`node.model.linear.quantize`."""
    memory_bytes: int
    """Memory for weights and KV pages together."""
    page_tokens: int = ADMISSION.page_tokens
    threads: int | None = None
    kernels: bool = True
    """Whether to use our own kernels where the device can run them; see
    :mod:`node.kernels.choice`."""
    keep_prefixes: bool = True
    """Whether pages with a name outlive their session while there is room."""
    layout: ModelLayout | None = None
    """The model's parts, if they are known: a model's own head is a model within its files."""


class Engine:
    """Runs a contiguous range of layers for many sessions at once."""

    def __init__(self, config: EngineConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.device = torch.device(config.device)
        self.layout = config.layout or ModelLayout.of(
            config.store, config.dtype, config.quantize, device=config.device
        )
        self.spec = self.layout.spec(config.name)
        self._width = self.layout.structure.row_width
        self.state_tokens = self.layout.state_tokens
        """KV tokens that a session is charged with for the states of its layers."""
        self.kv_tokens_min = kv_tokens_least(self.spec)
        self.layers_max = self._count_layers()
        self.held = (0, 0)
        self.bytes_loaded = 0
        rows = rows_kernels(self.device, self.layout.dtype) if config.kernels else None
        write_rows = None if rows is None else rows.write_rows
        self._writer = cache(
            partial(tried_writer, write_rows, dtype=self.layout.dtype, device=self.device)
        )
        """What writes keys and values of a shape, tried once."""
        self.loaded = LoadedRange(self.layout, self.device, rows)
        """The layers held, and the parts beside them."""
        self._attend_pages: AttendPages | None = None
        self._experts: GroupedKernel | None = None
        if config.kernels:
            self._attend_pages = pages_kernel(self.device, self.layout.dtype)
            self._experts = experts_kernel(self.device, self.layout.dtype)
        self._pools: dict[int, LayerPool] = {}
        self.kv = self._kv_pool(0)
        """The sessions' KV. A load makes another pool."""
        self._steps = self._step_run()

    def _count_layers(self) -> int:
        """Maximum number of layers that fits in the model; UserError if not even one does."""
        spec = self.spec
        count = layers_max(spec, self.config.memory_bytes, self.kv_tokens_min)
        if count:
            return count
        least = min(stage_bytes(spec, at, at + 1, self.kv_tokens_min) for at in range(spec.layers))
        raise UserError(self._too_little("one layer", least))

    def _too_little(self, wanted: str, least_bytes: int) -> str:
        least_gib = math.ceil(least_bytes / 2**30 * 10_000) / 10_000
        return (
            f"{self.config.memory_bytes / 2**30:.4f} GiB cannot hold {wanted} of {self.spec.name}:"
            f" --memory {least_gib:.4f} would do (GiB, with room for {self.kv_tokens_min} tokens)"
        )

    @property
    def by_pages(self) -> bool:
        """Whether this engine has a kernel that reads contexts in place, for trial at each load."""
        return self._attend_pages is not None

    @property
    def reads_in_place(self) -> bool:
        """Whether the kernel that reads contexts in place passed its trial on the layers held."""
        return self._steps.reads_in_place

    def load(
        self,
        start: int,
        end: int,
        progress: Progress | None = None,
        *,
        made_up: bool = False,
        left_bytes: int = 0,
    ) -> int:
        """Hold exactly layers ``[start, end)`` and give the rest of the memory to KV pages.

        Sessions must have ended: their KV is gone afterwards. Returns bytes read from disk.
        ``left_bytes`` of the lent memory are for something else.
        ``made_up``: load random weights, for timing only; the next load forgets them. Raises
        UserError if the range does not fit the lent memory or cannot be run, MachineError if there
        is less memory than lent or the device has failed.
        """
        if not 0 <= start < end <= self.spec.layers:
            raise UserError(f"layers [{start}, {end}) asked of {self.spec.layers}")
        pages = self._pages_beside(start, end, left_bytes)
        if pages < 1:
            least = stage_bytes(self.spec, start, end, self.kv_tokens_min)
            raise UserError(self._too_little(layers_text((start, end)), least))
        self._drop_pools()
        try:
            self.bytes_loaded = self.loaded.set(start, end, progress, made_up=made_up)
            self._pools.update((index, self._pool(pages, index)) for index in range(start, end))
            self._steps.warm_up()
            if self._experts is not None:
                self._steps.use_experts(self._experts)
            if self._attend_pages is not None:
                self._steps.use_pages(self._attend_pages)
        except AcceleratorError as error:
            self._raise_if_lost(error)
            raise
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]  # the rest is about torch's settings
        else:
            self.kv = self._kv_pool(pages)
            self.held = (start, end)
            if not made_up:
                self._refuse_overflow()
            give_back()  # weights that were replaced, and copies made while loading
            return self.bytes_loaded
        self.unload()  # after the handler: until then the exception's traceback holds the tensors
        lent_gib = self.config.memory_bytes / 2**30
        raise MachineError(  # not a UserError: a new start asks again how much memory is free
            f"{self.device} ran out of memory with {layers_text((start, end))} of {self.spec.name}"
            f" ({reason}): lend less than {lent_gib:.1f} GiB with --memory, or close what else"
            " uses it"
        )

    def _refuse_overflow(self) -> None:
        """Raise UserError if rows of a usual size become numbers beyond float16 in the layers held.

        A layer scales what comes in, and its own weights make it large again, so made up rows tell.
        """
        if self.layout.dtype is not torch.float16:
            return
        start, end = self.held
        generator = torch.Generator().manual_seed(0)
        tokens = min(TRIAL_ROWS, self.spec.context_tokens, self.kv.free_tokens)
        numbers = torch.randn(tokens, self._width, generator=generator)
        ids = torch.randint(0, self.spec.vocab, (tokens,), generator=generator).tolist()
        rows = self.layout.structure.trial_rows(start, numbers)
        item = WorkItem(
            session="trial",
            start=start,
            end=end,
            position=0,
            token_ids=tuple(ids) if start == 0 else None,
            hidden=rows if start else None,
        )
        if self.kv.reserve(item.session, tokens) is not None:
            return
        try:
            (result,) = self.step([item])
        finally:
            self.kv.free(item.session)
        if result.error is not None and OVERFLOWS in result.error:
            self.unload()
            raise UserError(f"{self.spec.name} overflows in float16, use bfloat16: {result.error}")

    def unload(self) -> None:
        """Free the memory of weights and KV; sessions must have ended."""
        self._drop_pools()
        self.loaded.clear()
        gc.collect()
        give_back()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_pools(self) -> None:
        """Drop the pools and all references to them: new weights may need their memory."""
        self.held, self._pools = (0, 0), {}
        self.kv, self._steps = self._kv_pool(0), self._step_run()

    def _pages_beside(self, start: int, end: int, left_bytes: int = 0) -> int:
        """Number of KV pages that fit in memory beside the weights of layers ``[start, end)``."""
        weights = stage_bytes(self.spec, start, end, 0) + left_bytes
        per_token = self.spec.kv_bytes_per_token_layer * (end - start)
        tokens = min((self.config.memory_bytes - weights) // per_token, KV_TOKENS_MOST)
        return tokens // self.config.page_tokens

    def kv_tokens_beside(self, start: int, end: int, left_bytes: int = 0) -> int:
        """KV tokens that fit in memory beside the weights of layers ``[start, end)`` and
        ``left_bytes`` for other uses."""
        return self._pages_beside(start, end, left_bytes) * self.config.page_tokens

    def _step_run(self) -> ModelRunner:
        return ModelRunner(
            self.loaded, self.layout, self.spec, self._pools, self.config.page_tokens
        )

    def _kv_pool(self, pages: int) -> KvPool:
        # Where keys depend on the context's length, equal tokens need not have equal ones; a state
        # belongs to one position.
        structure = self.layout.structure
        keeps = self.config.keep_prefixes and not (structure.by_length or structure.keeps_state)
        page_tokens = self.config.page_tokens
        return KvPool(self._pools, pages, page_tokens, structure.new_state, keeps=keeps)

    def _pool(self, pages: int, layer: int) -> LayerPool:
        rows = pages * self.config.page_tokens + 1
        shape = self.layout.structure.kv_shapes[layer]
        return LayerPool.empty(shape, rows, self.layout.dtype, self.device, self._writer(shape))

    def step(self, items: Sequence[WorkItem]) -> list[WorkResult]:
        """Run one batch; results come in the order of the items.

        A batch has at most one item per session, each at the session's position. An item gets an
        error if it cannot run (:func:`node.engine.work_check.work_refusal`), fails, or yields
        values that are not finite; its session stays where it stood, and the others go on. Raises
        DeviceLostError if the device has failed for good.
        """
        results: list[WorkResult | None] = [None] * len(items)
        rows: list[StepRows] = []
        sessions: set[str] = set()
        bounds = WorkBounds(
            start=self.held[0],
            end=self.held[1],
            page_tokens=self.config.page_tokens,
            width=self._width,
            vocab=self.spec.vocab,
            context_tokens=self.spec.context_tokens,
            carried=self.layout.structure.carried,
            unsound=unsound_of(items),
        )
        for index, item in enumerate(items):
            reservation = self.kv.get(item.session)
            error = work_refusal(item, reservation, bounds)
            if error is None and reservation is not None and item.position < reservation.written:
                error = self.kv.rewind(item.session, reservation, item.position)
            if item.session in sessions:
                error = "two items of one session in a step"
            if error is None and reservation is not None:
                if self.kv.grow(item.session, reservation, item.position + item.tokens):
                    sessions.add(item.session)
                    rows.append(StepRows(index=index, item=item, reservation=reservation))
                    continue
                error = "this session has ended"
            unsound = is_unsound(item, bounds)
            results[index] = WorkResult(item=item, error=error, unsound_input=unsound)
        if rows:
            with torch.inference_mode():
                for row, result in zip(rows, self._run_apart(rows), strict=True):
                    item = row.item
                    if result.error is None:
                        row.reservation.layers = (item.start, item.end)
                        end = item.position + item.tokens
                        self.kv.ran(item.session, row.reservation, item.position, end)
                    results[row.index] = result
        return [result for result in results if result is not None]

    def run_rows(self, start: int, end: int, rows: torch.Tensor) -> torch.Tensor | None:
        """Output of layers ``[start, end)`` for the hidden states of ``rows``, ``[rows, width]``,
        in a session of their own.

        None where the layers are not held, or there is no room for the session. Integers that rows
        carry beside hidden states are set to 0.
        """
        name, structure = "rows", self.layout.structure
        if not self.held[0] <= start < end <= self.held[1]:
            return None
        if self.kv.reserve(name, len(rows)) is not None:
            return None
        item = WorkItem(
            session=name,
            start=start,
            end=end,
            position=0,
            hidden=structure.trial_rows(start, rows),
            returns_rows=True,
        )
        try:
            (result,) = self.step([item])
        finally:
            self.kv.free(name)
        if structure.carried is None or result.hidden is None:
            return result.hidden
        return result.hidden[:, : structure.carried.hidden.width]

    def _raise_if_lost(self, error: Exception) -> None:
        """Raise DeviceLostError if the device itself reported ``error`` and no longer computes."""
        if not isinstance(error, AcceleratorError):
            return
        try:
            failed = lost(self.device) is not None
        except RuntimeError:  # for example too little memory, which may come back
            return
        if failed:
            raise DeviceLostError(_line(error)) from error

    def _run_apart(self, rows: list[StepRows]) -> list[WorkResult]:
        """Run rows together; if that raises, in halves, until the error falls on its own item.

        Running an item again writes the same KV to the same rows.
        """
        try:
            return self._steps.run(rows)
        except Exception as error:  # whatever one session's rows raise fails that session alone
            self._raise_if_lost(error)
            item = rows[0].item
            told = f"layers [{item.start}, {item.end}) failed: {_line(error)}"
            if len(rows) == 1:
                logger.exception("layers [%d, %d) failed for one session", item.start, item.end)
        if len(rows) == 1:
            return [WorkResult(item=item, error=told)]
        # Outside the handler, where the exception no longer holds the memory of what was computed.
        half = len(rows) // 2
        return self._run_apart(rows[:half]) + self._run_apart(rows[half:])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
