"""Runs one step: packs rows of many sessions, runs the layers that each needs, splits results."""

import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dht.errors import UserError
from dht.messages.types import ModelSpec
from node.attention.block_table import AttendPages, BlockTable
from node.attention.decode_table import decode_rows
from node.attention.paged_attention import Step
from node.attention.segment import Segment
from node.device.failure import AcceleratorError
from node.device.tensors import to_device
from node.engine.batch_output import results_of
from node.engine.batch_rows import StepRows, joined, own_rows
from node.engine.kernel_trial import try_attention_kernel
from node.engine.work_item import WorkResult
from node.kernels import moe
from node.kernels.moe import GroupedKernel
from node.kernels.trial import tried
from node.kv.layer_pool import LayerPool
from node.kv.pool import pool_rows
from node.kv.session_state import SessionState
from node.model.execution.cuda_graphs import looks_at_sessions
from node.model.inspection.layer_traits import FAILURES
from node.model.layer_range import LoadedRange, ModelLayout

logger = logging.getLogger(__name__)

ALONE = slice(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How it is tried whether rows may run together."""

    rows_tried: int = 4
    ahead_least: float = 0.03
    """Minimum difference that counts, relative to the norm of a layer's output: more than rounding
    to bfloat16 causes."""
    exact_least: float = 1e-4
    """Likewise in float32; of rows one by one on a CPU alone, whose convolutions keep all of it."""
    again_rows_max: int = 16
    """Rows of a session that run again in front of its newest ones: as many as a step reads the
    weights for anyway. They grow by each round's right drafts until all of a round are right."""
    state_far: float = 64.0
    """How far numbers of a state that is to be recognised lie above those that rows leave."""


RUNNER = RunnerConfig()

ELSEWHERE = slice(0, 0)
"""Placeholder for a context's pool rows when a kernel finds them by page."""


def _tensors_kept(layer: nn.Module) -> dict[tuple[str, str], int]:
    """Tensors that a layer's modules keep as plain attributes, by module and attribute."""
    return {
        (name, key): id(value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


class ModelRunner:
    """Runs steps over the layers in ``loaded``, with their KV in ``pools``."""

    def __init__(
        self,
        loaded: LoadedRange,
        layout: ModelLayout,
        spec: ModelSpec,
        pools: dict[int, LayerPool],
        page_tokens: int,
    ) -> None:
        self._loaded = loaded
        self._layout = layout
        self._pools = pools
        self._page_tokens = page_tokens
        self._spec = spec
        self._attend_pages: AttendPages | None = None
        self._by_pages_alone = not any(map(looks_at_sessions, layout.structure.calls))
        """Whether no layer needs a context's pool rows if ``attend_pages`` or a table is there."""
        self._kv_bytes = layout.dtype.itemsize * max(
            shape.numbers for shape in layout.structure.kv_shapes
        )

    @property
    def device(self) -> torch.device:
        return self._loaded.device

    @property
    def reads_in_place(self) -> bool:
        """Whether attention reads contexts page by page."""
        return self._attend_pages is not None

    def warm_up(self) -> None:
        """Run one row through every layer; UserError if its attention cannot be computed here."""
        where = self._layout.store.directory
        structure = self._layout.structure
        zeros = torch.zeros(1, structure.row_width, dtype=self._layout.dtype, device=self.device)
        position = torch.zeros(1, dtype=torch.long, device=self.device)
        self._loaded.forward.stacks = False
        for index in self._pools:
            row = structure.trial_rows(index, zeros)
            step = Step(pools=self._pools, write_slots=ALONE, segments=[self._trial(0, 1)])
            kept = _tensors_kept(self._loaded.layers[index])
            try:
                with torch.inference_mode():
                    out = self._loaded.forward.run(index, index + 1, step, row, position)
            except (torch.OutOfMemoryError, AcceleratorError):
                raise  # tells nothing about the model
            except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
                raise UserError(f"{where} cannot be served yet: {error}") from error
            if (structure.packed and step.calls != 1) or out.shape != row.shape:
                raise UserError(
                    f"{where} cannot be served yet: its layers do not call attention through"
                    " transformers' interface"
                )
            if _tensors_kept(self._loaded.layers[index]) != kept:
                raise UserError(f"{where} cannot be served yet: its layers keep a state themselves")
            if not structure.packed and not self._is_causal(index):
                raise UserError(
                    f"{where} cannot be served yet: its layers answer otherwise where rows come one"
                    " by one, beside another session's"
                )

        self._loaded.forward.stacks = structure.may_stack and all(map(self._stacks, self._pools))

    def _stacks(self, layer: int) -> bool:
        """Whether single rows of two sessions give together what each gives alone."""
        structure, dtype = self._layout.structure, self._layout.dtype
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(2 * RUNNER.rows_tried, structure.row_width, generator=generator)
        rows = rows.to(self.device, dtype)
        lengths = (RUNNER.rows_tried, RUNNER.rows_tried - 2)

        def made(segments: list[Segment], given: torch.Tensor) -> torch.Tensor:
            spans = [range(s.position, s.context_tokens) for s in segments]
            at = torch.tensor(list(itertools.chain.from_iterable(spans)), device=self.device)
            step = Step(pools=self._pools, write_slots=ALONE, segments=segments)
            return self._loaded.forward.run(layer, layer + 1, step, given, at).float()

        def begun() -> list[Segment]:
            """The newest rows of two sessions, whose rows before those ran."""
            self._loaded.forward.stacks = False
            ends = []
            for number, tokens in enumerate(lengths):
                first = number * RUNNER.rows_tried
                before = Segment(
                    first=0,
                    last=tokens - 1,
                    context_tokens=tokens - 1,
                    slots=slice(first, first + tokens - 1),
                    state=structure.new_state(),
                )
                made([before], rows[first : first + tokens - 1])
                slots = slice(first, first + tokens)
                ends.append(
                    replace(
                        before, first=number, last=number + 1, context_tokens=tokens, slots=slots
                    )
                )
            return ends

        def last_rows(stacks: bool) -> torch.Tensor:
            self._loaded.forward.stacks = stacks
            newest = [
                number * RUNNER.rows_tried + tokens - 1 for number, tokens in enumerate(lengths)
            ]
            copied = [replace(each, state=copy.deepcopy(each.state)) for each in ends]
            return made(copied, rows[newest])

        with torch.inference_mode():
            ends = begun()
            alone = last_rows(False)
            try:
                apart = torch.linalg.vector_norm(last_rows(True) - alone)
            except FAILURES as error:
                logger.info("rows of several sessions run one by one: %s", str(error)[:200])
                return False
        return bool(apart <= self._least * torch.linalg.vector_norm(alone))

    @property
    def _least(self) -> float:
        """Minimum difference that counts in the dtype of the layers."""
        return RUNNER.exact_least if self._layout.dtype is torch.float32 else RUNNER.ahead_least

    def _trial(self, first: int, last: int, state: SessionState | None = None) -> Segment:
        """Rows ``[first, last)`` of a session that has the first pool rows."""
        return Segment(
            first=0,
            last=last - first,
            context_tokens=last,
            slots=slice(0, last),
            state=state or self._layout.structure.new_state(),
        )

    def _is_causal(self, layer: int) -> bool:
        """Whether rows that run one by one, beside another session's, give the same as together.

        For masks and states that are not ours, only a trial tells.
        """
        structure = self._layout.structure
        new_state = structure.new_state
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(RUNNER.rows_tried, structure.row_width, generator=generator)
        rows = structure.trial_rows(layer, rows.to(self.device, self._layout.dtype))

        def made(
            first: int, last: int, state: SessionState | None, given: torch.Tensor = rows
        ) -> torch.Tensor:
            segments = [self._trial(first, last, state)]
            step = Step(pools=self._pools, write_slots=slice(first, last), segments=segments)
            positions = torch.arange(first, last, device=self.device)
            out = self._loaded.forward.run(layer, layer + 1, step, given[first:last], positions)
            return out[:, : structure.width].float()  # not the order in which tokens were chosen

        others, other = rows.flip(0), new_state()

        def one(at: int, state: SessionState | None) -> torch.Tensor:
            made(at, at + 1, other, others)  # a state of the modules' own would be mixed up
            return made(at, at + 1, state)

        half = RUNNER.rows_tried // 2

        def recurrences(*ends: int) -> torch.Tensor:
            """Those behind rows in runs that end there, of large ones behind the first half."""
            state = new_state()
            assert state is not None  # noqa: S101 - seen by the caller
            made(0, half, state)
            for kept in state.recurrences(layer):
                kept.fill_(RUNNER.state_far * (1 + kept.abs().max()))
            for first, last in itertools.pairwise((half, *ends)):
                made(first, last, state)
            return torch.cat([rows.new_zeros(0), *map(torch.flatten, state.recurrences(layer))])

        def forgets() -> bool:
            """Whether rows together lose what the rows before them left, however little that says
            in the layer's output."""
            apart = recurrences(*range(half + 1, RUNNER.rows_tried + 1))
            lost = torch.linalg.vector_norm(recurrences(RUNNER.rows_tried) - apart)
            return not lost <= RUNNER.ahead_least * torch.linalg.vector_norm(apart)

        with torch.inference_mode():
            whole = made(0, RUNNER.rows_tried, new_state())

            def is_same(parts: list[torch.Tensor], least: float) -> bool:
                difference = torch.linalg.vector_norm(whole - torch.cat(parts))
                return bool(difference <= least * torch.linalg.vector_norm(whole))

            if (state := new_state()) is not None:
                parts = [made(0, half, state), made(half, RUNNER.rows_tried, state)]
                if not is_same(parts, self._least) or forgets():
                    self._loaded.forward.row_by_row = True
            state = new_state()
            least = self._least if self.device.type == "cpu" else RUNNER.ahead_least
            return is_same([one(at, state) for at in range(RUNNER.rows_tried)], least)

    def use_experts(self, kernel: GroupedKernel) -> None:
        """Let ``kernel`` run mixtures of experts if its results are right on this device.

        Call it before any session comes. Raises MachineError if the kernel crashed the device.
        """
        layers = list(self._loaded.layers.values())
        apart = tried(
            self.device, "experts run by torch", lambda: moe.try_grouped_gemm(kernel, layers)
        )
        if apart is not None and moe.use(kernel, layers):
            logger.info("experts run by a kernel of ours; off by %.1g at most", apart)

    def use_pages(self, attend_pages: AttendPages) -> None:
        """Let ``attend_pages`` read contexts if its results are right on this device
        (:mod:`node.engine.kernel_trial`), and capture the steps that it makes possible.

        Call it before any session comes. Raises MachineError if the kernel crashed the device.
        """
        structure = self._layout.structure
        if not structure.packed:
            return
        apart = tried(
            self.device,
            "attention copies what it reads",
            lambda: try_attention_kernel(
                attend_pages,
                self._loaded,
                self._pools,
                self._page_tokens,
                structure.width,
                self._layout.dtype,
            ),
        )
        if apart is None:
            return
        logger.info("attention reads pages in place; off by %.1g at most", apart)
        self._attend_pages = attend_pages
        step = Step(
            pools=self._pools,
            write_slots=ALONE,
            segments=[],
            paged=BlockTable.room(1, 1, self._page_tokens, 0, self.device),
            attend_pages=attend_pages,
        )
        like = torch.zeros(1, structure.width, dtype=self._layout.dtype, device=self.device)
        with torch.inference_mode():
            self._loaded.forward.prepare(min(self._pools), max(self._pools) + 1, step, like)

    def run(self, rows: list[StepRows]) -> list[WorkResult]:
        """Pack the rows, run each layer over those that need it, split the results.

        Rows are ordered by the layers they need, so that a layer's active rows form few slices.
        """
        ordered = sorted(rows, key=lambda row: (row.item.start, row.item.end))
        for row in ordered:
            row.take_again()
        if apart := [row for row in ordered if self._runs_apart(row)]:
            self._run([row.again_alone() for row in apart], keeps=False)
            for row in apart:
                row.ran_again()
        hidden = self._run(ordered)
        return results_of(rows, own_rows(ordered, hidden), self._loaded, self._spec)

    def _runs_apart(self, row: StepRows) -> bool:
        """Whether a session's rows that run again do so in a pass of their own, behind which its
        states are copied anew: else these rows run again and again until all drafts are right."""
        most = 0 if self._loaded.forward.row_by_row else RUNNER.again_rows_max
        return row.again is not None and len(row.again) > most

    def _run(self, ordered: list[StepRows], *, keeps: bool = True) -> torch.Tensor:
        """What comes out of the rows' layers, ``[tokens, width]``. ``keeps``: whether sessions keep
        rows of the step that may be taken back."""
        at = 0
        for row in ordered:
            row.first, row.last = at, at + row.tokens
            at = row.last
            row.segment = self._segment(row)
            if row.reservation.state is not None:
                row.reservation.state.begin(row.position)
        hidden = self._embed(ordered)
        if keeps:
            for row in ordered:
                row.keep(hidden)
        positions = self._positions(ordered)
        slots = self._slots(ordered)
        featured = [row for row in ordered if row.item.features is not None]
        for row in featured:  # an attempt that failed has left some
            row.features.clear()
        for start, end in itertools.pairwise(_cuts(ordered)):
            for row in featured:
                row.look(start, hidden)
            active = [r for r in ordered if r.item.start <= start < r.item.end]
            if active:
                hidden = self._run_layers(start, end, active, at, hidden, positions, slots)
        return hidden

    def _embed(self, rows: list[StepRows]) -> torch.Tensor:
        """Input hidden states, ``[tokens, hidden]``."""
        entering = [row.item for row in rows if row.item.token_ids is not None]
        again = any(row.again is not None for row in rows)
        embedded: Iterator[torch.Tensor] = iter(())
        if entering and self._loaded.embed is not None:
            token_ids = [item.token_ids for item in entering if item.token_ids is not None]
            hidden = self._loaded.forward.enter(
                token_ids, [item.position for item in entering], self.device
            )
            if len(entering) == len(rows) and not again:
                return hidden
            embedded = iter(torch.split(hidden, [item.tokens for item in entering]))
        parts: list[torch.Tensor] = []
        for row in rows:
            parts += [] if row.again is None else [row.again]
            parts.append(next(embedded) if row.item.hidden is None else row.item.hidden)
        if not entering and not again:  # one transfer for all rows
            return to_device(joined(parts), self.device).to(self._layout.dtype)
        return joined([to_device(part, self.device).to(self._layout.dtype) for part in parts])

    def _positions(self, rows: Sequence[StepRows]) -> torch.Tensor:
        """Position of each row in its session, ``[tokens]``."""
        spans = [range(row.position, row.position + row.tokens) for row in rows]
        return to_device(list(itertools.chain.from_iterable(spans)), self.device)

    def _slots(self, rows: Sequence[StepRows]) -> torch.Tensor | slice:
        """Pool rows of the step's new tokens."""
        found = [self._new_rows(row) for row in rows]
        if len(rows) == 1 and isinstance(found[0], range) and rows[0].tokens > 1:
            return slice(found[0].start, found[0].stop)
        return to_device(list(itertools.chain.from_iterable(found)), self.device)

    def _new_rows(self, row: StepRows) -> Sequence[int]:
        """Pool rows of an item's tokens; a range if its pages are contiguous."""
        pages, size, first = row.reservation.pages, self._page_tokens, row.position
        last = first + row.tokens
        if row.reservation.run:
            return range(pages[0] * size + first, pages[0] * size + last)
        return [pages[at // size] * size + at % size for at in range(first, last)]

    def _segment(self, row: StepRows) -> Segment:
        context = row.item.position + row.item.tokens
        pages, size = row.reservation.pages, self._page_tokens
        whole: torch.Tensor | slice
        if row.reservation.run:
            whole = slice(pages[0] * size, pages[0] * size + context)
        elif self._attend_pages is not None and self._by_pages_alone:
            whole = ELSEWHERE
        else:
            whole = pool_rows(pages, context, size)
            if (
                row.tokens > 1 or self._loaded.forward.graphs is None
            ):  # a table needs it on the host
                whole = to_device(whole, self.device)
        return Segment(
            first=0,
            last=0,
            context_tokens=context,
            slots=whole,
            tokens_max=row.reservation.tokens,
            pages=pages,
            run=row.reservation.run,
            state=row.reservation.state,
        )

    def _rows_of(self, slots: torch.Tensor | slice) -> torch.Tensor:
        if isinstance(slots, slice):
            return torch.arange(slots.start, slots.stop, device=self.device)
        return slots

    def _run_layers(
        self,
        start: int,
        end: int,
        active: list[StepRows],
        total: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | slice,
    ) -> torch.Tensor:
        """Run layers ``[start, end)`` over the active rows; other rows pass unchanged.

        What comes out is in the dtype that peers compute in, also where layers add up in float32,
        as Mamba's do.
        """
        dtype = self._layout.dtype
        at = 0
        for row in active:
            row.segment.first, row.segment.last = at, at + row.last - row.first
            at = row.segment.last
        segments = [row.segment for row in active]
        if at == total:
            step = self._step(segments, slots)
            return self._loaded.forward.run(start, end, step, hidden, positions).to(dtype)
        spans = [range(row.first, row.last) for row in active]
        chosen = to_device(list(itertools.chain.from_iterable(spans)), self.device)
        step = self._step(segments, self._rows_of(slots)[chosen])
        merged = hidden.clone()
        rows = self._loaded.forward.run(start, end, step, hidden[chosen], positions[chosen])
        merged[chosen] = rows.to(dtype)
        return merged

    def _step(self, segments: list[Segment], slots: torch.Tensor | slice) -> Step:
        step = Step(pools=self._pools, write_slots=slots, segments=segments)
        decode = all(segment.rows == 1 for segment in segments)
        if decode:
            step.write_slots = self._rows_of(slots)
        if self._attend_pages is not None:
            step.attend_pages = self._attend_pages
            step.paged = BlockTable.of(segments, self._page_tokens, self.device)
        elif decode and self._layout.structure.packed:
            step.decode = decode_rows(
                segments,
                self._kv_bytes,
                self._page_tokens,
                self.device,
                tables_only=self._loaded.forward.graphs is not None,
            )
        if step.decode is None or not self._by_pages_alone:
            for segment in segments:
                if isinstance(segment.slots, torch.Tensor):
                    segment.slots = to_device(segment.slots, self.device)
        return step


def _cuts(rows: Sequence[StepRows]) -> list[int]:
    """Layers between which all rows of a step run together."""
    cuts = {row.item.start for row in rows} | {row.item.end for row in rows}
    for row in rows:
        if row.item.features is not None:
            cuts.update(row.item.features.layers)
    return sorted(cuts)
