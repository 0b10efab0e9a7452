"""Trials of kernels on the device that they will run on: parameters, and what a failure means."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from dht.errors import MachineError, first_line
from node.device.failure import lost

logger = logging.getLogger(__name__)

TRIAL_TOKENS, TRIAL_WIDTH = 5, 64
"""Tokens, and numbers per head, that a small operation is tried with."""
SEED = 0
ERROR_MAX = 0.02
"""Maximum error of a kernel, relative to the norm of the right output: of attention and rotation
for a row and head, of a product as a whole. Rounding to bfloat16 causes 0.003 in attention, 0.004
in a product; forgetting one token of 700 causes 0.04."""
ERRORS_MAX = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Maximum error of what takes the place of a model's own code, relative to the norm of that code's
output for a row: a few roundings."""

Found = TypeVar("Found")


class KernelRefused(Exception):
    """A kernel failed its trial; the message says how."""


def drawn(*size: int, scales: tuple[float, ...] = (1.0,)) -> Tensor:
    """The same random numbers at each call, ``[*size]``, in float32 on the CPU. Rows, along the
    dimension before the last, take the ``scales`` in turn."""
    numbers = torch.randn(*size, generator=torch.Generator().manual_seed(SEED))
    turns = torch.tensor(scales).repeat(-(-size[-2] // len(scales)))
    return numbers * turns[: size[-2], None]


def given_by(theirs: Callable[..., Any], *given: Any) -> Any:
    """What a model's own code returns; None if it takes other arguments."""
    try:
        with torch.inference_mode():
            return theirs(*given)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None


def alike(given: Tensor | None, wanted: Any, error_max: float) -> bool:
    """Whether two tensors differ by at most ``error_max``, relative to the norm of each row."""
    if given is None or not isinstance(wanted, Tensor):
        return False
    if given.shape != wanted.shape or given.dtype is not wanted.dtype:
        return False
    norm = torch.linalg.vector_norm
    apart, size = norm((given - wanted).float(), dim=-1), norm(wanted.float(), dim=-1)
    return bool((apart <= error_max * size).all())  # false for NaN, too


def tried(device: torch.device, without: str, trial: Callable[[], Found]) -> Found | None:
    """Result of ``trial``; None if it failed, having logged what runs ``without`` a kernel.

    Raises MachineError if the kernel crashed the device.
    """
    try:
        return trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # from a compiler or driver; there is another way
        # The crash may come from a launch by Triton, whose errors are not torch's.
        if (crash := lost(device)) is not None:
            raise MachineError(
                f"{device} failed in a kernel of ours ({crash}): start again with --no-kernels"
            ) from error
        logger.warning("%s: its kernel failed: %s", without, first_line(error))
        return None
