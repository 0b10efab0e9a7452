"""The speed of GPUs that nobody has measured, from their data sheets. Pure.

A layer's step reads its weights, and each session's KV, from memory, and multiplies; no kernel
reaches what a data sheet says, and each has to be launched. :class:`SheetConfig` says what this
project's kernels reach: fitted to every time that was measured of them on an H100 and an H200
(``bench/results/gpu_check*.json``) and to Helix's of an A100, L4, T4 and V100, none of which it
misses by a quarter (``tests/unit/node/profiling/test_data_sheets.py``). No consumer card was
measured. What a peer announces of itself is measured (:mod:`node.profiling.layer_profile`), never
this.
"""

import re
from dataclasses import dataclass, replace

from dht.errors import UserError
from dht.messages.types import RECORD_BOUNDS, ModelSpec, PlannerNode, kv_tokens_least, layers_max
from node.profiling.layer_fit import Timing
from node.profiling.layer_rates import BATCHES, CHUNK_CONTEXTS, CHUNKS, CONTEXTS, Profile, rates


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetConfig:
    """What of a data sheet the kernels of a layer reach, and what they cost beside."""

    memory_share: float = 0.85
    """Share of the bandwidth at which weights and KV are read."""
    compute_share: float = 0.6
    """Share of the rate of multiplications that plain products of 16 bits reach."""
    experts_share: float = 0.6
    """Share of that which products grouped by experts reach."""
    packed_share: float = 0.24
    """Share of the rate that products with packed weights reach: for some rows, not for one."""
    unpack_operations: float = 160.0
    """Operations that unpacking a weight within such a product takes, at the data sheet's rate."""
    unpacked_bytes: int = 4
    """Bytes written and read of each weight that is unpacked to 16 bits before a plain product."""
    launch_s: float = 2.7e-6
    """Time of a kernel's start."""
    launches: int = 20
    """Kernels of a dense layer."""
    launches_of_experts: int = 5
    """Further kernels of a layer with experts."""
    overlap: float = 3.0
    """Exponent with which the times of reading and multiplying add up; endless: the longer one."""


CONFIG = SheetConfig()

PACKED_BYTES_MAX = 1.5
"""Bytes per weight below which most are packed: 16 bits take two."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """A GPU as its maker describes it."""

    memory_gib: float
    memory_gb_per_s: float
    tflops: float
    """Dense 16-bit multiplications with sums in 32 bits, in 10¹² operations/s."""


GPUS = {
    "2080ti": DataSheet(11, 616, 53.8),
    "3060": DataSheet(12, 360, 25.6),
    "3060ti": DataSheet(8, 448, 32.4),
    "3070": DataSheet(8, 448, 40.6),
    "3080": DataSheet(10, 760, 59.5),
    "3080ti": DataSheet(12, 912, 68.2),
    "3090": DataSheet(24, 936, 71.2),
    "3090ti": DataSheet(24, 1008, 80.0),
    "4060": DataSheet(8, 272, 30.2),
    "4060ti": DataSheet(16, 288, 44.1),
    "4070": DataSheet(12, 504, 58.3),
    "4070ti": DataSheet(12, 504, 80.2),
    "4080": DataSheet(16, 717, 97.5),
    "4090": DataSheet(24, 1008, 165.2),
    "5070": DataSheet(12, 672, 61.7),
    "5070ti": DataSheet(16, 896, 87.9),
    "5080": DataSheet(16, 960, 112.6),
    "5090": DataSheet(32, 1792, 209.5),
    "7900xtx": DataSheet(24, 960, 122.8),
    "a10": DataSheet(24, 600, 125.0),
    "a100": DataSheet(40, 1555, 312.0),
    "a100-80": DataSheet(80, 1935, 312.0),
    "a4000": DataSheet(16, 448, 76.7),
    "a6000": DataSheet(48, 768, 154.8),
    "h100": DataSheet(80, 3350, 989.0),
    "h200": DataSheet(141, 4800, 989.0),
    "l4": DataSheet(24, 300, 121.0),
    "l40s": DataSheet(48, 864, 362.0),
    "t4": DataSheet(16, 320, 65.0),
    "v100": DataSheet(16, 900, 125.0),
}
"""GPUs by their makers' names in short; of 4060 Ti, the one with 16 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """What a step of one layer reads and computes, on average over a model's layers."""

    weight_bytes: int
    parameters: int
    kv_bytes_per_token: int
    expert_share: float = 0.0
    """Share of the weights that are routed experts'."""
    active_share: float = 1.0
    """Share of the routed experts that a token passes."""

    @property
    def packed(self) -> bool:
        """Whether most weights are stored in fewer bits than 16."""
        return self.weight_bytes < PACKED_BYTES_MAX * self.parameters

    def used_share(self, rows: int) -> float:
        """Share of the weights that a step of ``rows`` rows needs: they draw experts at random."""
        used = 1 - (1 - self.active_share) ** rows
        return 1 - self.expert_share * (1 - used)

    def read_bytes(self, rows: int) -> float:
        """Bytes of weights that a step of ``rows`` rows reads."""
        return self.weight_bytes * self.used_share(rows)

    def operations(self, rows: int) -> float:
        """Multiplications and additions of ``rows`` rows."""
        return 2 * self.parameters * rows * (1 - self.expert_share * (1 - self.active_share))


def layer_s(
    sheet: DataSheet, work: LayerWork, rows: int, kv_tokens: float, config: SheetConfig = CONFIG
) -> float:
    """Seconds of a layer in a step of ``rows`` rows that look at ``kv_tokens`` tokens in all."""
    byte_s = 1 / (config.memory_share * sheet.memory_gb_per_s * 1e9)
    operation_s = 1 / (sheet.tflops * 1e12)
    read_s = (work.read_bytes(rows) + kv_tokens * work.kv_bytes_per_token) * byte_s
    multiply_s = work.operations(rows) * operation_s / config.compute_share
    launches = config.launches + (config.launches_of_experts if work.expert_share else 0)
    start_s = launches * config.launch_s
    in_16_bits_s = multiply_s / (config.experts_share if work.expert_share else 1.0)
    power = config.overlap
    plain_s: float = (read_s**power + in_16_bits_s**power) ** (1 / power) + start_s
    if not work.packed:
        return plain_s
    if rows == 1:
        return read_s + start_s
    weights = work.parameters * work.used_share(rows)
    unpack_s = weights * config.unpack_operations * operation_s
    before_s = (work.weight_bytes + work.parameters * config.unpacked_bytes) * byte_s
    within_s = read_s + unpack_s + work.operations(rows) * operation_s / config.packed_share
    return min(within_s + start_s, plain_s + before_s)


def profile_of(sheet: DataSheet, work: LayerWork) -> Profile:
    """What :func:`node.profiling.layer_profile.measure` would about find on such a GPU."""

    def timing(rows: int, context_tokens: int, sessions: int) -> Timing:
        seconds = layer_s(sheet, work, rows, sessions * context_tokens)
        return Timing(batch=rows, context_tokens=context_tokens, seconds=seconds)

    return Profile(
        points=tuple(timing(rows, context, rows) for rows in BATCHES for context in CONTEXTS),
        checks=(),
        prefills=tuple(timing(rows, before, 1) for rows in CHUNKS for before in CHUNK_CONTEXTS),
        kv_tokens=0,
    )


def parse_gpus(text: str) -> tuple[str, ...]:
    """The GPUs of a list such as ``3x3090,1x4070``, by their keys in :data:`GPUS`.

    Raises UserError.
    """
    found: list[str] = []
    most = RECORD_BOUNDS.peers_max
    for each in text.lower().split(","):
        key, count = _key(each), 1
        if key not in GPUS and (several := re.fullmatch(r"\s*(\d+)\s*x(.*)", each)):
            key, count = _key(several[2]), int(several[1][:9])
        if key not in GPUS:
            raise UserError(
                f"GPU {key[:40]!r} is not known; known are {', '.join(GPUS)}. Write"
                " 3x3090,1x4070, or describe the machines in a file (docs/cluster-format.md)"
            )
        found += [key] * min(count, most + 1)
    if not 0 < len(found) <= most:
        names = f"more than {most}" if found else "no"
        raise UserError(f"{text[:40]!r} names {names} GPUs; 1 to {most} can be planned")
    return tuple(found)


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|radeon|rtx|tesla|rx |\s", "", name)


def planner_nodes(
    gpus: tuple[str, ...], spec: ModelSpec, work: LayerWork, memory_share: float
) -> tuple[PlannerNode, ...]:
    """The planner's view of ``gpus``, each a peer that lends ``memory_share`` of its memory."""
    nodes = []
    for number, key in enumerate(gpus):
        sheet = GPUS[key]
        profile = profile_of(sheet, work)
        memory_bytes = int(sheet.memory_gib * memory_share * 2**30)
        node = PlannerNode(
            peer_id=f"{key}-{1 + gpus[:number].count(key)}",
            memory_bytes=memory_bytes,
            kv_tokens_min=kv_tokens_least(spec),
            tokens_per_s=rates(profile, spec, memory_bytes, spec.layers),
            decode_layer_ns=profile.decode_times,
            prompt_layer_ns=profile.prompt_times,
        )
        held = layers_max(spec, memory_bytes, node.kv_tokens_min)
        nodes.append(replace(node, tokens_per_s=node.tokens_per_s[: max(1, held)]))
    return tuple(nodes)
