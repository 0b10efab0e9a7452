"""Moves a session's KV between engines, as rows in the order in which they were appended.

KV is append-only, so exported KV stays valid while the session goes on decoding (Llumnix, OSDI'24,
§4.2): most of it is copied while the session runs, the rest once it has stopped.
"""

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
    keys: tuple[torch.Tensor, ...]
    """Keys per layer, ``[tokens, kv_heads, width]``, on the CPU."""
    values: tuple[torch.Tensor, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.keys[0].shape[0]) if self.keys else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBytes:
    """:class:`KvRows` as sent: per layer the keys of all tokens, then their values."""

    start: int
    end: int
    position: int
    tokens: int
    body: bytes


def pack_kv(rows: KvRows) -> bytes:
    """Body of :class:`KvBytes` for ``rows``."""
    pairs = zip(rows.keys, rows.values, strict=True)
    parts = [part.contiguous().view(torch.uint8).flatten() for pair in pairs for part in pair]
    return torch.cat(parts).numpy().tobytes()


def unpack_kv(pools: Mapping[int, LayerPool], packed: KvBytes) -> KvRows | str:
    """Rows of the pools' shapes and dtypes, or why the body does not match; checked before use."""
    if not packed.start < packed.end or packed.tokens < 1:
        return f"KV of {packed.tokens} tokens in layers [{packed.start}, {packed.end}) came"
    if any(index not in pools for index in range(packed.start, packed.end)):
        return f"KV of layers [{packed.start}, {packed.end}) came, which are not all held here"
    layers = [pools[index] for index in range(packed.start, packed.end)]
    shapes = [
        ((packed.tokens, *pool.shape[1:]), pool.dtype)
        for layer in layers
        for pool in (layer.keys, layer.values)
    ]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    if len(packed.body) != sum(sizes):
        return f"{len(packed.body)} bytes of KV came, {sum(sizes)} expected"
    flat = torch.split(torch.frombuffer(bytearray(packed.body), dtype=torch.uint8), sizes)
    # A part may start at an address unaligned for its dtype; a view then needs its own memory.
    parts = [
        part.clone().view(dtype).view(shape)
        for part, (shape, dtype) in zip(flat, shapes, strict=True)
    ]
    return KvRows(
        start=packed.start,
        end=packed.end,
        position=packed.position,
        keys=tuple(parts[::2]),
        values=tuple(parts[1::2]),
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
        keys=tuple(pool.keys[slots.to(pool.keys.device)].to("cpu") for pool in layers),
        values=tuple(pool.values[slots.to(pool.values.device)].to("cpu") for pool in layers),
    )


def put(pools: Mapping[int, LayerPool], slots: torch.Tensor, rows: KvRows) -> None:
    """Write rows to the pools; :func:`kv_refusal` must have accepted them."""
    for index, keys, values in zip(
        range(rows.start, rows.end), rows.keys, rows.values, strict=True
    ):
        pool = pools[index]
        device = pool.keys.device
        where = slots.to(device)
        pool.keys[where] = keys.to(device)
        pool.values[where] = values.to(device)


def kv_refusal(pools: Mapping[int, LayerPool], rows: KvRows) -> str | None:
    """Why rows from another engine do not fit the pools, or None."""
    span = f"layers [{rows.start}, {rows.end})"
    if not rows.start < rows.end or any(i not in pools for i in range(rows.start, rows.end)):
        return f"KV of {span} came, which are not all held here"
    if not len(rows.keys) == len(rows.values) == rows.end - rows.start:
        return f"KV of {len(rows.keys)} and {len(rows.values)} layers came for {span}"
    if rows.tokens < 1:
        return "KV of no tokens came"
    for index, keys, values in zip(
        range(rows.start, rows.end), rows.keys, rows.values, strict=True
    ):
        pool = pools[index]
        for what, came, have in (("keys", keys, pool.keys), ("values", values, pool.values)):
            shape = (rows.tokens, *have.shape[1:])
            if tuple(came.shape) != shape:
                return f"{what} of layer {index} have shape {tuple(came.shape)}, {shape} expected"
            if came.dtype != have.dtype:
                return f"{what} of layer {index} are {came.dtype}, {have.dtype} expected"
            if not bool(torch.isfinite(came).all()):
                return f"{what} of layer {index} are not finite"
    return None
