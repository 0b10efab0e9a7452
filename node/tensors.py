"""Hidden states as bytes on the wire and back, with every length checked before use."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtypes that may travel."""


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
    def join(rows: Sequence["Rows"]) -> memoryview:
        """The rows' numbers in order, as bytes."""
        tensors = [part.tensor for part in rows]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        array = tensor.contiguous().cpu().view(torch.uint8).numpy()
        return memoryview(array.data).cast("B")
