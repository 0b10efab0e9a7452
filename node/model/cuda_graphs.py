"""Decode steps as CUDA graphs, one for each size of step, so that a step is one launch.

A graph replays on the tensors with which it was captured. A step is therefore padded to a bucket
of rows and a bucket of context, and staged into the buffers of that bucket; rows that pad it write
to a row of the pool that belongs to nobody, and what comes out of them is dropped. Where a kernel
reads contexts page by page, one bucket of context serves most steps, and its graphs are captured at
load; where contexts are copied by a table, padding is read too, and graphs are captured as steps
come. Capturing itself is a function that is passed in: everything else runs, and is tested, without
CUDA. Has not been run on a GPU yet.
"""

import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from node.attention.block_table import BlockTable
from node.attention.decode_table import TABLE_BYTES_MAX, DecodeRows
from node.attention.mask_rules import MaskRule
from node.attention.paged_attention import Step
from node.model.argument_tracing import Arguments, Constant
from node.model.structure import ModelStructure

logger = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
COLUMNS_LEAST = 128
"""Of context; buckets double from here, so that at most half of what is read is padding."""
PAGES_COLUMNS_LEAST = 4096
"""Of context where it is read page by page."""
PAGES_COLUMNS_STEP = 8
GRAPHS_MAX = 64
"""Kept at a time, those used last; each holds its buffers and its intermediate results."""
BYTES_MAX = TABLE_BYTES_MAX
"""Of keys and values that a graph's table, padding included, may copy in a layer."""
WARM_UPS = 3
"""Runs before a capture, in which libraries choose their kernels and allocate workspaces."""

Run = Callable[[int, int, Step, Tensor, Tensor], Tensor]
"""(start, end, step, hidden ``[rows, hidden]``, positions ``[rows]``) → ``[rows, hidden]``."""
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures what a function does to tensors; what it returns does that again."""


def row_bucket(rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None behind the largest."""
    return next((size for size in ROW_BUCKETS if size >= rows), None)


def column_bucket(columns: int) -> int:
    """The smallest bucket that holds a context of so many tokens."""
    size = COLUMNS_LEAST
    while size < columns:
        size *= 2
    return size


def page_bucket(columns: int) -> int:
    """Likewise for contexts that are read page by page, which cost nothing where they end."""
    size = PAGES_COLUMNS_LEAST
    while size < columns:
        size *= PAGES_COLUMNS_STEP
    return size


def recordable(anatomy: ModelStructure, start: int, end: int) -> bool:
    """Whether layers ``[start, end)`` and what makes their arguments can be captured at all."""
    return anatomy.packed and (
        all(traits.recordable for traits in anatomy.traits[start:end])
        and not any(looks_at_sessions(call) for call in anatomy.calls[start:end])
        and all(source.recordable and not source.by_length for source in anatomy.sources)
    )


def looks_at_sessions(call: Arguments) -> bool:
    """Whether a layer's mask is a predicate, which is asked session by session."""
    origins = [*call.positional, *(origin for _, origin in call.named)]
    rules = [o.value for o in origins if isinstance(o, Constant) and isinstance(o.value, MaskRule)]
    return any(rule.predicate is not None for rule in rules)


@dataclass(slots=True, kw_only=True)
class Buffers:
    """What a graph reads and writes, at fixed addresses."""

    hidden: Tensor
    positions: Tensor
    slots: Tensor
    decode: DecodeRows | None
    """Where contexts are, by a table; or else"""
    paged: BlockTable | None
    """page by page."""
    scrap_row: int
    out: Tensor | None = field(default=None)

    @classmethod
    def of(
        cls, rows: int, columns: int, like: Tensor, scrap_row: int, page_tokens: int = 0
    ) -> "Buffers":
        """For steps of so many rows of the width, dtype and device of ``like``.

        Their contexts are found by a table, or by pages of ``page_tokens`` where that is not 0.
        """
        device = like.device

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.long, device=device)

        decode = paged = None
        if page_tokens:
            paged = BlockTable.room(rows, columns, page_tokens, scrap_row // page_tokens, device)
        else:
            decode = DecodeRows(spans=full(1, rows, 2), table=full(scrap_row, rows, columns))
        return cls(
            hidden=like.new_zeros(rows, like.shape[-1]),
            positions=full(0, rows),
            slots=full(scrap_row, rows),
            decode=decode,
            paged=paged,
            scrap_row=scrap_row,
        )

    def stage(self, hidden: Tensor, positions: Tensor, step: Step) -> None:
        """Put a step's rows first and let the others write where nobody reads."""
        assert isinstance(step.write_slots, Tensor)  # noqa: S101 - so it is in decode steps
        count = hidden.shape[0]
        self.hidden[:count] = hidden
        self.hidden[count:] = 0
        self.positions[:count] = positions
        self.positions[count:] = 0
        self.slots[:count] = step.write_slots
        self.slots[count:] = self.scrap_row
        if self.paged is not None and step.paged is not None:
            self.paged.stage(step.paged, self.scrap_row // self.paged.page_tokens)
        if self.decode is not None and step.decode is not None:
            self._stage_table(self.decode, step.decode)

    def _stage_table(self, into: DecodeRows, rows: DecodeRows) -> None:
        count, columns = rows.table.shape
        into.spans[:count] = rows.spans
        into.spans[count:] = 1
        # Behind a row's end stands its last token: masked, but a number in any case.
        into.table[:count, :columns] = rows.table
        into.table[:count, columns:] = rows.table[:, -1:]
        into.table[count:] = self.scrap_row


def _size_of(step: Step) -> tuple[int, int] | None:
    """Rows and columns of a step that a graph could run; None where none could."""
    if step.compared is not None:  # which waits for the device
        return None
    if step.paged is not None:
        return (len(step.paged.spans), step.paged.columns) if step.paged.decode else None
    if step.decode is None or not step.decode.table.numel():
        return None
    rows, columns = step.decode.table.shape
    return rows, columns


def _token_bytes(step: Step, start: int, end: int) -> int:
    """Of one token's keys and values in a layer of ``[start, end)``, at most."""
    pools = [step.pools[index] for index in range(start, end)]
    return max(p.keys[0].nbytes + p.values[0].nbytes for p in pools)


@dataclass(slots=True, kw_only=True)
class _Graph:
    buffers: Buffers
    replay: Callable[[], None]


class CudaGraphs:
    """Graphs of the layers that are held, made when a step of their size first comes."""

    def __init__(self, run: Run, capture: Capture) -> None:
        """``run`` runs layers without a graph; see :data:`Capture`."""
        self._run = run
        self._capture = capture
        self._graphs: OrderedDict[tuple[int, int, int, int], _Graph] = OrderedDict()
        self._failed: set[tuple[int, int]] = set()
        self._too_large: set[tuple[int, int, int, int]] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs: the layers or the pools are others from now on."""
        self._graphs.clear()
        self._failed.clear()
        self._too_large.clear()

    def run(
        self, start: int, end: int, step: Step, hidden: Tensor, positions: Tensor
    ) -> Tensor | None:
        """``[rows, hidden]`` behind layers ``[start, end)``; None where no graph can do it."""
        asked = _size_of(step)
        if asked is None or (start, end) in self._failed:
            return None
        count, columns = asked
        size = row_bucket(count)
        if size is None:
            return None
        bucket = page_bucket(columns) if step.paged is not None else column_bucket(columns)
        key = (start, end, size, bucket)
        if key in self._too_large or (
            step.paged is None and size * bucket * _token_bytes(step, start, end) > BYTES_MAX
        ):
            return None
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._made(key, step, hidden)
            if graph is None:
                return None
        self._graphs.move_to_end(key)
        graph.buffers.stage(hidden, positions, step)
        graph.replay()
        step.calls += end - start
        assert graph.buffers.out is not None  # noqa: S101 - the capture made it
        return graph.buffers.out[:count].clone()  # the next replay writes there

    def prepare(self, start: int, end: int, step: Step, like: Tensor) -> int:
        """Capture steps of every number of rows over contexts of :data:`PAGES_COLUMNS_LEAST`
        tokens, so that no answer waits for it; returns how many there are.

        ``step`` says where pages are and who reads them; ``like`` is a row of hidden states.
        """
        made = 0
        for size in reversed(ROW_BUCKETS):  # what the largest needs in between serves the others
            key = (start, end, size, PAGES_COLUMNS_LEAST)
            if (start, end) in self._failed:
                break
            made += self._made(key, step, like) is not None
        return made

    def _made(self, key: tuple[int, int, int, int], like_step: Step, like: Tensor) -> _Graph | None:
        start, end, size, columns = key
        pools, paged = like_step.pools, like_step.paged
        page_tokens = 0 if paged is None else paged.page_tokens
        buffers = Buffers.of(size, columns, like, pools[start].scrap_row, page_tokens)
        step = Step(
            pools=pools,
            write_slots=buffers.slots,
            segments=[],
            decode=buffers.decode,
            paged=buffers.paged,
            attend_pages=like_step.attend_pages,
        )

        def body() -> None:
            buffers.out = self._run(start, end, step, buffers.hidden, buffers.positions)

        try:
            replay = self._capture(body)
        except torch.OutOfMemoryError:
            logger.warning("steps of %d rows over %d tokens run without graphs", size, columns)
            self._too_large.add(key)
            return None
        except Exception as error:  # noqa: BLE001 - Triton's are no RuntimeErrors
            told = str(error).strip().splitlines() or [repr(error)]
            logger.warning("layers [%d, %d) run without graphs: %s", start, end, told[0])
            self._failed.add((start, end))
            return None
        while len(self._graphs) >= GRAPHS_MAX:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph = _Graph(buffers=buffers, replay=replay)
        return graph


class CudaCapture:
    """Captures functions as CUDA graphs on one device; see :data:`Capture`.

    All graphs share one pool of memory for what they compute in between, as they never run at once
    and what one gives is copied before the next runs; blocks of a pool are reused on one stream
    only, so there is one of these, too. A capture that fails leaves torch's allocator unsure of
    what is being captured, so ``body`` is first run with every wait for the device forbidden.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Raises whatever ``body`` or its capture raises; the current stream stays what it was."""
        cuda = torch.cuda
        with cuda.device(self._device):  # streams and captures are the current device's
            if self._stream is None:
                self._stream = cuda.Stream()  # type: ignore[no-untyped-call]
            before, aside = cuda.current_stream(), self._stream
            aside.wait_stream(before)
            try:
                with cuda.stream(aside):
                    for _ in range(WARM_UPS - 1):
                        body()
                    with _waiting_forbidden():
                        body()
            finally:
                before.wait_stream(aside)
            graph = cuda.CUDAGraph()
            # A pool without a graph may not be asked for again: it is always a living one's.
            pool = next((each.pool() for each in self._made), None)
            try:  # other threads may use the device meanwhile
                with cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                    body()
            finally:
                cuda.set_stream(before)  # a capture that fails at its end does not do that
        self._made.add(graph)
        return graph.replay


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Let operations raise that make the CPU wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that it does not find all of them
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
