"""Tells a device that has failed for good from an error of what was run on it."""

import torch


class _NeverRaised(RuntimeError):
    """Stands for an error class that this version of torch does not have."""


AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", _NeverRaised)
"""Errors that CUDA itself reports, as opposed to torch's own; since torch 2.8."""


def lost(device: torch.device) -> RuntimeError | None:
    """The error of a device that has failed for good in this process; None if it computes."""
    try:
        torch.ones(1, device=device).add_(1).tolist()
    except AcceleratorError as error:
        return error
    return None
