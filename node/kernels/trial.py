"""Trials of kernels on the device that they will run on: parameters, and what a failure means."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from dht.errors import MachineError
from node.device.failure import lost

logger = logging.getLogger(__name__)

SEED = 0
ERROR_MAX = 0.02
"""Maximum error, relative to the norm of attention's output for a row and head. Rounding to
bfloat16 causes 0.003; forgetting one token of 700 causes 0.04."""

Found = TypeVar("Found")


class KernelRefused(Exception):
    """A kernel failed its trial; the message says how."""


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
        told = str(error).strip().splitlines() or [repr(error)]
        logger.warning("%s: its kernel failed: %s", without, told[0])
        return None
