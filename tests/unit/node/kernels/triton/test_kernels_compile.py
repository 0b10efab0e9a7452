"""Our kernels, compiled for cards that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

COMPILE = """
import json, re, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from node.kernels.triton.gate import NUMBERS_AT_ONCE, _gate_rows
from node.kernels.triton.grouped_gemm import _grouped_product, tiles_for
from node.kernels.triton.groups import PAIRS_AT_ONCE, SUMMED, _group_pairs, _sum_each
from node.kernels.triton.kv_rows import NUMBERS_AT_ONCE as WRITTEN_AT_ONCE, _write_rows
from node.kernels.triton.packed import ALONE, BYTES, WORDS, _packed_product
from node.kernels.triton.packed_row import row_product
from node.kernels.triton.paged_attention import STAGES, _attend_block, _merge_parts, tile_tokens
from node.kernels.triton.rms_norm import _norm_rows
from node.kernels.triton.rotary import _rotate_heads
from node.kernels.triton.router import ROWS_AT_ONCE, _choose_experts

WIDTH, GROUP = 128, 4
TWINS = (86,)  # computes as 80 does; its memory is smaller, by which tiles above here are chosen
PACKED_SPILL = 320  # the tile that an H100, on which it spills less, is quickest with
FLOATS = {"scale", "softcap", "eps", "factor", "alpha", "cubic", "limit", "shift"}
TABLES = {"pages", "segments", "blocks", "tokens", "order", "ends"}
ALIGNED = {
    "key_row", "key_head", "value_row", "value_head",
    "outs", "ins", "per_split", "row_stride", "expert_stride", "out_stride",
}


def compiled(kernel, target, constants, kinds, warps, stages=STAGES):
    names = kernel.arg_names
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in TABLES:
            signature[name] = "*i32"
        elif name in kinds:  # before FLOATS: a scale may be a tensor
            signature[name] = kinds[name]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    whole = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") or name in ALIGNED
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=whole)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def spilled(cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None
    path = Path(sys.argv[1]) / "kernel.cubin"
    path.write_bytes(cubin)
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    words = told.stdout.split()
    return [int(word[6:]) for word in words if word.startswith("STACK:")]


found = []
numbers = {name: "*bf16" for name in ("query", "keys", "values", "sinks", "out")}
for backend, arch, warp, room in json.loads(sys.argv[2]):
    target = GPUTarget(backend, arch, warp)
    for block_rows, split in ((1, True), (1, False), (16, False)):
        lanes = max(16, GROUP * block_rows)
        constants = {
            "QUERY_UNIT": 8, "GROUP": GROUP, "GROUP_LANES": lanes // block_rows,
            "BLOCK_ROWS": block_rows,
            "KEY_WIDTH": WIDTH, "KEY_LANES": WIDTH, "VALUE_WIDTH": WIDTH, "VALUE_LANES": WIDTH,
            "PAGE_TOKENS": 16, "TILE": tile_tokens(lanes, WIDTH, WIDTH, 2, room),
            "SPLIT": split, "WINDOWED": False, "CAPPED": False, "SINKS": False,
        }
        kinds = {**numbers, "peaks": "*fp32", "sums": "*fp32"}
        if split:
            kinds["out"] = "*fp32"
        made = compiled(_attend_block, target, constants, kinds, 4)
        spill = spilled(made.asm["cubin"]) if "cubin" in made.asm else None
        single = len(re.findall(r"(?:ld|st)\\.global\\.b16", made.asm.get("ptx", "")))
        found.append([arch, block_rows, split, made.metadata.shared, room, spill, single])
    merge = {"VALUE_WIDTH": WIDTH, "VALUE_LANES": WIDTH, "PARTS": 64, "SINKS": True}
    kinds = {**numbers, "parts": "*fp32", "peaks": "*fp32", "sums": "*fp32"}
    made = compiled(_merge_parts, target, merge, kinds, 4)
    found.append([arch, 0, True, made.metadata.shared, room, None, 0])
    for pairs in (8, 8192, 16384):
        tiles = tiles_for(pairs, 128, 2, room)
        constants = {
            "in_stride": 1, "EXPERTS": 128, "ROWS": tiles.rows, "OUTS": tiles.outs,
            "INS": tiles.ins, "SPREAD": True, "BIASED": False, "SHARED": False,
        }
        kinds = {name: "*bf16" for name in ("rows", "weights", "biases", "shares", "out")}
        made = compiled(_grouped_product, target, constants, kinds, tiles.warps, tiles.stages)
        spill = spilled(made.asm["cubin"]) if "cubin" in made.asm else None
        found.append([arch, tiles.rows, False, made.metadata.shared, room, spill, 0])
    if arch in TWINS:
        continue
    for kernel, constants, kinds in (
        (_group_pairs, {"PAIRS": PAIRS_AT_ONCE}, {"chosen": "*i64"}),
        (_sum_each, {"EACH": 8, "LANES": SUMMED}, {"made": "*bf16", "out": "*bf16"}),
        (
            _norm_rows,
            {"WIDTH": 4096, "LANES": 4096, "ROWS": 1},
            {"rows": "*bf16", "scale": "*bf16", "out": "*bf16"},
        ),
        (
            _rotate_heads,
            {"SECOND": 64, "HALF": 64, "LANES": 64, "HEADS": 8},
            {n: "*bf16" for n in ("query", "key", "cos", "sin", "query_out", "key_out")},
        ),
        (
            _choose_experts,
            {
                "TOP": 8, "TOP_LANES": 8, "LANES": 256, "ROWS": ROWS_AT_ONCE, "SOFTMAX": True,
                "NORMALISED": True, "BIASED": True,
            },
            {
                "logits": "*bf16", "biases": "*fp32", "scores_out": "*bf16",
                "chosen_out": "*i64",
            },
        ),
        (
            _gate_rows,
            {
                "gate_step": 1, "up_step": 1, "CUBIC": True, "LIMITED": True,
                "LANES": NUMBERS_AT_ONCE,
            },
            {n: "*bf16" for n in ("gate", "up", "out")},
        ),
        (
            _write_rows,
            {"KEY_WIDTH": WIDTH, "VALUE_WIDTH": WIDTH, "LANES": WRITTEN_AT_ONCE},
            {**{n: "*bf16" for n in ("key", "value", "keys", "values")}, "slots": "*i64"},
        ),
    ):
        made = compiled(
            kernel, target, constants, kinds, 8 if kernel in (_norm_rows, _group_pairs) else 4
        )
        spill = spilled(made.asm["cubin"]) if "cubin" in made.asm else None
        found.append([arch, 1, False, made.metadata.shared, room, spill, 0])
    for code, per_scale, (tiles, *_) in (
        ("uint4", 64, [ALONE]), ("uint8", 32, [ALONE]), ("e2m1", 32, [ALONE]),
        ("e2m1", 32, WORDS[0]), ("uint4", 64, WORDS[2]), ("uint8", 32, BYTES[0]),
    ):
        alone = tiles.rows == 1
        held = 8 if code != "uint8" else 4 if alone else 1
        exponents = code == "e2m1"
        constants = {
            "EXPERTS": 128, "OUTS": tiles.outs, "INS": tiles.ins,
            "WHOLE": True, "SPLIT": False, "CODE": code, "HELD": held,
            "COLUMNS": per_scale, "EXPONENTS": exponents, "ZEROS": not exponents,
            "FACTORS": False, "SPREAD": True, "BIASED": False, "SHARED": False,
        }
        if alone:
            constants["VECTOR"] = 4
        else:
            constants |= {"ROWS": tiles.rows, "TURNED": held == 8}
        kinds = {name: "*bf16" for name in ("rows", "factors", "biases", "shares", "out")}
        kinds["codes"] = "*u8" if held == 1 else "*i32"
        kinds["scales"] = "*u8" if exponents else "*bf16"
        kinds["zeros"] = "*fp16"
        kernel = row_product if alone else _packed_product
        made = compiled(kernel, target, constants, kinds, tiles.warps, tiles.stages)
        spill = spilled(made.asm["cubin"]) if "cubin" in made.asm else None
        most = PACKED_SPILL if tiles.rows == 128 else 64
        found.append([arch, tiles.rows, code, made.metadata.shared, room, spill, 0, most])
print(json.dumps(found))
"""
CARDS = [
    ("cuda", 80, 32, 163 << 10),
    ("cuda", 86, 32, 99 << 10),
    ("cuda", 90, 32, 227 << 10),
    ("cuda", 120, 32, 99 << 10),
    ("hip", "gfx942", 64, 64 << 10),
    ("hip", "gfx1100", 32, 64 << 10),
]
"""Backend, architecture, threads of a warp, and the memory that a block of them may share."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_for_cards_that_are_not_here(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Within the memory that each card shares; without spilling registers, and attention moving no
    number of two bytes alone, where that is known: heads of 128 numbers, four to a KV head.

    Kernels that have not changed since the last run come from its cache, which goes by their code.
    """
    kept = getattr(pytestconfig, "cache", None)  # not with "-p no:cacheprovider"
    cache = kept.mkdir("triton") if kept else tmp_path / "cache"
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.getcwd(),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path), json.dumps(CARDS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for each in found:
        each.extend([64] * (8 - len(each)))
    assert len(found) == 7 * len(CARDS) + (7 + 6) * (len(CARDS) - 1)
    for arch, block_rows, split, shared, room, spill, single, most in found:
        assert shared <= room, (arch, block_rows, split)
        assert single == 0, (arch, block_rows, split)
        if spill is not None:
            assert max(spill) <= most, (arch, block_rows, split, spill)
