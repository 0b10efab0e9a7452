"""Packs weight matrices in memory for the kernels that read them."""

import functools
import logging
from functools import partial

import torch
from torch import nn

from dht.errors import first_line
from node.device.products import least_seconds
from node.device.scripted import scripted
from node.packed.tensor import is_packed

logger = logging.getLogger(__name__)

PACKED_ROWS = 32
"""Number of rows that oneDNN is told to expect. By default it packs for one row, which is no
packing at all; a matrix packed for several rows serves any number (measured
at commit fddc651e)."""
NUMBERS_LEAST = 200_000
"""Minimum numbers in a packed matrix; below, a call of oneDNN costs more than packing saves."""
TRIAL_ERROR_MAX = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Maximum difference between the two ways to multiply, for numbers of size 1 in sums of 64, by the
dtypes that are packed."""
TIMED_ROWS, TIMED_MATRIX, TIMINGS = 4, (1024, 2048), 9
"""A decode step's product; others' work only ever adds to a timing, so the minimum counts."""


class PackedLinear(nn.Module):
    """``x @ W.T + b`` on a CPU, over a matrix in oneDNN's blocks.

    In float32 BLAS packs a matrix ``[out, in]`` again for every product of a few rows, which takes
    longer than the product; in bfloat16 oneDNN reads blocks up to 1.5 times as fast. Here it is
    packed once. ``weight`` is opaque: its dtype, device and shape can be
    read, its numbers cannot.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", _packed(linear.weight.data))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.data)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = scripted(packed_product)(rows, self.weight, self.bias, self.in_features)
        return out


def packed_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, in_features: int
) -> torch.Tensor:
    """``rows``, ``[…, in_features]``, times a packed matrix: ``[…, outs]``. Written so that
    TorchScript accepts it."""
    flat = rows.reshape(-1, in_features)
    count = flat.size(0)
    # In float32 the kernel for four rows is faster than those for one and two.
    if 0 < count < 4 and flat.dtype == torch.float32:
        flat = flat.repeat((4 + count - 1) // count, 1)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    shape = list(rows.size())
    shape[-1] = out.size(1)
    return out.narrow(0, 0, count).view(shape)


def favour_few_rows(module: nn.Module) -> nn.Module:
    """Pack the matrices of ``module`` for products of 1 to about 100 rows on a CPU: those in
    float32, and in bfloat16 where that is quicker on this CPU.

    Returns ``module``, or its replacement if it is a linear layer itself. Subclasses of linear
    layers, which may compute something else, other dtypes and other devices are left alone.
    """
    if _packable(module):
        return PackedLinear(module)  # type: ignore[arg-type]  # it is a linear layer
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _packable(child):
                setattr(parent, name, PackedLinear(child))  # type: ignore[arg-type]
    return module


def _packable(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype in TRIAL_ERROR_MAX
        and module.weight.numel() >= NUMBERS_LEAST
        and not module._forward_hooks
        and not is_packed(module)
        and _can_pack(module.weight.dtype)
    )


def _packed(weight: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return made


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch multiplies by packed matrices, tried once on small ones.

    The operators are those that torch's own compiler emits. They are not part of its documented
    interface, so their results are compared before anything relies on them.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        linear = nn.Linear(64, 96).to(dtype)
        rows = torch.randn(5, 64, generator=generator).to(dtype)
        try:
            if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                return False  # most processors without AVX-512
            packed = PackedLinear(linear)
            agrees = all(
                torch.allclose(packed(rows[:n]), linear(rows[:n]), atol=TRIAL_ERROR_MAX[dtype])
                for n in (1, 5)
            )
        except (AttributeError, RuntimeError) as error:
            logger.warning("matrices stay as they are: %s", first_line(error))
            return False
    if not agrees:
        logger.warning("matrices stay as they are: oneDNN's products differ")
    return agrees and (dtype is torch.float32 or _is_quicker(dtype))


def _is_quicker(dtype: torch.dtype) -> bool:
    """Whether few rows are multiplied faster by a packed matrix."""
    outs, ins = TIMED_MATRIX
    with torch.inference_mode():
        plain = nn.Linear(ins, outs, bias=False, dtype=dtype)
        packed = PackedLinear(plain)
        rows = torch.ones(TIMED_ROWS, ins, dtype=dtype)
        plain_s, packed_s = least_seconds([partial(plain, rows), partial(packed, rows)], TIMINGS)
    return packed_s < plain_s
