"""Quantises linear layers to 8 or 4 bits: more layers fit into memory, at a measured error.

int8: weights and each row of activations as 8-bit integers with one scale per row, multiplied as
integers (Dettmers et al., LLM.int8(), NeurIPS'22, without its outlier decomposition, which would
make a session's numbers depend on who shares the batch), by the kernels of ``bitsandbytes``.

int4: steps of one size between the least and the largest of 64 weights, zero among them, as packed
tensors (:mod:`node.packed`) that torch multiplies by on CPUs, and a kernel of ours on GPUs. On GPUs
that cannot run it, 4-bit NormalFloat in blocks of 64 (Dettmers et al., QLoRA, NeurIPS'23 §3) with
the kernels of ``bitsandbytes``. Both take the same memory and err alike
(``bench/families/quantization.py``).

Experts that a model's code keeps stacked are packed tensors in both, and on all devices; their
activations stay in the dtype. Everything else stays as it is: norms, routers, and the embedding and
the head, which are not part of any layer.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dht.command_line import pip_install
from dht.errors import UserError
from node.kernels.choice import multiplies_packed
from node.packed.packing import Packing
from node.packed.tensor import PackedTensor

BLOCK = 64
"""Number of weights that share a scale in 4 bits."""
NUMBERS_MIN = 4096
"""Minimum numbers in a quantised matrix: small ones, as of routers, weigh nothing, decide much."""
INT8_MAX = 127
"""Fixed by int8."""
UINT4_MAX = 15
"""Fixed by four bits."""
PIECE_NUMBERS = 1 << 18
"""Numbers that are packed at a time: what stays in a CPU's cache."""


def quantize_linears(module: nn.Module, kind: str) -> nn.Module:
    """Replace the linear layers within ``module`` that are not packed, in place; ``kind`` is one of
    QUANTISED.

    Raises UserError if ``bitsandbytes`` is missing or cannot work here.
    """
    for parent, name, linear in list(_linears(module, kind)):
        make = _Int8Linear if kind == "int8" else _int4_linear
        setattr(parent, name, make(linear, _library()))
    return module


def held_bytes(
    module: nn.Module,
    kind: str | None,
    dtype: torch.dtype,
    packed: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Bytes that ``module`` (perhaps on the meta device) takes when loaded in this precision.

    ``packed``: the bytes of those of its weights that are packed tensors.
    """
    plain = {n: t.numel() for n, t in module.state_dict().items() if n not in packed}
    total: int = sum(plain.values()) * dtype.itemsize + sum(packed.values())
    if kind is None:
        return total
    for name, linear in _named_linears(module, kind):
        if f"{name}.weight" not in packed:
            numbers, rows = linear.weight.numel(), linear.out_features
            bits = numbers + 4 * rows if kind == "int8" else numbers // 2 + 4 * numbers // BLOCK
            total += bits - numbers * dtype.itemsize
    return total


def packed_of(
    module: nn.Module, kind: str, device: torch.device, dtype: torch.dtype
) -> dict[str, bool]:
    """Names of the weights of ``module`` that are packed while they are read.

    They are those of stacked experts, ``[experts, outs, ins]``, and in 4 bits those of linear
    layers, where ``device`` multiplies rows in ``dtype`` by them. True for experts that a model's
    code keeps turned, ``[experts, ins, outs]``.
    """
    found: dict[str, bool] = {}
    for path, inner in module.named_modules():
        turned = bool(getattr(inner, "is_transposed", False))
        for name, weight in inner.named_parameters(path, recurse=False):
            if weight.dim() != 3 or weight[0].numel() < NUMBERS_MIN:
                continue
            if kind == "int8" or weight.shape[1 if turned else 2] % BLOCK == 0:
                found[name] = turned
    if kind == "int4" and (device.type == "cpu" or multiplies_packed(device, dtype)):
        found |= {f"{name}.weight": False for name, _ in _named_linears(module, kind)}
    return found


def quantised(weight: torch.Tensor, kind: str, device: torch.device) -> PackedTensor:
    """Matrices ``[..., outs, ins]`` in 8 or 4 bits on ``device``, a few rows at a time."""
    *leading, outs, ins = weight.shape
    if kind == "int8":
        packing = Packing(code="int8", columns=ins)
        parts = {
            "codes": torch.empty(*leading, outs, ins, dtype=torch.int8, device=device),
            "scales": torch.empty(*leading, outs, 1, device=device),
        }
    else:
        packing = Packing(code="uint4", columns=BLOCK)
        grid = (*leading, outs, ins // BLOCK)
        parts = {
            "codes": torch.empty(*leading, outs, ins // 2, dtype=torch.uint8, device=device),
            "scales": torch.empty(grid, dtype=torch.bfloat16, device=device),
            "zeros": torch.empty(grid, dtype=torch.uint8, device=device),
        }
    flat = {name: part.view(-1, outs, part.shape[-1]) for name, part in parts.items()}
    rows = max(1, PIECE_NUMBERS // ins)
    for index, matrix in enumerate(weight if leading else weight[None]):
        for start in range(0, outs if weight.device.type != "meta" else 0, rows):
            piece = matrix[start : start + rows].to(device, torch.float32)
            made = _in_8_bits(piece) if kind == "int8" else _in_4_bits(piece)
            for name, part in made.items():
                flat[name][index, start : start + rows] = part
    return PackedTensor(packing, parts)


def _in_8_bits(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = rows.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return {"codes": (rows / scales * INT8_MAX).round_(), "scales": scales / INT8_MAX}


def _in_4_bits(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = torch.unflatten(rows, -1, (-1, BLOCK))
    least, most = (each.squeeze(-1) for each in groups.aminmax(dim=-1, keepdim=True))
    least, most = least.clamp_max(0.0), most.clamp_min(0.0)
    tiny = torch.finfo(torch.bfloat16).tiny
    scales = ((most - least) / UINT4_MAX).clamp_min(tiny).to(torch.bfloat16)
    steps = scales.to(torch.float32)[..., None]
    zeros = (-least[..., None] / steps).round_().clamp_(0, UINT4_MAX)
    codes = (groups / steps).add_(zeros).round_().clamp_(0, UINT4_MAX).to(torch.uint8).flatten(-2)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return {"codes": pairs, "scales": scales, "zeros": zeros.squeeze(-1)}


def _named_linears(module: nn.Module, kind: str) -> Iterator[tuple[str, nn.Linear]]:
    names = {id(each): name for name, each in module.named_modules()}
    for _, _, linear in _linears(module, kind):
        yield names[id(linear)], linear


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
            f" {pip_install('bitsandbytes')}"
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
