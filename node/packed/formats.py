"""The formats in which packed checkpoints are published, each as rules (:mod:`.stored`)."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from dht.checkpoints.gguf_model import ARCHITECTURE
from dht.errors import UserError
from node.packed.ggml import ggml_rules
from node.packed.packing import Packing, Parts
from node.packed.stored import Described, Rule, Stored, read_names, settings_of
from node.packed.tensor import PackedTensor

GROUP_MAX = 1 << 20
FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}
FLOAT8_NAMES = frozenset({"F8_E4M3", "F8_E5M2"})
GPTQ_SHIFTS = {"gptq": 1, "gptq_v2": 0}
"""What is added to the zero points of each layout that is read."""
AUTO_ROUND_LAYOUTS = {
    **dict.fromkeys(("auto", "auto_round:auto_gptq", "auto_round:gptq"), "gptq"),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), "gptq_v2"),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), "awq"),
}
"""Fixed by AutoRound: the layout of each ``packing_format`` that is read."""
PLAIN_BITS = (16, 32)
"""Fixed by GPTQModel and AutoRound: ``bits`` of matrices that are not packed."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight columns in an int32 of AWQ."""
PIECE_NUMBERS = 1 << 18
"""Elements of a tensor whose codes are brought into order at a time."""
MX_COLUMNS = 32
"""Fixed by OCP Microscaling Formats 1.0: numbers that share an exponent."""
MX_BLOCK, NVFP4_BLOCK = (1, MX_COLUMNS), (1, 16)
MODELOPT_BLOCKS = {"FP8_PB_WO": (128, 128), "MXFP8": MX_BLOCK}
"""Blocks of FP8 that Model Optimizer does not write down, by ``quant_algo``."""
MODELOPT_KNOWN = frozenset(
    {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8",
     "MIXED_PRECISION", *MODELOPT_BLOCKS}
)  # fmt: skip
"""Values of ``quant_algo`` that are read; the tensors show which of FP8 and NVFP4 a matrix has."""
FP8_BLOCK = (128, 128)
"""What transformers takes where a configuration names no ``weight_block_size``."""
BLOCK_WORDS = re.compile(r"\d{1,9}x\d{1,9}")
"""How compressed-tensors wrote a block at first: ``128x128``."""
GROUP_COLUMNS = 128
"""Fixed by GPTQ's and AWQ's libraries: ``group_size`` where a configuration names none."""


def stored_weights(
    where: str, config: Mapping[str, Any], tensors: Mapping[str, Described]
) -> dict[str, Stored]:
    """The weights of a checkpoint by name, whatever its format.

    Raises UserError for a format that is not read, or tensors that do not fit it.
    """
    settings = settings_of(config)
    rules: Sequence[Rule] = ggml_rules() if ARCHITECTURE in config else ()
    if settings is not None:
        method = str(settings.get("quant_method") or "")[:40]
        if method not in FORMATS:
            told = f"are packed by the method {method!r}"
            if not method:
                told = "are packed, and its quantization_config names no quant_method"
            raise UserError(
                f"{where} cannot be served: its weights {told};"
                f" known are {', '.join(sorted(FORMATS))}"
            )
        try:
            rules = FORMATS[method](settings)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{where} cannot be served: its quantization_config is not understood ({error})"
            ) from error
    found = read_names(where, tensors, rules)
    for name, stored in found.items():
        if stored.make is None and tensors[name].dtype in FLOAT8_NAMES:
            lacks = (
                "its configuration names no quantization_config that says how"
                if settings is None
                else "its scales are missing"
            )
            raise UserError(
                f"{where} cannot be served: {name[:120]} is packed ({tensors[name].dtype}), and"
                f" {lacks}"
            )
    return found


def scaled(
    code: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    block: tuple[int, int] | None = None,
    turned: bool = False,
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> PackedTensor:
    """A packed tensor from codes and scales: one for all, one per row, or the grid of the format's
    own ``block``, whose last blocks need not be whole. ``beside`` are further parts.

    Raises ValueError for another grid: how it lies over the matrix nobody says.
    """
    bits = Packing(code=code, columns=1).bits
    outs, ins = codes.shape[-2], codes.shape[-1] * 8 // bits
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if scales.numel() == 1:
        scales, block = scales.reshape(1, 1), (outs, ins)
    elif scales.dim() == 1:
        scales = scales[:, None]
    rows, columns = block if block is not None else (1, ins)
    grid = -(-outs // rows), -(-ins // columns)
    if tuple(scales.shape[-2:]) != grid:
        told = "no block is named" if block is None else f"blocks of {rows} x {columns}"
        down, across = scales.shape[-2:]
        raise ValueError(
            f"{down} x {across} scales do not fit a matrix of {outs} x {ins}, where {told}"
        )
    packing = Packing(code=code, rows=rows, columns=columns)
    return PackedTensor(packing, {"codes": codes, "scales": scales, **beside}, turned=turned)


# Formats


def _fp8(settings: Mapping[str, Any]) -> list[Rule]:
    """Blocks of FP8 (DeepSeek-V3, Qwen3-FP8, MiniMax-M2), perhaps with experts in MXFP4; experts
    may be stacked."""
    block = _block(settings.get("weight_block_size", FP8_BLOCK))

    def floats(parts: Parts) -> torch.Tensor:
        return scaled(FLOAT8[parts["codes"].dtype], parts["codes"], parts["scales"], block=block)

    def halves(parts: Parts) -> torch.Tensor:
        return scaled("e2m1", parts["codes"].view(torch.uint8), parts["scales"], block=MX_BLOCK)

    scales = {"scales": (".weight_scale_inv", ".scale", ".qscale_weight", ".weight_scale")}
    of_stack = {"scales": ("_proj_scale_inv", "_proj_scale")}
    anchor, stack = ("codes", ".weight"), ("codes", "_proj")
    return [
        Rule(anchor=anchor, needed=scales, dtypes=FLOAT8_NAMES, make=floats),
        Rule(anchor=stack, needed=of_stack, dtypes=FLOAT8_NAMES, ending="_proj", make=floats),
        Rule(anchor=anchor, needed=scales, dtypes=frozenset({"I8"}), make=halves),
    ]


def _mxfp4(_: Mapping[str, Any]) -> list[Rule]:
    """Experts of gpt-oss, stored as ``[experts, outs, blocks, 16]`` and computed turned."""

    def make(parts: Parts) -> torch.Tensor:
        blocks = parts["codes"]
        if blocks.dim() != 4 or blocks.shape[-1] * 2 != MX_COLUMNS:
            raise ValueError(f"blocks of shape {tuple(blocks.shape)}")
        codes = blocks.reshape(*blocks.shape[:2], -1)
        return scaled("e2m1", codes, parts["scales"], block=MX_BLOCK, turned=True)

    return [
        Rule(
            anchor=("codes", "_blocks"),
            needed={"scales": ("_scales",)},
            dtypes=frozenset({"U8"}),
            ending="",
            make=make,
        )
    ]


def _compressed_tensors(settings: Mapping[str, Any]) -> list[Rule]:
    """FP8, INT8, INT4 and FP4 of compressed-tensors, also several of them in one checkpoint."""
    sparse = settings.get("sparsity_config") or {"format": "dense"}
    if settings.get("transform_config") or sparse != {**sparse, "format": "dense"}:
        raise ValueError("sparse and transformed weights are not read")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict):
        raise ValueError("no config_groups")
    weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)]
    known = [w for w in weights if isinstance(w, dict)]
    blocks = [b for w in known if (b := _block(w.get("block_structure"))) is not None]
    sizes = {_number(w, "group_size", -1, GROUP_MAX, 0) for w in known}
    blocks += [(1, size) for size in sizes if size > 0]
    packs = {
        (_number(w, "num_bits", 1, 16), _number(w, "group_size", -1, GROUP_MAX, 0))
        for w in known
        if w.get("type") == "int"
    }

    def fitting(codes: torch.Tensor, parts: Parts) -> tuple[int, int] | None:
        """The only block of the configuration whose grid the scales have; None without one."""
        found = {b for b in blocks if _fits(codes, _grid(parts["scales"]), b)}
        if len(found) > 1:
            raise ValueError(f"{sorted(found)} fit {tuple(parts['scales'].shape)} scales")
        return next(iter(found), None)

    def bytes_(parts: Parts) -> torch.Tensor:
        codes = parts["codes"]
        code = "int8" if codes.dtype is torch.int8 else FLOAT8[codes.dtype]
        zeros = {"zeros": _grid(parts["zeros"])} if "zeros" in parts else {}
        return scaled(code, codes, parts["scales"], block=fitting(codes, parts), beside=zeros)

    def packed(parts: Parts) -> torch.Tensor:
        codes, scales = parts["codes"], _grid(parts["scales"])
        found = set()
        for bits, group in packs:
            columns = codes.shape[-1] * 32 // bits
            size = group if group > 0 else columns
            if bits <= 8 and scales.shape[-1] == -(-columns // max(1, size)):
                found.add((bits, size))
        if len(found) != 1:
            raise ValueError(
                f"bits {sorted(packs)} and scales {tuple(scales.shape)} for {tuple(codes.shape)}"
            )
        [(bits, columns)] = found
        code, plain = _centred(codes, bits)
        others = {}
        if "zeros" in parts and parts["zeros"].dtype is torch.int8:  # of a scale for all columns
            others["zeros"] = _grid(parts["zeros"])
        elif "zeros" in parts:
            spread = _signed(parts["zeros"].t(), bits).t()
            others["zeros"] = spread[: codes.shape[-2]].contiguous()
        if "groups" in parts:
            return _ordered(code, plain, scales, columns, others, parts["groups"])
        return scaled(code, plain, scales, block=(1, columns), beside=others)

    def halves(parts: Parts) -> torch.Tensor:
        others = {}
        if "factors" in parts:
            factor = parts["factors"].float().reciprocal().reshape(1, 1)
            others["factors"] = factor.expand(parts["codes"].shape[0], 1).contiguous()
        codes = parts["codes"]
        wide = codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), device="meta")
        return scaled("e2m1", codes, parts["scales"], block=fitting(wide, parts), beside=others)

    scales = {"scales": (".weight_scale",)}
    zeros = {"zeros": (".weight_zero_point",)}
    return [
        Rule(
            anchor=("codes", ".weight_packed"),
            needed=scales,
            optional={**zeros, "groups": (".weight_g_idx",)},
            dtypes=frozenset({"I32"}),
            make=packed,
        ),
        Rule(
            anchor=("codes", ".weight_packed"),
            needed=scales,
            optional={"factors": (".weight_global_scale",)},
            dtypes=frozenset({"U8"}),
            make=halves,
        ),
        Rule(
            anchor=("codes", ".weight"),
            needed=scales,
            optional=zeros,
            dtypes=FLOAT8_NAMES | {"I8"},
            make=bytes_,
        ),
    ]


def _modelopt(settings: Mapping[str, Any]) -> list[Rule]:
    """FP8, MXFP8 and NVFP4 of NVIDIA's Model Optimizer."""
    inner = settings.get("quantization")
    said = inner if isinstance(inner, dict) else settings
    algorithm = str(said.get("quant_algo") or "MIXED_PRECISION").upper()
    if algorithm not in MODELOPT_KNOWN:
        known = ", ".join(sorted(MODELOPT_KNOWN))
        raise ValueError(f"quant_algo {algorithm[:40]}; known are {known}")
    block = _block(said.get("weight_block_size", MODELOPT_BLOCKS.get(algorithm)))

    def halves(parts: Parts) -> torch.Tensor:
        factor = parts["factors"].float().reshape(1, 1)
        spread = factor.expand(parts["codes"].shape[0], 1).contiguous()
        beside = {"factors": spread}
        return scaled("e2m1", parts["codes"], parts["scales"], block=NVFP4_BLOCK, beside=beside)

    def floats(parts: Parts) -> torch.Tensor:
        scales, grid = parts["scales"], block
        if scales.dim() == 4 and scales.shape[1] == scales.shape[3] == 1:  # [down, 1, across, 1]
            scales, grid = scales[:, 0, :, 0].contiguous(), block or MODELOPT_BLOCKS["FP8_PB_WO"]
        return scaled(FLOAT8[parts["codes"].dtype], parts["codes"], scales, block=grid)

    anchor, scales = ("codes", ".weight"), {"scales": (".weight_scale",)}
    both = {**scales, "factors": (".weight_scale_2",)}
    return [
        Rule(anchor=anchor, needed=both, dtypes=frozenset({"U8"}), make=halves),
        Rule(anchor=anchor, needed=scales, dtypes=FLOAT8_NAMES, make=floats),
    ]


def _gptq(settings: Mapping[str, Any]) -> list[Rule]:
    """``qweight`` ``[ins * bits / 32, outs]``, ``qzeros`` ``[groups, outs * bits / 32]``; matrices
    may have bits and groups of their own (``dynamic``), which their shapes tell apart."""
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if layout not in GPTQ_SHIFTS:
        raise ValueError(f"checkpoint_format {str(layout)[:20]}")
    said = [settings, *_of_some(settings, "dynamic")]
    sorted_ = any(bool(each.get("desc_act")) for each in said)
    kinds = set(map(_gptq_kind, said))

    def make(parts: Parts) -> torch.Tensor:
        bits, group = _fitting_kind(parts, kinds)
        codes = parts["codes"].t().contiguous()
        if bits in (4, 8):
            codes = codes.view(torch.uint8)  # the lowest code first, too
        else:
            codes = _in_pieces(lambda some: _packed(_unpacked(some, bits), 4), codes)
        # Whole int32s lose one for each code when they are written (GPTQModel,
        # ``convert_gptq_v2_to_v1_format``): what a zero point of 0 borrows, the next one gives
        # back.
        shift = GPTQ_SHIFTS[layout] * sum(1 << at for at in range(0, 32, bits))
        single = 0
        if 32 % bits:  # codes that lie in two int32s
            shift, single = 0, GPTQ_SHIFTS[layout]
        scales = parts["scales"].t().contiguous()
        zeros = (_unpacked(parts["zeros"] + shift, bits) + single) & ((1 << bits) - 1)
        others = {"zeros": zeros.t().contiguous()}
        code = "uint8" if bits == 8 else "uint4"
        columns = group if group > 0 else _gptq_columns(parts, bits)
        if "groups" in parts and (sorted_ or not _is_plain(parts["groups"], columns)):
            return _ordered(code, codes, scales, columns, others, parts["groups"])
        if sorted_ and scales.shape[-1] > 1:
            raise ValueError("the order of its columns (g_idx) is missing")
        return scaled(code, codes, scales, block=(1, columns), beside=others)

    return [
        Rule(
            anchor=("codes", ".qweight"),
            needed={"scales": (".scales",), "zeros": (".qzeros",)},
            optional={"groups": (".g_idx",)},
            dtypes=frozenset({"I32"}),
            make=make,
        )
    ]


def _gptq_kind(said: Mapping[str, Any]) -> tuple[int, int]:
    """Bits and group size of GPTQ's settings."""
    bits = _number(said, "bits", 2, 8)
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits {bits}")
    return bits, _number(said, "group_size", -1, GROUP_MAX, GROUP_COLUMNS)


def _gptq_columns(parts: Parts, bits: int) -> int:
    """Columns of a matrix of GPTQ with codes of ``bits``."""
    return parts["codes"].shape[0] * 32 // bits


def _fitting_kind(parts: Parts, kinds: Collection[tuple[int, int]]) -> tuple[int, int]:
    """The only bits and group size by which a matrix of GPTQ has the shapes that it has."""
    if len(kinds) == 1:
        return next(iter(kinds))
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for bits, group in kinds:
        columns = _gptq_columns(parts, bits)
        size = min(group, columns) if group > 0 else columns
        grid = -(-columns // max(1, size)), parts["codes"].shape[-1] * bits
        if grid == (parts["scales"].shape[0], parts["zeros"].shape[-1] * 32):
            found[bits, size] = bits, group
    if len(found) != 1:
        scales, codes = (tuple(parts[name].shape) for name in ("scales", "codes"))
        raise ValueError(f"bits and groups {sorted(kinds)} for {codes} codes and {scales} scales")
    return next(iter(found.values()))


def _of_some(settings: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """Settings of matrices that have some of their own under ``key``, by patterns of their names;
    not of those that are plain numbers."""
    own = settings.get(key) or {}
    if not isinstance(own, Mapping):
        raise TypeError(f"{key} {str(own)[:40]}")
    for name, said in own.items():
        if isinstance(said, Mapping) and not str(name).startswith("-:"):
            told = {k: v for k, v in said.items() if v is not None}
            if told.get("bits") not in PLAIN_BITS:
                yield {**settings, **told}


def _auto_round(settings: Mapping[str, Any]) -> list[Rule]:
    """Intel's AutoRound, which packs as GPTQ or AWQ does."""
    packing = settings.get("packing_format") or "auto"
    kind = settings.get("data_type") or "int"
    if packing not in AUTO_ROUND_LAYOUTS or kind != "int":
        raise ValueError(f"packing_format {str(packing)[:40]} of {str(kind)[:20]}")
    for key in ("rotation_config", "spinquant_config"):
        if settings.get(key):
            raise ValueError(f"weights turned by {key} are not read")
    layout = AUTO_ROUND_LAYOUTS[packing]
    if layout == "awq":
        return _awq({**settings, "version": "gemm", "zero_point": True})
    own = settings.get("extra_config")
    return _gptq({**settings, "checkpoint_format": layout, "dynamic": own})


def _fbgemm(settings: Mapping[str, Any]) -> list[Rule]:
    """FP8 with one scale for each row (Llama 3.1 405B)."""
    return _fp8({**settings, "weight_block_size": None})


def _awq(settings: Mapping[str, Any]) -> list[Rule]:
    """``qweight`` ``[ins, outs / 8]`` with columns out of order."""
    bits = _number(settings, "bits", 1, 16, 4)
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm" or settings.get("zero_point") is False:
        zeros = settings.get("zero_point", True) is not False
        raise ValueError(f"bits {bits}, version {version[:20]}, zero_point {zeros}")
    size = settings.get("group_size", settings.get("q_group_size"))
    group = _number({"group_size": size}, "group_size", -1, GROUP_MAX, GROUP_COLUMNS)

    def in_order(packed: torch.Tensor) -> torch.Tensor:
        found = _unpacked(packed, bits)
        eights = found.view(found.shape[0], -1, 8)[..., list(AWQ_ORDER)]
        return eights.reshape(found.shape).t()

    def make(parts: Parts) -> torch.Tensor:
        return scaled(
            "uint4",
            _in_pieces(lambda some: _packed(in_order(some.t()), bits), parts["codes"].t()),
            parts["scales"].t().contiguous(),
            block=(1, group if group > 0 else parts["codes"].shape[0]),
            beside={"zeros": in_order(parts["zeros"]).contiguous()},
        )

    return [
        Rule(
            anchor=("codes", ".qweight"),
            needed={"scales": (".scales",), "zeros": (".qzeros",)},
            dtypes=frozenset({"I32"}),
            make=make,
        )
    ]


FORMATS: dict[str, Callable[[Mapping[str, Any]], list[Rule]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "fbgemm_fp8": _fbgemm,
}
"""By the name of the method in a model's configuration."""


# Parts


def _number(said: Mapping[str, Any], key: str, low: int, high: int, default: int = -1) -> int:
    value = said.get(key)
    if value is None and default != -1:
        return default
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} is {str(value)[:40]}")
    return value


def _block(said: Any) -> tuple[int, int] | None:
    if said is None:
        return None
    if isinstance(said, str) and BLOCK_WORDS.fullmatch(said):
        said = [int(each) for each in said.split("x")]
    if not isinstance(said, list | tuple) or len(said) != 2:
        raise ValueError(f"block {str(said)[:40]}")
    rows, columns = (_number({"block": value}, "block", 1, GROUP_MAX) for value in said)
    return rows, columns


def _grid(scales: torch.Tensor) -> torch.Tensor:
    return scales[:, None] if scales.dim() == 1 else scales


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in int32s along the last axis, the lowest first, as bytes ``[..., codes]``; a code may
    begin in one int32 and end in the next."""
    if bits in (4, 8):
        single = packed.contiguous().view(torch.uint8)
        return single if bits == 8 else torch.stack([single & 15, single >> 4], dim=-1).flatten(-2)
    at = torch.arange(packed.shape[-1] * 32 // bits, device=packed.device) * bits
    words = torch.nn.functional.pad(packed.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    both = words[..., at // 32] | (words[..., at // 32 + 1] << 32)
    return ((both >> (at % 32)) & ((1 << bits) - 1)).to(torch.uint8)


def _signed(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as :func:`_unpacked`, in whose middle is zero, as int8."""
    return (_unpacked(packed, bits).to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def _centred(packed: torch.Tensor, bits: int) -> tuple[str, torch.Tensor]:
    """Codes of 1 to 8 bits in int32s, in whose middle is zero, as codes of 4 or 8 and their name in
    a :class:`.packing.Packing`."""
    if bits > 4:
        return "int8", _in_pieces(lambda some: _signed(some, bits), packed)
    if bits == 4:
        return "offset4", packed.contiguous().view(torch.uint8)
    return "offset4", _in_pieces(
        lambda some: _packed((_signed(some, bits) + 8).to(torch.uint8), 4), packed
    )


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the last axis as the bytes of a :class:`.packing.Packing`."""
    if bits == 8:
        return codes.contiguous()
    return codes[..., ::2] | codes[..., 1::2] << 4


def _in_pieces(make: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor) -> torch.Tensor:
    """``make(source)``, made of a few rows at a time, so that what it takes meanwhile is little."""
    count = source.shape[0]
    rows = max(1, PIECE_NUMBERS // max(1, math.prod(source.shape[1:])))
    if rows >= count or source.device.type == "meta":
        return make(source)
    first = make(source[:rows])
    each = first.shape[0] // rows
    made = first.new_empty((each * count, *first.shape[1:]))
    made[: each * rows] = first
    for start in range(rows, count, rows):
        end = min(start + rows, count)
        made[each * start : each * end] = make(source[start:end])
    return made


def _is_plain(groups: torch.Tensor, size: int) -> bool:
    """Whether columns are in the order of their groups of ``size``; taken as such without
    numbers."""
    if groups.device.type == "meta":
        return True
    return torch.equal(groups.int(), torch.arange(groups.numel(), dtype=torch.int32) // size)


def _fits(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> bool:
    return tuple(scales.shape) == tuple(
        -(-size // each) for size, each in zip(codes.shape, block, strict=True)
    )


def _ordered(
    code: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    size: int,
    others: dict[str, torch.Tensor],
    groups: torch.Tensor,
) -> PackedTensor:
    """A matrix whose columns were quantised in another order, ``size`` at a time; ``groups`` is
    each one's scale."""
    count = scales.shape[-1]
    if groups.device.type != "meta":
        if int(groups.min()) < 0 or int(groups.max()) >= count:
            raise ValueError("g_idx names groups that are not there")
        held = torch.bincount(groups.long(), minlength=count)
        if not bool((held[:-1] == size).all()) or not 0 < int(held[-1]) <= size:
            raise ValueError("groups of different sizes")
    order = torch.argsort(groups.long(), stable=True)
    bits = Packing(code=code, columns=1).bits
    apart = _in_pieces(lambda some: _packed(_unpacked(some, bits)[:, order], bits), codes)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    named = {"order": place.to(torch.int32)[None], **others}
    return scaled(code, apart.view(codes.dtype), scales, block=(1, size), beside=named)
