"""Converts hidden states to bytes for the wire and back; every length is checked before use."""

import math
from collections.abc import Sequence

import torch

from node.device.tensors import DTYPES, is_finite

INT8 = "int8"
"""Rows of int8, each preceded by its float32 scale: used on request for slow links, never exact."""
SCALE_BYTES = 4
"""Fixed by float32."""
BLOCK = 64
"""Maximum numbers of a feature that share a scale: a few of a hidden state's numbers are a thousand
times as large as the others, always the same ones."""


class RowsError(ValueError):
    """Bytes are not the rows that their header announces."""


def split_rows(
    body: bytes | memoryview, sent: str, hidden: int, counts: Sequence[int], dtype: str
) -> Sequence[torch.Tensor]:
    """Rows ``[count, hidden]`` in ``dtype`` of several sessions from one body, ``counts`` rows of
    each. They were ``sent`` in another dtype if their peer computes in another, or as INT8 (see
    :func:`quantized`).

    Raises RowsError if dtype or length do not match; nothing is allocated before the check.
    """
    if sent == INT8:
        rows = _from_int8(body, hidden, counts)
    elif (torch_dtype := DTYPES.get(sent)) is not None:
        _check_length(body, counts, hidden, hidden * torch_dtype.itemsize)
        flat = torch.frombuffer(bytearray(body), dtype=torch_dtype)
        rows = flat.view(sum(counts), hidden)
    else:
        raise RowsError(f"dtype {sent[:16]!r} may not travel")
    return torch.split(rows.to(DTYPES[dtype]), list(counts))


def _from_int8(body: bytes | memoryview, hidden: int, counts: Sequence[int]) -> torch.Tensor:
    _check_length(body, counts, hidden, hidden + SCALE_BYTES)
    scales, numbers = _scaled(body, hidden)
    if not bool(torch.isfinite(scales).all()):
        raise RowsError("the scale of a row is no finite number")
    return numbers * scales


def _scaled(body: bytes | memoryview, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales ``[rows, 1]`` and numbers ``[rows, width]`` of rows of int8; at least one row."""
    packed = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(-1, SCALE_BYTES + width)
    scales = packed[:, :SCALE_BYTES].flatten().view(torch.float32)[:, None]
    return scales, packed[:, SCALE_BYTES:].view(torch.int8)


def _check_length(
    body: bytes | memoryview, counts: Sequence[int], hidden: int, row_bytes: int
) -> None:
    if hidden < 1 or min(counts, default=0) < 1:
        raise RowsError(f"rows of {list(counts)[:8]} tokens and width {hidden} cannot be")
    found, expected = memoryview(body).nbytes, sum(counts) * row_bytes
    if found != expected:
        raise RowsError(f"{found} bytes of activations where {expected} were announced")


def join_rows(rows: Sequence[torch.Tensor]) -> memoryview:
    """Bytes of the rows in order, copied off the device in one transfer."""
    tensor = rows[0] if len(rows) == 1 else torch.cat(list(rows))
    array = tensor.contiguous().cpu().view(torch.uint8).numpy()
    return memoryview(array.data).cast("B")


def quantized(body: bytes | memoryview, dtype: str, hidden: int) -> bytes:
    """Quantise rows of ``dtype`` to int8 with a scale per row: its largest magnitude over 127.

    The result takes half of float16's bytes, a quarter of float32's.
    """
    return _quantized(torch.frombuffer(bytearray(body), dtype=DTYPES[dtype]).view(-1, hidden))


def _quantized(rows: torch.Tensor) -> bytes:
    values = rows.float()
    scales = values.abs().amax(dim=1, keepdim=True) / 127
    whole = (values / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    packed = torch.cat([scales.view(torch.uint8), whole.view(torch.uint8)], dim=1)
    return packed.numpy().tobytes()


def packed_features(features: torch.Tensor) -> bytes:
    """Vectors ``[vectors, hidden]`` as int8, with a float32 scale before each block of numbers:
    :func:`feature_bytes` each. What a head makes of them decides no token, so they need not be
    exact; empty where a number is not finite."""
    if not features.numel() or not is_finite(features):
        return b""
    return _quantized(features.reshape(-1, _block(features.shape[-1])))


def split_features(
    body: bytes | memoryview, hidden: int, counts: Sequence[int], dtype: str
) -> Sequence[torch.Tensor]:
    """Vectors ``[count, hidden]`` in ``dtype`` from what :func:`packed_features` made, ``counts``
    of each session; some may be 0. Those that are not finite are left out, all of that session.

    Raises RowsError if the length does not match; nothing is allocated before the check.
    """
    found, expected = memoryview(body).nbytes, sum(counts) * feature_bytes(hidden)
    if found != expected:
        raise RowsError(f"{found} bytes of features where {expected} were announced")
    if not expected:
        return [torch.empty(0, hidden, dtype=DTYPES[dtype]) for _ in counts]
    scales, numbers = _scaled(body, _block(hidden))
    vectors = (numbers * scales).view(-1, hidden)
    parts = torch.split(vectors.to(DTYPES[dtype]), list(counts))
    return [part if is_finite(part) else part[:0] for part in parts]


def feature_bytes(hidden: int) -> int:
    """Bytes of a vector of ``hidden`` numbers as :func:`packed_features` makes them."""
    return hidden + hidden // _block(hidden) * SCALE_BYTES


def _block(hidden: int) -> int:
    return math.gcd(hidden, BLOCK)
