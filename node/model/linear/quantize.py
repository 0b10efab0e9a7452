"""Quantises linear layers to 8 or 4 bits: more layers fit into memory, at a measured error.

int8: weights and each row of activations as 8-bit integers with one scale per row, multiplied as
integers (Dettmers et al., LLM.int8(), NeurIPS'22, without its outlier decomposition, which would
make a session's numbers depend on who shares the batch). int4: weights as 4-bit NormalFloat in
blocks of 64 (Dettmers et al., QLoRA, NeurIPS'23 §3), computed in the peer's dtype. The kernels are
those of ``bitsandbytes``, on GPUs and CPUs; ``bench/quantization.py`` measures the error. Experts
that a model's code keeps stacked have the same numbers as packed tensors (:mod:`node.packed`),
whose activations stay in the dtype.

Everything else stays as it is: norms, routers, and the embedding and the head, which are not part
of any layer.
"""

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dht.errors import UserError
from node.packed.packing import CODES, Packing
from node.packed.tensor import PackedTensor

KINDS = ("int8", "int4")
BLOCK = 64
"""Number of weights that share a scale in 4 bits."""
NUMBERS_MIN = 4096
"""Minimum numbers in a quantised matrix: small ones, as of routers, weigh nothing, decide much."""
INT8_MAX = 127


def quantize_linears(module: nn.Module, kind: str) -> nn.Module:
    """Replace the linear layers within ``module`` in place; ``kind`` is one of KINDS.

    Raises UserError if ``bitsandbytes`` is missing or cannot work here.
    """
    library = _library()
    for parent, name, linear in list(_linears(module, kind)):
        make = _Int8Linear if kind == "int8" else _int4_linear
        setattr(parent, name, make(linear, library))
    return module


def held_bytes(
    module: nn.Module,
    kind: str | None,
    dtype: torch.dtype,
    packed: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Bytes that ``module`` (perhaps on the meta device) takes when loaded in this precision.

    ``packed``: the bytes of those of its weights that a checkpoint brings packed.
    """
    plain = {n: t.numel() for n, t in module.state_dict().items() if n not in packed}
    total: int = sum(plain.values()) * dtype.itemsize + sum(packed.values())
    if kind is None:
        return total
    for name, turned in experts_of(module, kind).items():
        if name not in packed:
            weight = module.get_parameter(name)
            shape = weight.transpose(1, 2).shape if turned else weight.shape
            total += quantised_bytes(shape, kind) - weight.numel() * dtype.itemsize
    names = {id(each): name for name, each in module.named_modules()}
    for _, _, linear in _linears(module, kind):
        if f"{names[id(linear)]}.weight" in packed:
            continue
        weights = linear.weight.numel()
        total += quantised_bytes(linear.weight.shape, kind) - weights * dtype.itemsize
    return total


def quantised_bytes(shape: Sequence[int], kind: str) -> int:
    """Bytes of matrices ``[..., outs, ins]``: codes, and float32 scales per row or block."""
    numbers = math.prod(shape)
    return numbers + 4 * numbers // shape[-1] if kind == "int8" else numbers // 2 + numbers // 16


def experts_of(module: nn.Module, kind: str) -> dict[str, bool]:
    """Names of stacked experts' weights to quantise, ``[experts, outs, ins]``.

    True for those that a model's code keeps turned, ``[experts, ins, outs]``.
    """
    found: dict[str, bool] = {}
    for path, inner in module.named_modules():
        turned = bool(getattr(inner, "is_transposed", False))
        for name, weight in inner.named_parameters(path, recurse=False):
            if weight.dim() != 3 or weight[0].numel() < NUMBERS_MIN:
                continue
            if kind == "int8" or weight.shape[1 if turned else 2] % BLOCK == 0:
                found[name] = turned
    return found


def quantised(weight: torch.Tensor, kind: str, device: torch.device) -> PackedTensor:
    """Stacked matrices ``[experts, outs, ins]`` in 8 or 4 bits on ``device``, one by one."""
    code, block = ("int8", weight.shape[-1]) if kind == "int8" else ("nf4", BLOCK)
    values = torch.tensor(CODES["nf4"], device=device)
    between = (values[1:] + values[:-1]) / 2
    codes, scales = [], []
    for expert in weight:
        groups = expert.to(device, torch.float32).unflatten(-1, (-1, block))
        absmax = groups.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        relative = (groups / absmax[..., None]).flatten(-2)
        if kind == "int8":
            scales.append(absmax / INT8_MAX)
            codes.append((relative * INT8_MAX).round_().to(torch.int8))
        else:
            scales.append(absmax)
            places = torch.bucketize(relative.contiguous(), between, out_int32=True).to(torch.uint8)
            codes.append(places[..., ::2] | places[..., 1::2] << 4)
    parts = {"codes": torch.stack(codes), "scales": torch.stack(scales)}
    return PackedTensor(Packing(code=code, columns=block), parts)


def _linears(module: nn.Module, kind: str) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """``(parent, name, linear)`` to quantise; no subclasses, which may compute something else."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or child.weight.numel() < NUMBERS_MIN:
                continue
            if isinstance(child.weight, PackedTensor):
                continue
            if kind == "int8" or child.in_features % BLOCK == 0:
                yield parent, name, child


def _library() -> Any:
    """Import ``bitsandbytes`` without the code that it would fetch from a hub and run."""
    if (imported := sys.modules.get("bitsandbytes")) is not None:
        return imported
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    fetcher = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it now fails
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"--quantize needs the library bitsandbytes ({error}); install it with"
            " python -m pip install bitsandbytes"
        ) from error
    finally:
        del sys.modules["kernels"]
        if fetcher is not None:
            sys.modules["kernels"] = fetcher
    return bitsandbytes


class _Int8Linear(nn.Module):
    """``x @ W.T + b`` over 8-bit integers; rows do not depend on each other."""

    weight: torch.Tensor
    absmax: torch.Tensor

    def __init__(self, linear: nn.Linear, _: Any) -> None:
        super().__init__()
        weight = linear.weight.float()
        absmax = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (weight * (INT8_MAX / absmax)[:, None]).round_()
        self.register_buffer("weight", rounded.to(torch.int8))
        self.register_buffer("absmax", absmax)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        wide = flat.float()
        absmax = wide.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (wide * (INT8_MAX / absmax)[:, None]).round_().to(torch.int8)
        given = (rounded, self.weight, absmax, self.absmax)
        if rows.device.type == "cpu":
            out: torch.Tensor = torch.ops.bitsandbytes.int8_scaled_mm(
                *given, bias=self.bias, dtype=rows.dtype
            )
        else:
            out = scaled_product(*given, self.bias, rows.dtype)
        return out.reshape(*rows.shape[:-1], -1)


def scaled_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    rows_absmax: torch.Tensor,
    weight_absmax: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``rows @ weight.T`` of int8 matrices, ``[rows, outputs]``, scaled in float32.

    On GPUs the library's own scaling goes through float16, where numbers beyond 65,504 are
    infinite.
    """
    whole: torch.Tensor = torch.ops.bitsandbytes.int8_linear_matmul(rows, weight)
    out = whole.float() * (rows_absmax / INT8_MAX)[:, None] * (weight_absmax / INT8_MAX)
    return (out if bias is None else out + bias).to(dtype)


def _int4_linear(linear: nn.Linear, library: Any) -> nn.Module:
    made: nn.Module = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype,
        quant_type="nf4",
        device="meta",
    )
    weight: Any = library.nn.Params4bit(
        linear.weight.data,
        requires_grad=False,
        quant_type="nf4",
        blocksize=BLOCK,
        compress_statistics=False,
    )
    made.weight = weight.to(linear.weight.device)  # this is what quantises
    made.bias = linear.bias
    return made.eval()
