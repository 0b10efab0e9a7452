"""A tensor that is kept packed, and is a plain one to whoever computes with it.

The code of a model multiplies by its weights, stacks, joins, transposes and indexes them. For a
:class:`PackedTensor` these stay operations on packed parts. Products are made from the bits where
the layout allows it (:mod:`.operand`), else by dequantising a few rows at a time, and whatever else
is asked of it sees its numbers. So no module and no family has to know.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from node.device.products import multiplies
from node.packed.packing import Meaning, Parts, Room

TILE_NUMBERS = 1 << 17
"""Numbers that a product on a CPU dequantises at a time: what stays in its cache."""
ANYWHERE_NUMBERS = 1 << 24
"""The same on other devices, where launches cost and memory is what limits."""

aten = torch.ops.aten


class PackedTensor(torch.Tensor):
    """A matrix, or a stack of them, ``[..., outs, ins]``, in the bits of a checkpoint.

    ``turned``: seen as ``[..., ins, outs]``. Its dtype is the one that it computes in.
    """

    packing: Meaning
    parts: dict[str, torch.Tensor]
    turned: bool

    @staticmethod
    def __new__(
        cls: type["PackedTensor"],
        packing: Meaning,
        parts: Parts,
        dtype: torch.dtype = torch.float32,
        *,
        turned: bool = False,
    ) -> "PackedTensor":
        """Raises ValueError if the parts do not fit each other."""
        shape = packing.shape(parts)
        if turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        with torch.inference_mode(False):  # else no view of a parameter could be one
            made: PackedTensor = torch.Tensor._make_wrapper_subclass(
                cls, shape, dtype=dtype, device=parts["codes"].device
            )
        made.packing, made.parts, made.turned = packing, dict(parts), turned
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        known = _KNOWN.get(func)
        if known is not None and (done := known(*args, **named)) is not None:
            return done
        if (done := func.decompose(*args, **named)) is not NotImplemented:
            return done
        # A view of a parameter must not be of inference, even where one infers.
        views = any(result.alias_info is not None for result in func._schema.returns)
        with torch.inference_mode(torch.is_inference_mode_enabled() and not views):
            plain = tree_map_only(PackedTensor, PackedTensor.dequantised, (args, named))
            return func(*plain[0], **plain[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedTensor({tuple(self.shape)}, {self.packing})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedTensor":
        return self._with({name: part.clone() for name, part in self.parts.items()})

    @property
    def held_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    @property
    def is_finite(self) -> bool:
        """Whether no number can be too large for the dtype."""
        return self.packing.is_finite(self.parts, self.dtype)

    def dequantised(self) -> torch.Tensor:
        """The whole as a plain tensor, ``[…, outs, ins]``, or as it is turned."""
        made = self.packing.dequantise(self.parts, self.dtype)
        return made.transpose(-1, -2) if self.turned else made

    def made_up(self) -> "PackedTensor":
        """One of the same shape and packing, on the CPU, with random codes, to time with."""
        return self._with(self.packing.made_up(self.parts))

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows``, ``[count, ins]``, times the matrix: ``[count, outs]``."""
        return _product(self.packing, self.parts, rows)

    def of_expert(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """``rows``, ``[count, ins]``, times the matrix at ``index`` of a stack: ``[count, outs]``.

        The same as a product by that part, without the tensor in between, which takes as long as
        a small product."""
        parts = {name: part[index] for name, part in self.parts.items()}
        return _product(self.packing, parts, rows)

    def _with(
        self,
        parts: Parts,
        *,
        packing: Meaning | None = None,
        dtype: torch.dtype | None = None,
        turned: bool | None = None,
    ) -> "PackedTensor":
        return PackedTensor(
            packing or self.packing,
            parts,
            dtype or self.dtype,
            turned=self.turned if turned is None else turned,
        )


def _product(packing: Meaning, parts: Parts, rows: torch.Tensor) -> torch.Tensor:
    if (made := packing.product(parts, rows)) is not None:
        return made
    out = rows.new_empty(rows.shape[0], packing.shape(parts)[0])
    if rows.device.type == "cpu" and not multiplies(rows.dtype):
        rows = rows.float()  # tiles are computed in float32 anyway
    for start, tile in _tiles(packing, parts, rows.dtype):
        out[:, start : start + tile.shape[0]] = rows @ tile.t()
    return out


def _tiles(
    packing: Meaning, parts: Parts, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """A few rows of a matrix at a time: the first one's index, and ``[rows, ins]`` in ``dtype``,
    which stay until the next ones come."""
    room = Room()
    outs, ins = packing.shape(parts)
    numbers = TILE_NUMBERS if parts["codes"].device.type == "cpu" else ANYWHERE_NUMBERS
    rows = max(1, numbers // (ins * packing.rows)) * packing.rows
    for start in range(0, outs, rows):
        some = packing.some_rows(parts, start, min(start + rows, outs))
        yield start, packing.dequantise(some, dtype, room)


_KNOWN: dict[Any, Callable[..., Any]] = {}
"""Operations that know what a packed tensor is; None from them asks for the plain way."""


def _knows(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _KNOWN.update(dict.fromkeys(operations, function))
        return function

    return decorate


@_knows(aten.detach.default, aten.alias.default)
def _same(packed: PackedTensor) -> PackedTensor:
    return packed._with(packed.parts)


@_knows(aten.clone.default)
def _clone(packed: PackedTensor, **_: Any) -> PackedTensor:
    return packed._with({name: part.clone() for name, part in packed.parts.items()})


@_knows(aten._to_copy.default)
def _moved(
    packed: PackedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> PackedTensor | None:
    if dtype is not None and not dtype.is_floating_point:
        return None
    return packed._with(
        {name: part.to(device or part.device) for name, part in packed.parts.items()}, dtype=dtype
    )


@_knows(aten.t.default)
def _turned(packed: PackedTensor) -> PackedTensor:
    return packed._with(packed.parts, turned=not packed.turned)


@_knows(aten.transpose.int)
def _transposed(packed: PackedTensor, one: int, other: int) -> PackedTensor | None:
    last = packed.dim() - 1
    if {one % packed.dim(), other % packed.dim()} != {last, last - 1}:
        return None
    return packed._with(packed.parts, turned=not packed.turned)


@_knows(aten.select.int)
def _select(packed: PackedTensor, dim: int, index: int) -> PackedTensor | None:
    if packed.dim() < 3 or dim % packed.dim() != 0:
        return None
    return packed._with({name: part[index] for name, part in packed.parts.items()})


@_knows(aten.slice.Tensor)
def _slice(
    packed: PackedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> PackedTensor | None:
    if dim % packed.dim() != 0 or not _has_rows_apart(packed):
        return None
    return packed._with({name: part[start:end:step] for name, part in packed.parts.items()})


@_knows(aten.index.Tensor)
def _index(packed: PackedTensor, indices: Sequence[torch.Tensor | None]) -> PackedTensor | None:
    chosen = indices[-1]
    if chosen is None or chosen.dtype not in (torch.int64, torch.int32) or chosen.dim() > 1:
        return None
    if len(indices) == 1 and _has_rows_apart(packed):
        return packed._with({name: part[chosen] for name, part in packed.parts.items()})
    if len(indices) == packed.dim() == 2 and indices[0] is None and not packed.turned:
        order = packed.parts.get("order")
        is_whole = len(chosen) == packed.shape[1]
        if is_whole and (order is None or len(order) == 1):
            place = chosen if order is None else order[0][chosen]
            return packed._with({**packed.parts, "order": place[None].to(torch.int32)})
    return None


def _has_rows_apart(packed: PackedTensor) -> bool:
    """Whether each part's first axis is that of the tensor: of a stack, or of rows that share
    nothing."""
    if packed.dim() > 2:
        return True
    return not packed.turned and packed.packing.rows == 1 and "order" not in packed.parts


@_knows(aten.stack.default)
def _stack(tensors: Sequence[Any], dim: int = 0) -> PackedTensor | None:
    first = tensors[0]
    if dim != 0 or not _alike(tensors):
        return None
    parts = {name: torch.stack([each.parts[name] for each in tensors]) for name in first.parts}
    made: PackedTensor = first._with(parts)
    return made


@_knows(aten.cat.default)
def _cat(tensors: Sequence[Any], dim: int = 0) -> PackedTensor | None:
    """Join stacks, or rows of matrices."""
    if not _alike(tensors):
        return None
    first: PackedTensor = tensors[0]
    dim %= first.dim()
    if dim < first.dim() - 2:
        packing, found = first.packing, [each.parts for each in tensors]
    elif (
        first.turned
        or dim != first.dim() - 2
        or not first.packing.joins
        or ("order" in first.parts and len({each.shape for each in tensors}) > 1)
    ):
        return None
    elif all(each.shape[-2] % first.packing.rows == 0 for each in tensors[:-1]):
        packing, found = first.packing, [each.parts for each in tensors]
    else:
        spread = [each.packing.by_row(each.parts) for each in tensors]
        packing, found = spread[0][0], [parts for _, parts in spread]
    parts = {name: torch.cat([each[name] for each in found], dim=dim) for name in first.parts}
    return first._with(parts, packing=packing)


def _alike(tensors: Sequence[Any]) -> bool:
    """Whether these are packed in the same way."""
    first = tensors[0]
    return isinstance(first, PackedTensor) and all(
        isinstance(each, PackedTensor)
        and (each.packing, each.turned, each.parts.keys())
        == (first.packing, first.turned, first.parts.keys())
        and [part.dtype for part in each.parts.values()]
        == [part.dtype for part in first.parts.values()]
        for each in tensors
    )


@_knows(aten.linear.default)
def _linear(rows: Any, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if isinstance(rows, PackedTensor) or weight.turned or weight.dim() != 2:
        return None
    out: torch.Tensor = weight.product(rows.reshape(-1, rows.shape[-1]))
    if bias is not None:
        out += bias
    return out.view(*rows.shape[:-1], -1)


@_knows(aten.mm.default, aten.matmul.default)
def _matmul(rows: Any, weight: Any) -> torch.Tensor | None:
    if isinstance(rows, PackedTensor) or not weight.turned or weight.dim() != 2:
        return None
    out: torch.Tensor = weight.product(rows.reshape(-1, rows.shape[-1]))
    return out.view(*rows.shape[:-1], -1)


@_knows(aten.addmm.default)
def _addmm(bias: Any, rows: Any, weight: Any, **scaled: Any) -> torch.Tensor | None:
    if scaled or isinstance(bias, PackedTensor):
        return None
    out: torch.Tensor | None = _matmul(rows, weight)
    return None if out is None else out.add_(bias)


@_knows(aten.embedding.default)
def _embedding(weight: Any, ids: torch.Tensor, *_: Any) -> torch.Tensor | None:
    if not isinstance(weight, PackedTensor) or weight.turned or weight.dim() != 2:
        return None
    if "order" in weight.parts and weight.parts["order"].shape[-2] > 1:
        return None
    rows: torch.Tensor = weight.packing.picked(weight.parts, ids.reshape(-1), weight.dtype)
    return rows.view(*ids.shape, -1)


def rows_join(tensors: Sequence[Any]) -> bool:
    """Whether matrices packed in the same way are joined by their rows without dequantising."""
    first = tensors[0]
    return _alike(tensors) and first.packing.joins and "order" not in first.parts


def packed_weights(module: torch.nn.Module) -> list[PackedTensor]:
    """The module's own weights that are kept packed."""
    return [each for each in module.parameters(recurse=False) if isinstance(each, PackedTensor)]


def is_packed(module: torch.nn.Module) -> bool:
    """Whether one of the module's own weights, or of a module within it, is kept packed."""
    return any(isinstance(weight.data, PackedTensor) for weight in module.parameters())
