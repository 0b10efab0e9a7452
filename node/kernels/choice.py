"""Which kernels of our own a device can run."""

import logging
import sys

import torch

from node.attention.block_table import AttendPages
from node.kernels.moe import GroupedKernel

logger = logging.getLogger(__name__)

CAPABILITY_LEAST = (8, 0)
"""Of NVIDIA's cards: on older ones Triton multiplies without tensor cores."""
DTYPES = frozenset({torch.bfloat16, torch.float16})
"""That tensor cores multiply as they are."""
GROUPED_BY_TORCH = frozenset({9, 10})
"""Major capabilities on which torch multiplies bfloat16 by groups without waiting for the device
(``aten/src/ATen/native/cuda/GroupedBlas.cpp``)."""


def pages_kernel(device: torch.device, dtype: torch.dtype) -> AttendPages | None:
    """Attention over pages without a copy, where the device and what is installed allow it."""
    if not _runs_triton(device, dtype):
        return None
    try:
        from node.kernels.triton_paged_attention import attend_pages
    except ImportError as error:
        logger.warning(
            "attention copies what it reads: its kernel needs Triton (%s): pip install %s",
            error,
            "triton-windows" if sys.platform == "win32" else "triton",
        )
        return None
    return attend_pages


def experts_kernel(device: torch.device, dtype: torch.dtype) -> GroupedKernel | None:
    """Products by groups of rows that never wait for the device, where torch's own do."""
    if not _runs_triton(device, dtype):
        return None
    if torch.version.hip is None and dtype is torch.bfloat16:
        major, _ = torch.cuda.get_device_capability(device)
        if major in GROUPED_BY_TORCH:
            return None
    try:
        from node.kernels import triton_grouped_gemm
    except ImportError:  # said already
        return None
    return triton_grouped_gemm


def _runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in DTYPES:
        return False
    nvidia = torch.version.hip is None
    return not nvidia or torch.cuda.get_device_capability(device) >= CAPABILITY_LEAST
