"""Checkpoints packed as they are published, from a plain one, and what they mean as plain numbers.

Written by the formats' definitions, apart from what reads them (:mod:`node.packed.formats`).
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_BETWEEN = (E2M1[1:] + E2M1[:-1]) / 2
FP8_MAX, FP4_MAX = 448.0, 6.0
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors by the ends of their names, and the numbers that they mean in float32."""


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes per byte along the last axis, the lower half first."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def int32s(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the last axis in int32s, the lowest first."""
    each = 32 // bits
    apart = codes.long().reshape(*codes.shape[:-1], -1, each)
    whole = (apart << torch.arange(each, device=codes.device) * bits).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def fp8_blocks(weight: torch.Tensor, rows: int, columns: int) -> Packed:
    """E4M3 with a float32 scale per block."""
    outs, ins = weight.shape
    whole = torch.nn.functional.pad(weight, (0, -ins % columns, 0, -outs % rows))
    blocks = whole.view(whole.shape[0] // rows, rows, -1, columns)
    scales = blocks.abs().amax((1, 3)) / FP8_MAX
    spread = scales[:, None, :, None]
    codes = (blocks / spread).to(torch.float8_e4m3fn)
    plain = (codes.float() * spread).view(whole.shape)[:outs, :ins]
    tensors = {
        ".weight": codes.view(whole.shape)[:outs, :ins].contiguous(),
        ".weight_scale_inv": scales,
    }
    return tensors, plain.contiguous()


def fp8_rows(weight: torch.Tensor) -> Packed:
    """E4M3 with a bfloat16 scale per row."""
    scales = weight.abs().amax(1, keepdim=True) / FP8_MAX
    codes = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales.float()


def e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest 4-bit float's code."""
    between = E2M1_BETWEEN.to(values.device)
    return torch.bucketize(values.abs().contiguous(), between) | (values < 0).long() << 3


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes >= 8, -1.0, 1.0) * E2M1.to(codes.device)[codes & 7]


def mxfp4(weight: torch.Tensor) -> Packed:
    """Turned experts ``[experts, ins, outs]`` as blocks of 32 with an exponent."""
    turned = weight.transpose(1, 2)
    blocks = turned.reshape(*turned.shape[:2], -1, 32)
    exponents = (blocks.abs().amax(-1) / FP4_MAX).clamp_min(2.0**-30).log2().ceil()
    codes = e2m1(blocks / exponents.exp2()[..., None])
    plain = e2m1_values(codes) * exponents.exp2()[..., None]
    tensors = {"_blocks": nibbles(codes), "_scales": (exponents + 127).to(torch.uint8)}
    return tensors, plain.reshape(turned.shape).transpose(1, 2).contiguous()


def nvfp4(weight: torch.Tensor) -> Packed:
    """Blocks of 16 with an FP8 scale, and one number for the whole."""
    blocks = weight.reshape(weight.shape[0], -1, 16)
    whole = FP8_MAX * FP4_MAX / weight.abs().max()
    scales = (blocks.abs().amax(-1) / FP4_MAX * whole).to(torch.float8_e4m3fn)
    real = scales.float() / whole
    codes = e2m1(blocks / real.clamp_min(1e-12)[..., None])
    plain = (e2m1_values(codes) * real[..., None]).reshape(weight.shape)
    tensors = {
        ".weight_packed": nibbles(codes.reshape(weight.shape)),
        ".weight_scale": scales,
        ".weight_global_scale": whole.reshape(1),
    }
    return tensors, plain


def modelopt_nvfp4(weight: torch.Tensor) -> Packed:
    """As :func:`nvfp4` by other names, where the number is what one multiplies by."""
    tensors, plain = nvfp4(weight)
    return {
        ".weight": tensors[".weight_packed"],
        ".weight_scale": tensors[".weight_scale"],
        ".weight_scale_2": tensors[".weight_global_scale"].reciprocal().reshape(()),
    }, plain


def grouped(weight: torch.Tensor, bits: int, group: int, *, even: bool) -> tuple[torch.Tensor, ...]:
    """Codes ``[outs, ins]``, scales and zero points ``[outs, groups]``, and the numbers."""
    groups = weight.reshape(weight.shape[0], -1, group)
    low, high = groups.amin(-1), groups.amax(-1)
    most = (1 << bits) - 1
    if even:
        high = torch.maximum(high, -low)
        scales, zeros = high * 2 / most, torch.full_like(high, 1 << bits - 1)
    else:
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(0, most)
    scales = scales.half().float()
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    plain = (codes - zeros[..., None]) * scales[..., None]
    return codes.reshape(weight.shape).long(), scales, zeros.long(), plain.reshape(weight.shape)


def pack_quantized(weight: torch.Tensor, bits: int, group: int, *, even: bool) -> Packed:
    """INT4 and INT8 of compressed-tensors."""
    codes, scales, zeros, plain = grouped(weight, bits, group, even=even)
    tensors = {
        ".weight_packed": int32s(codes, bits),
        ".weight_scale": scales.half(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not even:
        short = -zeros.shape[0] % (32 // bits)
        padded = torch.nn.functional.pad(zeros, (0, 0, 0, short))
        tensors[".weight_zero_point"] = int32s(padded.t(), bits).t().contiguous()
    return tensors, plain


def gptq(weight: torch.Tensor, bits: int, group: int, *, ordered: bool = False) -> Packed:
    """GPTQ's layout; ``ordered`` with groups of columns that are not side by side."""
    ins = weight.shape[1]
    order = torch.arange(ins)
    if ordered:
        order = torch.randperm(ins, generator=torch.Generator().manual_seed(ins))
    codes, scales, zeros, plain = grouped(weight[:, order], bits, group, even=False)
    zeros = zeros.clamp_min(1)
    plain = (codes.reshape(*scales.shape, -1) - zeros[..., None]) * scales[..., None]
    back = torch.argsort(order)
    groups = torch.empty(ins, dtype=torch.int32)
    groups[order] = (torch.arange(ins) // group).to(torch.int32)
    tensors = {
        ".qweight": int32s(codes[:, back].contiguous(), bits).t().contiguous(),
        ".qzeros": int32s((zeros - 1).t().contiguous(), bits),
        ".scales": scales.t().half().contiguous(),
        ".g_idx": groups,
    }
    return tensors, plain.reshape(weight.shape)[:, back]


def awq(weight: torch.Tensor, group: int) -> Packed:
    """AWQ's layout: columns of eight out of order."""
    codes, scales, zeros, plain = grouped(weight, 4, group, even=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(values: torch.Tensor) -> torch.Tensor:
        return int32s(values.t().reshape(values.shape[1], -1, 8)[..., order].flatten(1), 4)

    tensors = {
        ".qweight": mixed(codes),
        ".qzeros": mixed(zeros),
        ".scales": scales.t().half().contiguous(),
    }
    return tensors, plain


def _compressed(kind: str, bits: int, layout: str, group: int | None, even: bool) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": bits,
                    "type": kind,
                    "symmetric": even,
                    "strategy": {None: "channel", 16: "tensor_group"}.get(group, "group"),
                    **({} if group is None else {"group_size": group}),
                },
            }
        },
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A published format."""

    settings: dict[str, Any]
    """``quantization_config``."""
    pack: Callable[[torch.Tensor], Packed]
    of_experts: bool = False
    """Whether it packs stacked experts, not linear modules."""


def formats(group: int, block: tuple[int, int]) -> dict[str, Format]:
    """By name; ``group`` columns share a scale of integers, a ``block`` one of FP8."""
    whole = {"bits": 4, "group_size": group}
    return {
        "fp8": Format(
            settings={"quant_method": "fp8", "weight_block_size": list(block)},
            pack=lambda weight: fp8_blocks(weight, *block),
        ),
        "fp8, ragged blocks": Format(
            settings={"quant_method": "fp8", "weight_block_size": [block[0] + 8, block[1] + 8]},
            pack=lambda weight: fp8_blocks(weight, block[0] + 8, block[1] + 8),
        ),
        "mxfp4": Format(settings={"quant_method": "mxfp4"}, pack=mxfp4, of_experts=True),
        "compressed-tensors, int4": Format(
            settings=_compressed("int", 4, "pack-quantized", group, True),
            pack=lambda weight: pack_quantized(weight, 4, group, even=True),
        ),
        "compressed-tensors, int4 with zeros": Format(
            settings=_compressed("int", 4, "pack-quantized", group, False),
            pack=lambda weight: pack_quantized(weight, 4, group, even=False),
        ),
        "compressed-tensors, int8": Format(
            settings=_compressed("int", 8, "pack-quantized", group, True),
            pack=lambda weight: pack_quantized(weight, 8, group, even=True),
        ),
        "compressed-tensors, fp8": Format(
            settings=_compressed("float", 8, "float-quantized", None, True), pack=fp8_rows
        ),
        "compressed-tensors, nvfp4": Format(
            settings=_compressed("float", 4, "nvfp4-pack-quantized", 16, True), pack=nvfp4
        ),
        "modelopt, nvfp4": Format(
            settings={"quant_method": "modelopt", "quant_algo": "NVFP4"}, pack=modelopt_nvfp4
        ),
        "gptq": Format(
            settings={"quant_method": "gptq", **whole, "desc_act": False},
            pack=lambda weight: gptq(weight, 4, group),
        ),
        "gptq, 8 bits": Format(
            settings={"quant_method": "gptq", **whole, "bits": 8, "desc_act": False},
            pack=lambda weight: gptq(weight, 8, group),
        ),
        "gptq, act-order": Format(
            settings={"quant_method": "gptq", **whole, "desc_act": True},
            pack=lambda weight: gptq(weight, 4, group, ordered=True),
        ),
        "awq": Format(
            settings={"quant_method": "awq", **whole, "version": "gemm"},
            pack=lambda weight: awq(weight, group),
        ),
    }


BLOCK = (16, 32)
FORMATS = formats(32, BLOCK)
"""For tiny models."""


def write(
    plain: Path, kind: Format, packed: Path, meant: Path | None = None, device: str = "cpu"
) -> None:
    """Pack the checkpoint in ``plain`` by a format into ``packed``; its numbers to ``meant``.

    Packs matrices within the layers, but routers, on ``device``.
    """
    tensors = load_file(plain / "model.safetensors", device=device)
    files: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        ending = "" if kind.of_experts else ".weight"
        wanted = tensor.dim() == 3 if kind.of_experts else tensor.dim() == 2
        router = ".gate." in key or ".router." in key
        if not wanted or not key.endswith(ending) or ".layers." not in key or router:
            files[key], numbers[key] = tensor, tensor
            continue
        made, means = kind.pack(tensor.float())
        if meant is not None:
            numbers[key] = means
        base = key.removesuffix(ending) if ending else key
        files |= {f"{base}{end}": part.contiguous() for end, part in made.items()}
    for directory, content in ((packed, files), (meant, numbers)):
        if directory is None:
            continue
        beside = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(plain, directory, dirs_exist_ok=True, ignore=beside)
        for stale in directory.glob("anabranch*"):
            stale.unlink()
        save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = kind.settings
    (packed / "config.json").write_text(json.dumps(config))
