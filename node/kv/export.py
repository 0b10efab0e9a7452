"""Moves a session's KV between engines, as rows in the order in which they were appended.

KV is append-only, so exported KV stays valid while the session goes on decoding (Llumnix, OSDI'24,
§4.2): most of it is copied while the session runs, the rest once it has stopped.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from node.kv.layer_pool import LayerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRows:
    """KV of one session for ``tokens`` tokens from ``position`` on, layers ``[start, end)``."""

    start: int
    end: int
    position: int
    layers: tuple[tuple[torch.Tensor, ...], ...]
    """Parts of each layer's pool (:attr:`node.kv.layer_pool.LayerPool.parts`), each ``[tokens,
    heads, width]``, on the CPU."""

    @property
    def tokens(self) -> int:
        return int(self.layers[0][0].shape[0]) if self.layers and self.layers[0] else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBytes:
    """:class:`KvRows` as sent: per layer the keys of all tokens, then their values, then
    their indexer keys where the layer has any."""

    start: int
    end: int
    position: int
    tokens: int
    body: bytes


def pack_kv(rows: KvRows) -> bytes:
    """Body of :class:`KvBytes` for ``rows``."""
    flat = itertools.chain.from_iterable(rows.layers)
    parts = [part.contiguous().view(torch.uint8).flatten() for part in flat]
    return torch.cat(parts).numpy().tobytes()


def unpack_kv(pools: Mapping[int, LayerPool], packed: KvBytes) -> KvRows | str:
    """Rows of the pools' shapes and dtypes, or why the body does not match; checked before use."""
    if not packed.start < packed.end or packed.tokens < 1:
        return f"KV of {packed.tokens} tokens in layers [{packed.start}, {packed.end}) came"
    if any(index not in pools for index in range(packed.start, packed.end)):
        return f"KV of layers [{packed.start}, {packed.end}) came, which are not all held here"
    layers = [pools[index] for index in range(packed.start, packed.end)]
    shapes = [
        ((packed.tokens, *part.shape[1:]), part.dtype) for layer in layers for part in layer.parts
    ]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    if len(packed.body) != sum(sizes):
        return f"{len(packed.body)} bytes of KV came, {sum(sizes)} expected"
    flat = torch.split(torch.frombuffer(bytearray(packed.body), dtype=torch.uint8), sizes)
    # A part may start at an address unaligned for its dtype; a view then needs its own memory.
    parts = (
        part.clone().view(dtype).view(shape)
        for part, (shape, dtype) in zip(flat, shapes, strict=True)
    )
    return KvRows(
        start=packed.start,
        end=packed.end,
        position=packed.position,
        layers=tuple(tuple(itertools.islice(parts, len(layer.parts))) for layer in layers),
    )


def take(
    pools: Mapping[int, LayerPool], slots: torch.Tensor, start: int, end: int, position: int
) -> KvRows:
    """Copy the pool rows ``slots`` of layers ``[start, end)`` to the CPU."""
    layers = [pools[index] for index in range(start, end)]
    return KvRows(
        start=start,
        end=end,
        position=position,
        layers=tuple(
            tuple(part[slots.to(part.device)].to("cpu") for part in pool.parts) for pool in layers
        ),
    )


def put(pools: Mapping[int, LayerPool], slots: torch.Tensor, rows: KvRows) -> None:
    """Write rows to the pools; :func:`kv_refusal` must have accepted them."""
    for index, parts in zip(range(rows.start, rows.end), rows.layers, strict=True):
        for held, came in zip(pools[index].parts, parts, strict=True):
            held[slots.to(held.device)] = came.to(held.device)


def kv_refusal(pools: Mapping[int, LayerPool], rows: KvRows) -> str | None:
    """Why rows from another engine do not fit the pools, or None."""
    span = f"layers [{rows.start}, {rows.end})"
    if not rows.start < rows.end or any(i not in pools for i in range(rows.start, rows.end)):
        return f"KV of {span} came, which are not all held here"
    if len(rows.layers) != rows.end - rows.start:
        return f"KV of {len(rows.layers)} layers came for {span}"
    if rows.tokens < 1:
        return "KV of no tokens came"
    for index, parts in zip(range(rows.start, rows.end), rows.layers, strict=True):
        held = pools[index].parts
        if len(parts) != len(held):
            return f"{len(parts)} parts of layer {index} came, {len(held)} expected"
        for what, came, have in zip(("keys", "values", "indexer keys"), parts, held, strict=False):
            shape = (rows.tokens, *have.shape[1:])
            if tuple(came.shape) != shape:
                return f"{what} of layer {index} have shape {tuple(came.shape)}, {shape} expected"
            if came.dtype != have.dtype:
                return f"{what} of layer {index} are {came.dtype}, {have.dtype} expected"
            if not bool(torch.isfinite(came).all()):
                return f"{what} of layer {index} are not finite"
    return None
