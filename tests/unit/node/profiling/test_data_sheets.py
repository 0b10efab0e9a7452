"""Speeds from data sheets, beside all that were measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dht.errors import UserError
from node.profiling.data_sheets import GPUS, LayerWork, layer_s, parse_gpus, profile_of

RESULTS = Path(__file__).parents[4] / "bench" / "results"


def mixture(attention: int, experts: int, chosen: float, bytes_: int, kv_bytes: float) -> LayerWork:
    """A layer's parts in weights, the share of experts that a token passes, and bytes."""
    return LayerWork(
        weight_bytes=bytes_,
        parameters=attention + experts,
        kv_bytes_per_token=round(kv_bytes),
        expert_share=experts / (attention + experts),
        active_share=chosen,
    )


def dense(parameters: int, bytes_each: float) -> LayerWork:
    return LayerWork(
        weight_bytes=round(bytes_each * parameters), parameters=parameters, kv_bytes_per_token=4096
    )


LLAMA_8B = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
LLAMA_70B = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
QWEN = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128, 128 * 3 * 2048 * 768, 8 / 128
GPT_OSS = 2 * 2880 * 4096 + 2 * 2880 * 512, 32 * 3 * 2880**2, 4 / 32
WINDOWED = 2048 / 3
"""KV that a token reads of gpt-oss: two of the three layers measured look at 128 tokens."""
SCALED = 1 / 2 + 2 / 128, 1 / 2 + 1 / 32
"""Bytes of a weight of 4 bits: with a scale of 16 bits for 128, and one of 8 for 32."""
WORK = {
    "llama-3-8b": dense(LLAMA_8B, 2),
    "llama-3-70b": dense(LLAMA_70B, 2),
    "llama-3-8b-int4": dense(LLAMA_8B, SCALED[0]),
    "llama-3-8b-fp8": dense(LLAMA_8B, 1),
    "qwen3-30b-a3b": mixture(*QWEN, 2 * (QWEN[0] + QWEN[1]), 2048),
    "qwen3-30b-a3b-fp8": mixture(*QWEN, QWEN[0] + QWEN[1], 2048),
    "gpt-oss-20b": mixture(*GPT_OSS, 2 * (GPT_OSS[0] + GPT_OSS[1]), WINDOWED),
    "gpt-oss-20b-mxfp4": mixture(
        *GPT_OSS, round(2 * GPT_OSS[0] + SCALED[1] * GPT_OSS[1]), WINDOWED
    ),
}
"""What a layer of each measured shape does."""


def measured(gpu: str, result: str) -> Iterator[tuple[str, str, str, float]]:
    """``(gpu, shape, step, µs)``: kernels of a layer, or where these were not timed the layer in a
    step. Times below what the reading takes cannot be, and are left out."""
    for name, part in json.loads((RESULTS / result).read_text())["parts"].items():
        if not name.startswith("engine") or "without" in name:
            continue
        shapes: dict[str, dict[str, Any]] = part.get("found", {}).get("shapes", {})
        for shape, points in shapes.items():
            for step, told in points.items():
                if not isinstance(told, dict) or not step.startswith(("decode_", "prefill_")):
                    continue
                rate = told.get("layer_tokens_per_s")
                us = told.get("kernels_us", 1e6 * int(step.split("_")[1]) / rate if rate else None)
                if us is not None and us >= told.get("floor_us", 0.0):
                    yield gpu, shape, step, us


ROWS = [*measured("h100", "gpu_check.json"), *measured("h200", "gpu_check_h200.json")]


@pytest.mark.parametrize(
    ("gpu", "shape", "step", "us"), ROWS, ids=["-".join(row[:3]) for row in ROWS]
)
def test_no_measured_layer_is_missed_by_a_quarter(
    gpu: str, shape: str, step: str, us: float
) -> None:
    """By precision, experts, rows and context."""
    kind, rows, *context = step.split("_")
    looked_at = int(rows) * int(context[0]) if kind == "decode" else int(rows) / 2
    told = layer_s(GPUS[gpu], WORK[shape], int(rows), looked_at)
    assert 1e6 * told == pytest.approx(us, rel=0.25)


def test_every_kind_of_layer_was_measured() -> None:
    assert {shape for _, shape, _, _ in ROWS} == set(WORK)
    assert len(ROWS) > 100


MEASURED_MS = {
    # A layer of LLaMA 30B and 70B: 2 decode rows, and a prompt's chunk of 1000 tokens, as Helix
    # measured them (bench/data/helix/profiles).
    ("a100", "30b"): (0.9, 5.0),
    ("a100", "70b"): (1.4, 8.0),
    ("l4", "30b"): (4.5, 24.0),
    ("l4", "70b"): (6.9, 38.0),
    ("t4", "30b"): (4.7, 41.0),
    ("t4", "70b"): (7.1, 59.0),
    ("v100", "30b"): (1.8, 12.0),
    ("v100", "70b"): (2.3, 19.0),
}
PARAMETERS = {"30b": 4 * 6656**2 + 3 * 6656 * 17920, "70b": 8192**2 * 2.25 + 3 * 8192 * 28672}
KV_BYTES = {"30b": 2 * 2 * 6656, "70b": 2 * 2 * 1024}


@pytest.mark.parametrize(("gpu", "model"), MEASURED_MS)
def test_a_data_sheet_says_about_what_was_measured(gpu: str, model: str) -> None:
    decode_ms, prompt_ms = MEASURED_MS[gpu, model]
    parameters = int(PARAMETERS[model])
    work = LayerWork(
        weight_bytes=2 * parameters, parameters=parameters, kv_bytes_per_token=KV_BYTES[model]
    )
    profile = profile_of(GPUS[gpu], work)
    assert 1e3 * profile.fit.seconds(2, 1) == pytest.approx(decode_ms, rel=0.25)
    assert 0.6 < 1e3 * profile.prompt_fit.seconds(1000, 0) / prompt_ms < 1.6


def test_a_token_reads_the_experts_it_passes_and_a_full_batch_all_of_them() -> None:
    work = LayerWork(
        weight_bytes=1000,
        parameters=500,
        kv_bytes_per_token=4,
        expert_share=0.9,
        active_share=8 / 128,
    )
    assert work.read_bytes(1) == pytest.approx(100 + 900 / 16)
    assert work.read_bytes(256) == pytest.approx(1000, rel=1e-3)
    assert work.operations(2) == pytest.approx(2 * 2 * 500 * (0.1 + 0.9 / 16))


def test_gpus_are_named_as_people_name_them() -> None:
    assert parse_gpus("2x3090,1x RTX 4070") == ("3090", "3090", "4070")
    assert parse_gpus("NVIDIA GeForce RTX 4090") == ("4090",)
    assert parse_gpus("Tesla T4,7900 XTX") == ("t4", "7900xtx")


@pytest.mark.parametrize("text", ["", "3x", "0x3090", "9999x3090", "3x9090", "3090,", "-1x3090"])
def test_what_is_no_list_of_gpus_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError):
        parse_gpus(text)


@pytest.mark.parametrize("count", ["9999", "9999999", "9" * 5000])
def test_too_many_gpus_are_told_as_such(count: str) -> None:
    with pytest.raises(UserError, match=r"names more than \d+ GPUs"):
        parse_gpus(f"{count}x3090")
