"""Speeds from data sheets, beside those that were measured on four GPUs."""

import pytest

from dht.errors import UserError
from node.profiling.data_sheets import GPUS, LayerWork, parse_gpus, profile_of

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
