"""Runs a step through the parts that a peer holds: embedding, layers, and head.

If a model is plain (:mod:`node.model.inspection.structure`), its modules are called directly.
Otherwise its own forward runs around the layers, with this peer's parts in it.
"""

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from node.attention.cache_view import BatchedCache, PoolCache, SharedKv
from node.attention.paged_attention import Step, set_step
from node.attention.segment import Segment
from node.device.tensors import to_device
from node.kernels.choice import RowsKernels
from node.kernels.gate import fuse_gates
from node.kernels.moe import run_packed_experts
from node.kernels.packed import multiply_packed
from node.kernels.rms_norm import fuse_norms
from node.kernels.rotary import fuse_rotation
from node.kernels.router import fuse_routers
from node.model.carried import Argument, Carried, Passed
from node.model.execution.cuda_graphs import Capture, CudaGraphs, recordable
from node.model.execution.torchscript_layers import TorchScriptLayers
from node.model.inspection.skeleton import EnoughHeard, Skeleton, argument_of, blank_input
from node.model.inspection.structure import ModelStructure
from node.model.linear.merged_linear import share_products
from node.model.linear.packed_linear import favour_few_rows
from node.packed.tensor import is_packed


class LayerForward:
    """Runs hidden states, ``[tokens, hidden]``, through parts of one model."""

    def __init__(
        self,
        structure: ModelStructure,
        skeleton: Skeleton,
        capture: Capture | None = None,
        kernels: RowsKernels | None = None,
    ) -> None:
        """``skeleton`` is on the parts' device; ``capture`` makes graphs of decode steps;
        ``kernels`` take the place of parts of the layers."""
        self._kernels = kernels
        self._structure = structure
        self._skeleton = skeleton
        self._embed_width = int(
            skeleton.parts[structure.before[0]].get_parameter("weight").shape[-1]
        )
        self._sources = [skeleton.module(source.name) for source in structure.sources]
        self._parts: dict[str, nn.Module] = {}
        self.traced = TorchScriptLayers(structure, self._sources)
        """Layers recorded for decode steps; empty if none are."""
        self._layers: dict[int, nn.Module] = {}
        self.row_by_row = False
        """Whether rows that follow others of their session run alone, as some layers with a state
        need."""
        self.stacks = False
        """Whether single rows of several sessions run along the batch dimension."""
        self.graphs = None if capture is None else CudaGraphs(self._as_they_are, capture)

    def hold(self, parts: dict[str, nn.Module]) -> None:
        """Use exactly these parts beside the layers, by their names in the model."""
        for name in self._parts.keys() - parts.keys():
            self._skeleton.take_out(name)
        for name, part in parts.items():
            self._skeleton.put(name, part)
        self._parts = dict(parts)

    def prepared(
        self, index: int, layer: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Optimise a layer: fewer products and launches, a better layout, recorded on a CPU."""
        if self._structure.packed:  # other layers may read weights without calling their modules
            share_products(layer, self._structure.traits[index].siblings)
            layer = favour_few_rows(layer)
        if device.type == "cuda":
            fuse_norms(layer, dtype, self._kernels.norm_rows if self._kernels else None)
            if self._kernels is not None:
                fuse_rotation(layer, dtype, device, self._kernels.rotate_heads)
                fuse_routers(layer, dtype, self._kernels.choose_experts)
                fuse_gates(layer, dtype, device, self._kernels.gate_rows)
        if is_packed(layer):
            run_packed_experts(layer)
        elif device.type == "cpu":
            self.traced.add(index, layer, dtype)
        return layer

    def multiply_packed(self, module: nn.Module) -> None:
        """Let the kernel for packed weights, if there is one, multiply by those of ``module``."""
        if self._kernels is not None:
            multiply_packed(module, self._kernels.packed)

    def keep(self, layers: dict[int, nn.Module]) -> None:
        """Run these layers from now on, and those that are added to them later; forget what was
        made of all others, and all graphs."""
        self._layers = layers
        self.traced.keep(list(layers))
        if self.graphs is not None:
            self.graphs.clear()

    def enter(
        self, token_ids: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        """Input of the first layer for several sessions' tokens, ``[tokens, hidden]``.

        ``starts``: position of each session's first token.
        """
        if not self._structure.packed:
            return _joined(
                [self._enter_alone(*each, device) for each in zip(token_ids, starts, strict=True)]
            )
        ids = to_device(list(itertools.chain.from_iterable(token_ids)), device)[None]
        if self._structure.plain_entry:
            hidden: torch.Tensor = self._parts[self._structure.before[0]](ids)[0]
            return hidden
        positions = [range(at, at + len(part)) for part, at in zip(token_ids, starts, strict=True)]
        packed = to_device(list(itertools.chain.from_iterable(positions)), device)[None]
        return self._skeleton.run(token_ids=ids, positions=packed).layers[0].hidden[0]

    def _enter_alone(
        self, token_ids: Sequence[int], start: int, device: torch.device
    ) -> torch.Tensor:
        end = start + len(token_ids)
        segment = Segment(first=0, last=len(token_ids), context_tokens=end, slots=slice(0, 0))
        heard = self._skeleton.run(
            token_ids=to_device(list(token_ids), device)[None],
            positions=torch.arange(start, end, device=device)[None],
            cache=PoolCache({}, segment),
        )
        passed = Passed(hidden=heard.layers[0].hidden)
        for index, call in enumerate(heard.layers):
            for argument, _ in self._carried.inputs[index]:
                passed.inputs[index, argument] = argument_of(call, argument)
        return self._carried.pack(0, passed, start)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocabulary]`` from output rows of the last layer."""
        hidden = hidden[:, : self._structure.width]
        if self._structure.plain_tail:
            flowing = hidden
            for name in self._structure.behind:
                flowing = self._parts[name](flowing)
            return flowing
        rows = hidden[None]
        if self._structure.carried is not None:
            rows = self._carried.hidden.tensor(hidden)
        heard = self._skeleton.run(
            **self._blank(hidden),
            positions=torch.arange(hidden.shape[0], device=hidden.device)[None],
            answer=lambda _, __: rows,
        )
        assert heard.logits is not None  # noqa: S101 - the forward returned them
        return heard.logits[0]

    def run(
        self, start: int, end: int, step: Step, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Output ``[tokens, hidden]`` of layers ``[start, end)``, which must be held, for input
        ``hidden``; ``positions`` is ``[tokens]``."""
        if not self._structure.packed:
            return self._session_by_session(start, end, step, hidden, positions)
        if self.graphs is not None and recordable(self._structure, start, end):
            replayed = self.graphs.run(start, end, step, hidden, positions)
            if replayed is not None:
                return replayed
        packed, position_ids = hidden[None], positions[None]

        def make(source: int) -> Any:
            return self._made(source, packed, position_ids, step.segments)

        done = self.traced.run(start, end, step, packed, position_ids, make)
        if done is not None:
            return done[0]
        return self._as_they_are(start, end, step, hidden, positions)

    def prepare(self, start: int, end: int, step: Step, like: torch.Tensor) -> None:
        """Capture decode steps like ``step`` through layers ``[start, end)`` before they come, if
        possible; see :meth:`node.model.execution.cuda_graphs.CudaGraphs.prepare`."""
        if self.graphs is not None and recordable(self._structure, start, end):
            self.graphs.prepare(start, end, step, like)

    def _as_they_are(
        self, start: int, end: int, step: Step, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run layers as modules, one after the other."""
        packed, position_ids = hidden[None], positions[None]
        set_step(step)
        try:
            outputs = [
                self._made(source, packed, position_ids, step.segments)
                for source in range(len(self._sources))
            ]
            for index in range(start, end):
                call = self._structure.calls[index]
                positional, named = call.resolve(packed, position_ids, outputs)
                packed = _hidden(self._layers[index](packed, *positional, **named))
        finally:
            set_step(None)
        return packed[0]

    def _made(
        self,
        at: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        segments: list[Segment],
    ) -> Any:
        """Output of a weightless module for the positions of all rows."""
        source, module = self._structure.sources[at], self._sources[at]
        if not source.by_length:
            positional, named = source.arguments.resolve(hidden, positions, ())
            return module(*positional, **named)
        parts: list[list[torch.Tensor]] = []
        whole = True
        for segment in segments:
            rows = positions[:, segment.first : segment.last]
            # Append the last position that the session may reach: every chunk of a session must see
            # the same frequencies, however it is cut and wherever it is replayed.
            reached = max(segment.tokens_max, segment.context_tokens) - 1
            longer = torch.cat([rows, rows.new_full((1, 1), reached)], dim=1)
            positional, named = source.arguments.resolve(hidden, longer, ())
            output = module(*positional, **named)
            whole = isinstance(output, torch.Tensor)
            tensors = [output] if whole else list(output)
            parts.append(
                [
                    tensor.narrow(dim, 0, segment.rows)
                    for tensor, dim in zip(tensors, source.token_dims, strict=True)
                ]
            )
        joined = [
            torch.cat(pieces, dim=dim)
            for pieces, dim in zip(zip(*parts, strict=True), source.token_dims, strict=True)
        ]
        return joined[0] if whole else tuple(joined)

    def _runs(self, segment: Segment) -> list[Segment]:
        """Parts of a session's rows that its layers run rightly at once."""
        if segment.position == 0 or not self.row_by_row:
            return [segment]
        return [_one_row(segment, at) for at in range(segment.rows)]

    def _session_by_session(
        self, start: int, end: int, step: Step, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run each session alone: the model's own forward around the layers ``[start, end)``.

        Single rows of sessions that have states run together, where that was seen to be right.
        """
        stacked = [s for s in step.segments if s.rows == 1 and s.position > 0]
        if self.stacks and len(stacked) > 1:
            made = self._stacked(start, end, step, stacked, hidden, positions)
            others = [s for s in step.segments if s.rows > 1 or s.position == 0]
            if not others:
                return made
            merged = hidden.clone()
            merged[[segment.first for segment in stacked]] = made
            for segment in others:
                alone = replace(step, segments=[segment])
                rows = self._session_by_session(start, end, alone, hidden, positions)
                merged[segment.first : segment.last] = rows
            return merged
        out = []
        for segment in itertools.chain.from_iterable(map(self._runs, step.segments)):
            rows = hidden[segment.first : segment.last]
            cache = PoolCache(step.pools, segment)
            tuples = self._structure.tuples
            inside = LayersInside(
                self._carried, self._layers, start, end, rows, cache, tuples=tuples
            )
            self._skeleton.run(
                **self._blank(rows),
                positions=positions[None, segment.first : segment.last],
                cache=cache,
                perform=inside.perform,
                reach=max(segment.tokens_max, segment.context_tokens),
            )
            out.append(inside.rows())
        return _joined(out)

    def _stacked(
        self,
        start: int,
        end: int,
        step: Step,
        segments: list[Segment],
        hidden: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Run one row of each session along the batch dimension."""
        chosen = [segment.first for segment in segments]
        rows = hidden if len(chosen) == len(hidden) else hidden[chosen]
        cache = BatchedCache(step.pools, segments, rows.device)
        tuples = self._structure.tuples
        inside = LayersInside(
            self._carried, self._layers, start, end, rows, cache, tuples=tuples, stacked=True
        )
        self._skeleton.run(
            embedded=rows.new_zeros(len(chosen), 1, self._embed_width),
            positions=positions[chosen][:, None],
            cache=cache,
            mask=cache.mask if any(kv.numbers for kv in self._structure.kv_shapes) else None,
            perform=inside.perform,
        )
        cache.states.put_back()
        return inside.rows()

    @property
    def _carried(self) -> Carried:
        carried = self._structure.carried
        assert carried is not None  # noqa: S101 - known where sessions run alone
        return carried

    def _blank(self, rows: torch.Tensor) -> dict[str, Any]:
        width = None if self._structure.by_ids else self._embed_width
        return blank_input(rows.shape[0], width, rows)


class LayersInside:
    """Layers ``[start, end)`` as what :meth:`node.model.inspection.skeleton.Skeleton.run` performs:
    inside their model's own forward, for one session's rows.

    The forward computes each layer's arguments and hands what a layer returns on to the next. What
    layers elsewhere would have handed on comes with the rows, and leaves with them again.
    """

    def __init__(
        self,
        carried: Carried,
        layers: Mapping[int, nn.Module],
        start: int,
        end: int,
        rows: torch.Tensor,
        cache: PoolCache,
        *,
        tuples: bool,
        stacked: bool = False,
    ) -> None:
        """``rows``, ``[tokens, width]``, go into layer ``start``; ``tuples``: whether layers return
        tuples; ``stacked``: whether each row is another session's. Raises UnsoundRows."""
        self._stacked = stacked
        self._position = cache.get_query_offset()
        self._tuples = tuples
        self._carried, self._layers = carried, layers
        self._start, self._end = start, end
        self._passed = carried.unpack(start, rows)
        self._shared = SharedKv(cache, rows.shape[0], self._passed.shared)

    def perform(
        self, index: int, hidden: torch.Tensor, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Output of a layer; of one that does not run here, its input."""
        if index < self._start:
            return (hidden, None) if self._tuples else hidden
        passed = self._passed
        given: dict[Argument, Any] = {
            argument: passed.inputs[index, argument] for argument, _ in self._carried.inputs[index]
        }
        if index == self._start:
            hidden = passed.hidden.transpose(0, 1) if self._stacked else passed.hidden
            if (chosen := self._carried.chosen[index]) is not None:
                given[chosen.argument] = passed.chosen
        self._shared.layer = index

        def seen(argument: Argument, value: Any) -> Any:
            if isinstance(value, MutableMapping) and not value:
                return self._shared
            return given.get(argument, value)

        output = self._layers[index](
            hidden,
            *(seen(at, value) for at, value in enumerate(positional)),
            **{name: seen(name, value) for name, value in named.items()},
        )
        if index < self._end - 1:
            return output
        parts = output if isinstance(output, tuple) else (output,)
        passed.hidden = parts[0].transpose(0, 1) if self._stacked else parts[0]
        passed.chosen = parts[1] if parts[1:] else None
        raise EnoughHeard

    def rows(self) -> torch.Tensor:
        """Rows ``[tokens, width]`` behind the last layer."""
        return self._carried.pack(self._end, self._passed, self._position)


def _one_row(segment: Segment, at: int) -> Segment:
    """Row ``at`` of a session's rows, alone."""
    context = segment.position + at + 1
    slots = segment.slots
    if isinstance(slots, slice):
        slots = slice(slots.start, slots.start + context)
    else:
        slots = slots[:context]
    return Segment(
        first=segment.first + at,
        last=segment.first + at + 1,
        context_tokens=context,
        slots=slots,
        tokens_max=segment.tokens_max,
        state=segment.state,
    )


def _hidden(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
