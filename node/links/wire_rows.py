"""Hidden states as bytes on the wire and back, with every length checked before use."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from node.device.tensors import DTYPES

INT8 = "int8"
"""Rows of int8, each behind its float32 scale: on request for slow links, and never exact."""
SCALE_BYTES = 4


class RowsError(ValueError):
    """Bytes that are not the rows their header promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Hidden states of consecutive tokens: ``tensor`` is ``[tokens, hidden]``."""

    tensor: torch.Tensor

    @staticmethod
    def split(
        body: bytes | memoryview, dtype: str, hidden: int, counts: Sequence[int]
    ) -> list["Rows"]:
        """Rows of several sessions from one body of ``sum(counts) × hidden`` numbers.

        Raises RowsError where dtype or length do not fit; nothing is allocated before the check.
        """
        torch_dtype = DTYPES.get(dtype)
        if torch_dtype is None:
            raise RowsError(f"dtype {dtype[:16]!r} may not travel")
        if hidden < 1 or min(counts, default=0) < 1:
            raise RowsError(f"rows of {list(counts)[:8]} tokens and width {hidden} cannot be")
        expected = sum(counts) * hidden * torch_dtype.itemsize
        if memoryview(body).nbytes != expected:
            raise RowsError(
                f"{memoryview(body).nbytes} bytes of activations where {expected} were announced"
            )
        flat = torch.frombuffer(bytearray(body), dtype=torch_dtype)
        parts = torch.split(flat.view(sum(counts), hidden), list(counts))
        return [Rows(tensor=part) for part in parts]

    @staticmethod
    def split_int8(
        body: bytes | memoryview, dtype: str, hidden: int, counts: Sequence[int]
    ) -> list["Rows"]:
        """Rows from a body of :func:`quantized`, in ``dtype``. Raises RowsError like ``split``."""
        if hidden < 1 or min(counts, default=0) < 1:
            raise RowsError(f"rows of {list(counts)[:8]} tokens and width {hidden} cannot be")
        expected = sum(counts) * (hidden + SCALE_BYTES)
        if memoryview(body).nbytes != expected:
            raise RowsError(
                f"{memoryview(body).nbytes} bytes of activations where {expected} were announced"
            )
        packed = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(sum(counts), -1)
        scales = packed[:, :SCALE_BYTES].contiguous().view(torch.float32)
        if not bool(torch.isfinite(scales).all()):
            raise RowsError("the scale of a row is no finite number")
        rows = (packed[:, SCALE_BYTES:].view(torch.int8) * scales).to(DTYPES[dtype])
        return [Rows(tensor=part) for part in torch.split(rows, list(counts))]

    @staticmethod
    def join(rows: Sequence["Rows"]) -> memoryview:
        """The rows' numbers in order, as bytes."""
        tensors = [part.tensor for part in rows]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        array = tensor.contiguous().cpu().view(torch.uint8).numpy()
        return memoryview(array.data).cast("B")


def quantized(body: bytes | memoryview, dtype: str, hidden: int) -> bytes:
    """Rows of ``dtype`` as int8 with a scale per row: its greatest magnitude over 127.

    Half of float16's bytes, a quarter of float32's.
    """
    values = torch.frombuffer(bytearray(body), dtype=DTYPES[dtype]).view(-1, hidden).float()
    scales = values.abs().amax(dim=1, keepdim=True) / 127
    whole = (values / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    packed = torch.cat([scales.view(torch.uint8), whole.view(torch.uint8)], dim=1)
    return packed.numpy().tobytes()
