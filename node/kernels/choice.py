"""Chooses which of our own kernels a device can run."""

import logging
import sys
from importlib.util import find_spec
from typing import NamedTuple

import torch

from node.attention.block_table import AttendPages
from node.kernels.gate import GateRows
from node.kernels.moe import GroupedKernel
from node.kernels.packed import PackedKernel
from node.kernels.rms_norm import NormRows
from node.kernels.rotary import Rotate
from node.kernels.router import ChooseExperts
from node.kv.layer_pool import WriteRows

logger = logging.getLogger(__name__)

CAPABILITY_LEAST = (8, 0)
"""Minimum compute capability, NVIDIA: on older cards Triton multiplies without tensor cores."""
DTYPES = frozenset({torch.bfloat16, torch.float16})
"""Dtypes that tensor cores multiply directly."""


class RowsKernels(NamedTuple):
    """Kernels that take the place of parts of a layer which work on each row by itself."""

    norm_rows: NormRows
    rotate_heads: Rotate
    choose_experts: ChooseExperts
    gate_rows: GateRows
    packed: PackedKernel
    write_rows: WriteRows


def rows_kernels(device: torch.device, dtype: torch.dtype) -> RowsKernels | None:
    """Norms, rotations, routers, gates and writes of keys and values in one launch each, products
    by packed weights from their bits; None if impossible here."""
    if not _runs_triton(device, dtype):
        return None
    try:
        from node.kernels.triton import packed
        from node.kernels.triton.gate import gate_rows
        from node.kernels.triton.kv_rows import write_rows
        from node.kernels.triton.rms_norm import norm_rows
        from node.kernels.triton.rotary import rotate_heads
        from node.kernels.triton.router import choose_experts
    except ImportError:  # :func:`pages_kernel` logs it
        return None
    return RowsKernels(norm_rows, rotate_heads, choose_experts, gate_rows, packed, write_rows)


def pages_kernel(device: torch.device, dtype: torch.dtype) -> AttendPages | None:
    """Attention over pages without a copy, if the device and the installed libraries allow it."""
    if not _runs_triton(device, dtype):
        return None
    try:
        from node.kernels.triton.paged_attention import attend_pages
    except ImportError as error:
        logger.warning(
            "attention copies what it reads: its kernel needs Triton (%s): pip install %s",
            error,
            "triton-windows" if sys.platform == "win32" else "triton",
        )
        return None
    return attend_pages


def experts_kernel(device: torch.device, dtype: torch.dtype) -> GroupedKernel | None:
    """Grouped products that never wait for the device; None if impossible here."""
    if not _runs_triton(device, dtype):
        return None
    try:
        from node.kernels.triton import grouped_gemm
    except ImportError:  # :func:`pages_kernel` has logged it
        return None
    return grouped_gemm


def multiplies_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device could multiply by packed weights; a GPU that is not here is taken for a new
    one."""
    here = torch.cuda.is_available()
    return _runs_triton(device, dtype) and not (here and find_spec("triton") is None)


def _runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in DTYPES:
        return False
    nvidia = torch.version.hip is None
    if not nvidia or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= CAPABILITY_LEAST
