"""Runs steps as CUDA graphs, one per size of step, so that a step is one launch.

A graph replays on the tensors with which it was captured. So a step is padded to a bucket of rows
and a bucket of context, and staged into that bucket's buffers. Padding rows write to a pool row
that belongs to no session, and their output is dropped. If a kernel reads contexts page by page,
one context bucket serves most steps, and its graphs are captured at load: of decodes alone, and of
chunks of prompts, perhaps beside decodes, whose launches would take longer than their work. If
contexts are copied by a table, padding is read too, and graphs are captured as steps of decodes
come. The capture function is passed in: everything else runs, and is tested, without CUDA.
"""

import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dht.errors import first_line
from node.attention.block_table import CHUNKS_MAX, BlockTable
from node.attention.decode_table import TABLE, DecodeRows
from node.attention.mask_rules import MaskRule
from node.attention.paged_attention import Step
from node.model.inspection.argument_tracing import ArgumentOrigins, Constant
from node.model.inspection.structure import ModelStructure

logger = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CHUNK_BUCKETS = (32, 64, 128, 192, 256, 384, 512, 640, 768)
"""Likewise for steps with chunks of prompts: the longest chunk of a step beside 256 decodes."""
COLUMNS_LEAST = 128
"""Minimum context bucket, in tokens; sizes double from here, so at most half is padding."""
PAGES_COLUMNS_LEAST = 4096
"""Minimum context bucket, in tokens, if contexts are read page by page."""
PAGES_COLUMNS_STEP = 8
GRAPHS_MAX = 64
"""Maximum number of graphs, the last used; each holds its buffers and intermediate results."""
BYTES_MAX = TABLE.table_bytes_max
"""Maximum bytes of keys and values that a graph's table, padding included, may copy per layer."""
WARM_UPS = 3
"""Number of runs before a capture, in which libraries choose kernels and allocate workspaces."""

StepFunction = Callable[[int, int, Step, Tensor, Tensor], Tensor]
"""(start, end, step, hidden ``[rows, hidden]``, positions ``[rows]``) → ``[rows, hidden]``."""
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures a function's operations on tensors and returns a function that repeats them."""


def row_bucket(rows: int, *, chunked: bool = False) -> int | None:
    """Smallest bucket of at least ``rows`` rows; None beyond the largest. ``chunked``: of steps
    with chunks of prompts."""
    buckets = CHUNK_BUCKETS if chunked else ROW_BUCKETS
    return next((size for size in buckets if size >= rows), None)


def column_bucket(columns: int) -> int:
    """Smallest bucket for a context of ``columns`` tokens, if contexts are copied by a table."""
    size = COLUMNS_LEAST
    while size < columns:
        size *= 2
    return size


def page_bucket(columns: int) -> int:
    """Smallest bucket for contexts of ``columns`` tokens read by page, where padding is free."""
    size = PAGES_COLUMNS_LEAST
    while size < columns:
        size *= PAGES_COLUMNS_STEP
    return size


def recordable(structure: ModelStructure, start: int, end: int) -> bool:
    """Whether layers ``[start, end)`` and the sources of their arguments can be captured."""
    return structure.packed and (
        all(traits.recordable for traits in structure.traits[start:end])
        and not any(looks_at_sessions(call) for call in structure.calls[start:end])
        and all(source.recordable and not source.by_length for source in structure.sources)
    )


def looks_at_sessions(call: ArgumentOrigins) -> bool:
    """Whether a layer's mask is a predicate, which is evaluated session by session."""
    origins = [*call.positional, *(origin for _, origin in call.named)]
    rules = [o.value for o in origins if isinstance(o, Constant) and isinstance(o.value, MaskRule)]
    return any(rule.predicate is not None for rule in rules)


@dataclass(slots=True, kw_only=True)
class Buffers:
    """Inputs and output of a graph, at fixed addresses."""

    hidden: Tensor
    positions: Tensor
    slots: Tensor
    decode: DecodeRows | None
    """Table of contexts; None if ``paged`` is used."""
    paged: BlockTable | None
    """Pages of contexts; None if ``decode`` is used."""
    scrap_row: int
    out: Tensor | None = field(default=None)

    @classmethod
    def of(
        cls,
        rows: int,
        columns: int,
        like: Tensor,
        scrap_row: int,
        page_tokens: int = 0,
        *,
        chunked: bool = False,
    ) -> "Buffers":
        """Buffers for steps of ``rows`` rows, with the width, dtype and device of ``like``.

        Contexts are found by a table, or by pages of ``page_tokens`` tokens if that is not 0.
        ``chunked``: sessions may have several rows.
        """
        device = like.device

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.long, device=device)

        decode = paged = None
        if page_tokens:
            scrap_page = scrap_row // page_tokens
            paged = BlockTable.room(rows, columns, page_tokens, scrap_page, device, chunked=chunked)
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
        """Copy a step's rows to the first rows; padding rows write to the scrap row."""
        slots, count = step.write_slots, hidden.shape[0]
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=self.slots.device)
        self.hidden[:count] = hidden
        self.hidden[count:] = 0
        self.positions[:count] = positions
        self.positions[count:] = 0
        self.slots[:count] = slots
        self.slots[count:] = self.scrap_row
        if self.paged is not None and step.paged is not None:
            self.paged.stage(step.paged, self.scrap_row // self.paged.page_tokens)
        if self.decode is not None and step.decode is not None:
            self._stage_table(self.decode, step.decode)

    def _stage_table(self, into: DecodeRows, rows: DecodeRows) -> None:
        count, columns = rows.table.shape
        into.spans[:count] = rows.spans
        into.spans[count:] = 1
        # Beyond a row's end its last token is repeated: masked, but certainly not NaN.
        into.table[:count, :columns] = rows.table
        into.table[:count, columns:] = rows.table[:, -1:]
        into.table[count:] = self.scrap_row


class Size(NamedTuple):
    """Layers ``[start, end)`` and the bucket of a graph's steps."""

    start: int
    end: int
    rows: int
    columns: int
    chunked: bool


def _size_of(step: Step, start: int, end: int, count: int) -> Size | None:
    """Bucket of a step of ``count`` rows; None if no graph could run it."""
    if step.compared is not None:  # a comparison waits for the device
        return None
    if step.paged is not None:
        spans = step.paged.spans
        chunks = len(spans) - spans.count(1)
        if chunks > CHUNKS_MAX:
            return None
        chunked, columns = chunks > 0, page_bucket(step.paged.columns)
    elif step.decode is None or not step.decode.table.numel():
        return None
    else:
        chunked, columns = False, column_bucket(step.decode.table.shape[1])
    rows = row_bucket(count, chunked=chunked)
    return None if rows is None else Size(start, end, rows, columns, chunked)


def _token_bytes(step: Step, start: int, end: int) -> int:
    """Maximum bytes of one token's keys and values in a layer of ``[start, end)``."""
    pools = [step.pools[index] for index in range(start, end)]
    return max((p.keys[0].nbytes + p.values[0].nbytes for p in pools), default=0)


@dataclass(slots=True, kw_only=True)
class _Graph:
    buffers: Buffers
    replay: Callable[[], None]


class CudaGraphs:
    """Graphs of the layers held, captured when a step of their size first comes."""

    def __init__(self, run: StepFunction, capture: Capture) -> None:
        """``run`` runs layers without a graph; for ``capture`` see :data:`Capture`."""
        self._run = run
        self._capture = capture
        self._graphs: OrderedDict[Size, _Graph] = OrderedDict()
        self._failed: set[tuple[int, int]] = set()
        self._too_large: set[Size] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs, because the layers or pools change."""
        self._graphs.clear()
        self._failed.clear()
        self._too_large.clear()

    def run(
        self, start: int, end: int, step: Step, hidden: Tensor, positions: Tensor
    ) -> Tensor | None:
        """Output ``[rows, hidden]`` of layers ``[start, end)``; None if no graph can run it."""
        count = hidden.shape[0]
        key = _size_of(step, start, end, count)
        if key is None or (start, end) in self._failed or key in self._too_large:
            return None
        copied = 0 if step.paged is not None else _token_bytes(step, start, end)
        if key.rows * key.columns * copied > BYTES_MAX:
            return None
        graph = self._graphs.get(key) or self._made(key, step, hidden)
        if graph is None:
            return None
        self._graphs.move_to_end(key)
        graph.buffers.stage(hidden, positions, step)
        graph.replay()
        step.calls += end - start
        assert graph.buffers.out is not None  # noqa: S101 - the capture made it
        return graph.buffers.out[:count].clone()  # the next replay overwrites it

    def prepare(self, start: int, end: int, step: Step, like: Tensor) -> int:
        """Capture steps of all buckets of rows over contexts of :data:`PAGES_COLUMNS_LEAST` tokens,
        so that no answer waits for a capture; returns the number of graphs.

        ``step`` names the pools, the page size and the kernel; ``like`` is a row of hidden states.
        """
        made = 0
        decodes = [(rows, False) for rows in ROW_BUCKETS]
        sizes = [*decodes, *((rows, True) for rows in CHUNK_BUCKETS)]
        for rows, chunked in sorted(sizes, reverse=True):  # others reuse the memory of the largest
            key = Size(start, end, rows, PAGES_COLUMNS_LEAST, chunked)
            if (start, end) in self._failed:
                break
            made += self._made(key, step, like) is not None
        return made

    def _made(self, key: Size, like_step: Step, like: Tensor) -> _Graph | None:
        start, end, size, columns, chunked = key
        pools, paged = like_step.pools, like_step.paged
        page_tokens = 0 if paged is None else paged.page_tokens
        scrap_row = pools[start].scrap_row
        buffers = Buffers.of(size, columns, like, scrap_row, page_tokens, chunked=chunked)
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
        except Exception as error:  # noqa: BLE001 - Triton's errors have other bases
            why = first_line(error)
            logger.warning("layers [%d, %d) run without graphs: %s", start, end, why)
            self._failed.add((start, end))
            return None
        while len(self._graphs) >= GRAPHS_MAX:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph = _Graph(buffers=buffers, replay=replay)
        return graph


class CudaCapture:
    """Captures functions as CUDA graphs on one device; see :data:`Capture`.

    All graphs share one memory pool for intermediate results, because they never run at the same
    time and a graph's output is copied before the next runs. A pool's blocks are reused on one
    stream only, so there is one stream, too. A failed capture leaves torch's allocator in an
    unclear state, so ``body`` first runs with every wait for the device forbidden.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Raises whatever ``body`` or its capture raises; the current stream does not change."""
        cuda = torch.cuda
        with cuda.device(self._device):  # streams and captures belong to the current device
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
            # Share the pool of a living graph: that of a graph that is gone may not be used again.
            pool = next((each.pool() for each in self._made), None)
            try:  # thread_local: other threads may use the device meanwhile
                with cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                    body()
            finally:
                cuda.set_stream(before)  # a capture that fails at its end does not restore it
        self._made.add(graph)
        return graph.replay


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Within the context, operations that make the CPU wait for the device raise."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns that it does not find all waits
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
