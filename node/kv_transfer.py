"""Moving a session's KV between engines: rows in the order in which they were appended.

KV is append-only, so what is exported stays true while the session goes on decoding (Llumnix,
OSDI'24, §4.2): the bulk is copied while it runs, the rest when it has stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from node.attention import LayerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRows:
    """KV of one session for ``tokens`` tokens from ``position`` on, layers ``[start, end)``."""

    start: int
    end: int
    position: int
    keys: tuple[torch.Tensor, ...]
    """Per layer ``[tokens, kv_heads, width]``, on the CPU."""
    values: tuple[torch.Tensor, ...]

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return int(self.keys[0].shape[0]) if self.keys else 0


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
    """Write rows that :func:`refusal` found nothing against."""
    for index, keys, values in zip(
        range(rows.start, rows.end), rows.keys, rows.values, strict=True
    ):
        pool = pools[index]
        device = pool.keys.device
        where = slots.to(device)
        pool.keys[where] = keys.to(device)
        pool.values[where] = values.to(device)


def refusal(pools: Mapping[int, LayerPool], rows: KvRows) -> str | None:
    """Why rows that came from elsewhere do not fit the pools, or None."""
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
