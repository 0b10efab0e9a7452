"""Records layers for decode steps on a CPU, so that no Python runs between their operations.

In a step of few rows, most of the time goes into the interpreter and the model's own Python code. A
layer whose operations do not depend on its tensors' values
(:mod:`node.model.inspection.layer_traits`) is traced once (TorchScript, which needs no compiler) as
a function of its rows, its arguments and the pool. The recording is compared with the layer itself
before it is used. A layer that cannot be recorded, or whose recording differs, runs as it is.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dht.errors import first_line
from node.attention.decode_table import DecodeRows
from node.attention.paged_attention import Step, set_step
from node.kv.layer_pool import LayerPool
from node.model.inspection.argument_tracing import ArgumentOrigins
from node.model.inspection.layer_traits import FAILURES
from node.model.inspection.structure import LayerSource, ModelStructure

logger = logging.getLogger(__name__)

ROWS_MAX = 64
"""Maximum rows of a step with recorded layers; with more, computing outweighs the interpreter."""
ROWS_TRACED, ROWS_COMPARED, CONTEXT_COMPARED = 3, (1, 2, ROWS_MAX), 3
ERROR_MAX = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Maximum difference between a recording and its layer, relative to the largest number."""

Recorded = Callable[..., Any]


class TorchScriptLayers:
    """Recordings of the layers held, and of the modules that compute their arguments."""

    def __init__(self, structure: ModelStructure, sources: Sequence[nn.Module]) -> None:
        self._structure = structure
        self._modules = list(sources)
        self._programs: dict[Any, Recorded | None] = {}
        """Program by kind of layer. TorchScript never forgets one, so weights are arguments."""
        self._layers: dict[int, tuple[Recorded, tuple[Tensor, ...]]] = {}
        """Program and weights of each layer."""
        self._sources: list[Recorded | None] = [None] * len(sources)
        self._sources_are_known = False

    def __len__(self) -> int:
        return len(self._layers)

    def keep(self, indices: Sequence[int]) -> None:
        """Forget all other layers."""
        self._layers = {at: made for at, made in self._layers.items() if at in indices}

    def add(self, index: int, layer: nn.Module, dtype: torch.dtype) -> None:
        """Record a layer on the CPU; it stays unrecorded if that is impossible."""
        structure = self._structure
        if not structure.packed or not structure.traits[index].recordable:
            return
        if not self._sources_are_known:
            self._sources = [
                self._recorded_source(source, module, dtype)
                for source, module in zip(structure.sources, self._modules, strict=True)
            ]
            self._sources_are_known = True
        names = [name for name, _ in _weights(layer)]
        weights = tuple(weight for _, weight in _weights(layer))
        counts = [len(source.token_dims) for source in structure.sources]
        holder = [layer]
        function = _flat(index, holder, names, structure.calls[index], counts)
        kind = (*_numbers(layer), structure.calls[index], *((w.shape, w.dtype) for w in weights))
        try:
            with torch.inference_mode():
                if kind not in self._programs:
                    self._programs[kind] = None  # stays so if recording fails
                    example = self._example(index, ROWS_TRACED, dtype, weights)
                    self._programs[kind] = _recorded(function, example)
                program = self._programs[kind]
                if program is None:
                    return
                for rows in ROWS_COMPARED:
                    given = self._example(index, rows, dtype, weights)
                    if not _close(program(*given), function(*given), dtype):
                        logger.info("layer %d stays as it is: its recording differs", index)
                        return
        except FAILURES as error:
            logger.info("layer %d stays as it is: %s", index, first_line(error))
            return
        finally:
            holder.clear()  # the program keeps the function that it was made from
        self._layers[index] = program, weights

    def run(
        self,
        start: int,
        end: int,
        step: Step,
        hidden: Tensor,
        positions: Tensor,
        make: Callable[[int], Any],
    ) -> Tensor | None:
        """Output ``[1, rows, hidden]`` of layers ``[start, end)``; None if not all are recorded.

        ``positions`` is ``[1, rows]``; ``make`` returns the output of an unrecorded source.
        """
        rows = step.decode
        if rows is None or hidden.shape[1] > ROWS_MAX:
            return None
        if any(index not in self._layers for index in range(start, end)):
            return None
        flat: list[Tensor] = []
        for at, made in enumerate(self._sources):
            output = make(at) if made is None else made(hidden, positions)
            flat.extend([output] if isinstance(output, Tensor) else output)
        slots = step.write_slots
        for index in range(start, end):
            pool = step.pools[index]
            program, weights = self._layers[index]
            hidden = program(
                hidden,
                positions,
                slots,
                rows.spans,
                rows.table,
                pool.keys,
                pool.values,
                *flat,
                *weights,
            )
        step.calls += end - start
        return hidden

    def _recorded_source(
        self, source: LayerSource, module: nn.Module, dtype: torch.dtype
    ) -> Recorded | None:
        if source.by_length or not source.recordable:
            return None

        def function(hidden: Tensor, positions: Tensor) -> Any:
            positional, named = source.arguments.resolve(hidden, positions, ())
            return module(*positional, **named)

        def example(rows: int) -> tuple[Tensor, Tensor]:
            return _hidden(rows, self._structure.width, dtype), 5 * torch.arange(rows)[None] + rows

        try:
            with torch.inference_mode():
                made = _recorded(function, example(ROWS_TRACED))
                for rows in ROWS_COMPARED:
                    given = example(rows)
                    if not _close(made(*given), function(*given), dtype):
                        return None
        except FAILURES as error:
            logger.info("%s stays as it is: %s", source.name, str(error).strip()[:200])
            return None
        return made

    def _example(
        self, index: int, rows: int, dtype: torch.dtype, weights: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Arguments of a recorded layer, each row being the last of a context of a few tokens."""
        kv_heads, key_width, value_width, _ = self._structure.kv_shapes[index]
        starts = CONTEXT_COMPARED * torch.arange(rows)
        hidden = _hidden(rows, self._structure.width, dtype)
        positions = starts[None] + 1
        flat: list[Tensor] = []
        for source, module in zip(self._structure.sources, self._modules, strict=True):
            positional, named = source.arguments.resolve(hidden, positions, ())
            output = module(*positional, **named)
            flat.extend([output] if isinstance(output, Tensor) else output)
        return (
            hidden,
            positions,
            starts + CONTEXT_COMPARED - 1,
            torch.stack([starts, torch.full_like(starts, CONTEXT_COMPARED)], dim=1),
            torch.empty(0, 0, dtype=torch.long),
            _random(rows * CONTEXT_COMPARED, kv_heads, key_width).to(dtype),
            _random(rows * CONTEXT_COMPARED, kv_heads, value_width).to(dtype),
            *flat,
            *weights,
        )


def _numbers(layer: nn.Module) -> list[Any]:
    """Types and settings of a layer's modules, without the layer's index."""
    return [
        (path, type(module), name, value)
        for path, module in layer.named_modules()
        for name, value in [("", None), *vars(module).items()]
        if isinstance(value, int | float | str | None) and name != "layer_idx"
    ]


def _weights(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, each once."""
    return [*layer.named_parameters(), *layer.named_buffers()]


@contextmanager
def _given(layer: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Within the context, the layer has the given tensors as its weights, by name."""
    own: list[tuple[dict[str, Any], str, Any]] = []
    for path, weight in weights.items():
        parent, _, name = path.rpartition(".")
        module = layer.get_submodule(parent)
        held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        own.append((held, name, held[name]))
        held[name] = weight
    try:
        yield
    finally:
        for held, name, weight in own:
            held[name] = weight


def _hidden(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return _random(1, rows, width).to(dtype)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def _flat(
    index: int,
    holder: Sequence[nn.Module],
    names: Sequence[str],
    call: ArgumentOrigins,
    counts: Sequence[int],
) -> Recorded:
    """The one layer in ``holder`` as a function of tensors alone. Outputs of sources, by
    ``counts``, and the layer's weights, by ``names``, come last."""

    def function(
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        spans: Tensor,
        table: Tensor,
        keys: Tensor,
        values: Tensor,
        *flat: Tensor,
    ) -> Tensor:
        outputs: list[Any] = []
        layer, left = holder[0], list(flat)
        for count in counts:
            part, left = left[:count], left[count:]
            outputs.append(part[0] if count == 1 else tuple(part))
        positional, named = call.resolve(hidden, positions, outputs)
        step = Step(
            pools={index: LayerPool(keys=keys, values=values)},
            write_slots=slots,
            segments=[],
            decode=DecodeRows(spans=spans, table=table),
        )
        set_step(step)
        try:
            with _given(layer, dict(zip(names, left, strict=True))):
                output = layer(hidden, *positional, **named)
        finally:
            set_step(None)
        made: Tensor = output[0] if isinstance(output, tuple) else output
        return made

    return function


def _recorded(function: Recorded, example: tuple[Tensor, ...]) -> Recorded:
    """``function`` as TorchScript; raises if it would freeze a value of the example."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made: Recorded = torch.jit.trace(  # type: ignore[no-untyped-call]
            function, example, check_trace=False
        )
    for warning in caught:
        if warning.category.__name__ == "TracerWarning":
            raise RuntimeError(str(warning.message).splitlines()[0])
    return made


def _close(one: Any, other: Any, dtype: torch.dtype) -> bool:
    if isinstance(one, Tensor):
        error = (one - other).abs().max()
        return bool(error <= ERROR_MAX[dtype] * other.abs().max().clamp(min=1e-6))
    return all(_close(a, b, dtype) for a, b in zip(one, other, strict=True))
