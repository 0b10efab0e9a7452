"""Which kernels of our own a device can run."""

import logging

import torch

from node.paged_rows import AttendPages

logger = logging.getLogger(__name__)

CAPABILITY_LEAST = (8, 0)
"""Of NVIDIA's cards: on older ones Triton multiplies without tensor cores."""
DTYPES = frozenset({torch.bfloat16, torch.float16})
"""That tensor cores multiply as they are."""


def pages_kernel(device: torch.device, dtype: torch.dtype) -> AttendPages | None:
    """Attention over pages without a copy, where the device and what is installed allow it."""
    if device.type != "cuda" or dtype not in DTYPES:
        return None
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < CAPABILITY_LEAST:
        return None
    try:
        from node.paged_kernel import attend_pages
    except ImportError as error:
        logger.warning("attention copies what it reads: its kernel needs Triton (%s)", error)
        return None
    return attend_pages
